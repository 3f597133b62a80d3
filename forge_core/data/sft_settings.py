"""The ``dataset`` section of supervised fine-tuning: where conversations come from and how they become training rows.

Invariants:
- A section is one set (``path``) or a mixture of sections (``mixture``), nested as deep as wanted, never both.
- Every set of the tree has a ``label`` of its own: its statistics and its draws are known by it.
- The guide's ``dataset: {path, split, streaming}`` loads as it stands.
- ``masking`` and ``system_prompt`` that a section leaves out are those of the section around it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from forge_core.config.data_sections import DatasetSection
from forge_core.config.section import Positive, Section

Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text"]
Masking = Literal["assistant", "last", "all"]
FILE_TYPES = (".jsonl", ".json", ".parquet", ".csv")
SOURCE_FIELDS = ("path", "name", "split", "streaming", "revision", "options", "size")


class SftSource(Section):
    """One set of a mixture, or a mixture within it."""

    path: str | None = Field(
        None,
        description="Where conversations come from: a hub id (org/name or hf://org/name), a local JSONL, Parquet, CSV "
        "or dataset folder, a pattern of such files, reasoning_gym://<task>, or python://<module or file>:<function>.",
    )
    name: str | None = Field(None, description="Configuration name of a hub data set.")
    split: str = Field("train", description="Split to train on.")
    streaming: bool = Field(False, description="Read the set piece by piece while training instead of as a whole.")
    revision: str | None = Field(None, description="Revision of a hub data set.")
    options: dict[str, Any] = Field({}, description="Arguments of a reasoning_gym task or a python:// function.")
    size: int | None = Field(None, ge=1, description="Use only the first rows. Left out: all.")
    format: Format = Field(
        "auto",
        description="messages (OpenAI), sharegpt, alpaca, prompt_completion or text; auto: told by the columns.",
    )
    columns: dict[str, str] = Field(
        {}, description="Which column holds what the format needs, such as {instruction: question, output: answer}."
    )
    system_prompt: str | None = Field(None, description="System message of conversations that have none; '': none.")
    masking: Masking | None = Field(
        None,
        description="Which tokens count in the loss: assistant: all replies; last: the last reply; all: every token. "
        "Left out: that of the section around it, at the top assistant.",
    )
    weight: float = Field(1.0, gt=0, description="Share of the documents of its mixture, relative to the others.")
    label: str | None = Field(None, description="Name in metrics and errors. Left out: from path, name and split.")
    mixture: list[SftSource] = Field([], description="Sets to mix, instead of path: each may be a mixture itself.")

    @model_validator(mode="after")
    def _one_kind(self) -> SftSource:
        if (self.path is None) == (not self.mixture):
            raise ValueError("give either path (one set) or mixture (several), not both and not neither")
        return self

    @property
    def called(self) -> str:
        """``label``, or one made of the names: ``org_set_config_split``, ``file_split``, ``a+b`` for a mixture."""
        if self.label:
            return self.label
        if self.path is None:
            return "+".join(sorted(child.called for child in self.mixture))
        parts = (_place_name(self.path), self.name, self.split)
        return "_".join(re.sub(r"[^\w.+-]+", "_", part) for part in parts if part)

    def section(self) -> DatasetSection:
        """The same set as a source of rows."""
        return DatasetSection(**{field: getattr(self, field) for field in SOURCE_FIELDS})

    def tree(self) -> Iterator[SftSource]:
        """This section and all within it."""
        yield self
        for child in self.mixture:
            yield from child.tree()


class SftDataConfig(SftSource):
    """The whole section: sources, and how their documents become rows of ``training.seq_len`` tokens."""

    chat_template: bool | None = Field(
        None, description="Apply the tokenizer's chat template. Left out: exactly when the tokenizer has one."
    )
    truncation: Literal["right", "left", "drop"] = Field(
        "right",
        description="A document longer than seq_len + 1 tokens: right: its end is cut, and an end-of-text token that "
        "does not count closes it; left: its beginning is cut; drop: it is left out. Each is counted.",
    )
    pack: bool = Field(True, description="Several documents in a row, blind to one another; false: one a row.")
    packing_window: Positive = Field(
        128, description="Rows that are packed together: more waste less, and take longer to begin and to resume."
    )
    shuffle: bool = Field(True, description="Visit documents in a new seeded order each epoch.")
    shuffle_buffer: Positive = Field(1000, description="Rows of a streamed set that are shuffled together.")
    holdout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of conversations held out for validation, by a hash of what comes before "
        "the first reply: the hash that eval.holdout of a GRPO run uses.",
    )
    workers: int = Field(0, ge=0, description="Processes that tokenize ahead of the trainer; 0: the trainer's own.")

    @model_validator(mode="after")
    def _labels_differ(self) -> SftDataConfig:
        labels = [source.called for source in self.tree()]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"mixture: several sets are called {', '.join(twice)}: give each a label of its own")
        return self


def _place_name(path: str) -> str:
    """Of a file or folder its name, of a function or task its own, of a hub id all of it: the same in any folder."""
    place = path.partition("://")[2] or path
    if path.startswith("python://"):
        return place.rpartition(":")[2]
    file = Path(place)
    if place.startswith(("/", ".", "~")) or file.suffix in FILE_TYPES:
        return file.parent.name if "*" in file.name else file.stem
    return place
