"""A group of ranks: it ends whole, it ends with its owner, and an error says which rank and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from forge_core.algorithms.losses import build_loss
from forge_core.algorithms.ops import Totals
from forge_core.observability.memory import SETTINGS as TO_LOWER
from forge_core.observability.memory import OutOfMemory
from forge_core.processes import ChildDied
from forge_core.stop import Stopped, StopToken
from forge_core.store import folder_files, open_store
from forge_core.training import hf_export
from forge_core.training.launch import PUNCTUAL, RankOptions, Rendezvous, rank_environment
from forge_core.training.packing import Sample
from forge_core.training.rank_group import RankError, RankGroup
from forge_core.training.rank_main import LINGER_S
from forge_core.training.settings import TrainerSettings
from forge_core.training.stored import StoredTrainer, TrainerSpec
from tests.runs.harness import tiny
from tests.training.tiny_models import samples, saved

pytestmark = pytest.mark.engine

SAMPLES = samples(16)
TOTALS = Totals(sum(sum(s.loss_mask[1:]) for s in SAMPLES), len(SAMPLES))
SETTINGS = {"learning_rate": 1e-2, "seq_len": 64, "token_budget": 128, "timeout_s": 4.0}


def adaptive_loss() -> Any:
    """DAPO whose KL weight the owner adapts."""
    return build_loss(tiny("loss={name: dapo, adaptive_kl: true}", "grpo.beta=0.1"))


def with_reference(given: list[Sample]) -> list[Sample]:
    return [Sample(**{**vars(s), "ref_logprobs": [-4.0] * len(s.tokens)}) for s in given]


def loss_out_of_memory() -> Any:
    """The same; on rank 1 it asks for a pebibyte."""
    loss = adaptive_loss()
    if dist.get_rank() == 1:
        loss.from_logprobs = lambda *_: torch.empty(1 << 50, dtype=torch.uint8)
    return loss


def made(folder: Path, stop: StopToken | None = None, make_loss: Callable[[], Any] = adaptive_loss) -> RankGroup:
    """Two ranks, not started yet, on a model in a store below ``folder``."""
    store = open_store(str(folder / "store"))
    store.publish("model/", folder_files(saved("qwen3-tied")[0]), request="model")
    return RankGroup(
        TrainerSpec(store.uri, "model/", TrainerSettings(**SETTINGS, data_parallel=2), make_loss),
        2,
        loss=adaptive_loss(),
        logs=folder / "logs",
        scratch="copy/",
        rendezvous=Rendezvous("test"),
        options=RankOptions(timeout_s=4.0, init_timeout_s=120.0),
        stop=stop,
    )


def started(folder: Path) -> RankGroup:
    group = made(folder)
    group.setup()
    return group


def train(trainer: Any, given: list[Sample] | None = None) -> Any:
    return trainer.train_samples(given or with_reference(SAMPLES), totals=TOTALS, temperature=1.0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RankGroup]:
    group = started(tmp_path)
    yield group
    group.cleanup()


def test_what_a_trainer_publishes_is_linked_into_a_store_on_its_disk(tmp_path: Path) -> None:
    store, kept = open_store(str(tmp_path / "store")), tmp_path / "kept"
    store.publish("model/", folder_files(saved("qwen3-tied")[0]), request="model")
    trainer = StoredTrainer(store, "model/", TrainerSettings(**SETTINGS), adaptive_loss(), threads=1)
    trainer.setup()
    kept.mkdir()
    files = trainer.upload_weights("weights/", kept)
    assert store.folder is not None
    assert {f.name for f in files} >= {"model.safetensors", "config.json", "probe.json"}
    assert all(os.path.samefile(store.folder / f.key, kept / f.name) for f in files)
    trainer.cleanup()


def test_files_of_weights_are_uploaded_while_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path / "store"))
    store.publish("model/", folder_files(saved("qwen3-tied")[0]), request="model")
    trainer = StoredTrainer(
        store, "model/", TrainerSettings(**SETTINGS, shard_bytes=20_000), adaptive_loss(), threads=1
    )
    trainer.setup()
    before_the_last, upload, save_file = threading.Event(), store.upload, hf_export.save_file

    def saved_file(tensors: Any, path: Path, *more: Any) -> None:
        if path.name.startswith(f"model-{len(hf_files):05d}"):
            assert before_the_last.wait(30), "no file was uploaded before the last one was written"
        save_file(tensors, path, *more)

    def uploaded(prefix: str, files: Any, **options: Any) -> Any:
        found = upload(prefix, files, **options)
        before_the_last.set()
        names.extend(files)
        return found

    hf_files = [f.name for f in trainer.upload_weights("before/") if f.name.endswith(".safetensors")]
    assert len(hf_files) > 2
    names: list[str] = []
    monkeypatch.setattr(hf_export, "save_file", saved_file)
    monkeypatch.setattr(store, "upload", uploaded)
    files = trainer.upload_weights("weights/")
    assert sorted(names) == sorted(f.name for f in files), "each once"
    assert {f.name: f.sha256 for f in files} == {f.name: f.sha256 for f in trainer.upload_weights("again/")}
    trainer.cleanup()


def test_two_ranks_do_what_one_does_with_the_owners_loss(group: RankGroup, tmp_path: Path) -> None:
    store, loss = open_store(str(tmp_path / "store")), adaptive_loss()
    alone = StoredTrainer(store, "model/", TrainerSettings(**SETTINGS), loss, threads=1)
    alone.setup()
    assert group.warm_up(SAMPLES[0], 0, temperature=0.7) is False  # ranks on a CPU take any size
    for beta in (0.1, 0.5):  # as adapted between steps
        for each in (loss, group._loss):
            each.load_state({**each.state(), "beta": beta})
        (result, step), (expected, expected_step) = train(group), train(alone)
        assert result.loss == pytest.approx(expected.loss, abs=1e-6)
        assert step.grad_norm == pytest.approx(expected_step.grad_norm, rel=1e-5)
        assert result.metrics == pytest.approx(expected.metrics, abs=1e-5)
    found, wanted = (t.logprobs_samples(SAMPLES, temperature=0.7) for t in (group, alone))
    assert [len(f) for f in found] == [sum(s.loss_mask[1:]) for s in SAMPLES]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    digest = group.state_digest()
    files = group.upload_checkpoint("checkpoint/", {"note": 1})
    store.publish_uploaded("checkpoint/", files, request="state")
    assert alone.load_checkpoint("checkpoint/") == {"note": 1}
    assert alone.state_digest() == digest
    train(group)
    assert group.load_checkpoint("checkpoint/") == {"note": 1}
    assert group.state_digest() == digest
    group.push_weights(tmp_path / "copy")
    assert {"config.json", "model.safetensors.index.json", "tokenizer.json"} <= {
        f.name for f in (tmp_path / "copy").iterdir()
    }
    assert store.list("copy") == []
    assert (group.get_status()["step"], group.get_status()["ranks"]) == (2, 2)
    # An error of a rank is its own text, ends the group, and is told from a dead rank.
    with pytest.raises(
        RankError, match=r"rank \d of the trainer: .*nothing is published(.|\n)*the end of .*trainer-0.log"
    ):
        group.load_checkpoint("absent/")
    assert not group.alive()
    with pytest.raises(ChildDied, match="its next use starts them again"):
        group.state_digest()


def test_a_rank_out_of_memory_says_what_it_holds_and_what_to_lower(tmp_path: Path) -> None:
    group = made(tmp_path, make_loss=loss_out_of_memory)
    group.setup()
    with pytest.raises(RankError, match=r"\Arank 1 of the trainer: .*trainer: out of memory, when") as caught:
        train(group)
    assert isinstance(caught.value, OutOfMemory)
    said = str(caught.value).partition("the end of")[0]
    for part in (
        "1048576.00 GiB more",
        "of which this role: parameters ",
        "optimizer ",
        "machine: total",
        *TO_LOWER["trainer"],
    ):
        assert part in said
    assert not group.alive()


@pytest.mark.parametrize("when", ["in a step", pytest.param("idle", marks=pytest.mark.soak)])
def test_a_rank_that_hangs_is_an_error_after_the_timeout_and_its_group_ends(group: RankGroup, when: str) -> None:
    pids = list(group._pids.values())
    threading.Timer(0.0 if when == "idle" else 1.0, os.kill, (pids[1], signal.SIGSTOP)).start()
    time.sleep(0.3)
    started_at = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 of the trainer: (.|\n)*comm\.timeout_s"):
        train(group, with_reference(SAMPLES) * (1 if when == "idle" else 400))
    assert time.monotonic() - started_at < 1.0 + 4.0 + 3.0
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_nccl_keeps_the_limit_to_a_few_seconds_unless_the_user_wants_it_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in PUNCTUAL:
        monkeypatch.delenv(name, raising=False)
    assert rank_environment(Rendezvous("test"), RankOptions()).items() >= PUNCTUAL.items()
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    wanted = PUNCTUAL | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert rank_environment(Rendezvous("test"), RankOptions()).items() >= wanted.items()


def test_a_leading_rank_that_hangs_is_an_error_that_names_the_limit(group: RankGroup) -> None:
    pids = list(group._pids.values())
    threading.Timer(1.0, os.kill, (pids[0], signal.SIGSTOP)).start()
    started_at = time.monotonic()
    with pytest.raises(ChildDied, match=r"\A[^\n]*comm\.timeout_s"):
        train(group, with_reference(SAMPLES) * 400)
    assert time.monotonic() - started_at < 1.0 + 4.0 + LINGER_S + 3.0
    assert not any(psutil.pid_exists(pid) for pid in pids)


_OWNER = """
import sys, time
from pathlib import Path
from tests.training.test_rank_group import started
group = started(Path(sys.argv[1]))
print(*group._pids.values(), group._group.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_owner_leaves_no_rank_behind(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 3
    assert all(psutil.pid_exists(pid) for pid in pids)
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_stop_does_not_wait_for_ranks_that_start(tmp_path: Path) -> None:
    stop = StopToken()
    group = made(tmp_path, stop)
    threading.Timer(1.0, stop.set, ("Ctrl-C",)).start()
    started_at = time.monotonic()
    with pytest.raises(Stopped, match="Ctrl-C"):
        group.setup()
    assert time.monotonic() - started_at < 2.0
    assert not group.alive()


def test_ranks_that_do_not_meet_in_time_are_an_error(tmp_path: Path) -> None:
    spec = TrainerSpec("file:///nowhere", "model/", TrainerSettings(data_parallel=2), adaptive_loss)
    group = RankGroup(
        spec,
        1,
        loss=None,
        logs=tmp_path,
        scratch="copy/",
        rendezvous=Rendezvous("alone", nodes=2),
        options=RankOptions(init_timeout_s=3.0),
    )
    with pytest.raises(ChildDied, match=r"did not meet within comm\.init_timeout_s=3|ended without being asked to"):
        group.setup()
    assert not group.alive()
