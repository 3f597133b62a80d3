"""The gate before a run: what a configuration must have so that training can start, checked before anything loads.

Guarantees: ``validate_for_training`` raises one ``ConfigError`` with every problem, each naming its key and the values
that would work; what is odd but runs is returned as warnings. Nothing here loads an engine; GPUs are counted (which
imports torch) only for a configuration that is right otherwise, or when a service says that it must have one.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from forge_core.config.data_sections import ScratchModel
from forge_core.config.errors import ConfigError
from forge_core.config.loss_sections import DistillLossSection
from forge_core.config.metric_sections import metric_problems
from forge_core.config.run_config import RunConfig
from forge_core.config.vllm_keys import vllm_problems
from forge_core.training.degrees import Shape, degree_problems

if TYPE_CHECKING:
    from forge_core.config.any_config import AnyConfig


def validate_for_training(config: RunConfig, gpus: int | None = None) -> list[str]:
    """Warnings of a configuration that can train; raises ``ConfigError`` for one that cannot.

    ``gpus``: GPUs of this machine; left out: counted.
    """
    from forge_core.config.gpu_gate import placed, placement_warnings  # it imports what imports this package
    from forge_core.devices import insisting

    problems = training_problems(config)
    placement = None
    if not problems or insisting(config):
        placement, found = placed(config, gpus)
        problems += found
    if problems or placement is None:
        raise ConfigError(problems, "this configuration cannot train")
    return [*config_warnings(config), *placement_warnings(config, placement)]


def training_problems(config: RunConfig) -> list[str]:
    """What keeps a configuration from training on any machine."""
    checks = (
        _missing,
        _teacher,
        _groups,
        _sampling,
        _lengths,
        model_problems,
        _evaluation,
        rank_problems,
        rank_store_problems,
        vllm_problems,
        lambda config: metric_problems(config.metric_logging),
    )
    return [problem for check in checks for problem in check(config)]


def config_warnings(config: RunConfig) -> list[str]:
    """What is odd about a configuration on any machine, though nothing refuses it."""
    from forge_core.config.gpu_gate import service_warnings

    checks = (service_warnings, _embedded_backend, store_warnings, schedule_warnings)
    return [warning for check in checks for warning in check(config)]


def _missing(config: RunConfig) -> list[str]:
    found = []
    if config.model is None:
        found.append(
            "model: is missing: name a folder or hub id, such as model=Qwen/Qwen3-0.6B, or describe a small "
            "model made on the spot, such as model.vocabulary='0123456789+='"
        )
    if config.dataset is None:
        found.append("dataset: is missing: training needs prompts: set dataset.path, such as dataset.path=openai/gsm8k")
    if not config.rewards.functions:
        found.append(
            "rewards.functions: is empty: without a reward there is nothing to learn: name at least one, "
            "such as rewards.functions='[{path: exact_match}]' or '[{path: my_reward.py:grade}]'"
        )
    return found


def _teacher(config: RunConfig) -> list[str]:
    if not isinstance(config.loss, DistillLossSection):
        return []
    found = []
    if config.loss.teacher is None:
        found.append("loss.teacher: is missing: name the model to learn from, such as loss.teacher=Qwen/Qwen3-8B")
    if config.grpo.beta == 0:
        found.append("grpo.beta: is 0, but it is the weight of the distillation: use grpo.beta=1.0")
    if config.filters.dynamic_sampling:
        found.append(
            "filters.dynamic_sampling: replaces groups whose rewards are all equal, but a teacher teaches with those "
            "too: set filters.dynamic_sampling=false"
        )
    return found


def _groups(config: RunConfig) -> list[str]:
    n, episodes, found = config.grpo.n_samples, config.episodes_per_optimizer_step, []
    if n == 1 and config.advantage.estimator != "reinforce_plus_plus" and not config.distils:
        found.append(
            "grpo.n_samples: is 1: an advantage compares the samples of one prompt, and one sample has none to be "
            "compared with: use 2 or more (8 is usual), or advantage.estimator=reinforce_plus_plus"
        )
    if config.filters.dynamic_sampling and config.advantage.estimator == "reinforce_plus_plus":
        found.append(
            "filters.dynamic_sampling: refills groups whose rewards are all equal, but advantage.estimator "
            "reinforce_plus_plus learns from those too: set filters.dynamic_sampling=false, or "
            "advantage.estimator=reinforce_plus_plus_baseline"
        )
    if config.filters.oversample > 1 and not config.filters.dynamic_sampling:
        found.append(
            f"filters.oversample: is {config.filters.oversample}, but without filters.dynamic_sampling every group is "
            "trained on: set filters.dynamic_sampling=true, or raise training.batch_size"
        )
    if config.filters.adaptive and config.filters.oversample == 1:
        found.append(
            "filters.adaptive: samples up to filters.oversample times the prompts of a batch, which is 1: set "
            "filters.oversample to the most that a batch may take, such as 4 (and filters.dynamic_sampling=true)"
        )
    if episodes % n:
        found.append(f"training.batch_size: {_incomplete_groups(config)}")
    elif config.rollout.shards and config.rollout.shards > config.groups_per_batch:
        found.append(
            f"rollout.shards: is {config.rollout.shards}, but a batch has only {config.groups_per_batch} groups and a "
            f"group never spans shards: use at most {config.groups_per_batch}"
        )
    return found


def _incomplete_groups(config: RunConfig) -> str:
    n, size = config.grpo.n_samples, config.training.batch_size
    accumulation = config.training.gradient_accumulation_steps
    step = n // gcd(n, accumulation)
    working = [str(s) for s in (size // step * step, (size // step + 1) * step) if s > 0]
    divisors = [d for d in range(2, n) if config.episodes_per_optimizer_step % d == 0]
    other = f", or grpo.n_samples={divisors[-1]}" if divisors else ""
    return (
        f"{size} x training.gradient_accumulation_steps {accumulation} = {config.episodes_per_optimizer_step} episodes "
        f"per optimizer step, which is not a multiple of grpo.n_samples {n} (groups are never split): "
        f"use training.batch_size={' or '.join(working)}{other}"
    )


def _sampling(config: RunConfig) -> list[str]:
    rollout, found = config.rollout, []
    truncating = {
        "rollout.top_p": (rollout.top_p, rollout.top_p < 1, "1"),
        "rollout.top_k": (rollout.top_k, rollout.top_k > 0, "0"),
        "rollout.min_p": (rollout.min_p, rollout.min_p > 0, "0"),
    }
    for key, (value, truncates, off) in truncating.items():
        if truncates and not rollout.allow_truncated_sampling:
            found.append(
                f"{key}: is {value}: truncated sampling biases the importance ratio: set {key}={off}, or accept the "
                "bias with rollout.allow_truncated_sampling=true"
            )
    if config.grpo.temperature == 0:
        found.append(
            "grpo.temperature: is 0: greedy sampling gives every sample of a group the same text and so no advantage: "
            "use a value above 0 (1.0 is usual)"
        )
    return found


def _lengths(config: RunConfig) -> list[str]:
    new, seq_len, prompt = config.rollout.max_new_tokens, config.training.seq_len, config.rollout.max_prompt_tokens
    found = []
    if new >= seq_len:
        found.append(
            f"rollout.max_new_tokens: is {new}, which leaves no room for a prompt in training.seq_len {seq_len}: "
            f"use less than {seq_len}, or a larger training.seq_len"
        )
    elif prompt is not None and prompt + new > seq_len:
        found.append(
            f"rollout.max_prompt_tokens: {prompt} + rollout.max_new_tokens {new} is more than training.seq_len "
            f"{seq_len}: use rollout.max_prompt_tokens={seq_len - new} or training.seq_len={prompt + new}"
        )
    if config.token_budget < seq_len:
        found.append(
            f"training.token_budget: is {config.token_budget}, less than training.seq_len {seq_len}: one sequence must "
            f"fit: use at least {seq_len}, or leave it out"
        )
    return found


def model_problems(config: AnyConfig) -> list[str]:
    """What a model made on the spot cannot be."""
    model, found = config.model, []
    if not isinstance(model, ScratchModel):
        return []
    if model.max_position_embeddings < config.training.seq_len:
        found.append(
            f"model.max_position_embeddings: is {model.max_position_embeddings}, less than training.seq_len "
            f"{config.training.seq_len}: use training.seq_len={model.max_position_embeddings}, or a longer model"
        )
    if model.num_heads % model.num_kv_heads:
        found.append(
            f"model.num_kv_heads: {model.num_kv_heads} does not divide model.num_heads {model.num_heads}: use a divisor"
        )
    if model.head_dim % 2:
        found.append(f"model.head_dim: is {model.head_dim}: rotary positions need an even number")
    if len(set(model.vocabulary)) < max(len(model.vocabulary), 1):
        found.append("model.vocabulary: is empty or has a character twice: give each character once")
    return found


def _evaluation(config: RunConfig) -> list[str]:
    if config.eval.prompts and not config.eval.holdout and config.eval.split is None:
        return [
            f"eval.holdout: is 0, so the evaluation (eval.prompts {config.eval.prompts}) has no prompts: hold "
            "out a share (eval.holdout=0.1), name a split (eval.split=test), or set eval.prompts=0"
        ]
    return []


def rank_problems(config: AnyConfig) -> list[str]:
    """Degrees that a model made on the spot cannot have; another model's shape is known when it is loaded."""
    model, degrees = config.model, config.parallelism
    if not isinstance(model, ScratchModel):
        return []
    shape = Shape(
        model.num_heads, model.num_kv_heads, model.intermediate_size, model.num_layers, model.tie_word_embeddings
    )
    return degree_problems(shape, degrees.tensor_parallel_degree, degrees.pipeline_parallel_degree)


