"""GPUs that several processes of Forge choose on one machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import pytest

from forge_core import gpu_leases, nvidia_smi
from forge_core.config import ConfigError, load_config
from forge_core.devices import Placement, alone, place
from forge_core.gpu_leases import Choose, lease, used
from forge_core.runs.initialise import initialise
from forge_core.weights.host_cache import SHARED_MEMORY
from forge_core.weights.locks import exclusive
from tests.runs.harness import memory, new_run

FOUR = ("0", "1", "2", "3")
HOLDER = """
import sys
from pathlib import Path
from forge_core import gpu_leases, nvidia_smi
from forge_core.devices import Placement
from forge_core.gpu_leases import lease
gpu_leases.SHARED_MEMORY = Path(sys.argv[1])
placement, held = lease(sys.argv[2].split(","), lambda gpus: Placement(((),), tuple(gpus[:1]), ()))
print(placement.trainer[0], flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_leases, "SHARED_MEMORY", tmp_path)
    return tmp_path


def placing(*overrides: str, role: str | None = None) -> Choose:
    config = load_config("configs/quickstart.yaml", overrides)
    return partial(place, config if role is None else alone(config, role))


@pytest.mark.fast
def test_roles_of_one_machine_have_gpus_of_their_own() -> None:
    """What two processes that take the first GPU would not have."""
    trainer, one = lease(FOUR, placing(role="trainer"))
    generator, two = lease(FOUR, placing(role="generator"))
    assert (trainer.trainer, generator.generator) == (("0",), (("1",),))
    assert one.contested == two.contested == ()
    one.close()
    again, three = lease(FOUR, placing(role="trainer"))
    assert again.trainer == ("0",), "what is given back is free"
    two.close()
    three.close()


@pytest.mark.fast
def test_a_second_run_takes_what_the_first_one_leaves() -> None:
    first, one = lease(FOUR, placing("grpo.beta=0.1"))
    assert used(first) == {"0", "1", "2"}
    second, two = lease(FOUR, placing("grpo.beta=0"))
    assert second.shared, "generator and trainer share the only free one rather than another run's"
    assert used(second) == {"3"}
    assert two.contested == ()
    third, three = lease(FOUR, placing("grpo.beta=0"))
    assert used(third) == {"0", "1"}, "none is free: as if it were alone"
    assert three.contested == ("0", "1")
    for held in (one, two, three):
        held.close()


@pytest.mark.fast
def test_where_too_few_are_free_the_others_are_shared_and_named() -> None:
    wants_two = placing("parallelism.data_parallel_shard_degree=2", role="trainer")
    _, one = lease(FOUR[:2], placing(role="trainer"))
    both, two = lease(FOUR[:2], wants_two)
    assert both.trainer == ("1", "0")
    assert two.contested == ("0",)
    with pytest.raises(ConfigError, match="not enough GPUs"):
        lease(FOUR[:1], wants_two)
    one.close()
    two.close()


@pytest.mark.fast
def test_without_gpus_nothing_is_locked(folder: Path) -> None:
    placement, held = lease((), placing())
    assert used(placement) == set()
    held.close()
    assert list(folder.iterdir()) == []


@pytest.mark.fast
@pytest.mark.parametrize("why", ["no folder", "another user's"])
def test_where_no_locks_can_be_had_gpus_are_chosen_as_if_nobody_had_any(
    why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    if why == "no folder":
        monkeypatch.setattr(gpu_leases, "SHARED_MEMORY", folder / "not there")
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "not" / "there"))
    else:
        monkeypatch.setattr("forge_core.weights.locks._open", refused)
    for _ in range(2):
        placement, held = lease(FOUR, placing(role="trainer"))
        assert (placement.trainer, held.contested, held.warning) == (("0",), (), None)


@pytest.mark.fast
def test_only_the_gpus_of_its_roles_are_a_processes_own() -> None:
    scorer, one = lease(FOUR, placing(role="scorer"))
    assert used(scorer) == set()
    trainer, two = lease(FOUR, placing(role="trainer"))
    assert trainer.trainer == ("0",)
    one.close()
    two.close()


