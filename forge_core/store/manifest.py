"""Published objects: files under names that hold their digest, and the manifest that makes them an object.

A manifest has two digests. ``request`` is known before the work and says what was asked for; reuse needs it to be
equal. ``content`` is that of the bytes: the digest over (name, sha256) of the files. ``provenance`` is recorded, and
compared with nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from forge_core.store.backend import check_key
from forge_core.store.digests import SHORT, content_digest
from forge_core.store.errors import CorruptObject, StoreError

MANIFEST = "manifest.json"
DATA = frozenset({".safetensors", ".json", ".parquet", ".txt", ".jinja", ".model"})  # types that hold no code


@dataclass(frozen=True)
class File:
    """``name`` is the plain name, ``key`` the full key in the store, ``size`` is in bytes."""

    name: str
    key: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a published object is made of. ``prefix`` ends with '/'."""

    prefix: str
    request: str
    content: str
    files: tuple[File, ...]
    provenance: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, prefix: str, request: str, files: Iterable[File], provenance: Mapping[str, Any]) -> Manifest:
        """The manifest of ``files``, each given once or more; StoreError when two different ones have one name."""
        named = sorted(set(files), key=lambda file: (file.name, file.sha256))
        for file, other in pairwise(named):
            if file.name == other.name:
                raise StoreError(f"{prefix}: two different files named {file.name!r} were uploaded: give each its own")
        content = content_digest({file.name: file.sha256 for file in named})
        return cls(prefix, request, content, tuple(named), dict(provenance))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Manifest:
        """KeyError, TypeError or ValueError unless ``value`` is a manifest whose digest is that of its files."""
        files = tuple(File(**item) for item in value["files"])
        for file in files:
            check_key(value["prefix"] + file.name)
            check_key(file.key)
        content = content_digest({file.name: file.sha256 for file in files})
        if content != value["content"]:
            raise ValueError("its content digest is not that of its files")
        return cls(value["prefix"], value["request"], content, files, value["provenance"])

    def file(self, name: str) -> File:
        """The entry of ``name``; KeyError names the files that there are."""
        for file in self.files:
            if file.name == name:
                return file
        raise KeyError(f"{self.prefix} has no file {name!r}; it has {', '.join(file.name for file in self.files)}")


def check_data(manifest: Manifest) -> Manifest:
    """``manifest`` when its files are of types that are data alone; CorruptObject otherwise: a loader that is given a
    folder may run what it finds there (a pickle, a module)."""
    for file in manifest.files:
        if PurePosixPath(file.name).suffix not in DATA:
            raise CorruptObject(
                f"{file.key}: files of this type may hold code, so it is not fetched: an object of a run consists of "
                f"{', '.join(sorted(DATA))} files; find out who wrote {manifest.prefix}"
            )
    return manifest


def stored_name(name: str, sha256: str) -> str:
    """``model.safetensors`` -> ``model-<first digits of sha256>.safetensors``."""
    path = PurePosixPath(name)
    return str(path.with_name(f"{path.stem}-{sha256[:SHORT]}{path.suffix}"))


def folder_files(folder: Path) -> dict[str, Path]:
    """All files below ``folder`` by their relative names, ready for ``Store.publish``."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
