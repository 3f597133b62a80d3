"""Multi-turn episodes: the policy speaks, the environment answers, until one of them ends it.

Invariants:
- Episodes go on side by side (``max_open`` of them at a time; each that ends makes room for the next): while the
  environment of one works, others are sampled. An engine that takes one call at a time samples all of them turn by
  turn, so that its batches, and with them a CPU run, depend on nothing but the plan.
- An environment that raises, answers what cannot be placed, or does not answer within ``turn_timeout_s``, costs its own
  episode, which is dropped with the reason. At the deadline what is unfinished is dropped. Nothing waits for a thread
  that hangs.
- Each limit holds by itself: tokens of a turn (it is cut, and answered as it is), tokens of the episode, turns, seconds
  of an answer, seconds of all episodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from forge_core.data_model import Completion, GenerationRequest
from forge_core.environments.episode import EpisodeInProgress
from forge_core.environments.protocol import Action, Environment, Message, Step, Task, storable
from forge_core.environments.threads import Threads
from forge_core.environments.tool_calls import Parse
from forge_core.environments.turns import TurnRenderer
from forge_core.generation.base import Generator
from forge_core.redaction import redact
from forge_core.stop import StopToken

log = logging.getLogger("forge")
POLL_S = 0.1
REASON = 500  # characters of why an episode is dropped
DEADLINE, BROKEN = "deadline", "environment"  # why an episode is dropped


@dataclass(frozen=True)
class Play:
    """How episodes are played. ``make`` makes an environment; ``parse`` finds the tool calls of a turn; ``workers``
    environments work at a time, ``max_open`` are there at a time (None: one for each episode); ``concurrent``: whether
    the engine takes calls from any number of threads."""

    make: Callable[[], Environment]
    renderer: TurnRenderer
    parse: Parse
    max_turns: int
    max_turn_tokens: int
    turn_timeout_s: float
    workers: int
    concurrent: bool
    max_open: int | None = None


def run_episodes(
    play: Play,
    engine: Generator,
    requests: Sequence[GenerationRequest],
    tasks: Mapping[str, Task],
    *,
    stop: StopToken | None = None,
    deadline_s: float | None = None,
) -> list[Completion]:
    """One completion per request, in order, each a whole episode (``EpisodeInProgress.completion``). ``tasks``: by
    request id. A request's ``max_new_tokens`` bounds all tokens of its episode, those of the environment included.
    Those that are dropped are ``"aborted"``, as a generator's are. Raises what the engine raises, and Stopped."""
    if not requests:
        return []
    return _Rollout(play, engine, requests, tasks, deadline_s).run(stop or StopToken())


