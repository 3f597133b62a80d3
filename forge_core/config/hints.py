"""Which key was meant by one that does not exist: renamed keys of other systems, the same name elsewhere, a typo."""

from __future__ import annotations

from difflib import SequenceMatcher, get_close_matches

from forge_core.config.keys import children, key_fields

# Names that users bring along (torchforge's, and the common ones of other trainers), found by their longest dotted end.
OLD_NAMES = {
    "group_size": "grpo.n_samples",
    "num_generations": "grpo.n_samples",
    "sampling_params.n": "grpo.n_samples",
    "sampling_params.temperature": "grpo.temperature",
    "sampling_params.top_p": "rollout.top_p",
    "sampling_params.top_k": "rollout.top_k",
    "sampling_params.max_tokens": "rollout.max_new_tokens",
    "max_tokens": "rollout.max_new_tokens",
    "max_res_tokens": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_req_tokens": "rollout.max_prompt_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "rollout_threads": "rollout.shards",
    "off_by_n": "max_staleness",
    "max_policy_age": "max_staleness",
    "max_off_policy_steps": "max_staleness",
    "local_batch_size": "training.batch_size",
    "replay_buffer.batch_size": "training.batch_size",
    "weight_sync_interval": "training.sync_interval",
    "training.steps": "steps",
    "max_steps": "steps",
    "num_steps": "steps",
    "optimizer.lr": "training.learning_rate",
    "lr": "training.learning_rate",
    "optimizer.eps": "training.eps",
    "optimizer.weight_decay": "training.weight_decay",
    "lr_scheduler.warmup_steps": "training.warmup_steps",
    "max_grad_norm": "training.max_norm",
    "grad_clip": "training.max_norm",
    "entropy_bonus": "training.entropy_coef",
    "kl_coef": "grpo.beta",
    "kl_beta": "grpo.beta",
    "epsilon_low": "grpo.clip_low",
    "epsilon_high": "grpo.clip_high",
    "clip_range": "grpo.clip_low",
    "clip_ratio_low": "grpo.clip_low",
    "clip_ratio_high": "grpo.clip_high",
    "clip_low": "grpo.clip_low",
    "clip_high": "grpo.clip_high",
    "loss.beta": "grpo.beta",
    "data_split": "dataset.split",
    "seed": "run.seed",
    "run_id": "run.id",
    "name": "run.id",
    "model_name": "model",
    "model.name": "model",
    "model.flavor": "model",
    "model_path": "model",
    "hf_assets_path": "model",
    "initial_load_path": "model",
    "engine_args.model": "model",
    "dataset.model": "model",
    "engine_args.tensor_parallel_size": "services.generator.procs",
    "actors.trainer": "services.trainer",
    "services.policy": "services.generator",
    "services.reference": "services.ref_model",
    "services.reward_actor": "rewards.workers",
    "reward_functions": "rewards.functions",
    "normalize_advantages": "advantage.normalize",
    "scale_rewards": "advantage.normalize",
    "agg_type": "loss.agg_type",
    "checkpoint.folder": "store",
    "output_dir": "store",
}


def suggestions(path: str) -> list[str]:
    """At most three keys that may have been meant by ``path``, the likeliest first; empty: no idea."""
    parent, _, leaf = path.rpartition(".")
    ends = [path.split(".", i)[-1] for i in range(path.count(".") + 1)]  # the path, then ever shorter ends of it
    renamed = [OLD_NAMES[end] for end in ends if end in OLD_NAMES and ("." in end or not parent)]
    if renamed := [key for key in renamed if key in key_fields()]:
        return renamed[:1]
    if suffix := [key for key in key_fields() if key.endswith(f".{path}")]:
        return _likeliest(suffix, path)
    if siblings := get_close_matches(leaf, children(parent), n=1, cutoff=0.75):
        return [f"{parent}.{siblings[0]}" if parent else siblings[0]]
    if same_name := [key for key in key_fields() if key.rpartition(".")[2] == leaf]:
        return _likeliest(same_name, path)
    if OLD_NAMES.get(leaf) in key_fields():
        return [OLD_NAMES[leaf]]
    names = {key.rpartition(".")[2] for key in key_fields()}
    close = get_close_matches(leaf, names, n=1, cutoff=0.8)
    return _likeliest([key for key in key_fields() if close and key.rpartition(".")[2] == close[0]], path)


def _likeliest(keys: list[str], path: str) -> list[str]:
    return sorted(keys, key=lambda key: -SequenceMatcher(None, key, path).ratio())[:3]
