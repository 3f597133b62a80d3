"""How far a policy has moved from another: KL divergence on the policy's own answers.

Invariant: both sets of log-probabilities come from the trainer's model code in one layout, never from a sampler: the
rounding of another kernel would be taken for a divergence. Equal weights give exactly 0.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from forge_core.config import RunConfig
from forge_core.data_model import Episode
from forge_core.devices import alone, place, visible_gpus
from forge_core.engine_thread import EngineThread
from forge_core.evaluation.statistics import kl_estimate
from forge_core.gpu_leases import lease
from forge_core.observability.memory import SETTINGS, memory_guard
from forge_core.stop import StopToken

log = logging.getLogger("forge")


def kl_divergence(config: RunConfig, policy: Path, other: Path, episodes: Sequence[Episode], stop: StopToken) -> float:
    """KL(policy || other) in nats per token, from answers that ``policy`` sampled at ``eval.temperature``. (Greedy
    answers stand for no distribution: there the divergence at temperature 1 along them is given.)"""
    samples = [(e.prompt_ids, e.response_ids) for e in episodes if e.response_ids]
    placement, held = lease(visible_gpus(), lambda gpus: place(alone(config, "reference"), gpus))
    if held.warning:
        log.warning(held.warning)
    with closing(held), closing(EngineThread("divergence", config.training.threads)) as thread:
        device = placement.device("ref_model")
        ours, theirs = (thread.call(_logprobs, device, config, folder, samples, stop) for folder in (policy, other))
    pairs = zip([x for row in ours for x in row], [x for row in theirs for x in row], strict=True)
    return kl_estimate([b - a for a, b in pairs])


@memory_guard("reference model", SETTINGS["reference model"])
def _logprobs(
    device: str, config: RunConfig, folder: Path, samples: Sequence[tuple[list[int], list[int]]], stop: StopToken
) -> list[list[float]]:
    from forge_core.reference.model import ReferenceModel

    model = ReferenceModel(
        folder,
        token_budget=config.token_budget,
        seq_len=config.training.seq_len,
        dtype=config.training.dtype,
        device=device,
    )
    model.setup()
    try:
        return model.forward(samples, config.eval.temperature or 1.0, stop=stop)
    finally:
        model.cleanup()
