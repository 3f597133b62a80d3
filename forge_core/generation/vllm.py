"""The vLLM generator: one or several engines in child processes, weights swapped under running requests.

Guarantees, beyond those of ``Generator``:
- ``generate`` is called concurrently: all callers share each engine's continuous batch, older batches first.
- ``update_weights`` hands over verified files only. An engine moves to the new version completely, or keeps the old
  one, or is started again on the old one; work that asks for a newer version than is served is refused.
- An unfinished response keeps its tokens across an update (``in_flight``) and its ``version_spans`` say which version
  sampled which tokens; with ``drain`` no response mixes versions.
- Engines divide requests by load, a prompt's samples staying together. A dead engine is started again, and its requests
  are sampled elsewhere meanwhile.
- No engine outlives this process, whatever ends it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_core.data_model import Completion, GenerationRequest, SamplingParams, VersionSpan
from forge_core.generation.base import GenerationError, check_requests, check_versions
from forge_core.generation.completions import Sampled, completions
from forge_core.generation.eos import eos_token_ids
from forge_core.generation.vllm_pool import EnginePool
from forge_core.generation.vllm_replica import Replica
from forge_core.generation.vllm_settings import VLLMSettings
from forge_core.models.resolve import read_json
from forge_core.observability.memory import SETTINGS, memory_guard
from forge_core.observability.metrics import Reduce, record_metric
from forge_core.stop import StopToken

POLL_S = 0.1
SILENT_S = 120.0  # an engine that is paused for new weights answers later than others
# vLLM's reasons, and ours: a response that repeats itself is cut short; one that failed is not complete.
REASONS = {"stop": "stop", "length": "length", "repetition": "length", "abort": "aborted", "error": "aborted"}
_guarded = memory_guard("generator", SETTINGS["vllm generator"])


class _Call:
    """One ``generate`` call: what it waits for, by names that no other call has or had: the last words of a request
    that was given up must not be taken for those of one that is asked for again."""

    def __init__(self, requests: Sequence[GenerationRequest], number: int) -> None:
        self.names = [f"{r.request_id}@{number}" for r in requests]
        self.waiting = dict(zip(self.names, requests, strict=True))
        self.results: dict[str, dict[str, Any]] = {}
        self.error: BaseException | None = None
        self.given_up_at: float | None = None  # then nothing of it is begun any more


class VLLMGenerator:
    """``weights(version)`` gives the local, verified folder of a policy version. ``logs``: folder of log files.
    ``stop`` ends engines that are being started."""

    def __init__(
        self,
        weights: Callable[[int], Path],
        *,
        version: int,
        settings: VLLMSettings,
        logs: Path,
        stop: StopToken | None = None,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise GenerationError(
                "generator.backend is vllm, but vLLM is not installed: pip install 'forge-rl[vllm]' on a machine with "
                "GPUs, scripts/install_vllm_cpu.sh on one without"
            )
        self._read_model(weights(version), settings.max_model_len)
        self._settings = dataclasses.replace(settings, max_model_len=self._max_len)
        self._changed = threading.Condition(threading.RLock())  # of the requests below, and of the pool
        self._numbers = itertools.count()  # of calls
        self._calls: dict[str, _Call] = {}  # by the name of each request
        self._assigned: dict[str, int] = {}  # name -> engine
        self._pool = EnginePool(
            weights,
            version,
            self._settings,
            logs=logs,
            changed=self._changed,
            on_done=self._on_done,
            on_lost=self._on_lost,
            on_ready=self._on_ready,
            stop=stop,
        )
        self._start()

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer (the first version's; training never changes it)."""
        return self._tokenizer

    @_guarded
    def generate(
        self, requests: Sequence[GenerationRequest], *, stop: StopToken | None = None, deadline_s: float | None = None
    ) -> list[Completion]:
        """Sample one completion per request, in order; called from any number of threads. ``deadline_s`` counts from
        the call. Raises ValueError for a request that is too long or asks for a newer version than is served."""
        check_requests(requests, max_positions=self._max_len, vocab_size=self._vocab_size)
        check_versions(requests, self._pool.version)
        if not requests:
            return []
        call = _Call(requests, next(self._numbers))
        with self._changed:
            self._pool.check_usable()
            self._calls.update(dict.fromkeys(call.waiting, call))
            self._dispatch(call.waiting)
        self._wait(call, stop, deadline_s)
        return completions(self._tokenizer, requests, [self._sampled(call.results[name]) for name in call.names])

    @_guarded
    def update_weights(self, version: int) -> None:
        """Serve ``version`` from now on. ValueError for an older version; WeightsError for files that do not fit, and
        when an engine could not take them: the old version keeps serving."""
        self._pool.update(version)
        for phase, seconds in self.last_update.items():
            record_metric(f"generator_perf/update_weights/{phase}_duration_avg_s", seconds, Reduce.MEAN)

    @property
    def last_update(self) -> dict[str, float]:
        """Seconds of each phase of the newest update: ``fetch`` (of files, with their digests), ``stage``, ``pause``,
        ``load``, ``resume``, ``probe``."""
        return self._pool.last_update

    def get_version(self) -> int:
        return self._pool.version

    def run(self, stop: StopToken) -> None:
        """Serve until ``stop`` is set or the generator is shut down. Raises GenerationError when an engine cannot be
        kept alive."""
        while not self._pool.closed and not stop.wait(POLL_S):
            self._pool.check_usable()

    def get_vllm_config(self) -> dict[str, dict[str, Any]]:
        """vLLM's resolved configuration by part: model, cache, parallel, scheduler, compilation."""
        return self._answer("config")

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability, at temperature 1, of every token after the first, under the served version. Raises
        ValueError for tokens that the model cannot have, or too many: vLLM samples one more."""
        asked = GenerationRequest("score", tuple(token_ids), 0, SamplingParams(max_new_tokens=1))
        check_requests([asked], max_positions=self._max_len, vocab_size=self._vocab_size)
        return self._answer("score", token_ids=list(token_ids))

    def sleep(self) -> None:
        """Free the engines' GPU memory (weights go to host memory, the key/value cache is dropped)."""
        self._pool.sleep()

    def wake(self) -> None:
        """Take the memory back; nothing may be generated before."""
        self._pool.wake()

    def shutdown(self) -> None:
        self._pool.close()

    @_guarded
    def _start(self) -> None:
        try:
            self._pool.start()
        except BaseException:
            self._pool.close()
            raise

    def _answer(self, kind: str, **arguments: Any) -> Any:
        """An engine's answer to a question that changes nothing."""
        answer = self._pool.any().call(kind, **arguments)
        if "refused" in answer:
            raise ValueError(f"{kind}: {answer['refused']}")
        return answer

    def _read_model(self, folder: Path, longest: int) -> None:
        from transformers import AutoTokenizer

        config = read_json(folder / "config.json")
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self._vocab_size = int(config["vocab_size"])
        self._max_len = min(longest, int(config["max_position_embeddings"]))
        self._eos_ids = eos_token_ids(folder, config.get("eos_token_id"), self._tokenizer)

    def _dispatch(self, requests: Mapping[str, GenerationRequest]) -> None:
        """Give ``requests`` to the least loaded engines, prompt by prompt; without a live engine they wait for one."""
        live = self._pool.live()
        if not live or not requests:
            return
        load = dict.fromkeys(live, 0)
        for index in self._assigned.values():
            if index in load:
                load[index] += 1
        parts: dict[int, list[dict[str, Any]]] = {index: [] for index in live}
        for _, group in itertools.groupby(requests.items(), key=lambda named: named[1].prompt_ids):
            members = dict(group)
            index = min(load, key=lambda i: (load[i], i))
            load[index] += len(members)
            parts[index] += [self._settings.request(name, request, self._eos_ids) for name, request in members.items()]
            self._assigned.update(dict.fromkeys(members, index))
        for index, part in parts.items():
            if part:
                live[index].generate(part)

    def _on_lost(self, index: int) -> None:
        """The pool has lost engine ``index``: what it had is sampled elsewhere, or when there is an engine again."""
        names = [name for name, i in self._assigned.items() if i == index]
        for name in names:
            del self._assigned[name]
        self._end_given_up()
        self._dispatch({name: self._calls[name].waiting[name] for name in names if name in self._calls})

    def _on_ready(self) -> None:
        self._dispatch({name: call.waiting[name] for name, call in self._calls.items() if name not in self._assigned})

    def _on_done(self, result: dict[str, Any]) -> None:
        with self._changed:
            index = self._assigned.pop(result["id"], None)
            call = self._calls.get(result["id"])
            if call is None or result["id"] not in call.waiting:
                return  # nobody waits for it any more
            if index is not None:
                self._pool.succeeded(index)
            del self._calls[result["id"]]
            request = call.waiting.pop(result["id"])
            call.results[result["id"]] = result
            if "refused" in result:
                call.error = call.error or ValueError(f"request {request.request_id}: {result['refused']}")
            if call.error or not call.waiting:
                self._changed.notify_all()

    def _wait(self, call: _Call, stop: StopToken | None, deadline_s: float | None) -> None:
        deadline = time.monotonic() + deadline_s if deadline_s is not None else None
        try:
            with self._changed:
                while call.waiting:
                    if call.error is not None:
                        raise call.error
                    self._pool.check_usable()
                    if stop is not None:
                        stop.check()
                    if deadline is not None and time.monotonic() > deadline:
                        self._give_up(call)
                    self._changed.wait(POLL_S)
                if call.error is not None:
                    raise call.error
        finally:
            self._forget(call)

    def _give_up(self, call: _Call) -> None:
        """After its deadline: what has no engine ends as it is, the rest when its engine says how far it came. One that
        says nothing is ended."""
        now = time.monotonic()
        if call.given_up_at is None:
            call.given_up_at = now
            self._abort(list(call.waiting))
            self._end_given_up()
        elif now > call.given_up_at + SILENT_S:
            call.given_up_at = now
            for replica in self._engines_of(call.waiting):
                replica.kill(f"it did not end requests within {SILENT_S:.0f} s")

    def _end_given_up(self) -> None:
        late = [name for name, call in self._calls.items() if call.given_up_at is not None]
        over = [name for name in late if name not in self._assigned]
        for name in over:
            self._on_done({"id": name, "tokens": [], "logprobs": [], "reason": "abort", "spans": []})

    def _forget(self, call: _Call) -> None:
        """After an error or a stop: end what the engines still do for ``call``."""
        with self._changed:
            names = list(call.waiting)
            self._abort(names)
            for name in names:
                self._calls.pop(name, None)
                self._assigned.pop(name, None)

    def _engines_of(self, names: Iterable[str]) -> list[Replica]:
        mine = {self._assigned.get(name) for name in names}
        return [replica for index, replica in self._pool.live().items() if index in mine]

    def _abort(self, names: Sequence[str]) -> None:
        for index, replica in self._pool.live().items():
            if mine := [name for name in names if self._assigned.get(name) == index]:
                replica.abort(mine)

    def _sampled(self, result: dict[str, Any]) -> Sampled:
        spans = version_spans(result["spans"], len(result["tokens"]))
        version = spans[0].version if spans else self._pool.version
        return Sampled(result["tokens"], result["logprobs"], REASONS.get(result["reason"], "aborted"), version, spans)


def version_spans(starts: Sequence[tuple[int, int]], length: int) -> list[VersionSpan]:
    """``(version, first token)`` pairs of a response of ``length`` tokens as spans; empty ones are left out. A response
    that was never begun has no pairs."""
    ends = [*[start for _, start in starts[1:]], length][: len(starts)]
    return [
        VersionSpan(version, start, min(end, length))
        for (version, start), end in zip(starts, ends, strict=True)
        if start < min(end, length)
    ]
