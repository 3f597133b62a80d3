"""Prompts of a run, from wherever they come.

Guarantees:
- A prompt set is immutable and indexed by row number; a row gives the same prompt every time.
- ``prompt_id`` is the digest of the messages, so equal prompts have one id, whatever row or source they come from.
- Holding out is decided by ``prompt_id`` alone: duplicates fall on one side, and neither seed nor order matters.
- Everything that is wrong is a DataError naming the key (``dataset.path``, ``dataset.prompt_column``, …).
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from forge_core.config.data_sections import DatasetSection
from forge_core.data.errors import DataError
from forge_core.data.layouts import Layout, choose_layout, value_at
from forge_core.data.rendering import render
from forge_core.data.sources import (
    FILE_TYPES,
    Source,
    function_rows,
    is_pattern,
    load_function,
    read_file,
    read_files,
    reasoning_gym_rows,
    refuse_split,
)

__all__ = ["Prompt", "PromptSet", "check_dataset", "load_prompts", "prompt_id", "render", "split_holdout"]

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One prompt. ``target`` is the ground truth (None: there is none); ``metadata`` the row's other columns."""

    row: int
    prompt_id: str
    messages: list[Message]
    target: str | None
    task: str
    metadata: dict[str, Any] = field(default_factory=dict)


class PromptSet(Sequence):
    """The prompts of one data set, made from their rows when asked for."""

    def __init__(self, source: Source, section: DatasetSection, layout: Layout, key: str):
        self._source, self._section, self._layout, self._key = source, section, layout, key

    def __len__(self) -> int:
        return len(self._source.rows)

    def __getitem__(self, index: Any) -> Any:
        number = range(len(self))[index]  # counts negative numbers from the end, raises IndexError
        row = self._source.rows[number]
        messages, reply = self._messages(number, row)
        raw = value_at(row, self._layout.answer) if self._layout.answer else reply
        target = _text(raw)
        if target is not None and self._layout.extract:
            target = self._layout.extract(target)
        metadata = self._metadata(row, raw if target != raw else None)
        return Prompt(number, prompt_id(messages), messages, target, self._source.label, metadata)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def prompt_ids(self) -> list[str]:
        """``prompt_id`` of every row, without making the prompts."""
        return [prompt_id(self._messages(number, row)[0]) for number, row in enumerate(self._source.rows)]

    @property
    def unanswered(self) -> int:
        """How many rows have no ground truth: nothing in its column or, without one, no reply at the end."""
        answer, rows = self._layout.answer, self._source.rows
        if answer is None:
            return sum(not self._messages(number, row)[1] for number, row in enumerate(rows))
        return sum(value_at(row, answer) in (None, "") for row in rows)

    @property
    def columns(self) -> list[str]:
        return self._source.columns

    def column(self, name: str) -> list[Any]:
        """The value of a column, or of a dotted path into one, in every row. Raises DataError when there is none."""
        if name not in self.columns and name.split(".")[0] not in self.columns:
            raise DataError(f"{self._key}: there is no column {name!r}; the columns are {', '.join(self.columns)}")
        return [value_at(row, name) for row in self._source.rows]

    def _messages(self, number: int, row: Mapping[str, Any]) -> tuple[list[Message], str | None]:
        """Messages of a row, and the reply when they end with one."""
        value = value_at(row, self._layout.prompt)
        where = f"{self._key}.prompt_column: row {number}, column {self._layout.prompt!r}"
        messages, template = _to_messages(value, where), self._section.prompt_template
        reply = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
        if not messages:
            raise DataError(f"{where}: holds nothing but the assistant's reply; a prompt must come before it")
        messages[-1]["content"] = template.replace("{prompt}", messages[-1]["content"])
        if self._section.system_prompt is not None:
            messages = [message for message in messages if message["role"] != "system"]
            messages.insert(0, {"role": "system", "content": self._section.system_prompt})
        return messages, reply

    def _metadata(self, row: Mapping[str, Any], solution: Any) -> dict[str, Any]:
        """The other columns; the ground truth as it was before the target was taken from it is ``solution``."""
        used = (self._layout.prompt, self._layout.answer)
        kept = {name: _jsonable(value, name, self._key) for name, value in row.items() if name not in used}
        return {"solution": _jsonable(solution, "solution", self._key), **kept} if solution is not None else kept


def load_prompts(section: DatasetSection, *, seed: int, needs_answer: bool = False, key: str = "dataset") -> PromptSet:
    """The prompts that ``section`` describes. Raises DataError.

    ``seed`` is for sources that make their rows (reasoning_gym, Python functions). ``needs_answer``: some reward
    compares with the ground truth, so there must be one. ``key`` is the section's name in errors.
    """
    _check_template(section, key)
    source = open_rows(section, seed, section.size, key)
    if not source.rows:
        raise DataError(f"{key}.path: {section.path} has no rows (split {section.split}): give it at least one prompt")
    return PromptSet(source, section, _layout(section, source.columns, needs_answer, key), key)


