"""The sets that the tests of loaders read."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def files() -> Iterator[Path]:
    """Two sets of questions, one of texts in three Parquet files, and one whose replies are long."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stem, rows, longest in (("short", 90, 12), ("long", 35, 60)):
            made = [{"prompt": f"{stem} {i}", "completion": "ab " * draw.randint(1, longest)} for i in range(rows)]
            (folder / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        for part in range(3):
            texts = [f"text {part} {i} " + "c" * draw.randint(1, 40) for i in range(11 + part)]
            pq.write_table(pa.table({"text": texts}), folder / f"part{part}.parquet")
        yield folder
