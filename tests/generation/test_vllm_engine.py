"""The child process of an engine, without an engine: whom an error reaches."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.generation import vllm_engine
from forge_core.generation.vllm_engine import EngineHost
from forge_core.generation.vllm_in_place import EXTENSION
from forge_core.generation.vllm_open import Open, finished

Sent = list[tuple[str, Any]]


class Engine:
    """Answers a request with its prompt as the response; ``on_add`` and ``on_rpc`` may raise."""

    def __init__(self, on_add: Callable[[str], None], on_rpc: Callable[[], None]) -> None:
        self.errored = False
        self._on_add, self._on_rpc = on_add, on_rpc

    async def add_request(self, name: str, prompt: dict[str, Any], params: Any, *, priority: int) -> Any:
        self._on_add(name)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        tokens = prompt["prompt_token_ids"]
        places = [*range(len(tokens))]
        logprobs = SimpleNamespace(start_indices=places, token_ids=tokens, logprobs=[-1.0] * len(tokens))
        sequence = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason="length")
        queue.put_nowait(SimpleNamespace(finished=True, prompt_token_ids=tokens, outputs=[sequence]))

        def get_nowait() -> Any:
            return queue.get_nowait()

        return SimpleNamespace(get_nowait=get_nowait, get=queue.get)

    async def sleep(self, level: int) -> None:
        self._on_rpc()


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "sampling_params", lambda params: params)


def nothing(*_: Any) -> None:
    pass


def played(
    messages: Sent, on_add: Callable[..., None] = nothing, dies: bool = False, after: int = 0
) -> tuple[Sent, bool]:
    """What the host says to ``messages``, ``after`` so many turns of the event loop each, and whether it has ended."""
    sent: Sent = []

    async def play() -> bool:
        def failing() -> None:
            raise OSError("no memory")

        engine = Engine(on_add, failing)
        engine.errored = dies
        host = EngineHost(engine, SimpleNamespace(send=sent.append), 0, "float32")  # type: ignore[arg-type]
        for message in messages:
            host.handle(message)
            for _ in range(after):
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        return host.ended.is_set()

    return sent, asyncio.run(play())


def told(sent: Sent) -> list[dict[str, Any]]:
    """All results that the parent has heard of."""
    return [result for kind, body in sent if kind == "done" for result in body]


def asked(*names: str) -> tuple[str, Any]:
    return "generate", [
        {"id": name, "prompt_ids": [3, 4], "priority": 0, "min_version": 0, "params": {}} for name in names
    ]


def raising(error: Exception) -> Callable[[str], None]:
    def on_add(name: str) -> None:
        if name.startswith("bad"):
            raise error

    return on_add


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), TypeError("no"), AttributeError("no"), Exception("as vLLM's own, which is no ValueError")],
)
def test_an_error_in_one_request_is_its_answer_and_the_others_go_on(error: Exception) -> None:
    sent, ended = played([asked("bad", "good")], raising(error))
    results = {result["id"]: result for result in told(sent)}
    assert results["bad"] == {"id": "bad", "refused": f"{type(error).__name__}: {error}"}
    assert results["good"]["tokens"] == [3, 4]
    assert not ended


def test_what_ends_together_is_told_in_one_message_and_before_what_is_answered_later() -> None:
    names = [f"r{i}" for i in range(40)]
    sent, _ = played([asked(*names)])
    assert [kind for kind, _ in sent] == ["done"]
    assert [result["id"] for result in told(sent)] == names
    sent, _ = played([asked(*names), ("config", {"call": 7})], after=3)
    assert [kind for kind, _ in sent] == ["done", "reply"]
    assert [result["id"] for result in told(sent)] == names


@pytest.mark.parametrize("last", ["reply", "died"])
def test_what_has_ended_is_told_before_an_answer_and_before_the_end(last: str) -> None:
    sent: Sent = []

    async def fails() -> None:
        raise RuntimeError("dead")

    async def play() -> None:
        host = EngineHost(Engine(nothing, nothing), SimpleNamespace(send=sent.append), 0, "float32")  # type: ignore[arg-type]
        failed = asyncio.ensure_future(fails())
        await asyncio.wait([failed])
        host._report({"id": "r"})
        if last == "died":
            host._finished_task(failed)
        else:
            await host._answer("config", {"call": 7})
            failed.exception()

    asyncio.run(play())
    assert [kind for kind, _ in sent] == ["done", last]
    assert told(sent) == [{"id": "r"}]


def test_the_death_of_the_engine_is_no_answer_to_a_request() -> None:
    sent, ended = played([asked("bad")], raising(RuntimeError("dead")), dies=True)
    assert sent == [("died", "RuntimeError: dead")]
    assert ended


@pytest.mark.parametrize("kind", ["score", "config"])
def test_a_question_that_fails_is_answered_and_the_engine_goes_on(kind: str) -> None:
    arguments = {"token_ids": [1]} if kind == "score" else {}
    sent, ended = played([(kind, {"call": 7, **arguments}), asked("good")])  # this engine knows neither
    ((number, answer),) = (body for name, body in sent if name == "reply")
    assert (number, list(answer)) == (7, ["refused"])
    assert [result["id"] for result in told(sent)] == ["good"]
    assert not ended


STAGED = [("stage", {"folder": "/w"}), ("staged", {}), ("staged", {}), ("load_in_place", {"folder": "/w"})]


@pytest.mark.parametrize(
    ("extension", "calls"), [(EXTENSION, STAGED), ("mine.Worker", [("reload_weights", {"weights_path": "/w"})])]
)
def test_workers_read_weights_before_they_load_them_unless_they_have_an_extension_of_the_users(
    extension: str, calls: list[tuple[str, dict[str, str]]]
) -> None:
    made = []

    async def rpc(method: str, kwargs: dict[str, str] | None = None) -> list[bool]:
        made.append((method, kwargs or {}))
        return [True, made.count(("staged", {})) > 1]  # the second worker takes longer

    parallel = SimpleNamespace(worker_extension_cls=extension)
    engine = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel), collective_rpc=rpc)

    async def load() -> None:
        host = EngineHost(engine, SimpleNamespace(), 0, "float32")  # type: ignore[arg-type]
        await host._stage("/w")
        await host._load("/w")

    asyncio.run(load())
    assert made == calls


def test_log_probabilities_of_other_tokens_are_refused() -> None:
    item = Open({"id": "a", "prompt_ids": [1]})
    flat = SimpleNamespace(start_indices=[0, 2], token_ids=[5, 9, 6, 9], logprobs=[-1.0, -9.0, -2.0, -9.0])
    answers = []
    for tokens in ([5, 6], [5, 7], [5]):
        sequence = SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason="stop")
        answers.append(finished(item, SimpleNamespace(prompt_token_ids=[1], outputs=[sequence])))
    assert answers[0]["logprobs"] == [-1.0, -2.0]
    assert all("of other tokens" in answer["refused"] for answer in answers[1:])
    nothing_sampled = SimpleNamespace(token_ids=[], logprobs=None, finish_reason=None)
    aborted = finished(item, SimpleNamespace(prompt_token_ids=[1], outputs=[nothing_sampled]))
    assert (aborted["tokens"], aborted["logprobs"], aborted["reason"]) == ([], [], "abort")


def test_a_change_that_fails_ends_the_engine() -> None:
    sent, ended = played([("sleep", {"call": 7})])
    assert sent == [("failed", (7, "OSError: no memory")), ("died", "OSError: no memory")]
    assert ended


@pytest.mark.engine
def test_graphs_that_compute_something_else_are_refused_however_vllm_came_to_them() -> None:
    from vllm.config import CompilationConfig
    from vllm.config.compilation import CUDAGraphMode

    def refused(mode: CUDAGraphMode, **settings: Any) -> bool:
        compilation = CompilationConfig(mode=3, cudagraph_mode=mode, **settings)
        compilation.set_splitting_ops_for_v1(all2all_backend="naive", data_parallel_size=1)
        try:
            vllm_engine.check_graphs(compilation)
        except ValueError:
            return True
        return False

    assert [mode.name for mode in CUDAGraphMode if refused(mode)] == ["FULL"]
    whole = [mode.name for mode in CUDAGraphMode if refused(mode, splitting_ops=[])]
    assert whole == ["FULL", "FULL_AND_PIECEWISE"], "vLLM makes FULL of its default where nothing is split"


def test_an_engine_is_not_loaded_with_such_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL")))
    arguments = lambda **given: SimpleNamespace(create_engine_config=lambda context: config)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(AsyncEngineArgs=arguments))
    usage = SimpleNamespace(UsageContext=SimpleNamespace(LLM_CLASS=None))
    monkeypatch.setitem(sys.modules, "vllm.usage.usage_lib", usage)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", SimpleNamespace(AsyncLLM=None))
    channel: Any = SimpleNamespace(receive=lambda: {"engine_args": {}})
    with pytest.raises(ValueError, match="cudagraph_mode to FULL_DECODE_ONLY"):
        asyncio.run(vllm_engine.serve(channel))
