# ruff: noqa: E501
"""Every metric that a run writes by itself: key, meaning, unit, where it comes from.

``docs/metrics.md`` has this as a table, and a test holds it against what runs write. A key with ``{…}`` stands for many.
Keys that torchforge has under the same meaning have its names; ``ledger`` is what a ledger entry calls them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Key:
    """``when``: in which steps it is there (empty: in all of its kind of run). ``timed``: it depends on the machine, so
    equal runs have other values."""

    key: str
    meaning: str
    unit: str = ""
    when: str = ""
    ledger: str | None = None
    timed: bool = False
    runs: str = "grpo"  # grpo, sft or both
    reduction: str = "last"

    @property
    def in_ledger(self) -> str:
        return self.ledger or self.key


TRAINER, LOOP = "main_perf/continuous_training", "main_perf/continuous_rollouts"
DROPPED = "main/continuous_rollouts/episodes_dropped"
BETA, VALID, EVAL = "`grpo.beta` > 0", "where it is validated", "where a version was evaluated"

CATALOGUE: tuple[Key, ...] = (
    # Learning
    Key("rl_trainer/loss", "policy loss", ledger="loss"),
    Key("ForgeSFTRecipe/train_step/loss", "loss on the step's rows", "nats/token", ledger="loss", runs="sft"),
    Key("rl_trainer/learning_rate", "learning rate of the (last) optimizer step", ledger="learning_rate", runs="both"),
    Key("grad_norm", "norm of the gradient before clipping, mean over optimizer steps", runs="both"),
    Key("grad_norm/max", "largest norm of the gradient", runs="sft", reduction="max"),
    Key("entropy", "entropy of the model at the tokens that count", "nats", runs="both", reduction="mean"),
    Key("loss/kl_ref/mean", "KL estimate (k3) to the reference model; 0 without one", "nats", ledger="kl", reduction="mean"),
    Key("kl/beta", "weight of the KL penalty that was used", "", "`loss.adaptive_kl`"),
    Key("loss/ratio/mean", "importance ratio of policy and anchor", ledger="ratio/mean", when="a step that trained", reduction="mean"),
    Key("clip/fraction", "share of tokens where the clip decided", when="losses that clip", reduction="mean"),
    Key("loss/clip/high_fraction", "share of tokens clipped, with positive advantage", ledger="clip/high_fraction", when="losses that clip", reduction="mean"),
    Key("loss/clip/low_fraction", "share of tokens clipped, with negative advantage", ledger="clip/low_fraction", when="losses that clip", reduction="mean"),
    Key("clip/dual_fraction", "share of tokens where the dual clip decided", when="`loss.name=dapo`", reduction="mean"),
    Key("correction/weight", "weight of the off-policy correction", when="`loss.correction`", reduction="mean"),
    Key("tokens/computed", "share of the loss tokens that were computed: groups without signal are not", when="a step that trained"),
    Key("mismatch/mean_abs_logprob", "sampler against trainer: absolute difference of log-probabilities", "nats/token", "a step that trained", reduction="mean"),
    Key("mismatch/max_abs_logprob", "the largest of these", "nats", "a step that trained", reduction="max"),
    Key("mismatch/one_version_mean_abs_logprob", "the mean over responses that one policy version sampled", "nats/token", "where there are any", reduction="mean"),
    Key("mismatch/k3", "KL estimate of sampler to trainer", "nats/token", "a step that trained", reduction="mean"),
    Key("mismatch/effective_samples", "Kish's effective sample size of the sampled tokens, as a share", when="a step that trained"),
    Key("resume/drift", "relative difference of replayed parameters", when="first step after an inexact replay"),
    # Rewards and data
    Key("reward/mean", "mean reward of graded episodes", reduction="mean"),
    Key("reward/std", "standard deviation of these rewards", reduction="std"),
    Key("reward/{name}/mean", "mean of one component, unweighted", reduction="mean"),
    Key("reward/{name}/std", "standard deviation of one component", reduction="std"),
    Key("reward/{name}/failed", "grades that failed", "episodes", reduction="sum"),
    Key("reward/{name}/{count}", "what else a reward object counts (calls, cost, agreement)", when="rewards that count", reduction="sum"),
    Key("advantage/mean", "mean advantage of trained episodes", reduction="mean"),
    Key("advantage/std", "standard deviation of these advantages", reduction="std"),
    Key("advantage/max", "largest advantage", reduction="max"),
    Key("advantage/min", "smallest advantage", reduction="min"),
    Key("episode/avg_prompt_tokens", "length of prompts", "tokens", ledger="prompt/mean_tokens", reduction="mean"),
    Key("episode/max_prompt_tokens", "longest prompt", "tokens", ledger="prompt/max_tokens", reduction="max"),
    Key("episode/min_prompt_tokens", "shortest prompt", "tokens", ledger="prompt/min_tokens", reduction="min"),
    Key("episode/avg_response_tokens", "length of responses", "tokens", ledger="response/mean_tokens", reduction="mean"),
    Key("episode/max_response_tokens", "longest response", "tokens", ledger="response/max_tokens", reduction="max"),
    Key("episode/min_response_tokens", "shortest response", "tokens", ledger="response/min_tokens", reduction="min"),
    Key("response/truncated_share", "share of responses cut at the length limit", reduction="mean"),
    Key("generator/generate/count_sequences_completed", "responses sampled", "episodes", ledger="generated/episodes", reduction="sum"),
    Key("generator/generate/sum_tokens_generated", "tokens sampled", "tokens", reduction="sum"),
    Key("buffer/sample/avg_sampled_policy_age", "age of trained episodes", "training steps", ledger="age/mean", reduction="mean"),
    Key("buffer/sample/max_sampled_policy_age", "age of the oldest", "training steps", reduction="max"),
    Key("buffer/sample/min_sampled_policy_age", "age of the newest", "training steps", ledger="age/min", reduction="min"),
    Key("age/count/{age}", "staleness histogram: trained episodes of this age", "episodes", "ages that occur", reduction="sum"),
    Key("episodes/planned", "episodes of the plan", "episodes", runs="both", reduction="sum"),
    Key("episodes/trained", "episodes (of a supervised run: documents) trained on", "episodes", runs="both", reduction="sum"),
    Key(f"{DROPPED}/total", "planned episodes not trained on", "episodes", runs="both", reduction="sum"),
    Key(f"{DROPPED}/{{reason}}", "of these, dropped for one reason", "episodes", "reasons that occur", reduction="sum"),
    Key("data/target_tokens", "tokens that count in the loss", "tokens", runs="sft", reduction="sum"),
    Key("data/packed", "share of positions that hold a token", runs="sft"),
    Key("data/tokens", "tokens of documents", "tokens", runs="sft", reduction="sum"),
    Key("dataset/{label}/{count}", "the data loader's counts since the run began ([data.md](data.md))", runs="sft"),
    Key("packing/{count}", "the packer's counts since the run began", runs="sft"),
    # Held-out
    Key("eval/version", "the evaluated policy version", when=EVAL),
    Key("eval/reward/mean", "mean reward on held-out prompts", when=EVAL, reduction="mean"),
    Key("eval/reward/{bound}", "bounds of its 95 % interval", when=EVAL),
    Key("eval/before/{measure}", "all of these, of a version before the last", when="the last step"),
    Key("eval/{measure}", "what else the evaluation measures ([evaluation.md](evaluation.md))", when=EVAL),
    Key("validation/loss", "loss on held-out documents", "nats/token", VALID, runs="sft"),
    # Time
    Key(f"{TRAINER}/train_step/duration_avg_s", "optimizer steps", "s", ledger="time/train", timed=True, runs="both"),
    Key("time/load", "waiting for the episodes of the batch, with rewards and reference log-probabilities; what is there is read while the step before is taken", "s", timed=True),
    Key("time/state_digest", "digest of the parameters after the step", "s", timed=True, runs="both"),
    Key(f"{TRAINER}/push_weights/duration_avg_s", "publishing the weights", "s", ledger="time/publish", timed=True, runs="both"),
    Key(f"{TRAINER}/waiting_for_buffer/duration_avg_s", "from the commit before to the start of this step; null in the first step after a resume", "s", timed=True, runs="both"),
    Key(f"{TRAINER}/total_duration_avg_s", "the train task, from start to commit", "s", ledger="time/step", timed=True, runs="both"),
    Key(f"{LOOP}/policy_generation/duration_avg_s", "a shard of responses", "s", timed=True, reduction="mean"),
    Key(f"{LOOP}/policy_generation/duration_max_s", "the slowest shard", "s", timed=True, reduction="max"),
    Key(f"{LOOP}/reward_evaluation/duration_avg_s", "grading a shard", "s", timed=True, reduction="mean"),
    Key(f"{LOOP}/reward_evaluation/duration_max_s", "the slowest shard", "s", timed=True, reduction="max"),
    Key(f"{LOOP}/reference_model_calculate_logprobs/duration_avg_s", "reference log-probabilities of a shard", "s", BETA, timed=True, reduction="mean"),
    Key(f"{LOOP}/reference_model_calculate_logprobs/duration_max_s", "the slowest shard", "s", BETA, timed=True, reduction="max"),
    Key("time/generate", "engine-seconds of the batch's shards", "s", timed=True, reduction="sum"),
    Key("time/score", "seconds of grading of all shards", "s", timed=True, reduction="sum"),
    Key("time/reference", "seconds of the reference model", "s", timed=True, reduction="sum"),
    Key("time/eval", "how long the step waited for an evaluation", "s", EVAL, timed=True),
    Key("time/validation", "validation", "s", VALID, timed=True, runs="sft"),
    Key("time/grades_per_second", "grading, mean over shards", "1/s", timed=True, reduction="mean"),
    Key("time/grade/{name}", "seconds that one reward took, over all processes", "s", timed=True, reduction="sum"),
    Key("time/store_free_bytes", "free on the file system of the store", "bytes", "stores of plain files", timed=True, runs="both"),
    Key("time/store_bytes", "all objects of the store, counted every ten minutes at most", "bytes", "`alarms.bucket_gib`", timed=True, runs="both"),
    Key("time/peak_flops", "what the trainer's GPUs can do (dense bfloat16)", "1/s", "known GPUs", timed=True, runs="both"),
    # Throughput and what waits
    Key("generator/tokens_per_second", "tokens sampled, a second in which any engine worked", "1/s", timed=True),
    Key("scorer/tokens_per_second", "response tokens graded, a second of grading", "1/s", timed=True),
    Key("reference/tokens_per_second", "response tokens, a second of the reference model", "1/s", BETA, timed=True),
    Key("trainer/tokens_per_second", "tokens trained on, prompts included, a second of optimizer steps", "1/s", timed=True),
    Key("trainer/tokens_per_second", "tokens of documents, a second of optimizer steps", "1/s", ledger="time/tokens_per_second", timed=True, runs="sft"),
    Key("trainer/tokens", "tokens trained on, prompts included", "tokens", runs="both", reduction="sum"),
    Key("trainer/model_flops", "operations of the model for these tokens, without recomputation", "", runs="both", reduction="sum"),
    Key("trainer/tflops_per_second", "these, a second of optimizer steps", "10^12/s", timed=True, runs="both"),
    Key("trainer/mfu", "model FLOPs utilisation: these, as a share of what the GPUs can do", "", "known GPUs", timed=True, runs="both"),
    Key("trainer/idle_share", "share of the time between two commits outside of the train task; null in the first step after a resume", "", timed=True, runs="both"),
    Key("generator/idle_share", "share of the time between the ends of two batches in which no engine sampled this one; null in the first step of a process", "", timed=True),
    Key("generator/waiting/duration_max_s", "the longest that a shard waited for its engine", "s", timed=True, reduction="max"),
    Key("generator/update_weights/count_weight_updates", "updates of an engine's weights", "", "where an engine moved", timed=True, reduction="sum"),
    Key("generator_perf/update_weights/total_duration_avg_s", "weight sync: fetching and loading a version", "s", "where an engine moved", timed=True, reduction="mean"),
    Key("generator_perf/update_weights/{phase}_duration_avg_s", "of these, its `fetch`, `stage`, `pause`, `load`, `resume` and `probe`: from `pause` to `resume` it samples nothing", "s", "where a vLLM engine moved", timed=True, reduction="mean"),
    Key("generator_perf/update_weights/total_duration_max_s", "the slowest of these", "s", "where an engine moved", timed=True, reduction="max"),
    Key("weights/bytes", "bytes of the published weights: what a weight sync moves", "bytes", runs="both"),
    Key("orchestration/handover_s", "from the last input's end (or the commit before) to the start of the train task; null in the first step after a resume", "s", timed=True),
    Key("orchestration/step_s", "of the train task: what is not training, publishing, evaluating or validating", "s", timed=True, runs="both"),
    Key("orchestration/share", "both of these, as a share of the time between two commits; null in the first step after a resume", "", timed=True, runs="both"),
)  # fmt: skip


def names(runs: str) -> dict[str, str]:
    """What metrics of a ledger entry are called, where that is not their name in the ledger; ``runs``: grpo or sft."""
    return {key.in_ledger: key.key for key in CATALOGUE if key.ledger and key.runs in (runs, "both")}


def known(key: str, runs: str) -> Key | None:
    """The entry that ``key`` of a run belongs to; None: the user's code recorded it."""
    exact, patterns = _index(runs)
    return exact.get(key) or next((entry for pattern, entry in patterns if pattern.fullmatch(key)), None)


def is_timed(key: str) -> bool:
    """Whether equal runs have other values of ``key``: durations, rates, and what derives from them."""
    entry = known(key, "grpo") or known(key, "sft")
    return entry.timed if entry else key.startswith("time/") or "duration_" in key


@cache
def _index(runs: str) -> tuple[dict[str, Key], list[tuple[re.Pattern[str], Key]]]:
    mine = [key for key in CATALOGUE if key.runs in (runs, "both")]
    exact = {key.key: key for key in mine if "{" not in key.key}
    return exact, [(_pattern(key.key), key) for key in mine if "{" in key.key]


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile(".+".join(re.escape(part) for part in re.split(r"\{\w+\}", key)))


def table() -> str:
    """The catalogue as the table of docs/metrics.md."""
    return "\n".join(
        ["| key | meaning | unit | runs | when | in the ledger |", "|---|---|---|---|---|---|", *_lines(CATALOGUE)]
    )


def _lines(keys: Iterable[Key]) -> Iterator[str]:
    for key in keys:
        ledger = f"`{key.ledger}`" if key.ledger else ""
        yield f"| `{key.key}` | {key.meaning} | {key.unit} | {key.runs} | {key.when or 'every step'} | {ledger} |"
