"""Settings of the vLLM generator, and what they mean for one engine's process."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_core.data_model import GenerationRequest
from forge_core.devices import Placement
from forge_core.generation.vllm_in_place import EXTENSION

# On a CPU vLLM compiles for 18 s where a graph is wanted, and it dies of a prompt that it takes in parts when the
# request has a seed (it sets back the generator of random numbers, which torch cannot do there): prompts are taken
# whole.
ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False}
CACHE_BYTES, SHARE = "kv_cache_memory_bytes", "gpu_memory_utilization"
ANY_SHARE = 0.01  # vLLM refuses to start where less than this share is free, also if it is told the size of the cache
TEXTUAL = ("stop", "bad_words", "structured_outputs")  # for these vLLM must have the tokenizer


def states_memory(engine_args: Mapping[str, Any]) -> bool:
    """Whether an engine is told the size of its key/value cache, and no share of the GPU that must be free."""
    return bool(engine_args.get(CACHE_BYTES)) and SHARE not in engine_args


@dataclass(frozen=True)
class VLLMSettings:
    """``gpus``: of each engine, the GPU ids that it is pinned to (empty: on the CPU); its tensor-parallel degree is
    their number. ``max_model_len``: longest prompt plus response, in tokens. ``engine_args`` and ``sampling_params``
    are passed through to vLLM. ``drain``: responses are finished before weights are swapped. ``sleep``: the engine can
    free its memory. ``memory_share``: of a GPU, where ``engine_args`` does not say."""

    gpus: tuple[tuple[str, ...], ...] = ((),)
    dtype: str = "float32"
    max_model_len: int = 2048
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    drain: bool = False
    sleep: bool = False
    memory_share: float = 0.9
    threads: int | None = None

    @property
    def on_cpu(self) -> bool:
        return not any(self.gpus)

    @property
    def arithmetic(self) -> str:
        """The coarsest type that the engines compute in, by its name in ``models/probe.py``."""
        args = self.engine_args
        if args.get("quantization") or args.get("quantization_config") or "fp8" in str(args.get("kv_cache_dtype", "")):
            return "float8"
        return "tensorfloat32" if self.dtype == "float32" and not self.on_cpu else self.dtype

    @property
    def measures(self) -> bool:
        """Whether an engine looks at the free memory of its GPUs while it loads, which what others take there
        disturbs."""
        return not self.on_cpu and not states_memory(self.engine_args)

    def arguments(self, index: int, folder: Path) -> dict[str, Any]:
        """vLLM's arguments of engine ``index``; ``generator.engine_args`` may set all but Forge's own."""
        gpus = self.gpus[index]
        share = ANY_SHARE if states_memory(self.engine_args) else self.memory_share
        defaults: dict[str, Any] = {SHARE: share} if gpus else dict(ON_CPU)
        defaults["worker_extension_cls"] = EXTENSION
        ours = {
            "model": str(folder),
            "tensor_parallel_size": max(len(gpus), 1),
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "skip_tokenizer_init": not any(self.sampling_params.get(name) for name in TEXTUAL),
            "generation_config": "vllm",
            "scheduling_policy": "priority",
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": self.sleep and bool(gpus),
            "disable_log_stats": True,
        }
        return {**defaults, **self.engine_args, **ours}

    def variables(self, index: int) -> dict[str, str | None]:
        """Environment of engine ``index``."""
        gpus = self.gpus[index]
        env: dict[str, str | None] = {"VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        if importlib.util.find_spec("flashinfer") is None:
            env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if not gpus:
            threads = str(self.threads or len(os.sched_getaffinity(0)))
            env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
            # Its only worker in the engine's own process: half as many imports, and no messages between them.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            stated = self.engine_args.get(CACHE_BYTES)  # which vLLM overrides by the variable, where there is one
            env["VLLM_CPU_KVCACHE_SPACE"] = None if stated else os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
            if self.engine_args.get("enforce_eager", True):  # else the first request compiles for 18 s
                env["TORCHDYNAMO_DISABLE"] = "1"
        return env | Placement.environment(gpus)

    def request(self, name: str, request: GenerationRequest, eos_ids: Sequence[int]) -> dict[str, Any]:
        """``request`` as it travels to an engine, under ``name``."""
        sampling = request.sampling
        params = {
            **self.sampling_params,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": request.seed % 2**63,
            "logprobs": 0,
            "flat_logprobs": True,  # lists of numbers; else there are two objects a token
            "detokenize": self._stop_strings,
        }
        if not params.get("ignore_eos"):
            params["stop_token_ids"] = [*eos_ids, *(params.get("stop_token_ids") or ())]
        return {
            "id": name,
            "prompt_ids": list(request.prompt_ids),
            "priority": request.priority,
            "min_version": request.min_version,
            "params": params,
        }

    @property
    def _stop_strings(self) -> bool:
        """Only these need vLLM to write text."""
        return bool(self.sampling_params.get("stop"))
