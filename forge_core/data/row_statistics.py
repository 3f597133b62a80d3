"""What a loader has given so far, and what it left out.

Guarantees:
- Totals of the whole run: they are part of the loader's state, and equal after a resume.
- The first document of a set that is cut or left out is said in the log, with the setting that decides.
- A metric's name is ``dataset/<label>/<what>`` or ``packing/<what>``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from forge_core.data.documents import Drawn
from forge_core.data.encoding import Document

_log = logging.getLogger("forge")
_REASONS = {
    "truncated": "a document of {label} is longer than {longest} tokens and was cut ({key}.truncation={truncation})",
    "too_long": "a document of {label} is longer than {longest} tokens and was left out ({key}.truncation=drop)",
    "no_target": "a document of {label} has no token that counts in the loss and was left out ({key}.masking)",
}


class Statistics:
    """``key``: the section's name; ``truncation``: its setting."""

    def __init__(self, key: str, truncation: str, seq_len: int) -> None:
        self._key, self._truncation, self._seq_len = key, truncation, seq_len
        self._sets: dict[str, dict[str, int]] = {}
        self._rows, self._tokens = 0, 0

    def give(self, drawn: Sequence[Drawn], documents: Sequence[Document], epochs: Mapping[str, int]) -> None:
        """Count a row. ``epochs``: how many of each of its sets were over before it."""
        self._rows += 1
        for one, document in zip(drawn, documents, strict=True):
            length, found = len(document.tokens), self._of(one.label)
            self._tokens += length - 1
            found["samples"] += 1
            found["tokens"] += length
            found["longest"] = max(found["longest"], length)
            found["shortest"] = min(found["shortest"] or length, length)
            found["epochs"] = max(found["epochs"], epochs[one.label])
            if document.fate == "truncated":
                self._count(one.label, "truncated")

    def leave_out(self, drawn: Drawn, document: Document) -> None:
        """Count a document that cannot be used."""
        self._count(drawn.label, document.fate)

    def metrics(self) -> dict[str, float]:
        """``num_epochs``: full epochs that are over; lengths in tokens."""
        found: dict[str, float] = {}
        for label, counts in sorted(self._sets.items()):
            values = {
                "samples_processed": counts["samples"],
                "tokens_processed": counts["tokens"],
                "mean_seq_len": counts["tokens"] / max(counts["samples"], 1),
                "max_seq_len": counts["longest"],
                "min_seq_len": counts["shortest"],
                "num_epochs": counts["epochs"],
                **{reason: counts[reason] for reason in _REASONS},
            }
            found |= {f"dataset/{label}/{name}": float(value) for name, value in values.items()}
        given = self._rows * self._seq_len
        padded = 100.0 * (1 - self._tokens / given) if given else 0.0
        return {**found, "packing/rows": float(self._rows), "packing/pct_of_tokens_padded": padded}

    def left_out_text(self) -> str:
        """How many documents of which set were left out and why, for an error."""
        counts = [
            f"{counts[reason]} of {label} {reason}"
            for label, counts in sorted(self._sets.items())
            for reason in _REASONS
            if counts[reason]
        ]
        return ", ".join(counts) or "none was drawn"

    def state(self) -> dict[str, Any]:
        return {
            "rows": self._rows,
            "tokens": self._tokens,
            "sets": {name: dict(counts) for name, counts in self._sets.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        self._rows, self._tokens = state["rows"], state["tokens"]
        self._sets = {name: dict(counts) for name, counts in state["sets"].items()}

    def _of(self, label: str) -> dict[str, int]:
        names = ("samples", "tokens", "longest", "shortest", "epochs", *_REASONS)
        return self._sets.setdefault(label, dict.fromkeys(names, 0))

    def _count(self, label: str, reason: str) -> None:
        counts = self._of(label)
        counts[reason] += 1
        if counts[reason] == 1:
            values = {"label": label, "longest": self._seq_len + 1, "key": self._key, "truncation": self._truncation}
            _log.warning("%s; all such are counted in dataset/%s/%s", _REASONS[reason].format(**values), label, reason)