def _embedded_backend(config: RunConfig) -> list[str]:
    if config.generator.backend != "hf":
        return []
    found = []
    if config.max_staleness > 1:
        found.append(
            f"max_staleness is {config.max_staleness}, but the embedded generator (generator.backend=hf) runs one "
            "rollout at a time: more than 1 gains nothing and trains on older episodes"
        )
    for name in ("engine_args", "sampling_params"):
        if getattr(config.generator, name):
            found.append(f"generator.{name} is for vLLM: generator.backend=hf does not look at it")
    return found


def rank_store_problems(config: AnyConfig) -> list[str]:
    """A store that the ranks cannot share."""
    problem = unshared_store(config, config.store or "")
    return [problem] if problem else []


def unshared_store(config: AnyConfig, store: str) -> str | None:
    """Why the processes that train cannot share ``store``."""
    ranks = config.parallelism.ranks
    if not store.startswith("memory://") or (ranks == 1 and not config.training.own_process):
        return None
    wanted = "training.own_process asks for another" if ranks == 1 else f"parallelism asks for {ranks} more"
    return f"store: {store} exists in one process only, but {wanted} to train in: use a folder or s3://bucket/prefix"


def store_warnings(config: AnyConfig) -> list[str]:
    """A store that nothing can be resumed from."""
    if config.store and config.store.startswith("memory://"):
        return [f"store is {config.store}: it ends with the process, so this run cannot be resumed"]
    return []


def schedule_warnings(config: AnyConfig) -> list[str]:
    """A learning rate that never reaches its peak."""
    warmup, steps = config.training.warmup_steps, config.optimizer_steps
    if warmup <= steps:
        return []
    return [f"training.warmup_steps is {warmup}, more than the {steps} optimizer steps of the run"]
