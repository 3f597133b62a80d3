"""Multi-turn episodes with a policy that says what it is told: tokens, limits, failures, concurrency."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from forge_core.config import ConfigError
from forge_core.data_model import Completion
from forge_core.environments.calculator import Calculator
from forge_core.environments.protocol import Action, Step, Task
from forge_core.environments.rollout import Play, run_episodes
from forge_core.generation.base import GenerationError
from forge_core.observability.metrics import collecting, record_metric
from forge_core.observability.reductions import Reduce
from forge_core.stop import Stopped, StopToken
from tests.environments.scripted import END, Characters, Echo, Policy, decode, encode, episodes_of, play, request, task


class Ending(Echo):
    """Ends the episode with its first turn."""

    def step(self, action: Action) -> Step:
        return Step(done=True)


class Counted(Echo):
    """Counts how many are open."""

    lock, open, most = threading.Lock(), 0, 0

    def reset(self, task: Task) -> None:
        super().reset(task)
        with Counted.lock:
            Counted.open += 1
            Counted.most = max(Counted.most, Counted.open)

    def close(self) -> None:
        with Counted.lock:
            Counted.open -= 1


def episodes(
    policy: Policy, fates: dict[str, str | None], how: Play | None = None, max_tokens: int = 100, **keywords: Any
) -> dict[str, Completion]:
    tasks = {name: task(fate) for name, fate in fates.items()}
    done = episodes_of(policy, tasks, how or play(), max_tokens, **keywords)
    assert [c.metadata["request_id"] for c in done.values()] == list(fates)
    return done


def turns(*said: str) -> Callable[[str], str]:
    """Say one after the other, whatever the answers are."""
    return lambda text: said[min(text.count("]"), len(said) - 1)]


def test_an_episode_is_the_tokens_of_all_turns_with_a_mask_of_the_policys_own():
    policy = Policy(turns("ab", "cx"))
    done = episodes(policy, {"e": None})["e"]
    assert done.token_ids == [*encode("ab"), END, *encode("[ab]"), *encode("cx"), END]
    assert done.metadata["response_mask"] == [True] * 3 + [False] * 4 + [True] * 3
    assert done.logprobs == [-0.5] * 3 + [0.0] * 4 + [-0.5] * 3
    assert done.text == "cx"
    assert done.metadata["finish_reason"] == "stop"
    assert {k: v for k, v in done.metadata["environment"].items() if k != "transcript"} == {
        "reward": 1.25, "turns": 2, "echoes": 1.0,
    }  # fmt: skip
    assert [m["content"] for m in done.metadata["environment"]["transcript"]] == ["ab", "[ab]", "cx"]


def test_the_prompt_of_a_turn_is_every_token_before_it():
    policy = Policy(turns("ab", "cd", "x"))
    done = episodes(policy, {"e": None})["e"]
    for before, after in zip(policy.asked, policy.asked[1:], strict=False):
        assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
    last = policy.asked[-1].prompt_ids
    assert [*last[1:], *encode("x"), END] == done.token_ids
    assert len({r.seed for r in policy.asked}) == 3, "each turn has random numbers of its own"
    assert {(r.priority, r.min_version) for r in policy.asked} == {(3, 2)}


def test_an_engine_that_answers_another_prompt_is_an_error():
    class Changed(Policy):
        def _answer(self, request: Any, number: int) -> Completion:
            done = super()._answer(request, number)
            done.metadata["prompt_ids"] = done.metadata["prompt_ids"][1:]
            return done

    with pytest.raises(GenerationError, match=r"request e/turn-0: the engine answered another prompt"):
        episodes(Changed(turns("x")), {"e": None})


def test_spans_say_which_version_sampled_which_turn():
    policy = Policy(turns("ab", "x"), version=lambda call: 3 + call)
    done = episodes(policy, {"e": None})["e"]
    assert [(s.version, s.start, s.end) for s in done.metadata["version_spans"]] == [(4, 0, 3), (5, 7, 9)]
    assert done.metadata["policy_version"] == 4


@pytest.mark.parametrize(
    ("changes", "max_tokens", "said", "tokens"),
    [
        ({"max_turns": 2}, 100, ("ab", "cd"), "ab[ab]cd"),
        ({"max_turn_tokens": 3, "max_turns": 2}, 100, ("abcdef",), "abc[abc]abc"),
        ({}, 9, ("ab", "cdef"), "ab[ab]cd"),  # the second turn is cut at the episode's limit
        ({}, 7, ("ab", "cd"), "ab"),  # no room after the answer
        ({}, 4, ("ab", "cd"), "ab"),  # not even for the answer
    ],
)
def test_each_limit_ends_an_episode_by_itself(
    changes: dict[str, Any], max_tokens: int, said: tuple[str, ...], tokens: str
):
    done = episodes(Policy(turns(*said)), {"e": None}, play(**changes), max_tokens)["e"]
    assert decode(done.token_ids) == tokens
    assert len(done.token_ids) <= max_tokens
    assert done.metadata["finish_reason"] == "length"
    assert done.metadata["dropped"] is None


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("broken", "environment: OSError: the game is gone"),
        ("broken at once", "environment: OSError: no game"),
        ("silent", "environment: it answered nothing, and did not end the episode"),
        ("nothing", "environment: TypeError: step returned None, which is no Step"),
        ("no text", "environment: ValueError: a message has a role and a content, both text, unlike {'role': 'user'}"),
        ("not a number", "environment: ValueError: reward is nan, which is no finite number"),
    ],
)
def test_a_broken_environment_costs_its_own_episode_with_the_reason(fate: str, reason: str):
    done = episodes(Policy(turns("ab", "x")), {"good": None, "bad": fate, "also good": None})
    assert (done["bad"].metadata["finish_reason"], done["bad"].metadata["dropped"]) == ("aborted", reason)
    assert [done[name].metadata["finish_reason"] for name in ("good", "also good")] == ["stop", "stop"]


def test_an_answer_that_cannot_be_placed_costs_its_own_episode():
    class Strict(Characters):
        def after(self, observation: Any, *, end_token: int | None) -> list[int]:
            if observation[0]["content"] == "[ab]":
                raise ConfigError("the template refuses it")
            return super().after(observation, end_token=end_token)

    policy = Policy(lambda text: "x" if "]" in text else "ab" if text == "q" else "cd")
    how = replace(play(), renderer=Strict())  # type: ignore[arg-type]
    asked = {"bad": task(), "good": task()}
    requests = [request("bad"), request("good", "r")]
    bad, good = run_episodes(how, policy, requests, asked)
    assert bad.metadata["dropped"] == "environment: the template refuses it"
    assert (good.metadata["finish_reason"], decode(good.token_ids)) == ("stop", "cd[cd]x")


def test_an_episode_that_ends_with_a_turn_that_was_cut_was_cut():
    done = episodes(Policy(turns("abcx")), {"e": None}, play(Ending, max_turn_tokens=3))["e"]
    assert (decode(done.token_ids), done.metadata["finish_reason"]) == ("abc", "length")


@pytest.mark.parametrize("concurrent", [False, True])
def test_no_more_environments_are_open_than_max_open_says(concurrent: bool):
    Counted.most = Counted.open = 0
    fates = dict.fromkeys(map(str, range(7)))
    done = episodes(Policy(turns("ab", "x")), fates, play(Counted, max_open=3, concurrent=concurrent))
    assert {c.metadata["finish_reason"] for c in done.values()} == {"stop"}
    assert Counted.most <= 3
    assert concurrent or Counted.most == 3, "they begin together, since the engine takes one call at a time"


def test_what_is_played_at_a_time_depends_on_nothing_but_the_plan():
    policies = [Policy(lambda text: "x" if "]" in text else "ab") for _ in range(2)]
    for policy in policies:
        fates = {"a": None, "b": "slow", "c": None, "d": "slow", "e": None}
        episodes(policy, fates, play(max_open=2))
    assert policies[0].calls == policies[1].calls
    assert policies[0].calls[0] == ["a/turn-0", "b/turn-0"]


def test_an_environment_that_hangs_is_given_up_and_holds_nobody():
    started = time.monotonic()
    done = episodes(
        Policy(turns("ab", "x")),
        {**dict.fromkeys("abc"), **dict.fromkeys(["s1", "s2"], "stuck")},
        play(workers=2, turn_timeout_s=0.3, concurrent=True),
    )
    assert time.monotonic() - started < 5
    assert done["s1"].metadata["dropped"] == "environment: no answer within turn_timeout_s=0.3"
    assert {done[name].metadata["finish_reason"] for name in "abc"} == {"stop"}


def test_an_environment_that_hangs_while_it_is_closed_holds_nobody():
    class Hanging(Echo):
        def close(self) -> None:
            if self._fate == "hangs":
                time.sleep(3600)

    started = time.monotonic()
    fates = {"h": "hangs", **dict.fromkeys("abc")}
    done = episodes(Policy(turns("ab", "x")), fates, play(Hanging, workers=1, max_open=1, turn_timeout_s=0.3))
    assert time.monotonic() - started < 5
    assert {c.metadata["dropped"] for c in done.values()} == {None}


def test_a_beginning_that_comes_too_late_is_closed_again():
    closed: list[float] = []

    class Late(Echo):
        def reset(self, task: Task) -> None:
            super().reset(task)
            if self._fate == "late":
                time.sleep(0.6)

        def close(self) -> None:
            if self._fate == "late":
                closed.append(time.monotonic())

    started = time.monotonic()
    done = episodes(Policy(turns("x")), {"l": "late", "a": None}, play(Late, turn_timeout_s=0.2))
    assert done["l"].metadata["dropped"] == "environment: no answer within turn_timeout_s=0.2"
    while not (closed and closed[-1] - started > 0.55) and time.monotonic() < started + 5:
        time.sleep(0.01)
    assert closed[-1] - started > 0.55


def test_what_an_environment_records_belongs_to_the_stage_that_plays_it():
    class Recording(Echo):
        def step(self, action: Action) -> Step:
            record_metric("environment/steps", 1.0, Reduce.SUM)
            return super().step(action)

    with collecting() as mine:
        episodes(Policy(turns("ab", "x")), {"a": None, "b": None}, play(Recording))
    assert mine.drain()["0"]["environment/steps"]["count"] == 4, "and not among what no stage recorded"


def test_what_an_environment_says_of_its_end_is_cut_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GAME_API_KEY", "sk-planted-0123456789")

    class Leaking(Echo):
        def step(self, action: Action) -> Step:
            raise OSError("401 for sk-planted-0123456789 " + "x" * 5000)

    dropped = episodes(Policy(turns("ab")), {"a": None}, play(Leaking))["a"].metadata["dropped"]
    assert "planted" not in dropped
    assert len(dropped) < 600


def test_what_an_environment_counts_does_not_replace_its_reward():
    class Counting(Echo):
        def step(self, action: Action) -> Step:
            return Step(reward=1.0, done=True, counts={"reward": 7.0, "turns": 9.0})

    assert episodes(Policy(turns("ab")), {"a": None}, play(Counting))["a"].metadata["environment"]["reward"] == 1.0


def test_waiting_for_a_worker_is_not_the_environments_time():
    done = episodes(Policy(turns("x")), dict.fromkeys(map(str, range(6)), "slow"), play(workers=1, turn_timeout_s=0.8))
    assert {c.metadata["dropped"] for c in done.values()} == {None}


def test_at_the_deadline_what_is_unfinished_is_dropped():
    policy = Policy(turns("ab"))
    done = episodes(policy, {"e": None}, play(max_turns=10**6, max_turn_tokens=3), 10**6, deadline_s=0.3)["e"]
    assert (done.metadata["finish_reason"], done.metadata["dropped"]) == ("aborted", "deadline")


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_stop_ends_the_rollout_and_the_engines_calls(concurrent: bool):
    stop = StopToken()
    threading.Timer(0.2, stop.set, ["Ctrl-C"]).start()
    started = time.monotonic()
    with pytest.raises(Stopped, match="Ctrl-C"):
        episodes(Policy(turns("ab"), seconds=60), {"e": None, "f": None}, play(concurrent=concurrent), stop=stop)
    assert time.monotonic() - started < 5


def test_an_engine_that_takes_one_call_at_a_time_samples_all_episodes_turn_by_turn():
    policy = Policy(lambda text: "x" if text.count("]") >= 2 else "ab")
    episodes(policy, {"a": "slow", "b": None, "c": None})
    assert policy.calls == [[f"{name}/turn-{turn}" for name in "abc"] for turn in range(3)]


def test_with_a_concurrent_engine_a_slow_environment_delays_no_other_episode():
    policy = Policy(lambda text: "x" if text.count("]") >= 2 else "ab")
    episodes(policy, {"a": "slow", "b": None, "c": None}, play(concurrent=True))
    order = [call for (call,) in policy.calls]
    assert order.index("b/turn-2") < order.index("a/turn-1")
    assert order.index("c/turn-2") < order.index("a/turn-1")


def test_every_environment_is_closed():
    closed: list[str] = []

    class Closing(Echo):
        def close(self) -> None:
            closed.append(self._fate)

    episodes(Policy(turns("ab", "x")), {"a": "one", "b": "broken", "c": "broken at once"}, play(Closing))
    deadline = time.monotonic() + 5
    while len(closed) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(closed) == ["broken", "broken at once", "one"]


def test_tools_are_called_and_their_answers_read():
    policy = Policy(lambda text: f"it is {text.partition('}')[2]}" if "}" in text else "{6*7}")
    done = episodes(policy, {"e": None}, play(Calculator))["e"]
    assert done.text.replace("\x00", "") == "it is 42"
    assert done.metadata["environment"]["tool_calls"] == 1.0


def test_the_engines_error_is_raised():
    class Broken(Policy):
        def generate(self, *arguments: Any, **keywords: Any) -> list[Completion]:
            raise GenerationError("diverged")

    with pytest.raises(GenerationError, match="diverged"):
        episodes(Broken(turns("x")), {"e": None})
