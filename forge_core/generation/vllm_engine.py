"""The child process that owns one vLLM engine: ``python -m forge_core.generation.vllm_engine FD``.

It serves one parent over the socket FD (``forge_core.processes.channel.Channel``). Invariants:
- Requests of any number of callers share one continuous batch, older batches first (priority scheduling); vLLM gets
  them as it can begin them (``vllm_admission.py``).
- Every request is salted with the version it is prefilled by, so a prefix cached under other weights is never hit.
- A swap of weights happens between two steps of the engine. A request that has tokens keeps them and notes where the
  new version starts; one that has none is prefilled again. Nothing finished is reported between a swap and its probe.
- A request whose ``min_version`` is above the served version is refused.
- An error in one request, or in a question that changes nothing (``READING``), is the answer to it: the engine goes on.
- A swap that fails ends this process: parameters may be half loaded. The parent starts it again on the last good
  version. So does the death of the engine's own process, whatever was waiting for it.

It touches vLLM's output processor for one thing only: how many tokens a request has at the moment of a swap.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from forge_core.collector import collect_seldom
from forge_core.generation.vllm_admission import Admission
from forge_core.generation.vllm_in_place import EXTENSION
from forge_core.generation.vllm_open import Open, finished, sampling_params
from forge_core.generation.vllm_slots import PROBE_PRIORITY, reserve_slots
from forge_core.models.probe import check
from forge_core.processes.channel import Channel

LOOK_S = 0.2
STAGED_S = 0.005  # between two looks at whether weights are staged
READING = ("config", "score")


@contextmanager
def timed(times: dict[str, float], phase: str) -> Iterator[None]:
    """Seconds of the block, as ``times[phase]``."""
    started = time.monotonic()
    yield
    times[phase] = time.monotonic() - started


class EngineHost:
    """See the module. ``version`` is the one that the engine was loaded with; ``dtype`` what it computes in."""

    def __init__(self, engine: Any, channel: Channel, version: int, dtype: str) -> None:
        self.version = version
        self._engine, self._channel, self._dtype = engine, channel, dtype
        self._open: dict[str, Open] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._adding = 0
        self._numbers = itertools.count()
        self._gate = asyncio.Event()  # closed while weights are swapped
        self._gate.set()
        self._admission = Admission(self._gate, lambda item: bool(self._tokens(item)), self._start)
        self._held: list[dict[str, Any]] | None = None  # finished since the swap, waiting for its probe
        self._finished: list[dict[str, Any]] = []  # that the parent is about to be told of
        self.ended = asyncio.Event()

    def handle(self, message: tuple[str, Any]) -> None:
        """Act on one message of the parent; called in the event loop."""
        kind, body = message
        if kind == "generate":
            for request in body:
                self._start(self._generate(Open(request)))
        elif kind == "abort":
            self._start(self._abort(body))
        elif kind == "shutdown":
            self.ended.set()
        else:
            self._start(self._answer(kind, body))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished_task)

    def _finished_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._tell()
            self._channel.send(("died", f"{type(error).__name__}: {error}"))
            self.ended.set()

    async def _answer(self, kind: str, body: dict[str, Any]) -> None:
        number = body.pop("call")
        try:
            result = await getattr(self, f"_on_{kind}")(**body)
        except Exception as error:
            if self._engine.errored:
                raise  # that is its death, and no answer
            text = f"{type(error).__name__}: {error}"
            if kind not in READING:
                self._channel.send(("failed", (number, text)))
                raise  # the engine's memory or weights are in an unknown state
            result = {"refused": text}
        self._tell()
        self._channel.send(("reply", (number, result)))

    # Requests -----------------------------------------------------------------------------------------------------

    async def _generate(self, item: Open) -> None:
        self._open[item.request["id"]] = item
        try:
            output = await self._run(item)
            while item.again:
                item.again, item.attempt = False, item.attempt + 1
                output = await self._run(item)
            result = finished(item, output)
        except Exception as error:  # of vLLM's checks of one request some are no ValueError
            if self._engine.errored:
                raise  # that is its death, and no answer
            result = {"id": item.request["id"], "refused": f"{type(error).__name__}: {error}"}
        finally:
            del self._open[item.request["id"]]
        self._report(result)

    async def _run(self, item: Open) -> Any:
        """Let the engine work on ``item`` until it ends or is taken back; its final output, None for no token."""
        await self._admission.enter(item)
        try:
            return await self._sampled(item)
        finally:
            self._admission.left(item)

    async def _sampled(self, item: Open) -> Any:
        while not self._gate.is_set():
            await self._gate.wait()
        if item.aborted:
            return None
        request = item.request
        if self.version < request["min_version"]:
            raise ValueError(
                f"this engine serves version {self.version}, and the batch may be sampled by version "
                f"{request['min_version']} at least"
            )
        item.spans = [(self.version, 0)]
        prompt = {"prompt_token_ids": request["prompt_ids"], "cache_salt": f"version-{self.version}"}
        self._adding += 1
        try:
            queue = await self._engine.add_request(
                item.inner_id, prompt, sampling_params(request["params"]), priority=request["priority"]
            )
        finally:
            self._adding -= 1
        if item.aborted:  # meanwhile: the engine may not have known it yet
            await self._engine.abort([item.inner_id])
        output = queue.get_nowait() or await queue.get()
        while not output.finished:
            output = await queue.get()
        return output

    async def _abort(self, ids: list[str]) -> None:
        items = [self._open[name] for name in ids if name in self._open]
        for item in items:
            item.aborted, item.again = True, False
        self._admission.aborted()
        await self._engine.abort([item.inner_id for item in items])

    def _report(self, result: dict[str, Any]) -> None:
        if self._held is not None:
            self._held.append(result)
            return
        if not self._finished:
            asyncio.get_running_loop().call_soon(self._tell)
        self._finished.append(result)

    def _tell(self) -> None:
        """What a step of the engine finished goes to the parent as one message: each would interrupt its trainer."""
        finished, self._finished = self._finished, []
        if finished:
            self._channel.send(("done", finished))

    # Weights ------------------------------------------------------------------------------------------------------

    async def _on_update(
        self, version: int, folder: str, drain: bool, probe: dict[str, Any] | None
    ) -> dict[str, float]:
        """Swap to ``version``; the seconds of each phase."""
        times: dict[str, float] = {}
        with timed(times, "stage"):
            await self._stage(folder)
        with timed(times, "pause"):
            self._gate.clear()
            while self._adding:
                await asyncio.sleep(0.001)
            await self._engine.pause_generation(mode="wait" if drain else "keep", clear_cache=False)
            await self._counted()
        self._held = []
        untouched = self._mark(version)
        with timed(times, "load"):
            await self._load(folder)
        self.version = version
        with timed(times, "resume"):
            await self._engine.abort([item.inner_id for item in untouched])
            await self._engine.resume_generation()
            self._gate.set()
        with timed(times, "probe"):
            await self._check(probe)
        held, self._held = self._held, None
        for result in held:
            self._report(result)
        return times

    async def _stage(self, folder: str) -> None:
        """Have the workers read the weights while the engine goes on."""
        if not self._extended:
            return
        await self._engine.collective_rpc("stage", kwargs={"folder": folder})
        while not all(await self._engine.collective_rpc("staged")):
            await asyncio.sleep(STAGED_S)

    async def _load(self, folder: str) -> None:
        """In place, unless the workers have an extension of the user's."""
        method, name = ("load_in_place", "folder") if self._extended else ("reload_weights", "weights_path")
        await self._engine.collective_rpc(method, kwargs={name: folder})

    @property
    def _extended(self) -> bool:
        """Whether the workers have Forge's extension, and not one of the user's."""
        return self._engine.vllm_config.parallel_config.worker_extension_cls == EXTENSION

    async def _counted(self) -> None:
        """Wait until the tokens of the steps before the pause have all arrived here."""
        before: list[int | None] | None = None
        while (found := [self._tokens(item) for item in self._open.values()]) != before:
            before = found
            await asyncio.sleep(0.005)

    def _tokens(self, item: Open) -> int | None:
        """How many tokens a request has; None while it waits at the gate, or has just finished."""
        processor = self._engine.output_processor
        inner = processor.external_req_ids.get(item.inner_id)
        return processor.request_states[inner[0]].detokenizer.num_output_tokens() if inner else None

    def _mark(self, version: int) -> list[Open]:
        """Note where ``version`` begins in every request that has tokens; those that have none, to be run again."""
        untouched = []
        for item in self._open.values():
            count = self._tokens(item)
            if count is None:
                continue
            if count:
                item.spans.append((version, count))
            elif not item.aborted:
                item.again = True
                untouched.append(item)
        return untouched

    async def _check(self, probe: dict[str, Any] | None) -> None:
        """Compare the log-probabilities of the probe's tokens with the trainer's."""
        if probe is None:
            return
        room = self._engine.model_config.max_model_len - 1  # of a longer sequence its beginning
        scores = [self._prompt_logprobs(ids[:room], f"probe-{self.version}") for ids in probe["token_ids"]]
        check(probe, await asyncio.gather(*scores), self._dtype, self.version)

    async def _prompt_logprobs(self, token_ids: list[int], salt: str) -> list[float]:
        from vllm import SamplingParams

        prompt = {"prompt_token_ids": token_ids, "cache_salt": salt}
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, temperature=0.0)
        name = f"{salt}-{next(self._numbers)}"
        (output,) = [
            o async for o in self._engine.generate(prompt, params, name, priority=PROBE_PRIORITY) if o.finished
        ]
        return [entry[token].logprob for token, entry in zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)]

    async def _on_score(self, token_ids: list[int]) -> list[float]:
        """Log-probability, at temperature 1, of each token after the first; never from a cache."""
        return await self._prompt_logprobs(token_ids, f"score-{next(self._numbers)}")

    # Memory and settings ------------------------------------------------------------------------------------------

    async def _on_sleep(self) -> None:
        await self._engine.sleep(level=1)

    async def _on_wake(self) -> None:
        await self._engine.wake_up()

    async def _on_config(self) -> dict[str, Any]:
        return _plain_config(self._engine.vllm_config)


