"""What a store holds of a run, for comparing: all of it, what was decided, and the promises about it."""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

from forge_core.data_model import TRAINING, from_parquet
from forge_core.runs.episodes import EPISODES_FILE, TRAINING_FILE
from forge_core.store import Ledger, Store, layout, open_store

LEFT_OUT = ("started_at", "finished_at", "attempt")
ADVICE = ("gc", "workers")  # folders of what Store.put_json writes
ATTEMPT = re.compile(r"(/\d{8})-[^/]+/$")


class Stored:
    """The run ``run_id`` in the store ``root``; what looks at files needs a folder store."""

    def __init__(self, root: Path | str, run_id: str = "tiny") -> None:
        self.root, self.run_id = Path(root), run_id
        self.folder = self.root / "runs" / run_id
        self.store: Store = open_store(str(root))

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.store, self.run_id)

    def files(self) -> list[Path]:
        """All stored files, without opening the store: cheap enough to be asked a hundred times a second."""
        return [Path(folder) / name for folder, _, names in os.walk(self.folder) for name in names]

    def head(self) -> int:
        """The number of committed training steps."""
        return len(list(self.folder.glob("ledger/0*.json")))

    def checkpointed(self) -> int:
        """The version that the newest complete checkpoint holds; 0 without one."""
        return max(
            (int(path.parent.name[:8]) + 1 for path in self.folder.glob("checkpoints/*/manifest.json")), default=0
        )

    def snapshot(self) -> dict[str, str]:
        """Digest of each stored file by key."""
        return {str(path.relative_to(self.root)): sha256(path.read_bytes()).hexdigest() for path in self.files()}

    def decided(self) -> list[dict[str, Any]]:
        """The ledger without times and attempt ids."""
        return [decided(entry) for entry in self.ledger.entries()]

    def episodes(self) -> list[dict[str, Any]]:
        """Every column but ``created_at`` of every episode that was trained on, in order."""
        rows: list[dict[str, Any]] = []
        for entry in self.ledger.entries():
            for prefix in entry["shards"]["episodes"]:
                table = parquet.read_table(io.BytesIO(self.store.open_published(prefix).read(EPISODES_FILE)))
                rows += table.drop_columns(["created_at"]).to_pylist()
        return rows

    def weights(self, version: int) -> dict[str, bytes]:
        """The files of a committed version."""
        published = self.store.open_published(self.ledger.weights_prefix(version))
        return {name: published.read(name) for name in published.files}

    def fates(self, entry: dict[str, Any]) -> list[dict[str, Any]]:
        data = self.store.open_published(entry["training"]).read(TRAINING_FILE)
        return from_parquet(data, TRAINING, entry["training"])


def decided(entry: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in entry.items() if key not in LEFT_OUT}
    metrics = {name: value for name, value in entry["metrics"].items() if not name.startswith("time/")}
    prefixes = {key: ATTEMPT.sub(r"\1/", entry[key]) for key in ("weights", "training")}
    return {**kept, **prefixes, "metrics": metrics}


def check_same_run(one: Stored, other: Stored, steps: int) -> None:
    """Two runs are the same bit for bit: episodes, ledger (chain included), last weights."""
    assert one.decided() == other.decided()
    assert one.ledger.verify() == steps
    assert one.episodes() == other.episodes()
    assert one.weights(steps) == other.weights(steps)


def check_complete(run: Stored, steps: int, max_staleness: int) -> None:
    """No gap or repeat, every planned episode exactly once trained or dropped, no age above the bound."""
    assert run.ledger.verify() == steps
    for entry in run.ledger.entries():
        groups = [group for plan in entry["plans"] for group in run.store.read_json(plan)["groups"]]
        prefix = f"{run.run_id}/{entry['batch']:08d}"
        planned = [f"{prefix}/{g['group']:08d}/{s:08d}" for g in groups for s in range(len(g["seeds"]))]
        fates = run.fates(entry)
        assert [fate["episode_id"] for fate in fates] == planned
        assert all(fate["trained"] == (fate["dropped"] is None) for fate in fates)
        assert Counter(f["dropped"] for f in fates if f["dropped"]) == Counter(entry["episodes"]["dropped"])
        assert entry["max_age"] == max((f["age"] for f in fates if f["trained"]), default=0) <= max_staleness


def check_untouched(before: dict[str, str], after: dict[str, str], run_id: str = "tiny") -> None:
    """Nothing that existed was changed (but for advice, which is overwritten), no finished shard was made again, no
    committed step was published again."""
    lasting = {
        key: content
        for key, content in before.items()
        if not key.startswith(tuple(f"runs/{run_id}/{folder}/" for folder in ADVICE))
    }
    changed = {key for key, content in lasting.items() if after.get(key) != content}
    assert not changed, f"changed or gone: {sorted(changed)}"
    new = after.keys() - before.keys()
    finished = {key.removesuffix("manifest.json") for key in before if key.endswith("/manifest.json")}
    again = sorted(key for key in new if key.rpartition("/")[0] + "/" in finished)
    assert not again, f"files added to finished objects: {again}"
    committed = [int(Path(key).stem) for key in before if f"{run_id}/ledger/0" in key]
    for batch in committed:
        names = (layout.training(run_id, batch, "x")[:-2], layout.weights(run_id, batch + 1, "x")[:-2])
        repeated = sorted(key for key in new if key.startswith(names))
        assert not repeated, f"step {batch} was committed, and published again: {repeated}"
