"""Environments and policies that misbehave: what they do can be stored or costs one episode, and holds up nobody."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forge_core.data_model import Completion
from forge_core.environments.calculator import Calculator
from forge_core.environments.protocol import Action, Step, Task, ToolCall
from forge_core.environments.tool_calls import hermes_calls
from tests.data.tokenizers import CHATML, tokenizer
from tests.environments.scripted import Echo, Policy, decode, episodes_of, play, task

SAYS = {"role": "user", "content": "[ab]"}


def played(step: Callable[[], Any], max_tokens: int = 100) -> dict[str, Completion]:
    """The episode ``bad`` whose environment answers with ``step``, beside a good one."""

    class Bad(Echo):
        def step(self, action: Action) -> Step:
            return step() if self._fate == "bad" else super().step(action)

    policy = Policy(lambda text: "x" if "]" in text else "ab")
    return episodes_of(policy, {"bad": task("bad"), "good": task()}, play(Bad, max_turns=2), max_tokens)


def stored(done: Completion) -> str:
    """What a store keeps of an episode."""
    text = json.dumps({"game": 1, "environment": done.metadata["environment"]}, sort_keys=True, ensure_ascii=False)
    text.encode()
    (done.metadata["dropped"] or "").encode()
    return text


def raises(error: BaseException) -> Callable[[], Any]:
    def step() -> Step:
        raise error

    return step


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (raises(SystemExit(3)), "SystemExit: 3"),
        (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
        (raises(ValueError("half \ud800 a character")), "ValueError: half ? a character"),
        (lambda: (SAYS, 1.0, False), "is no Step"),
        (lambda: Step(SAYS), "a message has a role and a content"),
        (lambda: Step("hello"), "a message has a role and a content"),
        (lambda: Step([{**SAYS, "board": object()}]), "object is not JSON serializable"),
        (lambda: Step([{**SAYS, "content": "\ud800"}]), "UnicodeEncodeError"),
        (lambda: Step(reward="1", done=True), "must be real number, not str"),  # type: ignore[arg-type]
        (lambda: Step(reward=None, done=True), "must be real number, not NoneType"),  # type: ignore[arg-type]
        (lambda: Step(done=True, counts={1: 2.0}), "a count has the name 1"),  # type: ignore[dict-item]
        (lambda: Step(done=True, counts={"n": float("inf")}), "n is inf"),
    ],
)
def test_what_is_no_answer_costs_its_own_episode_with_the_reason(step: Callable[[], Any], reason: str):
    done = played(step)
    assert (done["bad"].metadata["dropped"] or "").startswith("environment: ")
    assert reason in done["bad"].metadata["dropped"]
    assert [done["good"].metadata[key] for key in ("finish_reason", "dropped")] == ["stop", None]
    assert all(map(stored, done.values()))


def test_numbers_of_every_kind_can_be_stored():
    done = played(lambda: Step(reward=np.float32(0.5), done=True, counts={"moves": np.int64(3)}))["bad"]
    assert json.loads(stored(done))["environment"] == {
        "reward": 0.5, "moves": 3.0, "turns": 1, "transcript": [{"role": "assistant", "content": "ab"}],
    }  # fmt: skip


def test_an_observation_that_can_be_read_once_is_read_once():
    done = played(lambda: Step(dict(SAYS) for _ in range(2)))["bad"]
    assert decode(done.token_ids) == "ab[ab][ab]x"


def test_an_observation_that_is_changed_afterwards_stays_as_it_was_said():
    said = dict(SAYS)
    step = Step([said])
    said["content"] = "another"
    assert step.observation[0] == SAYS


def test_an_observation_of_any_size_ends_its_episode_and_holds_up_nobody():
    start = time.monotonic()
    done = played(lambda: Step([{"role": "user", "content": "y" * 50_000_000}]))
    assert time.monotonic() - start < 3
    assert (done["bad"].metadata["finish_reason"], decode(done["bad"].token_ids)) == ("length", "ab")
    assert len(stored(done["bad"])) < 5000
    assert done["good"].metadata["finish_reason"] == "stop"


def test_a_text_of_more_characters_than_are_tokenised_has_more_tokens():
    from forge_core.environments.turns import TurnRenderer

    made = tokenizer(CHATML)
    renderer = TurnRenderer(made, None, ())
    longest = max(made.get_vocab(), key=len)
    assert renderer.most_characters(1) == len(longest)
    assert len(made.encode("a" * (renderer.most_characters(5) + 1), add_special_tokens=False)) > 5


def test_what_reset_raises_costs_its_own_episode_whatever_it_is():
    class Exits(Echo):
        def reset(self, task: Task) -> None:
            super().reset(task)
            if self._fate == "exits":
                sys.exit(1)

    done = episodes_of(Policy(lambda text: "x"), {"bad": task("exits"), "good": task()}, play(Exits))
    assert done["bad"].metadata["dropped"] == "environment: SystemExit: 1"
    assert done["good"].metadata["finish_reason"] == "stop"


def test_environments_that_hang_in_reset_and_in_step_hold_up_no_others():
    class Hangs(Echo):
        def reset(self, task: Task) -> None:
            super().reset(task)
            if self._fate == "at once":
                threading.Event().wait(60)

        def step(self, action: Action) -> Step:
            if self._fate == "later":
                threading.Event().wait(60)
            return super().step(action)

    fates = {f"bad {n}": task(fate) for n, fate in enumerate(("at once", "later") * 3)}
    start = time.monotonic()
    done = episodes_of(
        Policy(lambda text: "x"), {**fates, "good": task()}, play(Hangs, workers=2, turn_timeout_s=0.2, concurrent=True)
    )
    assert time.monotonic() - start < 5
    assert done["good"].metadata["finish_reason"] == "stop"
    assert {done[name].metadata["dropped"] for name in fates} == {"environment: no answer within turn_timeout_s=0.2"}


def answers(text: str) -> list[dict[str, Any]]:
    calculator = Calculator()
    calculator.reset(Task([], None, {}, 1))
    return list(calculator.step(Action(text, tuple(hermes_calls(text)))).observation)


def test_two_calls_in_one_turn_are_answered_in_their_order():
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "6*%d"}}</tool_call>'
    said = answers(f"First {call % 7}, then {call % 8}.")
    assert [(m["content"], m["tool_call_id"]) for m in said] == [("42", "call00000"), ("48", "call00001")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<tool_call>42</tool_call>", "error: a call is an object"),
        ("<tool_call>calculate(6*7)</tool_call>", "error: the call is no JSON"),
        ("<tool_call>" + "[" * 100_000, "error: the call is no JSON"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "error: there is no tool"),
        ('<tool_call>{"name": "calculate", "arguments": {"\\ud800": 1}}</tool_call>', "error: calculate: "),
        ('<tool_call>{"name": "calculate", "arguments": {"expression": "\\ud800"}}</tool_call>', "error: '"),
        ('<tool_call>{"name": "calculate", "arguments": {"self": 1, "function": 2}}</tool_call>', "error: calculate: "),
    ],
)
def test_a_call_that_is_no_call_is_an_observation(text: str, said: str):
    (message,) = answers(text)
    assert message["content"].startswith(said)
    assert Step([message]).observation == (message,)


def test_a_call_may_name_a_tool_by_half_a_character_and_is_told_so():
    call = ToolCall("\ud800", {})
    calculator = Calculator()
    calculator.reset(Task([], None, {}, 1))
    assert calculator.step(Action("", (call,))).observation[0]["name"] == "?"
