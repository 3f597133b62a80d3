"""Engines and where they run: the generator, services and their GPUs, published weights."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from forge_core.config.optimizer_section import Dtype
from forge_core.config.section import Positive, Section


class GeneratorSection(Section):
    backend: Literal["hf", "vllm"] = Field(
        "hf", description="hf: transformers in this process; vllm: vLLM engines in child processes (extra vllm)."
    )
    dtype: Dtype = Field("float32", description="Type of the generator's weights.")
    max_batch: Positive = Field(512, description="Sequences decoded together, at most (embedded backend).")
    threads: int | None = Field(None, ge=1, description="CPU threads of the generator. Left out: its share of cores.")
    engine_args: dict[str, Any] = Field(
        {}, description="Arguments of vLLM's engine, such as max_num_seqs or gpu_memory_utilization, passed through."
    )
    sampling_params: dict[str, Any] = Field(
        {}, description="Further sampling parameters of vLLM, such as stop_token_ids, passed through."
    )
    weight_update: Literal["in_flight", "drain"] = Field(
        "in_flight",
        description="in_flight: unfinished responses of vLLM go on with the new weights; drain: they finish first.",
    )
    sharing: Literal["sleep", "split"] = Field(
        "sleep",
        description="sleep: on the trainer's GPU vLLM's memory is freed while the trainer works; split: both keep "
        "their share (generator.engine_args.gpu_memory_utilization or kv_cache_memory_bytes).",
    )
    engines_per_gpu: Positive = Field(
        1,
        description="Engines of vLLM on each of the generator's GPUs, which divide requests and memory: a small model "
        "takes the processor that drives an engine longer than the GPU. Then gpu_memory_utilization is that of one.",
    )


class ServiceSection(Section):
    procs: Positive = Field(
        1,
        description="GPUs of one replica: the tensor-parallel degree of a vLLM engine. The trainer has as many as its "
        "parallel degrees say.",
    )
    num_replicas: Positive = Field(1, description="Engines of the generator (vLLM).")
    with_gpus: bool | None = Field(
        None,
        description="true: on GPUs, or the run is refused; false: on the CPU. Left out: on GPUs where the machine has "
        "any. On a machine with one GPU the roles share it, and the reference may share the trainer's.",
    )


class ServicesSection(Section):
    generator: ServiceSection = Field(ServiceSection(), description="The sampling engine.")
    trainer: ServiceSection = Field(ServiceSection(), description="The trainer.")
    ref_model: ServiceSection | None = Field(
        ServiceSection(), description="The frozen reference model; null: none (needs grpo.beta=0)."
    )


class CommSection(Section):
    init_timeout_s: float = Field(600.0, gt=0, description="Seconds that the trainer's ranks have to find each other.")
    timeout_s: float = Field(300.0, gt=0, description="Seconds after which a collective of the trainer has failed.")


class QuantizeSection(Section):
    float8: bool = Field(False, description="Matrix products of the trainer's layers in float8, where the GPU has it.")


class WeightsSection(Section):
    dtype: Dtype | None = Field(None, description="Type of published weights. Left out: training.dtype.")
    keep: int = Field(2, ge=1, description="Newest versions kept besides those that the run still needs.")
    shard_bytes: int = Field(
        250_000_000, ge=1, description="Largest safetensors file, in bytes: files are written and checked side by side."
    )
    prefetch: bool = Field(True, description="Fetch new weights to the host's shared memory while generation goes on.")
    fetchers: Positive = Field(8, description="Parallel range reads that fetch one version of the weights.")
