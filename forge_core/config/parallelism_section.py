"""How the trainer's ranks divide the work. The degrees decide how many ranks there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from forge_core.config.section import Positive, Section

LEFT = -1  # of the trainer's processes, to the other degrees
UNDIVIDED = ("data_parallel_replicate_degree", "context_parallel_degree", "expert_parallel_degree")


class ParallelismSection(Section):
    tensor_parallel_degree: Positive = Field(1, description="Tensor-parallel ranks of the trainer.")
    pipeline_parallel_degree: Positive = Field(1, description="Pipeline-parallel ranks of the trainer.")
    data_parallel_shard_degree: int = Field(
        1,
        ge=LEFT,
        description="Sharded data-parallel (FSDP) ranks of the trainer; -1: what services.trainer.procs of a GRPO run "
        "leaves to the other degrees.",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_degrees_of_one(cls, given: Any) -> Any:
        """Files of torchforge name degrees that there are not here: of 1, they divide nothing."""
        if not isinstance(given, Mapping):
            return given
        return {key: value for key, value in given.items() if key not in UNDIVIDED or value is True or value != 1}

    @field_validator("data_parallel_shard_degree")
    @classmethod
    def _some_ranks(cls, degree: int) -> int:
        if degree == 0:
            raise ValueError("no rank would train")
        return degree

    @property
    def ranks(self) -> int:
        """Processes of the trainer: the product of the degrees."""
        return self.data_parallel_shard_degree * self.tensor_parallel_degree * self.pipeline_parallel_degree

    def of_ranks(self, procs: int | None) -> ParallelismSection:
        """With a number in the place of -1, for a trainer of ``procs`` processes (None: nothing says how many). Raises
        ValueError when they cannot be divided so."""
        if self.data_parallel_shard_degree != LEFT:
            return self
        others = self.tensor_parallel_degree * self.pipeline_parallel_degree
        if procs is None or procs % others:
            found = "nothing says how many these are" if procs is None else f"services.trainer.procs is {procs}"
            raise ValueError(
                "parallelism.data_parallel_shard_degree: is -1, what tensor_parallel_degree x pipeline_parallel_degree "
                f"= {others} leaves of the trainer's processes, but {found}: set the degree to a number, or "
                f"services.trainer.procs of a GRPO run to a multiple of {others}"
            )
        return self.model_copy(update={"data_parallel_shard_degree": procs // others})
