"""GPUs that several processes of Forge choose on one machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from forge_core import gpu_leases
from forge_core.config import ConfigError, load_config
from forge_core.devices import Placement, alone, place
from forge_core.gpu_leases import Choose, lease, used
from forge_core.runs.initialise import initialise
from tests.runs.harness import memory, new_run

FOUR = ("0", "1", "2", "3")
HOLDER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from forge_core.devices import Placement
from forge_core.gpu_leases import lease
placement, held = lease(sys.argv[2].split(","), lambda gpus: Placement(((),), tuple(gpus[:1]), ()))
print(placement.trainer[0], flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
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
    monkeypatch.setattr(gpu_leases, "uuids", lambda: ("GPU-a", "GPU-b"))
    first: Choose = lambda gpus: Placement(((),), tuple(gpus[:1]), ())
    _, one = lease(("0", "1"), first)
    placement, two = lease(("GPU-a", "GPU-b"), first)
    assert placement.trainer == ("GPU-b",)
    one.close()
    two.close()


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
    assert notes[1].startswith("GPU 0, 1 is in use by another process of Forge too")
    assert len(notes) == 2
    for run in runs:
        run.close()
    _, held = lease(("0", "1"), placing())
    assert held.contested == ()
    held.close()