def check_dataset(section: DatasetSection, *, seed: int = 0, needs_answer: bool = False, key: str = "dataset") -> None:
    """Find what is wrong with ``section`` without reading it whole: at most one row of a file is read, the hub is
    only asked what there is, and a Python function is imported but not called. Raises DataError.
    """
    _check_template(section, key)
    if section.path.startswith("python://"):
        refuse_split(section, key)
        load_function(section.path.removeprefix("python://"), section.options, seed, key)
        return
    place = section.path.removeprefix("hf://")
    if "://" not in place and not Path(place).exists() and not is_pattern(place):
        refuse_missing_file(place, key)
        from forge_core.data.hub import check_hub

        columns = check_hub(place, section, key)
        if columns is not None:
            _layout(section, columns, needs_answer, key)
        return
    one_row = section.model_copy(update={"size": 1})
    prompts = load_prompts(one_row, seed=seed, needs_answer=needs_answer, key=key)
    prompts[0]  # raises where the row holds no prompt
    if section.curriculum is not None:
        prompts.column(section.curriculum.column)


def prompt_id(messages: Sequence[Message]) -> str:
    """First 16 hex digits of the SHA-256 of the messages as canonical JSON."""
    text = json.dumps(list(messages), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def held_out(identifier: str, share: float) -> bool:
    """Whether the prompt with this id belongs to the held-out ``share`` (its id, as a fraction, is below it)."""
    return int(identifier, 16) < int(share * 2**64)


def split_holdout(prompts: PromptSet, share: float) -> tuple[list[int], list[int]]:
    """Row numbers ``(to train on, held out)``, each in row order; about ``share`` of distinct prompts is held out."""
    sides: tuple[list[int], list[int]] = ([], [])
    for row, identifier in enumerate(prompts.prompt_ids):
        sides[held_out(identifier, share)].append(row)
    return sides


def open_rows(section: DatasetSection, seed: int, limit: int | None, key: str) -> Source:
    """The rows of ``section``, at most ``limit``, whatever they mean. Raises DataError."""
    path, options = section.path, section.options
    if path.startswith(("reasoning_gym://", "python://")):
        refuse_split(section, key)
    if path.startswith("reasoning_gym://"):
        return reasoning_gym_rows(path.removeprefix("reasoning_gym://"), options, limit, seed, key)
    if path.startswith("python://"):
        return function_rows(path.removeprefix("python://"), options, limit, seed, key)
    place = path.removeprefix("hf://")
    if "://" in place or not place:
        raise DataError(
            f"{key}.path: {path!r} is no data set: use a hub id (org/name), a local path, hf://, "
            "reasoning_gym://<task> or python://<module>:<function>"
        )
    from forge_core.data import hub

    local = Path(place)
    if is_pattern(place) or local.is_file():
        refuse_split(section, key)
    if is_pattern(place):
        return read_files(place, options, limit, key)
    if local.is_file():
        return read_file(local, limit, key)
    if local.is_dir() and any((local / name).exists() for name in ("state.json", "dataset_dict.json")):
        return hub.saved_rows(local, section, key)
    if not local.is_dir():
        refuse_missing_file(place, key)
    return hub.hub_rows(place, section, key)


def refuse_missing_file(place: str, key: str) -> None:
    """A path that can only be a file and is not there is not looked for on the hub."""
    from forge_core.data.hub import is_hub_id

    if place.endswith(FILE_TYPES) or not is_hub_id(place):
        raise DataError(
            f"{key}.path: there is no file or folder {place!r} (looked from {Path.cwd()}, then from the folder of the "
            "configuration file)"
        )


def _layout(section: DatasetSection, columns: Sequence[str], needs_answer: bool, key: str) -> Layout:
    return choose_layout(
        columns, section.prompt_column, section.answer_column, where=section.path, key=key, needs_answer=needs_answer
    )


def _check_template(section: DatasetSection, key: str) -> None:
    if "{prompt}" not in section.prompt_template:
        raise DataError(
            f"{key}.prompt_template: {section.prompt_template!r} does not hold {{prompt}}: put it where "
            "the prompt column belongs"
        )


def _to_messages(value: Any, where: str) -> list[Message]:
    """Chat messages of a cell that holds text or messages (of which role and content are kept)."""
    if isinstance(value, str | int | float) and value != "":
        return [{"role": "user", "content": str(value)}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: holds {value!r}; a prompt is non-empty text or a list of chat messages")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(part), str) for part in ("role", "content")):
            raise DataError(f"{where}: the message {message!r} must be an object with the texts role and content")
        messages.append({"role": message["role"], "content": message["content"]})
    return messages


def _text(value: Any) -> str | None:
    """Ground truth as text: structures as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | dict):
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return str(value)


def _jsonable(value: Any, column: str, key: str) -> Any:
    """A cell in JSON types. Raises DataError for what is none (images, bytes)."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_jsonable(item, column, key) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item, column, key) for name, item in value.items()}
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    raise DataError(
        f"{key}.path: column {column!r} holds a {type(value).__name__}, which an episode cannot store: "
        "load the set with a python:// function that leaves this column out"
    )
