"""The trainer is loaded while the first batch is sampled: where that is right, and without a trace in the run."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from flows import roles
from forge_core.models.errors import ModelError
from forge_core.runs import context, trainer_session
from forge_core.runs.context import RunContext
from forge_core.runs.initialise import initialise
from forge_core.runs.record import create_run
from forge_core.runs.training import train_batch
from forge_core.store import open_store
from forge_core.training import trainer
from forge_core.training.packing import Sample
from forge_core.training.stored import StoredTrainer
from tests.runs.harness import advance, decided, make_batch, memory, new_run, opened, tiny

VLLM = ("generator.backend=vllm", "max_staleness=1")
STATED = "generator.engine_args.kv_cache_memory_bytes=4000000000"
SHARE = "generator.engine_args.gpu_memory_utilization=0.3"


class Begun:
    """Stands for the trainer's session: which versions it was asked to load."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def begin(self, version: int) -> None:
        self.versions.append(version)

    def close(self) -> None:
        pass


def run(*overrides: str, role: str | None = None, shared: bool = False) -> tuple[RunContext, list[int]]:
    store = open_store(memory())
    ctx = opened(RunContext(store, create_run(store, tiny(*overrides)), role=role))
    begun = ctx.__dict__["trainer"] = Begun()
    ctx.__dict__["placement"] = dataclasses.replace(ctx.placement, shared=shared)
    return ctx, begun.versions


@pytest.mark.fast
@pytest.mark.parametrize(
    ("overrides", "role", "shared", "versions"),
    [
        (VLLM, None, False, [2]),
        ((), None, False, []),  # the embedded generator works in this process
        ((), "trainer", False, [2]),
        (("generator.backend=vllm",), None, True, []),  # they take turns
        ((*VLLM, "generator.sharing=split"), None, True, []),  # the engine comes first
        ((*VLLM, "generator.sharing=split", STATED), None, True, [2]),  # it measures no memory
        ((*VLLM, "generator.sharing=split", STATED, SHARE), None, True, []),  # that share must be free when it starts
        (("generator.backend=vllm", STATED), None, True, []),  # they take turns all the same
        ((*VLLM, "steps=2"), None, False, []),  # there is nothing left to train
    ],
)
def test_where_the_trainer_is_loaded_ahead(
    overrides: tuple[str, ...], role: str | None, shared: bool, versions: list[int]
) -> None:
    ctx, begun = run(*overrides, role=role, shared=shared)
    ctx.load_trainer(2)
    assert begun == versions


@pytest.mark.fast
@pytest.mark.parametrize(("sharing", "versions"), [("split", [0]), ("sleep", [])])
def test_on_a_gpu_of_both_it_is_loaded_once_the_engine_is(
    sharing: str, versions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, begun = run(*VLLM, f"generator.sharing={sharing}", shared=True)

    class Engine:
        def get_version(self) -> int:
            return 0

        def shutdown(self) -> None:
            pass

    before: list[list[int]] = []

    def build(*_: Any) -> Engine:
        before.append([*begun])
        return Engine()

    monkeypatch.setattr(context, "build_generator", build)
    ctx.load_trainer(0)
    ctx.generator(0)
    assert (before, begun) == ([[]], versions)
    ctx.forget_generator()
    ctx.generator(0)
    assert begun == versions, "an engine that is loaded again changes nothing"


@pytest.mark.fast
def test_the_trainers_role_loads_before_it_waits_for_work(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    run = SimpleNamespace(
        ledger=SimpleNamespace(head=lambda: 3), load_trainer=lambda version: did.append(f"loads {version}")
    )
    role = SimpleNamespace(
        open=lambda: did.append("opens"), context=run, run=None, outcome="done", frontier=SimpleNamespace(step=None),
        work=lambda look: did.append("waits") or [],
    )  # fmt: skip
    monkeypatch.setattr(roles, "RoleSession", lambda *_: nullcontext(role))
    monkeypatch.setattr(roles, "initialise", lambda run: did.append("initialises"))
    assert roles.trainer.fn("run", "store") == "done"
    assert did == ["opens", "initialises", "loads 3", "waits"]


@pytest.mark.engine
def test_a_trainer_that_was_begun_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = advance(new_run(memory()), 2)
    built: list[RunContext] = []
    build = trainer_session.build_trainer

    def counted(ctx: RunContext, *arguments: Any) -> Any:
        built.append(ctx)
        return build(ctx, *arguments)

    monkeypatch.setattr(trainer_session, "build_trainer", counted)
    ahead = new_run(memory())
    initialise(ahead)
    ahead.trainer.begin(0)
    advance(ahead, 1)
    ahead.trainer._begin(0)  # too late: it stays where it is
    advance(ahead, 2)
    assert built == [ahead]
    assert decided(ahead) == decided(expected)


@pytest.mark.engine
def test_what_went_wrong_ahead_is_met_again_by_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = new_run(memory())
    initialise(ctx)
    make_batch(ctx, 0)

    def broken(*_: Any) -> None:
        raise ModelError("not a model")

    with monkeypatch.context() as patched:
        patched.setattr(trainer_session, "build_trainer", broken)
        ctx.trainer.begin(0)
        with pytest.raises(ModelError, match="not a model"):
            train_batch(ctx, 0)
    assert train_batch(ctx, 0)["version_out"] == 1


@pytest.mark.engine
@pytest.mark.parametrize(("awaited_at", "made"), [(None, [0, 1, 2, 3]), (1, [0, 1])])
def test_code_is_made_for_every_shape_until_a_step_is_awaited(
    awaited_at: int | None, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = new_run(memory(), "grpo.beta=0.1")
    initialise(ctx)
    session, places = ctx.trainer, []

    def warm_up(stored: StoredTrainer, sample: Sample, place: int, *, temperature: float) -> bool:
        places.append(place)
        session._awaited = place == awaited_at  # as ``learn`` does from another thread
        assert sample.ref_logprobs is not None
        assert len(sample.tokens) <= ctx.config.training.seq_len
        assert temperature == ctx.config.grpo.temperature
        return place < 3

    monkeypatch.setattr(StoredTrainer, "warm_up", warm_up)
    session._begin(0)
    assert places == made
    make_batch(ctx, 0)
    train_batch(ctx, 0)
    session._begin(0)  # too late
    assert places == made


@pytest.mark.engine
@pytest.mark.parametrize(
    "overrides", [(), ("grpo.beta=0.1",), ("loss.name=dapo",), ("loss.name=gspo",), ("training.entropy_coef=0.01",)]
)
def test_any_loss_takes_the_sample_that_code_is_made_with(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = new_run(memory(), *overrides)
    initialise(ctx)
    session = ctx.trainer
    session.prepare(0)
    before = session._loaded().state_digest()
    monkeypatch.setattr(trainer, "sizes_for", lambda device, compiled: 2)
    sample = session._like_those_of_steps()
    assert [session._warm_up(sample, place) for place in range(5)] == [True] * 4 + [False]
    assert session._loaded().state_digest() == before
