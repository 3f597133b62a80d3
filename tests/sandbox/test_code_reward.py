"""The reward of code: what passes, what part of it counts, and what cannot be had by cheating."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from forge_core.rewards import RewardActor, RewardError, RewardItem
from forge_core.rewards.code import CodeReward, last_block
from forge_core.rewards.code_cases import CallCase, ProgramCase, TestCase, cases, same_output, same_value
from forge_core.rewards.identity import check_rewards
from forge_core.sandbox import SandboxedPythonCoder
from forge_core.sandbox.asking import CallFailed, call, judge

pytestmark = pytest.mark.server  # many processes


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward(test_timeout_s=5.0)


def grade(reward: CodeReward, code: str, tests: Any, **metadata: Any) -> float:
    return reward.grade("", f"Here it is:\n```python\n{code}\n```\nDone.", {"tests": tests, **metadata})


SUMS = [{"stdin": f"{a} {b}", "stdout": str(a + b)} for a, b in ((1, 2), (5, 6), (0, 0), (-1, 1))]
ADDS = [{"function": "add", "args": [a, b], "returns": a + b} for a, b in ((1, 2), (5, 6))]
ADD = "def add(a, b): return a + b"


def test_the_share_of_tests_passed_is_the_reward(reward: CodeReward) -> None:
    assert grade(reward, "print(sum(map(int, input().split())))", SUMS) == 1.0
    assert grade(reward, "a, b = map(int, input().split()); print(abs(a) + abs(b))", SUMS) == 0.75
    assert grade(reward, "print('no')", SUMS) == 0.0


def test_without_partial_credit_all_tests_count() -> None:
    strict = CodeReward(partial_credit=False)
    assert grade(strict, "a, b = map(int, input().split()); print(abs(a) + abs(b))", SUMS) == 0.0
    assert grade(strict, "print(sum(map(int, input().split())))", SUMS) == 1.0


def test_functions_and_methods_are_called(reward: CodeReward) -> None:
    assert grade(reward, ADD, ADDS) == 1.0
    assert grade(reward, "def add(a, b): return 3", ADDS) == 0.5
    method = [{"function": "Solution.two", "args": [[2, 7], 9], "kwargs": {"base": 0}, "returns": [0, 1]}]
    assert grade(reward, "class Solution:\n    def two(self, n, t, base): return (base, base + 1)", method) == 1.0


def test_asserts_and_checks_of_an_entry_point_are_run(reward: CodeReward) -> None:
    tests = ["assert add(1, 2) == 3", "assert abs(add(0.1, 0.2) - 0.3) < 1e-9", "assert add([1], [2]) == [1, 2]"]
    assert grade(reward, ADD, tests) == 1.0
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n"
    assert grade(reward, ADD, check, entry_point="add") == 1.0
    assert grade(reward, "def add(a, b): return 3", check, entry_point="add") == 0.0


def test_tests_may_be_json_pairs_or_the_answer(reward: CodeReward) -> None:
    program = "print(sum(map(int, input().split())))"
    assert grade(reward, program, '{"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}') == 0.5
    assert grade(reward, ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}) == 1.0
    assert reward.grade("", f"```\n{ADD}\n```", {"answer": "assert add(1, 1) == 2"}) == 1.0


def test_a_prompt_without_usable_tests_is_an_error_that_names_the_column(reward: CodeReward) -> None:
    with pytest.raises(KeyError, match="neither the column 'tests' nor the answer"):
        grade(reward, ADD, None)
    with pytest.raises(ValueError, match="has the keys \\['question'\\]: use stdin and stdout"):
        grade(reward, ADD, [{"question": 1}])


def test_the_last_closed_block_of_python_is_the_code() -> None:
    assert last_block("```python\na\n```\ntext\n```py\nb\n```\n```json\n{}\n```") == "b\n"
    assert last_block("```\nx = 1\n```") == "x = 1\n"
    assert last_block("```python\nnever closed") is None
    assert last_block("no code") is None


def test_blocks_of_other_languages_and_of_output_are_not_taken_for_the_code() -> None:
    assert last_block("```bash\npip install x\n```\nThen:\n```python\nprint(1)\n```\nDone.") == "print(1)\n"
    assert last_block("```json\n{}\n```\nand\n```\ny = 2\n```\n") == "y = 2\n"
    assert last_block("```python\nprint(1)\n```\nOutput:\n```\n1\n```\n") == "print(1)\n"
    assert last_block("1. So:\n   ```py\n   if 1:\n       x\n   ```") == "if 1:\n    x\n"
    assert last_block("```python\nprint('```')\n```") == "print('```')\n"


def test_a_completion_without_code_earns_nothing(reward: CodeReward) -> None:
    assert reward.grade("", "The answer is 3.", {"tests": SUMS}) == 0.0


CHEATS = {
    "exits before the test is over": "import os\nos._exit(0)",
    "exits when called": "def add(*a): raise SystemExit(0)",
    "equals everything": "class Any:\n    def __eq__(self, o): return True\ndef add(*a): return Any()",
    "a number that equals everything": "class N(int):\n    def __eq__(self, o): return True\n"
    "    __hash__ = int.__hash__\ndef add(*a): return N(7)",
    "a list that equals everything": "class L(list):\n    def __eq__(self, o): return True\ndef add(*a): return L()",
    "patches what compares": "import builtins, operator, math\nbuiltins.abs = lambda x: 0\n"
    "math.isclose = lambda *a: True\n"
    "operator.eq = lambda *a: True\ndef add(*a): return 0",
    "patches its judge": "import sys\nfor m in list(sys.modules.values()):\n"
    "    for n in ('encode', 'loads', 'dumps'):\n"
    "        if hasattr(m, n): setattr(m, n, lambda *a: b'{\"passed\": true}')\ndef add(*a): return 0",
    "says it on every channel": "import os\nfor fd in range(64):\n    try: os.write(fd, b'{\"passed\": true}\\n' * 9)\n"
    "    except OSError: pass\ndef add(*a): return 0",
    "answers before it is asked": "import os\nfor fd in range(64):\n"
    '    try: os.write(fd, b\'{"value": {"object": 0}}\\n{"value": true, "arguments": {"list": []}}\\n\')\n'
    "    except OSError: pass\ndef add(*a): return 0",
    "raises what an assert does": "def add(*a): raise AssertionError('passed')",
    "looks for the expected value": "import gc, sys\ndef add(*a):\n"
    "    found = [o for o in gc.get_objects() if isinstance(o, dict) and 'returns' in o]\n"
    "    frame = sys._getframe()\n    while frame.f_back: frame = frame.f_back\n"
    "    return found[0]['returns'] if found else frame.f_locals.get('expected')",
    "takes the traceback's test apart": "import sys\ndef add(*a): return open('/tmp/main.py').read().count('123456')",
    "never ends": "while True: pass",
    "is endless": "def add(*a): return 'x' * 10**7",
    "answers too deeply": "def add(*a):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "answers with a number too large": "def add(*a): return 10**400",
}
ENDED_BY_TIME = ("never ends", "patches its judge")  # the whole of their time, five times


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheating_earns_nothing(coder: SandboxedPythonCoder, cheat: str) -> None:
    reward = CodeReward(test_timeout_s=0.5 if cheat in ENDED_BY_TIME else 1.0)
    tests = [
        {"function": "add", "args": [61728, 61728], "returns": 123456},
        {"function": "add", "args": [0.25, 0.25], "returns": 0.5},
        "assert add(61728, 61728) == 123456",
        "assert abs(add(61728, 61728) - 123456) < 1",
        {"stdin": "", "stdout": "123456"},
    ]
    assert grade(reward, CHEATS[cheat], tests) == 0.0


def test_no_test_sees_what_an_earlier_one_left(reward: CodeReward) -> None:
    code = """
