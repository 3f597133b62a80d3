"""Keys of torchforge that have no counterpart, and why: an old configuration is answered with the reason.

A name is a run of dotted parts, wherever it stands in a key; ``*`` is any one part, and a name of one part stands at
the beginning of a key. docs/migrating.md gives the same reasons.
"""

from __future__ import annotations

import re

_DATA = "prompts are read, and advantages computed, in the run's own process"
_DCP = "weights reach the engines through the store, in Hugging Face format"
_PARALLEL = "the trainer divides data (FSDP), tensors and layers alone, so only 1 can be given"
_FORMAT = "models are Hugging Face folders, when they are read and when they are written"
_REFERENCE = "the reference model works on one device, in the trainer's precision"
_PLAN = "the plan of a batch says which episodes it is made of"
_START = "each part has its own time limit, and an error names the part that did not start"

LEFT_OUT = {
    "training_threads": "there is one trainer",
    "provisioner": "machines are Prefect work pools, or a script that forge slurm prints",
    "services.*.hosts": "several machines share a run as roles, or as nodes of the trainer",
    "services.*.mesh_name": "Forge names its processes itself",
    "actors.*.mesh_name": "Forge names its processes itself",
    "actors.dataset": _DATA,
    "actors.compute_advantages": _DATA,
    "actors.replay_buffer": "there is no buffer: batches are objects in the store",
    "reward_actor.with_gpus": "each reward model has a device of its own (device)",
    "services.weight_sync_timeout": "a version that cannot be fetched is an error of the store, with its retries",
    "services.startup_timeout": _START,
    "services.actor_memory_mb": "memory is the machine's; forge config --estimate says what a run takes",
    "monarch.fault_tolerance": "a run in roles always restarts what died",
    "training.verify_weight_sync": "every file is checked against its digest before it is loaded",
    "replay_buffer.dp_size": "the parallel degrees say how many ranks share a batch",
    "replay_buffer.max_buffer_size": "at most max_staleness + 1 batches are open",
    "replay_buffer.eviction_policy": "no episode is ever older than max_staleness, so none is evicted",
    "replay_buffer.sample_policy": _PLAN,
    "replay_buffer.collate": "episodes are packed into rows by their lengths",
    "trainer.use_dcp": _DCP,
    "trainer.dcp_path": _DCP,
    "trainer.state_dict_key": _DCP,
    "policy.use_dcp_for_weight_sync": _DCP,
    "generator.use_dcp_for_weight_sync": _DCP,
    "trainer.loss": "the loss is a section of its own: loss",
    "optimizer.name": "the optimizer is AdamW",
    "optimizer.implementation": "the optimizer is AdamW, sharded as the parameters are",
    "optimizer.early_step_in_backward": "gradients are clipped by their total norm, known after the backward pass",
    "lr_scheduler.decay_ratio": "the decay takes all optimizer steps after the warm-up",
    "training.gc_freq": "Python's garbage collector is left alone",
    "training.deterministic": "a run on a CPU with rollout.version=oldest is the same bit by bit",
    "training.enable_cpu_offload": "parameters and optimizer state stay on the trainer's devices",
    "training.mixed_precision_reduce": "gradients are reduced in float32",
    "model.converters": "float8 and adapters are keys of their own",
    "model.print_after_conversion": "float8 and adapters are keys of their own",
    "ref_model.parallelism": _REFERENCE,
    "parallelism.data_parallel_replicate_degree": _PARALLEL,
    "parallelism.context_parallel_degree": _PARALLEL,
    "parallelism.expert_parallel_degree": _PARALLEL,
    "parallelism.disable_loss_parallel": "log-probabilities are computed in parts that never hold all logits",
    "checkpoint.enable": "a run always writes checkpoints; with checkpoint.interval=0 only at its end",
    "checkpoint.enable_checkpoint": "a run always writes checkpoints; with checkpoint.interval=0 only at its end",
    "checkpoint.initial_load_in_hf": _FORMAT,
    "checkpoint.last_save_in_hf": _FORMAT,
    "checkpoint.load_step": "a run resumes where it stopped; another run can begin with any version: model=run://RUN_ID/N",
    "checkpoint.async_mode": "a checkpoint follows the commit of its step, and generation goes on meanwhile",
    "activation_checkpoint.selective_ac_option": "selective recomputes cheap operations, as op did",
    "comm.trace_buf_size": "it is torch's to set, by its own environment variables",
    "memory_estimation": "forge config --estimate says what each role takes",
    "trainer.memory_estimation": "forge config --estimate says what each role takes",
    "job": "the run's record holds its configuration; logs lie in the Forge home",
    "trainer.job": "the run's record holds its configuration; logs lie in the Forge home",
    "profiling": "durations and memory are metrics of every step; torch's profiler is not built in",
    "metrics.log_freq": "every step is recorded",
    "wandb.per_rank_share_run": "values of ranks are keys of the one W&B run",
}


def reason_for(path: str) -> str | None:
    """Why there is no key for the one that ``path`` was in torchforge; None: it is not one of these."""
    return next((reason for name, reason in LEFT_OUT.items() if pattern_of(name).search(path)), None)


def pattern_of(name: str) -> re.Pattern[str]:
    """Finds the keys that ``name`` stands for."""
    inside = r"(^|\.)" if "." in name else "^"
    return re.compile(inside + re.escape(name).replace(r"\*", r"[^.]+") + r"(\.|$)")
