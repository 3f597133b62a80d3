"""The probe of a model that is being published (see ``models/probe.py``), computed by the trainer's own model code.

Every rank computes all of it, in one batch without a mask: no shape that compiled code would have to know.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from forge_core.data_model import TextTrainBatch
from forge_core.models import probe
from forge_core.training.settings import TrainerSettings


def write_probe(
    folder: Path,
    vocab_size: int,
    settings: TrainerSettings,
    logprobs: Callable[[TextTrainBatch], list[list[float]]],
    *,
    writes: bool,
) -> None:
    """``logprobs``: the trainer's, of each row; all ranks call it together. ``writes``: whether this one writes."""
    token_ids = probe.sequences(vocab_size, max(settings.seq_len - 1, 2))  # an engine needs room for one token more
    ids_BT = torch.tensor(token_ids)
    ones_BT = torch.ones(ids_BT[:, 1:].shape)
    found = logprobs(TextTrainBatch(ids_BT[:, :-1], ids_BT[:, 1:], ones_BT, ones_BT))
    if writes:
        dtype = "float8" if settings.float8 else probe.coarsest(settings.dtype, settings.weights_dtype)
        probe.write(folder, token_ids, found, dtype)
