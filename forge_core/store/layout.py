"""Where everything lies below the store root. This layout is public and stable.

Numbers are zero-padded to eight digits. A function whose name stands for an object returns a prefix that ends in '/';
the others return keys. ``attempt`` names one try of a training step: tries never share a prefix.
"""

from __future__ import annotations

DELETING = ".deleting-"  # in the keys of ``deleting``


def number(value: int) -> str:
    """``12`` -> ``00000012``."""
    if value < 0:
        raise ValueError(f"batches, rounds, shards and versions count from 0, got {value}")
    return f"{value:08d}"


def run(run_id: str) -> str:
    """Everything of a run."""
    return f"runs/{run_id}/"


def run_json(run_id: str) -> str:
    """Resolved configuration, code version, time of creation."""
    return f"{run(run_id)}run.json"


def plan(run_id: str, batch: int, round: int) -> str:
    """What a batch is made of."""
    return f"{run(run_id)}plans/{number(batch)}/{number(round)}.json"


def episodes(run_id: str, batch: int, round: int, shard: int) -> str:
    """Rollout output of one shard."""
    return _shard(run_id, "episodes", batch, round, shard)


def rewards(run_id: str, batch: int, round: int, shard: int) -> str:
    """Scores of one shard."""
    return _shard(run_id, "rewards", batch, round, shard)


def reference(run_id: str, batch: int, round: int, shard: int) -> str:
    """Reference log-probabilities of one shard."""
    return _shard(run_id, "reference", batch, round, shard)


def training(run_id: str, batch: int, attempt: str) -> str:
    """The fate of every episode of a batch."""
    return f"{run(run_id)}training/{number(batch)}-{attempt}/"


def weights(run_id: str, version: int, attempt: str) -> str:
    """A policy in Hugging Face format."""
    return f"{run(run_id)}weights/{number(version)}-{attempt}/"


def adapter(run_id: str, version: int, attempt: str) -> str:
    """The LoRA adapter of a version whose weights are published merged, as ``peft`` reads it."""
    return f"{run(run_id)}adapters/{number(version)}-{attempt}/"


def ledger(run_id: str, batch: int) -> str:
    """The commit of training step ``batch``, which makes version ``batch + 1``."""
    return f"{run(run_id)}ledger/{number(batch)}.json"


def ledger_init(run_id: str) -> str:
    """The commit of version 0."""
    return f"{run(run_id)}ledger/init.json"


def checkpoint(run_id: str, batch: int, attempt: str) -> str:
    """The trainer's state after step ``batch``."""
    return f"{run(run_id)}checkpoints/{number(batch)}-{attempt}/"


def metrics_folder(run_id: str) -> str:
    """A file for each committed training step."""
    return f"{run(run_id)}metrics/"


def metrics(run_id: str, batch: int) -> str:
    """The metrics of training step ``batch``."""
    return f"{metrics_folder(run_id)}{number(batch)}.parquet"


def rescored_folder(run_id: str) -> str:
    """What came of each batch of a run that ``forge rescore`` made."""
    return f"{run(run_id)}rescored/"


def rescored(run_id: str, batch: int) -> str:
    """The commit of a batch whose stored episodes were graded again."""
    return f"{rescored_folder(run_id)}{number(batch)}.json"


def stop(run_id: str, n: int) -> str:
    """The ``n``-th stop request."""
    return f"{run(run_id)}control/stop-{number(n)}.json"


def failure(run_id: str, name: str) -> str:
    """Why a process that worked on the run ended."""
    return f"{run(run_id)}control/failure-{name}.json"


def config_change(run_id: str, n: int) -> str:
    """The ``n``-th change of configuration or code that a resume was allowed."""
    return f"{run(run_id)}control/config-{number(n)}.json"


def evaluation(run_id: str, version: int, weights_digest: str) -> str:
    """Episodes and scores of one evaluated version: with these weights, since a step that was lost before its commit
    may be taken again with other ones."""
    return f"{run(run_id)}evaluations/{number(version)}-{weights_digest[:12]}/"


def claims(run_id: str, batch: int, round: int, shard: int) -> str:
    """Folder of the claims of one shard of rollouts: advice among generators."""
    return f"{run(run_id)}claims/{number(batch)}/{number(round)}/{number(shard)}/"


def rewards_claims(run_id: str, batch: int, round: int, shard: int) -> str:
    """Folder of the claims of one shard to grade: advice among scorers."""
    return _stage_claims(run_id, "rewards", batch, round, shard)


def reference_claims(run_id: str, batch: int, round: int, shard: int) -> str:
    """Folder of the claims of one shard without reference log-probabilities: advice among reference workers."""
    return _stage_claims(run_id, "reference", batch, round, shard)


def evaluation_claims(run_id: str, version: int, weights_digest: str) -> str:
    """Folder of the claims of one evaluation."""
    return f"{run(run_id)}claims/evaluation-{number(version)}-{weights_digest[:12]}/"


def claim(folder: str, n: int) -> str:
    """The ``n``-th claim in a folder of claims."""
    return f"{folder}{number(n)}.json"


def worker(run_id: str, name: str) -> str:
    """The heartbeat of a process that works on the run; overwritten."""
    return f"{run(run_id)}workers/{name}.json"


def candidate(run_id: str, version: int, n: int) -> str:
    """The ``n``-th try of a version that is published and waits for its evaluation before its commit."""
    return f"{run(run_id)}candidates/{number(version)}/{number(n)}.json"


def tombstone(run_id: str, name: str) -> str:
    """When a collector first saw that nothing reaches an object."""
    return f"{run(run_id)}gc/{name}.json"


def deleting(prefix: str, collector: str = "") -> str:
    """That a collector is about to delete the weights ``prefix``. Without ``collector``: how all such keys begin."""
    run_folder, _, name = prefix.rstrip("/").rpartition("/weights/")
    beginning = f"{run_folder}/gc/weights-{name}{DELETING}"
    return f"{beginning}{collector}.json" if collector else beginning


def best(run_id: str) -> str:
    """The best evaluated version of the first steps, so that nobody looks through the whole ledger for it."""
    return f"{run(run_id)}gc/best.json"


def model(name: str, n: int) -> str:
    """Entry ``n`` of the history of a model in the registry."""
    return f"models/{name}/{number(n)}.json"


def evaluation_of(identity: str) -> str:
    """The evaluation that ``identity``, the digest of weights, prompts, sampling and rewards, stands for: of any run,
    or of a model that no run made."""
    return f"evaluations/{identity}/"


def evaluation_asked(question: str) -> str:
    """Which evaluation answers ``question``, the digest of what was asked for before a tokenizer was loaded."""
    return f"evaluations/asked/{question}.json"


def retraining(retrain_id: str) -> str:
    """What a retraining began with."""
    return f"retrainings/{retrain_id}.json"


def _stage_claims(run_id: str, kind: str, batch: int, round: int, shard: int) -> str:
    return f"{run(run_id)}claims/{number(batch)}/{kind}/{number(round)}/{number(shard)}/"


def _shard(run_id: str, kind: str, batch: int, round: int, shard: int) -> str:
    return f"{run(run_id)}{kind}/{number(batch)}/{number(round)}-{number(shard)}/"