@pytest.mark.fast
def test_one_gpu_under_two_names_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_leases, "uuid_of", lambda index: ("GPU-a", "GPU-b")[index])
    first: Choose = lambda gpus: Placement(((),), tuple(gpus[:1]), ())
    _, one = lease(("0", "1"), first)
    placement, two = lease(("GPU-a", "GPU-b"), first)
    assert placement.trainer == ("GPU-b",)
    one.close()
    two.close()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("cards", "order", "known"),
    [
        ("echo GPU-a, H200; echo GPU-b, H200", None, ("GPU-a", "GPU-b", None)),
        ("echo GPU-a, T4; echo GPU-b, H200", None, (None, None, None)),  # CUDA's first is the faster one
        ("echo GPU-a, T4; echo GPU-b, H200", "PCI_BUS_ID", ("GPU-a", "GPU-b", None)),
        ("exit 9", None, (None, None, None)),
    ],
)
def test_an_index_is_a_card_where_the_driver_counts_as_cuda_does(
    cards: str, order: str | None, known: tuple[str | None, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(folder, cards, monkeypatch)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if order:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert tuple(nvidia_smi.uuid_of(index) for index in range(3)) == known


@pytest.mark.fast
def test_a_driver_that_does_not_answer_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver(folder, "exec sleep 20", monkeypatch)
    monkeypatch.setattr(nvidia_smi, "ANSWER_S", 0.2)
    assert nvidia_smi.uuids() == ()
    assert "nvidia-smi has not answered within 0 s" in caplog.text
    monkeypatch.setattr(nvidia_smi, "ANSWER_S", 20.0)
    driver(folder, "echo GPU-a, H200", monkeypatch)
    assert nvidia_smi.uuids() == ("GPU-a",)


def driver(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ``nvidia-smi`` that says what it is told to, and that nobody has asked yet."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    nvidia_smi._answered.cache_clear()
    monkeypatch.setattr(nvidia_smi, "_answered", cache(nvidia_smi._answered.__wrapped__))


@pytest.mark.fast
def test_who_is_stopped_while_choosing_keeps_nobody_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu_leases, "CHOOSING_S", 0.1)
    _, one = lease(FOUR, placing(role="trainer"))
    with exclusive(next(folder.glob("forge-gpus-*")) / "choosing"):
        placement, two = lease(FOUR, placing(role="trainer"))
    assert placement.trainer == ("0",), "as if nobody had any"
    assert "GPUs are chosen without a look" in caplog.text
    assert "/choosing for more than 0.1 s" in caplog.text
    two.close()
    assert gpu_leases.busy(FOUR) == ("0",)
    one.close()


@pytest.mark.fast
def test_what_is_given_back_is_free_though_a_forked_process_has_it_too() -> None:
    _, one = lease(FOUR, placing(role="trainer"))
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        assert gpu_leases.busy(FOUR) == ("0",)
        one.close()
        assert gpu_leases.busy(FOUR) == ()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.fast
def test_a_lock_outlives_those_who_tidy_temporary_folders() -> None:
    monkeypatched, gpu_leases.SHARED_MEMORY = gpu_leases.SHARED_MEMORY, SHARED_MEMORY
    try:
        _, held = lease(["test-of-locks"], lambda gpus: Placement(((),), tuple(gpus), ()))
        file = SHARED_MEMORY / f"forge-gpus-{os.getuid()}" / "test-of-locks"
        assert file.exists()
        held.close()
        file.unlink()
    finally:
        gpu_leases.SHARED_MEMORY = monkeypatched


@pytest.mark.server
def test_processes_that_start_together_choose_different_gpus_and_one_that_is_killed_leaves_its_own(
    folder: Path,
) -> None:
    def start(gpus: Sequence[str] = FOUR) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(folder), ",".join(gpus)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def chosen(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    processes = [start() for _ in FOUR]
    try:
        found = [chosen(process) for process in processes]
        assert sorted(found) == list(FOUR)
        processes[1].kill()
        processes[1].wait()
        processes.append(start())
        assert chosen(processes[-1]) == found[1]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.engine
def test_runs_say_which_gpus_they_share_and_give_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    runs = [new_run(memory()) for _ in range(3)]
    initialise(runs[0])
    monkeypatch.setattr("forge_core.runs.context.visible_gpus", lambda: ("0", "1", "2"))
    for run in runs:
        run.note = notes.append
    assert [used(run.placement) for run in runs] == [{"0", "1"}, {"2"}, {"0", "1"}]
    assert notes[0] == "generator and trainer share GPU 2: other processes of Forge have the rest"
    assert notes[1].startswith("another process of Forge has GPU 0, 1 too")
    assert len(notes) == 2
    for run in runs:
        run.close()
    _, held = lease(("0", "1"), placing())
    assert held.contested == ()
    held.close()


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("runs.context", "devices", "config.gpu_gate", "evaluation.evaluating"):
        monkeypatch.setattr(f"forge_core.{module}.visible_gpus", lambda: FOUR)


@pytest.mark.fast
def test_what_the_gate_says_of_a_placement_is_said_of_the_one_that_is_left(four_gpus: None) -> None:
    insists = placing("grpo.beta=0.1", "services.ref_model.with_gpus=true")
    assert len(used(insists(FOUR))) == 3
    _, others = lease(FOUR, lambda gpus: Placement(((),), tuple(gpus[:2]), ()))
    notes: list[str] = []
    run = new_run(memory(), "grpo.beta=0.1", "services.ref_model.with_gpus=true")
    run.note = notes.append
    assert run.placement == Placement((("2",),), ("3",), ("3",))
    assert notes == [
        "warning: services.ref_model.with_gpus is true, but no GPU is left for it: the reference shares the trainer's"
    ]
    run.close()
    others.close()
    alone = new_run(memory(), "grpo.beta=0.1", "services.ref_model.with_gpus=true")
    alone.note = notes.append
    assert alone.placement.reference == ("2",)
    alone.close()
    assert len(notes) == 1


@pytest.mark.fast
def test_a_reward_model_is_not_left_on_a_gpu_that_the_lease_gives_to_vllm(
    four_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = f"{{name: reward_model, model: {tmp_path}, device: 'cuda:2'}}"
    run = new_run(
        memory(), "grpo.beta=0", "generator.backend=vllm", "generator.engine_args.gpu_memory_utilization=0.95",
        f"rewards.functions=[{model}]",
    )  # fmt: skip
    _, others = lease(FOUR, lambda gpus: Placement(((),), tuple(gpus[:2]), ()))
    with pytest.raises(ConfigError, match=r"reward_model is on cuda:2, where vLLM takes 95%.*set its device to cuda:0"):
        run.placement  # noqa: B018
    run.close()
    assert gpu_leases.busy(FOUR) == ("0", "1"), "what it was given is free again"
    others.close()


@pytest.mark.fast
def test_news_of_a_run_are_shown_where_nobody_shows_them(four_gpus: None, caplog: pytest.LogCaptureFixture) -> None:
    """As in a role, which has no display of its own."""
    _, others = lease(FOUR, lambda gpus: Placement(((),), tuple(gpus), ()))
    run = new_run(memory())
    assert used(run.placement) == {"0", "1"}
    assert [r.levelname for r in caplog.records if "another process of Forge has GPU 0, 1 too" in r.message] == [
        "WARNING"
    ]
    run.close()
    others.close()
