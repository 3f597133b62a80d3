"""Whether two sets of prompts are the same, whatever files they came in.

Guarantee: equal prompts with equal answers have equal digests; neither the order of the rows nor the names of their
files matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from forge_core.data.prompts import Prompt
from forge_core.store.digests import digest


def prompt_digest(prompt: Prompt) -> str:
    """Digest of what a row says: messages, answer and the other columns."""
    metadata = json.dumps(prompt.metadata, sort_keys=True, ensure_ascii=False)  # as text: it may hold NaN
    return digest([prompt.messages, prompt.target, metadata])


def rows_digest(prompts: Iterable[Prompt]) -> str:
    """Digest of a set of rows, each as often as it is there."""
    return digest(sorted(prompt_digest(prompt) for prompt in prompts))
