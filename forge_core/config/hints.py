"""Which key was meant by one that does not exist: renamed keys of other systems, the same name elsewhere, a typo."""

from __future__ import annotations

from difflib import SequenceMatcher, get_close_matches

from forge_core.config.keys import children, key_fields

# Names of torchforge, in all of its versions and guides, found by their longest dotted end. docs/migrating.md has all
# of them, and those without a counterpart (``left_out.py``).
TORCHFORGE_NAMES = {
    "group_size": "grpo.n_samples",
    "sampling_params.n": "grpo.n_samples",
    "sampling_params.temperature": "grpo.temperature",
    "sampling_params.top_p": "rollout.top_p",
    "sampling_params.top_k": "rollout.top_k",
    "sampling_params.max_tokens": "rollout.max_new_tokens",
    "max_res_tokens": "rollout.max_new_tokens",
    "max_req_tokens": "rollout.max_prompt_tokens",
    "rollout_threads": "rollout.shards",
    "off_by_n": "max_staleness",
    "max_policy_age": "max_staleness",
    "max_resample_count": "training.epochs_per_batch",
    "replay_buffer.max_policy_age": "max_staleness",
    "replay_buffer.max_resample_count": "training.epochs_per_batch",
    "local_batch_size": "training.batch_size",
    "training.global_batch_size": "training.batch_size",
    "replay_buffer.batch_size": "training.batch_size",
    "replay_buffer.seed": "run.seed",
    "training.steps": "steps",
    "training.seed": "run.seed",
    "training.dataset": "dataset.path",
    "training.dataset_path": "dataset.path",
    "training.mixed_precision_param": "training.dtype",
    "training.gradient_checkpointing": "training.activation_checkpointing",
    "compile": "training.compile",
    "compile.enable": "training.compile",
    "quantize.linear.float8": "quantize.float8",
    "optimizer.lr": "training.learning_rate",
    "optimizer.eps": "training.eps",
    "optimizer.beta1": "training.betas",
    "optimizer.beta2": "training.betas",
    "optimizer.weight_decay": "training.weight_decay",
    "lr_scheduler.warmup_steps": "training.warmup_steps",
    "lr_scheduler.decay_type": "training.lr_decay",
    "lr_scheduler.min_lr_factor": "training.lr_min_ratio",
    "activation_checkpoint.mode": "training.activation_checkpointing",
    "comm.init_timeout_seconds": "comm.init_timeout_s",
    "comm.train_timeout_seconds": "comm.timeout_s",
    "checkpoint.folder": "store",
    "checkpoint.keep_latest_k": "checkpoint.keep",
    "data_split": "dataset.split",
    "model_name": "model",
    "model.name": "model",
    "model.flavor": "model",
    "hf_assets_path": "model",
    "tokenizer_path": "model",
    "initial_load_path": "model",
    "dataset.model": "model",
    "engine_args.model": "model",
    "engine_args.tensor_parallel_size": "services.generator.procs",
    "engine_args.pipeline_parallel_size": "services.generator.procs",
    "engine_args.enforce_eager": "generator.engine_args",
    "generator.gpu_memory_utilization": "generator.engine_args",
    "generator.max_concurrent_requests": "generator.engine_args",
    "prefetch_weights_to_shm": "weights.prefetch",
    "n_fetcher_procs": "weights.fetchers",
    "enable_in_flight_weight_updates": "generator.weight_update",
    "colocate_with": "generator.sharing",
    "services.generator.colocate_with": "generator.sharing",
    "monarch.max_restarts": "roles.max_restarts",
    "actors.trainer": "services.trainer",
    "services.policy": "services.generator",
    "services.reward_actor": "rewards.workers",
    "reward_actor.procs": "rewards.workers",
    "reward_actor.num_replicas": "rewards.workers",
    "processes.procs": "parallelism.data_parallel_shard_degree",
    "processes.with_gpus": "services.trainer.with_gpus",
    "console.reduce_across_ranks": "metric_logging.console.logging_mode",
    "wandb.reduce_across_ranks": "metric_logging.wandb.logging_mode",
    "metrics.logger": "metric_logging",
    "agg_type": "loss.agg_type",
    "clip_range": "grpo.clip_low",
}
# The common ones of other trainers.
OTHER_NAMES = {
    "num_generations": "grpo.n_samples",
    "max_tokens": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_off_policy_steps": "max_staleness",
    "weight_sync_interval": "training.sync_interval",
    "max_steps": "steps",
    "num_steps": "steps",
    "lr": "training.learning_rate",
    "max_grad_norm": "training.max_norm",
    "grad_clip": "training.max_norm",
    "entropy_bonus": "training.entropy_coef",
    "gen_batch_size": "filters.oversample",
    "over_sampling_batch_size": "filters.oversample",
    "max_num_gen_batches": "filters.max_rounds",
    "kl_coef": "grpo.beta",
    "kl_beta": "grpo.beta",
    "epsilon_low": "grpo.clip_low",
    "epsilon_high": "grpo.clip_high",
    "clip_ratio_low": "grpo.clip_low",
    "clip_ratio_high": "grpo.clip_high",
    "clip_low": "grpo.clip_low",
    "clip_high": "grpo.clip_high",
    "loss.beta": "grpo.beta",
    "seed": "run.seed",
    "run_id": "run.id",
    "name": "run.id",
    "model_path": "model",
    "services.reference": "services.ref_model",
    "reward_functions": "rewards.functions",
    "normalize_advantages": "advantage.normalize",
    "scale_rewards": "advantage.normalize",
    "output_dir": "store",
}
OLD_NAMES = {**TORCHFORGE_NAMES, **OTHER_NAMES}


def suggestions(path: str) -> list[str]:
    """At most three keys that may have been meant by ``path``, the likeliest first; empty: no idea."""
    parent, _, leaf = path.rpartition(".")
    ends = [path.split(".", i)[-1] for i in range(path.count(".") + 1)]  # the path, then ever shorter ends of it
    renamed = [OLD_NAMES[end] for end in ends if end in OLD_NAMES and ("." in end or not parent)]
    if renamed := [key for key in renamed if key in key_fields()]:
        return renamed[:1]
    if own := [end for end in ends[1:] if "." in end and end in key_fields()]:  # a section of ours within one of theirs
        return own[:1]
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
