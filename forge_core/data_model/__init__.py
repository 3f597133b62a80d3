"""Arrow schemas and in-memory types that every part of Forge shares."""

from forge_core.data_model.schemas import (
    EPISODES,
    METRICS,
    REFERENCE,
    REWARDS,
    SCHEMA_VERSION,
    TRAINING,
    from_parquet,
    to_parquet,
)
from forge_core.data_model.types import (
    Completion,
    Episode,
    ForwardBackwardResult,
    GenerationRequest,
    OptimStepResult,
    SamplingParams,
    TextTrainBatch,
    VersionSpan,
)

__all__ = [
    "EPISODES",
    "METRICS",
    "REFERENCE",
    "REWARDS",
    "SCHEMA_VERSION",
    "TRAINING",
    "Completion",
    "Episode",
    "ForwardBackwardResult",
    "GenerationRequest",
    "OptimStepResult",
    "SamplingParams",
    "TextTrainBatch",
    "VersionSpan",
    "from_parquet",
    "to_parquet",
]
