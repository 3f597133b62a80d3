"""Rows of local files, reasoning_gym tasks and Python functions.

Guarantees:
- A set is a sequence of rows (dicts by column) whose order never changes.
- ``limit`` rows are read at most, so that reading one row is a cheap check of a file.
- A cell of a CSV file is text, whatever it looks like: ``007`` stays ``007``, and ``NA`` is a word.
- Everything that is wrong with ``path`` is a DataError that names the key and the remedy.
"""

from __future__ import annotations

import csv
import difflib
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from forge_core.config.data_sections import DatasetSection
from forge_core.config.references import revealed
from forge_core.data.errors import DataError
from forge_core.data.importing import ObjectPathError, load_object, misfit
from forge_core.data.tagged import encode

Row = dict[str, Any]
FILE_TYPES = (".jsonl", ".json", ".parquet", ".csv")
ENCODING = "utf-8-sig"  # UTF-8, with or without the mark that some programs begin a file with
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escaped half of a character outside the first 65536


class ArrowRows(Sequence):
    """Rows of an Arrow table, made into dicts one by one."""

    def __init__(self, table: pa.Table):
        self.table = table.combine_chunks() if table.nbytes < 2**30 else table

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: Any) -> Any:
        return self.table.slice(range(len(self))[index], 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for batch in self.table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()


@dataclass(frozen=True)
class Source:
    """Rows with their columns; ``label`` becomes the ``task`` of each prompt."""

    rows: Sequence[Row]
    columns: list[str]
    label: str


def read_file(path: Path, limit: int | None, key: str) -> Source:
    """Rows of one JSONL, JSON (a list of objects), Parquet or CSV file."""
    if path.suffix == ".parquet":
        table = _parquet(path, limit, key)
        return Source(ArrowRows(table), table.column_names, path.stem)
    if path.suffix not in FILE_TYPES:
        raise DataError(f"{key}.path: {path} is not one of the file types {', '.join(FILE_TYPES)}: convert it to JSONL")
    rows = list(islice(text_rows(path, key), limit))
    return Source(rows, columns_of(rows, str(path), key), path.stem)


def text_rows(path: Path, key: str) -> Iterator[Row]:
    """Rows of a JSONL, JSON or CSV file, one by one. Raises DataError."""
    readers: dict[str, Callable[[Path, str], Iterable[Row]]] = {".jsonl": _jsonl, ".json": _json, ".csv": _csv}
    try:
        yield from readers[path.suffix](path, key)
    except UnicodeDecodeError as error:
        raise DataError(f"{key}.path: {path} is not UTF-8 text ({error}): convert it") from error


def files_rows(files: Sequence[str], key: str) -> Iterator[Row]:
    """``text_rows`` of all ``files``. Raises DataError, also when a row is not a dict."""
    for name in files:
        for number, row in enumerate(text_rows(Path(name), key)):
            _check_object(row, number, name, key)
            yield row


def is_pattern(place: str) -> bool:
    """Whether ``place`` is a pattern of file names (``incoming/*.jsonl``) and no file of that very name."""
    return any(sign in place for sign in "*?[") and not Path(place).exists()


def refuse_split(section: DatasetSection, key: str) -> None:
    """Files and rows that are made have no splits: one that is asked for would be the rows that are trained on."""
    if section.split != "train":
        raise DataError(
            f"{key}.split: {section.path} has only the split train, not {section.split!r}: a split is part of a hub "
            "set, or a file (train.jsonl, test.jsonl) of a folder that dataset.path names; dataset.size takes the "
            "first rows"
        )


def matching(pattern: str) -> list[str]:
    """The files that ``pattern`` matches now, sorted."""
    return sorted(name for name in glob(pattern, recursive=True) if Path(name).is_file())


def read_files(pattern: str, options: dict[str, Any], limit: int | None, key: str) -> Source:
    """Rows of all files that ``pattern`` matches, or of ``options.files`` where it is given, file by file."""
    files = options.get("files") or matching(pattern)
    if not files:
        raise DataError(f"{key}.path: no file matches {pattern!r} (looked from {Path.cwd()})")
    if gone := [name for name in files if not Path(name).is_file()]:
        raise DataError(f"{key}.options.files: {', '.join(gone)} of {pattern!r} cannot be read: restore what was there")
    rows: list[Row] = []
    for name in files:
        if limit is None or len(rows) < limit:
            rows += read_file(Path(name), None if limit is None else limit - len(rows), key).rows
    return Source(rows, columns_of(rows, pattern, key), Path(pattern).parent.name or "prompts")


def columns_of(rows: Sequence[Row], where: str, key: str) -> list[str]:
    """Columns in order of appearance. Raises DataError when a row is not a dict."""
    columns: dict[str, None] = {}
    for number, row in enumerate(rows):
        _check_object(row, number, where, key)
        columns.update(dict.fromkeys(row))
    return list(columns)


def _check_object(row: Any, number: int, where: str, key: str) -> None:
    if not isinstance(row, dict):
        raise DataError(f"{key}.path: row {number} of {where} is a {type(row).__name__}; rows must be objects")


def reasoning_gym_rows(task: str, options: dict[str, Any], limit: int | None, seed: int, key: str) -> Source:
    """Entries of a reasoning_gym task: ``question``, ``answer``, and all that its verifier needs.

    ``options.seed`` is ``seed`` unless given, ``options.size`` is ``limit`` unless given, else the library's 500.
    """
    gym = _import_reasoning_gym(key)
    if task not in gym.factory.DATASETS:
        raise DataError(f"{key}.path: reasoning_gym has no task {task!r}{_close(task, gym.factory.DATASETS)}")
    sizes = {} if limit is None else {"size": limit}
    try:
        entries = gym.create_dataset(task, **{**sizes, "seed": seed, **options})
    except (TypeError, ValueError, AssertionError) as error:  # how the library refuses its arguments
        raise DataError(f"{key}.options: reasoning_gym task {task} refuses {options}: {error}") from error
    verifier = {name: value for name, value in options.items() if name not in ("size", "seed")}
    rows = [_gym_row(task, verifier, entries[index]) for index in range(min(len(entries), limit or len(entries)))]
    return Source(rows, ["question", "answer", "reasoning_gym"], task)


def load_function(path: str, options: dict[str, Any], seed: int, key: str) -> Callable[[], list[Row]]:
    """The function of ``module:function`` with its arguments bound; a ``seed`` parameter gets ``seed`` unless set."""
    try:
        function = load_object(path)
    except ObjectPathError as error:
        raise DataError(f"{key}.path: python://{error}") from error
    if not callable(function):
        raise DataError(f"{key}.path: python://{path} is a {type(function).__name__}, not a function")
    parameters = inspect.signature(function).parameters
    arguments = {**({"seed": seed} if "seed" in parameters else {}), **options}
    if unfit := misfit(function, **arguments):
        raise DataError(
            f"{key}.options: python://{path} takes ({', '.join(parameters)}), but {options} was given: {unfit}"
        ) from unfit
    return lambda: function(**(arguments | revealed(options, f"{key}.options")))


def function_rows(path: str, options: dict[str, Any], limit: int | None, seed: int, key: str) -> Source:
    """The list of dicts that a user's function returns."""
    rows = load_function(path, options, seed, key)()
    if not isinstance(rows, list):
        raise DataError(f"{key}.path: python://{path} returned a {type(rows).__name__}; it must return a list of dicts")
    rows = rows[:limit]
    return Source(rows, columns_of(rows, f"python://{path}", key), path.rpartition(":")[2])


def _parquet(path: Path, limit: int | None, key: str) -> pa.Table:
    try:
        return _parquet_rows(path, limit, key)
    except pa.ArrowException as error:
        raise DataError(f"{key}.path: {path} is not valid Parquet: {error}") from error


def _parquet_rows(path: Path, limit: int | None, key: str) -> pa.Table:
    import pyarrow.parquet as pq

    file, batches, rows = pq.ParquetFile(path, memory_map=True), [], 0
    refuse_repeated(file.schema_arrow.names, str(path), key)
    if limit is None:
        return pq.read_table(path, memory_map=True)
    for batch in file.iter_batches(min(limit, 65536)):
        batches.append(batch)
        rows += batch.num_rows
        if rows >= limit:
            break
    return pa.Table.from_batches(batches, schema=file.schema_arrow).slice(0, limit)


def _jsonl(path: Path, key: str) -> Iterator[Row]:
    with path.open(encoding=ENCODING) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse(line, f"{path}, line {number}", key)


def _json(path: Path, key: str) -> list[Row]:
    rows = _parse(path.read_text(encoding=ENCODING), str(path), key)
    if not isinstance(rows, list):
        raise DataError(
            f"{key}.path: {path} holds a {type(rows).__name__}; it must be a list of objects (or use JSONL)"
        )
    return rows


def _csv(path: Path, key: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the library's own limit is shorter than a document
    with path.open(encoding=ENCODING, newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            refuse_repeated(reader.fieldnames or (), str(path), key)
            yield from (_as_wide_as_the_head(row, f"{path}, line {reader.line_num}", key) for row in reader)
        except csv.Error as error:
            raise DataError(f"{key}.path: {path}, line {reader.line_num} is not valid CSV: {error}") from error


def refuse_repeated(columns: Iterable[str], where: str, key: str) -> None:
    """Raises DataError for two columns of one name, of which a row could keep but one; those without a name may be."""
    if repeated := [name for name, times in Counter(columns).items() if times > 1 and name]:
        names = ", ".join(map(repr, repeated))
        raise DataError(f"{key}.path: {where} has the column {names} more than once: rename or remove all but one")


def _as_wide_as_the_head(row: dict[Any, Any], where: str, key: str) -> Row:
    if None in row or None in row.values():  # how the library says too many cells, and too few
        more = "more" if None in row else "fewer"
        raise DataError(f"{key}.path: {where} has {more} cells than the first line: quote cells that hold a comma")
    return row


def _parse(text: str, where: str, key: str) -> Any:
    def unrepeated(pairs: list[tuple[str, Any]]) -> Row:
        found = dict(pairs)
        if len(found) < len(pairs):
            refuse_repeated((name for name, _ in pairs), where, key)
        return found

    try:
        found = json.loads(text, object_pairs_hook=unrepeated)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise DataError(f"{key}.path: {where} is not valid JSON: {error}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{key}.path: {where} holds half of a character ({error}): repair or remove it") from error
    return found


def _import_reasoning_gym(key: str) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError(
            f"{key}.path: reasoning_gym:// needs the package reasoning-gym: pip install 'forge-rl[examples]' ({error})"
        ) from error
    return reasoning_gym


def _close(task: str, tasks: Iterable[str]) -> str:
    """The names a misspelt task may have meant."""
    names = difflib.get_close_matches(task, list(tasks), n=5, cutoff=0.5)
    return f": did you mean {' or '.join(names)}?" if names else f": it has {', '.join(sorted(tasks))}"


def _gym_row(task: str, options: dict[str, Any], entry: Row) -> Row:
    stored = {"task": task, "options": options, "entry": encode(entry)}
    return {"question": entry["question"], "answer": entry["answer"], "reasoning_gym": stored}
