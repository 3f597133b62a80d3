"""What a trainer uploads is written once: a store of plain files links it, and nothing stays beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.algorithms.ops import Totals
from forge_core.store import Store, folder_files, open_store
from forge_core.store import local as local_store
from forge_core.training.packing import Sample
from forge_core.training.settings import TrainerSettings
from forge_core.training.sft_loss import SFTLoss
from forge_core.training.stored import StoredTrainer
from tests.training.tiny_models import saved

pytestmark = pytest.mark.engine


def stepped(store: Store) -> StoredTrainer:
    """A trainer that has made a step."""
    store.publish("model", folder_files(saved("qwen3-tied")[0]), request="model")
    trainer = StoredTrainer(store, "model", TrainerSettings(seq_len=64, token_budget=256), SFTLoss(), threads=1)
    trainer.setup()
    trainer.train_samples(
        [Sample([1, 2, 3, 4], [False, True, True, True], [0.0] * 4)], totals=Totals(3, 1), temperature=1
    )
    return trainer


def test_files_of_a_plain_store_are_linked_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path / "store"))
    trainer, write, copied = stepped(store), local_store._write, list[Path]()

    def noted(data: bytes | Path, target: Path) -> None:
        copied.extend([data] if isinstance(data, Path) else [])
        write(data, target)

    monkeypatch.setattr(local_store, "_write", noted)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))  # nothing is written elsewhere either
    files = [*trainer.upload_checkpoint("checkpoint/", {}), *trainer.upload_weights("weights/")]
    assert len(files) > 4
    assert copied == []
    stored = [tmp_path / "store" / file.key for file in files]
    assert all(
        path.stat().st_nlink == 1 and path.stat().st_size == f.size for path, f in zip(stored, files, strict=True)
    )
    trainer.cleanup()
    assert not [path for path in (tmp_path / "store" / ".cache").rglob("scratch-*") if path.is_dir()]


def test_for_other_stores_they_are_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trainer = stepped(open_store("memory://uploads"))
    assert trainer.upload_checkpoint("checkpoint/", {})
    assert trainer.upload_weights("weights/")
    trainer.cleanup()
    assert not list(tmp_path.glob("forge-temporary-*"))
