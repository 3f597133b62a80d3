"""The adapter of verifiers, with the package itself (``pip install 'verifiers<0.2'``): skipped where it is not
installed, which is so in CI."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_core.config import ConfigError, load_config
from forge_core.environments.protocol import Action, Task, ToolCall
from forge_core.environments.resolve import check_environment, tools_of
from tests.environments.scripted import Policy, episodes_of, play

try:
    import verifiers

    INSTALLED = hasattr(verifiers, "MultiTurnEnv")
except ImportError:
    INSTALLED = False

MODULE = '''
import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    if a == 13:
        raise ValueError("unlucky")
    return a + b


class Rewriting(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        messages[0].content = "another question"
        return [{"role": "user", "content": "go on"}]


class Broken(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        raise vf.InfraError("the sandbox is gone")


def right(completion, answer, **kwargs):
    return float(answer in completion[-1]["content"])


def load_environment(kind="tool", groups=False):
    rows = Dataset.from_list([{"question": "3+4?", "answer": "7"}, {"question": "5+6?", "answer": "11"}])
    rubric = vf.Rubric(funcs=[right], weights=[1.0])
    if groups:
        rubric.add_reward_func(lambda completions, **kwargs: [0.0 for _ in completions])
    settings = dict(dataset=rows, system_prompt="Add.", rubric=rubric)
    if kind == "tool":
        return vf.ToolEnv(tools=[add], max_turns=4, **settings)
    return {"rewriting": Rewriting, "broken": Broken}[kind](max_turns=4, **settings)
'''


def config(**options: Any) -> Any:
    return load_config(
        {
            "model": {"vocabulary": "01"},
            "environment": {
                "path": "verifiers", "options": options, "tool_format": "text", "tool_pattern": r"(?P<name>\w+)\(\)"
            },
        }
    )  # fmt: skip


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_without_the_package_the_run_is_refused_with_what_to_install():
    with pytest.raises(ConfigError, match=r"needs the package verifiers<0.2 .*: pip install 'verifiers<0.2'"):
        check_environment(config(environment="adding"))


@pytest.fixture(scope="module")
def adding(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The id of an environment that is installed."""
    if not INSTALLED:
        pytest.skip("verifiers is not installed")
    folder: Path = tmp_path_factory.mktemp("environments")
    (folder / "adding.py").write_text(MODULE)
    sys.path.append(str(folder))
    return "adding"


def started(environment: str, **arguments: Any) -> Any:
    from forge_core.environments.verifiers import VerifiersEnvironment, prompts

    row = next(row for row in prompts(environment, arguments) if row["answer"] == "7")
    made = VerifiersEnvironment(environment, arguments)
    made.reset(Task(row["prompt"], row["answer"], row, 0))
    return made


def test_the_data_set_gives_prompts_with_its_system_message(adding: str):
    from forge_core.environments.verifiers import prompts

    rows = sorted(prompts(adding, {}, size=2), key=lambda row: row["answer"])
    assert rows[1]["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4?"}]
    assert [row["answer"] for row in rows] == ["11", "7"]


def test_the_tools_are_those_of_the_environment(adding: str):
    (tool,) = tools_of(config(environment=adding).environment)
    assert tool["type"] == "function"
    assert tool["function"]["name"] == "add"
    assert tool["function"]["parameters"]["required"] == ["a", "b"]
    check_environment(config(environment=adding))


def test_a_call_is_answered_by_the_environments_tool_and_the_rubric_is_the_reward(adding: str):
    environment = started(adding)
    step = environment.step(Action("let me see", (ToolCall("add", {"a": 3, "b": 4}),)))
    assert [(m["role"], m["content"]) for m in step.observation] == [("tool", "7")]
    done = environment.step(Action("it is 7"))
    assert (done.done, done.reward) == (True, 1.0)
    assert (done.counts["right"], done.counts["total_tool_calls"], done.counts["num_turns"]) == (1.0, 1.0, 2.0)
    environment.close()


@pytest.mark.parametrize(
    "call", [ToolCall("add", {"a": 13, "b": 1}), ToolCall("add", error="the call is no JSON"), ToolCall("subtract", {})]
)
def test_a_failed_tool_is_an_observation(adding: str, call: ToolCall):
    environment = started(adding)
    step = environment.step(Action("", (call,)))
    assert not step.done
    assert step.observation[0]["role"] == "tool"
    environment.close()


@pytest.mark.parametrize(
    ("kind", "said"), [("rewriting", "rewrote the conversation"), ("broken", "the sandbox is gone")]
)
def test_an_environment_that_breaks_says_why(adding: str, kind: str, said: str):
    environment = started(adding, kind=kind)
    with pytest.raises(Exception, match=said):
        environment.step(Action("hm"))
    environment.close()


def test_episodes_of_one_environment_go_on_side_by_side(adding: str):
    from forge_core.environments.verifiers import VerifiersEnvironment, prompts

    rows = {row["answer"]: row for row in prompts(adding, {})}
    tasks = {
        name: Task(rows[answer]["prompt"], answer, rows[answer], 0)
        for name, answer in zip("abcd", ["7", "11"] * 2, strict=True)
    }
    done = episodes_of(Policy(lambda text: "7"), tasks, play(lambda: VerifiersEnvironment(adding)))
    assert [done[name].metadata["environment"]["reward"] for name in "abcd"] == [1.0, 0.0, 1.0, 0.0]


def test_the_packages_signal_handlers_are_not_installed(adding: str):
    started(adding, kind="tool").close()
    assert signal.getsignal(signal.SIGINT).__module__ != "verifiers.envs.environment"


def test_a_rubric_that_grades_groups_is_refused(adding: str):
    with pytest.raises(ConfigError, match="grades groups, not episodes"):
        check_environment(config(environment=adding, arguments={"groups": True}))