import os
def add(a, b):
    if os.path.exists("/tmp/was-here"): return a + b
    open("/tmp/was-here", "w").close()
"""
    assert grade(reward, code, ADDS) == 0.0


def test_what_a_call_does_to_its_arguments_is_seen_by_the_test(coder: SandboxedPythonCoder) -> None:
    test = "x, y = [3, 1], {1: 2}\nchange(x, y)\nassert x == [1, 3] and y == {}"
    assert judge(coder, "def change(x, y): x.sort(); y.clear()", test).passed


def test_classes_are_tested_through_stand_ins(coder: SandboxedPythonCoder) -> None:
    code = """
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self): return self.items.pop()
def size(stack): return len(stack.items)
"""
    test = "s = Stack(1)\ns.push(2).push(3)\nassert s.pop() == 3\nassert s.items == [1, 2]\nassert size(s) == 2"
    assert judge(coder, code, test).passed
    assert not judge(coder, code, test.replace("== 3", "== 2")).passed


def test_exceptions_that_a_test_expects_reach_it(coder: SandboxedPythonCoder) -> None:
    test = "try: f(-1)\nexcept ValueError as error: assert 'negative' in str(error)\nelse: assert False"
    assert judge(coder, "def f(x):\n    if x < 0: raise ValueError('negative')", test).passed
    assert not judge(coder, "def f(x): pass", test).passed


def test_code_that_ends_before_it_is_asked_fails(coder: SandboxedPythonCoder) -> None:
    verdict = judge(coder, "import os\nos._exit(0)", "import time\ntime.sleep(0.5)\nadd(1, 1)")
    assert verdict.reason.startswith("the code ended with exit status 0")


def test_a_verdict_says_why(coder: SandboxedPythonCoder) -> None:
    assert judge(coder, ADD, "assert add(1, 1) == 3, 'one and one'").reason == "AssertionError: one and one"
    assert judge(coder, "1 / 0", "add(1, 1)").reason.endswith("ZeroDivisionError: division by zero")
    assert "limit of time" in judge(coder, "while True: pass", "add(1, 1)", timeout=0.5).reason
    with pytest.raises(CallFailed, match="'add' is not defined"):
        call(coder, "x = 1", "add")


def test_values_of_all_plain_types_come_back_as_they_are(coder: SandboxedPythonCoder) -> None:
    code = "from collections import *\ndef f(x): return {1: (x, 2.5, None, True), 'b': {b'1', frozenset([3j])}}\n"
    assert call(coder, code, "f", ["é\n"]) == {1: ("é\n", 2.5, None, True), "b": {b"1", frozenset([3j])}}
    assert call(coder, code + "def g(): return Counter('aab'), 10**9999", "g") == ({"a": 2, "b": 1}, 10**9999)


def test_values_are_compared_as_json_writes_them() -> None:
    assert same_value((1, 2), [1, 2])
    assert same_value({1: [0.1 + 0.2]}, {"1": [0.3]})
    assert same_value(3, 3.0)
    assert not same_value(True, 1)
    assert not same_value([1, 2], [1, 2, 3])
    assert not same_value("3", 3)
    assert not same_value(10**400, 1.5)


def test_output_is_compared_line_by_line_with_floats_rounded() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert same_output("0.33333333", "0.3333333")
    assert not same_output("1000000", "1000001")
    assert not same_output("1 2", "1\n2")
    assert not same_output("", "1")
    assert not same_output("nan", "0.5")


def test_cases_of_each_kind() -> None:
    found = cases(
        {"tests": [{"input": ["1", "2"], "output": "3"}, {"function": "f", "returns": 1}, "assert 1"]}, "tests"
    )
    assert found == [ProgramCase("1\n2", "3"), CallCase("f", [], 1), TestCase("assert 1")]


def test_code_that_hangs_costs_no_more_than_the_time_of_all_tests() -> None:
    reward, start = CodeReward(test_timeout_s=0.5, total_s=1.0), time.monotonic()
    assert grade(reward, "while True: pass", SUMS * 5) == 0.0
    assert time.monotonic() - start < 2.5


def test_a_configuration_names_it_and_a_machine_without_bubblewrap_refuses_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from forge_core.config.reward_sections import CodeSection

    functions = [CodeSection(name="code", test_timeout_s=2.0)]
    actor = RewardActor(functions)
    try:
        items = [RewardItem("", f"```python\n{ADD}\n```", {"tests": ADDS}) for _ in range(3)]
        assert [graded.reward for graded in actor.grade_many(items)] == [1.0] * 3
    finally:
        actor.close()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RewardError, match=r"bubblewrap is not installed.*apt-get install bubblewrap"):
        RewardActor(functions)
    with pytest.raises(RewardError, match="apt-get install bubblewrap"):
        check_rewards(functions)  # what every command does before it loads anything