class _Rollout:
    def __init__(
        self,
        play: Play,
        engine: Generator,
        requests: Sequence[GenerationRequest],
        tasks: Mapping[str, Task],
        deadline_s: float | None,
    ) -> None:
        self._play, self._engine, self._tasks = play, engine, tasks
        version = engine.get_version()
        self._episodes = [EpisodeInProgress(request, version) for request in requests]
        self._order = {id(episode): number for number, episode in enumerate(self._episodes)}
        self._prompts: dict[str, str] = {}
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._waiting = list(self._episodes)  # to begin
        self._open: list[EpisodeInProgress] = []
        self._closing: dict[Future[None], _Closing] = {}
        self._ready: list[EpisodeInProgress] = []
        self._sampling: dict[Future[list[Completion]], list[tuple[EpisodeInProgress, GenerationRequest]]] = {}
        self._acting: dict[Future[Step | None], EpisodeInProgress] = {}
        self._calls = Threads(len(requests) if play.concurrent else 1, "forge-turn")
        self._workers = Threads(min(play.workers, len(requests)), "forge-environment")
        self._halt = StopToken()  # of the engine's calls: set when this rollout ends before they do

    def run(self, stop: StopToken) -> list[Completion]:
        try:
            while not all(episode.ended for episode in self._episodes):
                if stop.is_set():
                    stop.check()
                self._make_room()
                self._sample_ready()
                self._collect()
                self._give_up()
        finally:
            self._end()
        return [episode.completion(self._prompts.get(episode.request.request_id, "")) for episode in self._episodes]

    def _make_room(self) -> None:
        """Close the environments of episodes that have ended, and begin others in their place."""
        for episode in [e for e in self._open if e.ended]:
            self._open.remove(episode)
            self._close(episode)
        self._closing = {future: closing for future, closing in self._closing.items() if not future.done()}
        room = (self._play.max_open or len(self._episodes)) - len(self._open) - len(self._closing)
        begun, self._waiting = self._waiting[: max(room, 0)], self._waiting[max(room, 0) :]
        for episode in begun:
            self._open.append(episode)
            self._act(episode, self._beginning(episode))

    def _close(self, episode: EpisodeInProgress) -> None:
        if episode.environment is not None:
            closing = _Closing(episode.environment)
            self._closing[self._workers.submit(closing)] = closing

    # The policy's turn ------------------------------------------------------------------------------------------------

    def _sample_ready(self) -> None:
        if self._play.concurrent:
            for episode in self._ready:
                self._sample([episode])
        elif self._ready and not (self._sampling or self._acting or (self._waiting and self._closing)):
            self._sample(sorted(self._ready, key=lambda episode: self._order[id(episode)]))
        else:
            return
        self._ready = []

    def _sample(self, episodes: list[EpisodeInProgress]) -> None:
        asked = [(episode, episode.next_request(self._play.max_turn_tokens)) for episode in episodes]
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.001)
        requests = [request for _, request in asked]
        call = self._calls.submit(lambda: self._engine.generate(requests, stop=self._halt, deadline_s=left))
        self._sampling[call] = asked

    def _sampled(self, call: Future[list[Completion]]) -> None:
        for (episode, request), completion in zip(self._sampling.pop(call), call.result(), strict=True):
            if episode.ended:
                continue
            self._prompts.setdefault(episode.request.request_id, completion.prompt)
            episode.add_turn(request, completion)
            if not episode.ended:
                self._act(episode, self._answering(episode, completion))

    # The environment's turn -------------------------------------------------------------------------------------------

    def _beginning(self, episode: EpisodeInProgress) -> Callable[[], Step | None]:
        def begin() -> None:
            environment = self._play.make()
            episode.environment = environment
            environment.reset(self._tasks[episode.request.request_id])
            if episode.ended:  # given up meanwhile, and closed before there was much to close
                _Closing(environment)()

        return begin

    def _answering(self, episode: EpisodeInProgress, completion: Completion) -> Callable[[], Step]:
        environment, text = episode.environment, completion.text
        assert environment is not None
        said = self._play.renderer.said(completion.token_ids, end_token=episode.end_token)

        def answer() -> Step:
            step = environment.step(Action(text, tuple(self._play.parse(said))))
            if not isinstance(step, Step):
                raise TypeError(f"step returned {step!r:.200}, which is no Step")
            return step

        return answer

    def _act(self, episode: EpisodeInProgress, work: Callable[[], Step | None]) -> None:
        def begin() -> Step | None:
            episode.asked_at = time.monotonic()
            return work()

        episode.asked_at = None
        self._acting[self._workers.submit(begin)] = episode

    def _acted(self, work: Future[Step | None]) -> None:
        episode = self._acting.pop(work)
        if episode.ended:
            return
        if (error := work.exception()) is not None:
            self._break(episode, f"{type(error).__name__}: {error}")
        elif (step := work.result()) is None:  # it has begun
            self._ready.append(episode)
        else:
            self._answered(episode, step)

    def _answered(self, episode: EpisodeInProgress, step: Step) -> None:
        episode.reward += step.reward
        for name, count in step.counts.items():
            episode.counts[name] = episode.counts.get(name, 0.0) + count
        if step.done:
            episode.finish()
        elif not step.observation:
            self._break(episode, "it answered nothing, and did not end the episode")
        elif episode.turns >= self._play.max_turns:
            episode.end("length")
        else:
            self._observe(episode, step.observation)

    def _observe(self, episode: EpisodeInProgress, observation: Sequence[Message]) -> None:
        said = sum(len(message["content"]) for message in observation)
        if said > self._play.renderer.most_characters(episode.room):  # not tokenised: that would hold up the others
            episode.add_what_is_too_long(observation)
            return
        try:
            token_ids = self._play.renderer.after(observation, end_token=episode.end_token)
        except ValueError as error:  # roles that the template refuses, characters that the tokenizer lacks
            self._break(episode, str(error))
            return
        episode.add_observation(list(observation), token_ids)
        if not episode.ended:
            self._ready.append(episode)

    def _break(self, episode: EpisodeInProgress, why: str) -> None:
        why = storable(redact(why)[:REASON])  # it is logged and stored
        log.warning("the environment of episode %s failed, it is dropped: %s", episode.request.request_id, why)
        episode.end("aborted", f"{BROKEN}: {why}")

    # Time -------------------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        pending: set[Future[Any]] = {*self._sampling, *self._acting, *self._closing}
        done = wait(pending, POLL_S, FIRST_COMPLETED).done if pending else set()
        for future in [f for f in self._sampling if f in done]:
            self._sampled(future)
        for work in [w for w in self._acting if w in done]:
            self._acted(work)

    def _give_up(self) -> None:
        now, limit = time.monotonic(), self._play.turn_timeout_s
        for work, episode in list(self._acting.items()):
            if episode.asked_at is not None and now - episode.asked_at > limit and not work.done():
                del self._acting[work]
                self._workers.abandon(work)
                self._break(episode, f"no answer within turn_timeout_s={limit:g}")
        for future, closing in list(self._closing.items()):
            if closing.begun_at is not None and now - closing.begun_at > limit and not future.done():
                del self._closing[future]
                self._workers.abandon(future)
                log.warning("closing an environment took more than turn_timeout_s=%g: it is left to itself", limit)
        if self._deadline is not None and now > self._deadline:
            for episode in self._episodes:
                episode.end("aborted", DEADLINE)

    def _end(self) -> None:
        """Leave nothing that works for this rollout, but what cannot be ended."""
        self._halt.set("the rollout has ended")
        for work in self._acting:
            self._workers.abandon(work)
        for episode in self._open:
            self._close(episode)
        self._calls.close()
        self._workers.close()


class _Closing:
    """Closes an environment. ``begun_at``: when that began, on the monotonic clock."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.begun_at: float | None = None

    def __call__(self) -> None:
        self.begun_at = time.monotonic()
        try:
            self._environment.close()
        except Exception as error:  # its episode is over
            log.warning("closing an environment failed: %s: %s", type(error).__name__, error)
