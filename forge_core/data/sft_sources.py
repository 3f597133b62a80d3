"""From the ``dataset`` section of supervised fine-tuning to a stream of examples.

Guarantees:
- What is wrong with a set is a DataError naming the key within the section (``dataset.mixture.1.columns``).
- ``check_sft_data`` reads the first row of each set (of a streamed one the first few), asks the hub only what there is
  and calls no function.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_core.data.conversations import Converter, choose_converter
from forge_core.data.documents import Documents, MixedDocuments, TableDocuments, check_not_empty
from forge_core.data.errors import DataError
from forge_core.data.hub import check_hub, streamed_files, streamed_rows
from forge_core.data.prompts import open_rows, refuse_missing_file
from forge_core.data.sft_settings import SftDataConfig, SftSource
from forge_core.data.sources import Row, is_pattern, load_function, matching, refuse_split
from forge_core.data.streamed import StreamedDocuments


def open_documents(section: SftDataConfig, seed: int, key: str) -> Documents:
    """The endless stream of ``section``. Raises DataError."""
    return _open(section, section, section.system_prompt, seed, key)


def maskings(section: SftSource, around: str = "assistant") -> dict[str, str]:
    """The masking of every set by its label."""
    own = section.masking or around
    if section.path is not None:
        return {section.called: own}
    return {label: found for child in section.mixture for label, found in maskings(child, own).items()}


def check_sft_data(section: SftDataConfig, *, key: str = "dataset") -> None:
    """Find what is wrong with ``section`` before a model is loaded, from the first rows. Raises DataError."""
    for source, system, where in _sets(section, section.system_prompt, key):
        _check(source, system, where)


def _sets(source: SftSource, system: str | None, key: str) -> Iterator[tuple[SftSource, str | None, str]]:
    """Every set with its system prompt and its key."""
    if source.path is not None:
        yield source, system, key
    for number, child in enumerate(source.mixture):
        yield from _sets(child, _system(child, system), f"{key}.mixture.{number}")


def _system(source: SftSource, around: str | None) -> str | None:
    return around if source.system_prompt is None else source.system_prompt


def _open(source: SftSource, whole: SftDataConfig, system: str | None, seed: int, key: str) -> Documents:
    if source.mixture:
        children = [
            (_open(child, whole, _system(child, system), seed, f"{key}.mixture.{number}"), child.weight)
            for number, child in enumerate(source.mixture)
        ]
        return MixedDocuments(source.called, children, seed)
    return (_streamed if source.streaming else _table)(source, whole, system, seed, key)


def _table(source: SftSource, whole: SftDataConfig, system: str | None, seed: int, key: str) -> Documents:
    found = open_rows(source.section(), seed, source.size, key)
    check_not_empty(len(found.rows), key, str(source.path))
    return TableDocuments(
        source.called, found.rows, _converter(source, found.columns, system, key), seed, whole.shuffle
    )


def _streamed(source: SftSource, whole: SftDataConfig, system: str | None, seed: int, key: str) -> Documents:
    stream, first = open_stream(source, key)
    convert = _converter(source, list(first), system, key)
    return StreamedDocuments(
        source.called, stream, convert, seed, whole.shuffle, whole.shuffle_buffer, source.size, key
    )


def open_stream(source: SftSource, key: str) -> tuple[Any, Row]:
    """A ``datasets.IterableDataset`` of a set that is read piece by piece, and its first row. Raises DataError."""
    stream, first = _stream(source, key)
    if first is None:
        check_not_empty(0, key, str(source.path))
    return stream, first or {}


def _stream(source: SftSource, key: str) -> tuple[Any, Row | None]:
    place = str(source.path).removeprefix("hf://")
    if "://" in place:
        raise DataError(f"{key}.streaming: {place} makes its rows in one go: set {key}.streaming=false")
    if is_pattern(place) or Path(place).is_file():
        files = matching(place) if is_pattern(place) else [place]
        if not files:
            raise DataError(f"{key}.path: no file matches {place!r} (looked from {Path.cwd()})")
        return streamed_files(files, source.section(), key)
    if not Path(place).is_dir():
        refuse_missing_file(place, key)
    return streamed_rows(place, source.section(), key)


def _check(source: SftSource, system: str | None, key: str) -> None:
    path = str(source.path)
    if source.streaming and "://" in path.removeprefix("hf://"):
        open_stream(source, key)  # refuses it
    if path.startswith("python://"):
        refuse_split(source.section(), key)
        load_function(path.removeprefix("python://"), source.options, 0, key)
        return
    place = path.removeprefix("hf://")
    local = Path(place).exists() or is_pattern(place)
    if local and source.streaming:
        _, row = open_stream(source, key)
        _converter(source, list(row), system, key)(0, row)
        return
    if local or path.startswith("reasoning_gym://"):
        found = open_rows(source.section(), 0, 1, key)
        check_not_empty(len(found.rows), key, path)
        _converter(source, found.columns, system, key)(0, found.rows[0])
        return
    refuse_missing_file(place, key)
    columns = check_hub(place, source.section(), key)
    if columns is not None:
        _converter(source, columns, system, key)


def _converter(source: SftSource, columns: list[str], system: str | None, key: str) -> Converter:
    return choose_converter(columns, source.format, source.columns, system, where=str(source.path), key=key)
