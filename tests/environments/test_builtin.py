"""The built-in environments: calculator, guessing, Python."""

from __future__ import annotations

import pytest

from forge_core.environments.calculator import Calculator, calculate
from forge_core.environments.guess import GuessNumber, prompts
from forge_core.environments.protocol import Action, Task, ToolCall
from forge_core.environments.python_tool import PythonTool
from forge_core.environments.tools import ToolEnvironment, ToolError, answer

TASK = Task([{"role": "user", "content": "?"}], "37", {}, 1)


def call(name: str, **arguments: object) -> Action:
    return Action("", (ToolCall(name, arguments),))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("123456789 * 987654321", "121932631112635269"),
        ("(3 + 4) * -12", "-84"),
        ("1/3 + 1/6", "0.5"),
        ("2 ** 100", str(2**100)),
        ("0.1 + 0.2", "0.3"),
        ("10 / 4", "2.5"),
        ("2 ** -1", "0.5"),
        ("99999.99 * 99999.99", "9999998000.0001"),
        ("1234567890123.5", "1234567890123.5"),
        ("-1234567890123.5 / 10 ** 16", "-0.00012345678901235"),
        ("1 + 1e-20", "1.00000000000000000001"),
        ("100_000_000_000_000_000_000.1 + (\n0.2)", "100000000000000000000.3"),
        ("1 / 3", "0.333333333333"),
        ("1 / 6", "0.166666666667"),
        ("2 ** -300", "4.9090934653e-91"),
        ("1e-99999999", "0"),
    ],
)
def test_arithmetic_is_exact(expression: str, value: str):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "an exponent is an integer"),
        ("10 ** 400", "too large"),
        ("__import__('os')", "only numbers"),
        ("1 if True else 2", "only numbers"),
        ("2 +", "no arithmetic expression"),
        ("(" * 500, "more than 200 characters"),
        ("(" * 150, "no arithmetic expression"),
        ("True + 1", "only numbers"),
        ("1e99999999", "a number is too large"),
        ("1e999", "a number is too large"),
        ("-1e999 * 2", "a number is too large"),
    ],
)
def test_anything_else_is_an_error_for_the_policy(expression: str, said: str):
    with pytest.raises(ToolError, match=said.replace("(", r"\(")):
        calculate(expression)


def test_the_definition_says_what_the_tool_takes():
    (definition,) = Calculator.tools
    assert definition["function"]["name"] == "calculate"
    assert definition["function"]["parameters"]["required"] == ["expression"]


def test_a_tool_answers_and_a_turn_without_a_call_ends_the_episode():
    calculator = Calculator()
    calculator.reset(TASK)
    step = calculator.step(call("calculate", expression="6*7"))
    assert (list(step.observation), step.done) == ([answer("calculate", "42", 0)], False)
    assert dict(step.counts) == {"tool_calls": 1, "tool_errors": 0}
    assert calculator.step(Action("42")).done


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (call("calculate", expression="1/0"), "error: division by zero"),
        (call("calculate"), "error: calculate: missing a required argument: 'expression'"),
        (call("calculate", expression=5), "error: calculate: expression must be of the type string"),
        (call("search", q="x"), "error: there is no tool 'search'; there is calculate"),
        (Action("", (ToolCall("", error="the call is no JSON"),)), "error: the call is no JSON"),
    ],
)
def test_a_failed_tool_is_an_observation(action: Action, said: str):
    calculator = Calculator()
    calculator.reset(TASK)
    step = calculator.step(action)
    assert [message["content"] for message in step.observation] == [said]
    assert step.counts["tool_errors"] == 1


def test_an_error_in_a_tool_itself_is_the_environments():
    def broken(x: str) -> str:
        """
        Break.

        Args:
            x: Anything.
        """
        raise KeyError(x)

    class Broken(ToolEnvironment):
        functions = (broken,)

    environment = Broken()
    environment.reset(TASK)
    with pytest.raises(KeyError):
        environment.step(call("broken", x="a"))


def test_guessing_is_answered_until_the_number_is_found():
    game = GuessNumber()
    game.reset(TASK)
    said = [step.observation[0]["content"] for step in map(game.step, map(Action, ["50", "I say 20!", "hm"]))]
    assert said == ["lower", "higher", "say a number"]
    found = game.step(Action("37"))
    assert (found.done, found.reward) == (True, 1.0)


def test_games_are_made_from_the_seed_and_their_answers_are_playable():
    rows = prompts(50, 3, most=9)
    assert rows == prompts(50, 3, most=9)
    assert {int(row["answer"]) for row in rows} <= set(range(1, 10))
    with pytest.raises(ValueError, match="no number from 1 to 9"):
        GuessNumber(most=9).reset(TASK)


@pytest.mark.server
def test_python_runs_in_the_sandbox_and_its_failures_are_observations():
    environment = PythonTool()
    environment.reset(TASK)

    def said(code: str) -> str:
        return environment.step(call("python", code=code)).observation[0]["content"]

    assert said("print(sum(range(101)))") == "5050"
    assert said("x = 1") == "(nothing was printed)"
    assert said("1/0") == "error: ZeroDivisionError: division by zero"
    assert said("import socket; socket.create_connection(('127.0.0.1', 1))").startswith("error: ")
