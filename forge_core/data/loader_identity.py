"""Whether a state of a loader belongs to these data and settings.

Guarantee: what decides the order and content of rows is compared; where the files lie and how many processes read
them is not.
"""

from __future__ import annotations

import hashlib
from typing import Any

from forge_core.data.documents import Documents, State
from forge_core.data.errors import DataError
from forge_core.data.sft_settings import SftDataConfig
from forge_core.store.digests import digest


def identity(section: SftDataConfig, documents: Documents, tokenizer: Any, seq_len: int, seed: int) -> State:
    """What decides the rows, as JSON: settings by key, data by label, the tokenizer as a digest."""
    return {
        "seed": seed,
        "seq_len": seq_len,
        "tokenizer": tokenizer_digest(tokenizer),
        "settings": {key: value for source in section.tree() for key, value in _settings(source).items()},
        "data": documents.fingerprint(),
    }


def check_same(stored: Any, own: State, key: str) -> None:
    """Raise DataError naming what differs between the identity of a state and one's own."""
    if not isinstance(stored, dict):
        raise DataError(f"{key}: the stored position is none of a loader: it was written by something else")
    parts = [name for name in own if not isinstance(own[name], dict) and stored.get(name) != own[name]]
    for group in ("settings", "data"):
        before, now = stored.get(group) or {}, own[group]
        parts += [f"{group} {name}" for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if parts:
        raise DataError(
            f"{key}: the stored position belongs to other rows; these differ: {', '.join(parts)}. Restore them, or "
            "begin a new run"
        )


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of the vocabulary, the merges, the special tokens and the chat template."""
    special = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    backend = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    return digest([backend, str(tokenizer.chat_template), special])[:16]


def _settings(source: Any) -> State:
    apart = {"path", "mixture", "workers", "label"}
    values = source.model_dump(mode="json", exclude=apart)
    return {f"{source.called}: {name}": value for name, value in values.items()}
