"""Rows of data sets on the Hugging Face hub, and of folders that ``datasets`` saved or can read.

Guarantees:
- An unreachable hub is noticed in seconds (``datasets`` alone retries for 23), and what is cached is used then.
- A streamed set is read into memory up to ``size`` rows (10 000 when unset) when the run starts: the order of a run
  is then decided by row numbers, as for any other set, so it can be resumed exactly.
- A refusal of the hub is a DataError that names the key to change.
- Cells of CSV files in a local folder are text, as those of a file are; of a set on the hub ``datasets`` decides.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from forge_core.config.data_sections import DatasetSection
from forge_core.data.errors import DataError
from forge_core.data.layouts import CONFIG_NAMES
from forge_core.data.sources import (
    ENCODING,
    FILE_TYPES,
    ArrowRows,
    Row,
    Source,
    columns_of,
    files_rows,
    refuse_repeated,
    refuse_split,
)

STREAMED_ROWS = 10_000
HEAD = 100  # rows of streamed files that are looked at for their columns
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_log = logging.getLogger(__name__)


def is_hub_id(path: str) -> bool:
    """Whether ``path`` has the form of a hub id (``org/name``, or one of the old single names)."""
    return bool(_HUB_ID.match(path))


def hub_rows(path: str, section: DatasetSection, key: str) -> Source:
    """All rows of a split of a hub set, or of a folder of data files."""
    import datasets

    with hub_errors(path, section, key):
        loaded = datasets.load_dataset(
            path,
            section.name or CONFIG_NAMES.get(path),
            split=section.split,
            streaming=section.streaming,
            revision=section.revision,
            **_csv_as_text(path, section, key),
        )
        if section.streaming:
            return _streamed(loaded, path, section, key)
    return _table(loaded, path, section.size)


def streamed_rows(path: str, section: DatasetSection, key: str) -> tuple[Any, Row | None]:
    """A ``datasets.IterableDataset`` of a split of a hub set or of a folder of data files, and its first row."""
    import datasets

    with hub_errors(path, section, key):
        stream = datasets.load_dataset(
            path,
            section.name or CONFIG_NAMES.get(path),
            split=section.split,
            streaming=True,
            revision=section.revision,
            **_csv_as_text(path, section, key),
        )
        return stream, next(iter(stream), None)


def streamed_files(files: list[str], section: DatasetSection, key: str) -> tuple[Any, Row | None]:
    """The same of local files: Parquet, or others, whose rows are those that ``read_file`` gives. (The readers that
    ``datasets`` has for those guess types from the first rows: text that looks like a number or a date does not stay as
    it is.) The row has the columns of the first ``HEAD`` rows."""
    import datasets

    refuse_split(section, key)
    suffixes = {Path(file).suffix for file in files}
    if not suffixes <= set(FILE_TYPES) or (len(suffixes) > 1 and ".parquet" in suffixes):
        named = ", ".join(sorted(suffixes))
        raise DataError(f"{key}.path: streamed files must be of one type of {', '.join(FILE_TYPES)}, not {named}")
    files = [file for file in files if Path(file).stat().st_size]  # the readers stumble over empty ones
    if not files:
        raise DataError(f"{key}.path: {section.path} has no rows: give it at least one")
    with hub_errors(files[0], section, key):
        if ".parquet" in suffixes:
            stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        else:
            stream = datasets.IterableDataset.from_generator(files_rows, gen_kwargs={"files": files, "key": key})
        head = list(islice(stream, HEAD))
    columns = columns_of(head, section.path, key)
    return stream, {**dict.fromkeys(columns), **head[0]} if head else None


def _csv_as_text(path: str, section: DatasetSection, key: str) -> dict[str, Any]:
    """What ``load_dataset`` is told of a local folder of CSV files, so that it guesses no types."""
    import datasets

    if not Path(path).is_dir() or not any(Path(path).rglob("*.csv")):
        return {}
    config = datasets.load_dataset_builder(path, section.name).config
    files = (config.data_files or {}).get(re.split(r"[\[+]", section.split)[0])
    if not files or not hasattr(config, "keep_default_na") or config.features is not None:
        return {}  # no CSV files, or a description of the set that says what they hold
    heads = [_csv_head(file) for file in files]
    for file, head in zip(files, heads, strict=True):
        refuse_repeated(head, file, key)
    texts = datasets.Features(dict.fromkeys(heads[0], datasets.Value("string")))
    return {"features": texts, "keep_default_na": False, "encoding": ENCODING}


def _csv_head(file: str) -> list[str]:
    with Path(file).open(encoding=ENCODING, newline="") as lines:
        return next(csv.reader(lines), [])


def check_hub(path: str, section: DatasetSection, key: str) -> list[str] | None:
    """Ask the hub whether the set, its configuration and split exist; its columns, if the hub knows them."""
    import datasets

    with hub_errors(path, section, key):
        name = section.name or CONFIG_NAMES.get(path)
        info = datasets.load_dataset_builder(path, name, revision=section.revision).info
    split = re.split(r"[\[+]", section.split)[0]  # a slice such as train[:10%] is part of the name
    if info.splits and split not in info.splits:
        raise DataError(f"{key}.split: {path} has no split {split!r}; it has {', '.join(info.splits)}")
    return list(info.features) if info.features else None


def saved_rows(folder: Path, section: DatasetSection, key: str) -> Source:
    """Rows of a folder written by ``save_to_disk``."""
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        if section.split not in loaded:
            raise DataError(f"{key}.split: {folder} has no split {section.split!r}; it has {', '.join(loaded)}")
        loaded = loaded[section.split]
    return _table(loaded, folder.name, section.size)


def _table(loaded: Any, label: str, size: int | None) -> Source:
    if size is not None:
        loaded = loaded.select(range(min(size, len(loaded))))
    return Source(ArrowRows(loaded.with_format("arrow")[:]), list(loaded.column_names), label)


def _streamed(stream: Any, path: str, section: DatasetSection, key: str) -> Source:
    limit = section.size or STREAMED_ROWS
    rows = list(islice(stream, limit))
    if section.size is None and len(rows) == limit:
        _log.warning("%s.streaming: using the first %d rows of %s; set %s.size to use more", key, limit, path, key)
    return Source(rows, columns_of(rows, path, key), path)


@contextlib.contextmanager
def hub_errors(path: str, section: DatasetSection, key: str) -> Iterator[None]:
    """Turn what ``datasets`` raises into a DataError that says which key to change."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    local = Path(path).exists()
    reachable = local or hub_reachable()
    try:
        with contextlib.nullcontext() if reachable else _offline():
            yield
    except DataError:
        raise
    except DatasetNotFoundError as error:
        raise DataError(
            f"{key}.path: {error} There is no local file or folder {path!r} either. Check the spelling; for a private "
            f"or gated set, accept its terms at {_page(path)} and set HF_TOKEN to a token that may read it"
        ) from error
    except KeyError as error:  # how ``datasets`` fails where rows of JSON files have other columns than the first
        raise DataError(
            f"{key}.path: the rows of {path!r} differ in their columns (some lack {error}): give all of them the same"
            + (f", or name the files: {key}.path='{path}/**/*.jsonl'" if local else "")
        ) from error
    except ValueError as error:  # unknown configuration or split; the message lists those there are
        field = "split" if "split" in str(error).lower() else "path" if local else "name"
        raise DataError(f"{key}.{field}: {path}: {error}") from error
    except (OSError, DatasetsError) as error:
        if local:
            raise DataError(f"{key}.path: could not read the files of {path!r}: {error}") from error
        raise DataError(
            f"{key}.path: there is no local file or folder {path!r}; as a hub set: {_refusal(path, error, reachable)}. "
            "Check the spelling, the network and (for a private or gated set) HF_TOKEN and that you accepted its terms "
            f"at {_page(path)}, or download it elsewhere and give its path"
        ) from error


def _page(path: str) -> str:
    import datasets

    return f"{datasets.config.HF_ENDPOINT}/datasets/{path}"


def _refusal(path: str, error: Exception, reachable: bool) -> str:
    """Why the hub gave nothing; offline, what is missing where."""
    import datasets

    if reachable:
        return f"the hub answered: {error}"
    why = "offline mode is on (HF_HUB_OFFLINE)" if datasets.config.HF_HUB_OFFLINE else "the hub cannot be reached"
    folder = datasets.config.HF_DATASETS_CACHE / path.replace("/", "___")
    return f"{why} and the cache lacks it: there is no usable {folder} ({error})"


def hub_reachable(timeout_s: float = 3.0) -> bool:
    """Whether the hub accepts connections. True behind a proxy, where only a real request could tell."""
    import datasets

    if datasets.config.HF_HUB_OFFLINE:
        return False
    address = urllib.parse.urlsplit(datasets.config.HF_ENDPOINT)
    if address.scheme in urllib.request.getproxies():
        return True
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=timeout_s).close()
    except OSError:  # the answer, not an error
        return False
    return True


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let the libraries use their cache only. They read these flags at each call."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