def _plain_config(config: Any) -> dict[str, Any]:
    """The parts of vLLM's configuration that decide speed and memory, as plain values."""
    parts = {
        name: getattr(config, f"{name}_config") for name in ("model", "cache", "parallel", "scheduler", "compilation")
    }
    return {
        name: {k: v for k, v in vars(part).items() if isinstance(v, str | int | float | bool | type(None))}
        for name, part in parts.items()
    }


async def serve(channel: Channel) -> None:
    """Load the engine that the first message describes and serve until the parent ends it or is gone."""
    start = await asyncio.to_thread(channel.receive)
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(**start["engine_args"])
    config = args.create_engine_config(UsageContext.LLM_CLASS)
    check_graphs(config.compilation_config)
    reserve_slots(config.scheduler_config)
    engine = AsyncLLM.from_vllm_config(config, usage_context=UsageContext.LLM_CLASS, disable_log_stats=True)
    serving = asyncio.ensure_future(_serve(engine, channel, start))
    dying = asyncio.ensure_future(_died(engine))
    await asyncio.wait([serving, dying], return_when=asyncio.FIRST_COMPLETED)
    await (serving if serving.done() else dying)


def check_graphs(compilation: Any) -> None:
    """Raise ValueError where vLLM would replay graphs of whole steps for steps with prompts, which computes something
    else (``config/vllm_keys.py``). It comes to that by itself too, as with ``splitting_ops: []`` or some passes."""
    if compilation.cudagraph_mode.name == "FULL":
        raise ValueError(
            "vLLM made cudagraph_mode FULL of the engine's settings, under which it samples from another distribution "
            "than the model's: set generator.engine_args.compilation_config.cudagraph_mode to FULL_DECODE_ONLY, or "
            "leave out what keeps graphs from being piecewise (splitting_ops, pass_config)"
        )


async def _died(engine: Any) -> None:
    """Raise once the engine's own process is gone: vLLM answers no call that was waiting for it."""
    while not engine.errored:
        await asyncio.sleep(LOOK_S)
    raise RuntimeError("the process of vLLM's engine is gone")


async def _serve(engine: Any, channel: Channel, start: dict[str, Any]) -> None:
    host = EngineHost(engine, channel, start["version"], start["dtype"])
    await host._check(start["probe"])
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(host.handle, channel.receive())
        except (EOFError, OSError):
            loop.call_soon_threadsafe(host.ended.set)

    channel.send(("ready", {"max_model_len": engine.model_config.max_model_len}))
    threading.Thread(target=read, name="parent", daemon=True).start()
    await host.ended.wait()
    _end(0)  # before ``engine`` is dropped, which would wait for its processes


def main() -> None:
    collect_seldom()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        asyncio.run(serve(channel))
    except BaseException as error:
        channel.send(("died", f"{type(error).__name__}: {error}"))
        traceback.print_exc()
        _end(1)


def _end(status: int) -> NoReturn:
    """At once: vLLM's threads and processes, which take seconds to end in order, are ended by the guard."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
