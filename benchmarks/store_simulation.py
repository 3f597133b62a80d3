"""What a large run in roles asks of its object store: requests, collisions of claims, and what they cost a step.

    .venv/bin/python -m benchmarks.store_simulation --generators 64 --ranks 8 --steps 6

Real: the store over an S3 server, ledger, plans, frontier, claims, heartbeats, the stages with their Parquet tables,
the training step with its commit, the loop in which a role looks for work, and the look for stop requests. Simulated:
engines, which sleep instead of computing, and weights, which are small files, one a rank. All roles are threads of one
process, so times are not those of 64 machines; what is counted is requests, and these follow the seconds that
generating and training take (``--generate-s``, ``--train-s``).

Prices are those of AWS S3 Standard (us-east-1): 0.005 USD for 1,000 PUT or LIST, 0.0004 USD for 1,000 GET or HEAD.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance, write
from flows.role_session import BEATS, RoleSession
from flows.stopping import StopWatcher
from forge_core.config import RunConfig, load_config
from forge_core.data.prompts import load_prompts
from forge_core.data_model import Completion, GenerationRequest, VersionSpan
from forge_core.rewards.grading import Graded
from forge_core.runs import RunRef
from forge_core.runs.claims import Claims
from forge_core.runs.context import RunContext
from forge_core.runs.frontier import Frontier, Rollout
from forge_core.runs.heartbeat import Heartbeat, Unchanged
from forge_core.runs.planning import Planner
from forge_core.runs.record import create_run, load_run, now
from forge_core.runs.stages import sample_shard, score_shard
from forge_core.runs.trainer_session import Outcome
from forge_core.runs.training import train_batch
from forge_core.runs.turns import NoTurns
from forge_core.stop import StopToken
from forge_core.store import Store, digest, layout
from forge_core.store.backend import Backend
from forge_core.store.checkpoints import publish_checkpoint
from forge_core.store.store import _backend
from tests.fixtures_s3 import BUCKET, seaweedfs

USD = {"PUT": 0.005 / 1000, "LIST": 0.005 / 1000, "GET": 0.0004 / 1000, "HEAD": 0.0004 / 1000, "DELETE": 0.0}
VERBS = {
    "create": "PUT", "write": "PUT", "read": "GET", "read_range": "GET", "download": "GET", "exists": "HEAD",
    "written_at": "HEAD", "list": "LIST", "folders": "LIST", "now": "LIST", "unfinished": "LIST", "delete": "DELETE",
}  # fmt: skip
WEIGHTS_BYTES = 4096


@dataclass
class Requests:
    """How many requests each role made: (role, verb, kind of object) -> number; and claims that another had won."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    claims: int = 0
    collisions: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, role: str, verb: str, path: str, won: bool) -> None:
        parts = path.split("/")
        kind = parts[2].removesuffix(".json") if parts[0] == "runs" and len(parts) > 2 else parts[0]
        with self._lock:
            self.counts[role, verb, kind] += 1
            if kind == "claims" and verb == "PUT":
                self.claims += 1
                self.collisions += not won


class Counted:
    """A backend whose requests are counted as those of ``role``. A create that was lost reads back whose it is."""

    def __init__(self, backend: Backend, role: str, requests: Requests) -> None:
        self._backend, self._role, self._requests = backend, role, requests

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        return self._counting(name, value) if name in VERBS else value

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            path, result = args[0] if args else "", None
            try:
                result = call(*args, **options)
                return result
            finally:
                lost = name == "create" and result is False
                self._requests.add(self._role, VERBS[name], path, not lost)
                if lost:
                    self._requests.add(self._role, "GET", path, True)

        return counted


class Engine:
    """A generator that sleeps. On a machine of its own it fetches every version that it moves to."""

    def __init__(self, ctx: RunContext, seconds: float, seed: int) -> None:
        self._ctx, self._seconds, self._version, self._random = ctx, seconds, -1, random.Random(seed)

    def get_version(self) -> int:
        return self._version

    def update_weights(self, version: int) -> None:
        published = self._ctx.store.open_published(self._ctx._weights_manifest(version).prefix)
        for name in published.files:
            published.read(name)
        self._version = version

    def generate(self, requests: list[GenerationRequest], **_: Any) -> list[Completion]:
        self._ctx.stop.wait(self._seconds * self._random.uniform(0.7, 1.3))
        return [self._completion(request) for request in requests]

    def _completion(self, request: GenerationRequest) -> Completion:
        about = {"policy_version": self._version, "version_spans": [VersionSpan(self._version, 0, 4)]}
        meta = {"request_id": request.request_id, "prompt_ids": list(request.prompt_ids), "finish_reason": "stop"}
        return Completion("", "1234", [1, 2, 3, 4], [-0.5] * 4, meta | about)

    def shutdown(self) -> None: ...


class Ranks:
    """A trainer of ``ranks`` processes, each of which uploads its share of weights and checkpoints."""

    def __init__(self, ctx: RunContext, ranks: int, seconds: float) -> None:
        self._ctx, self._seconds, self._pool, self._count = ctx, seconds, ThreadPoolExecutor(ranks), ranks

    def learn(self, data: Any) -> Outcome:
        self._ctx.stop.wait(self._seconds)
        return Outcome(True, {}, digest(data.batch))

    def upload_weights(self, prefix: str, folder: Path) -> list[Any]:
        return self._uploaded(prefix, "model")

    def checkpoint(self, entry: dict[str, Any]) -> None:
        ctx = self._ctx
        prefix = layout.checkpoint(ctx.run_id, entry["batch"], ctx.attempt)
        publish_checkpoint(ctx.store, ctx.run_id, entry, ctx.attempt, self._uploaded(prefix, "shard"))

    def _uploaded(self, prefix: str, name: str) -> list[Any]:
        data = random.randbytes(WEIGHTS_BYTES)
        upload = lambda rank: self._ctx.store.upload(prefix, {f"{name}-{rank}.safetensors": data})
        return [file for files in self._pool.map(upload, range(self._count)) for file in files]

    def close(self) -> None:
        self._pool.shutdown()


class Weights:
    """In place of this host's cache, which all machines of the simulation would share."""

    def prefetch(self, version: int) -> None: ...
    def adopt(self, manifest: Any, folder: Path, *, copy: bool = False) -> None: ...
    def close(self) -> None: ...

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


class Grader:
    def grade_with_metrics(self, items: list[Any], stop: Any) -> tuple[list[Graded], dict[str, float]]:
        return [Graded(random.random(), {}) for _ in items], {}

    def close(self) -> None: ...


class Done:
    """The future of a task that has run."""

    state = property(lambda self: self)
    name = "Completed"

    def is_final(self) -> bool:
        return True

    is_completed = is_final

    def wait(self, timeout: float | None = None) -> None: ...


class Role(RoleSession):
    """The loop of a role, without Prefect around it and without the checks of its machine."""

    def __init__(self, simulation: Simulation, role: str, number: int) -> None:
        self.role, self.name, self.stop = role, f"{role}-{number}", simulation.stop
        self._store = Store(Counted(simulation.backend, role, simulation.requests))  # type: ignore[arg-type]
        record = replace(load_run(self._store, simulation.run_id), code_checked=True)
        self.config, self.run = record.config, RunRef(record.run_id, self._store.uri)
        self._running, self._moved = [], Unchanged()
        self._context = RunContext(self._store, record, self.stop, role=role)
        simulation.equip(self._context, number)
        self.frontier, timeout_s = Frontier(self._context), self.config.roles.claim_timeout_s
        self.claims = Claims(self._store, self.run.run_id, self.name, timeout_s=timeout_s)
        self._heartbeat = Heartbeat(self._store, self.run.run_id, role, self.name, every_s=timeout_s / BEATS)

    def run_to_the_end(self) -> None:
        look, do = {
            "generator": (lambda: self.claimed(self.frontier.sampling), self._sample),
            "scorer": (lambda: self.claimed(self.frontier.unscored), lambda w: score_shard(self.context, w.episodes)),
            "trainer": (self.frontier.step, lambda step: train_batch(self.context, step.batch)),
        }[self.role]
        with self.heartbeat, StopWatcher(self.stop, self._store, self.run.run_id, None):
            for work in self.work(look):
                do(work)
                self.start(work, Done())
        self.context.close()

    def _sample(self, work: Any) -> None:
        assert isinstance(work, Rollout)
        sample_shard(self.context, work.batch, work.shard, work.round)


@dataclass
class Simulation:
    """A run with ``generators`` generators, ``scorers`` scorers and a trainer of ``ranks`` ranks."""

    backend: Backend
    generators: int
    ranks: int
    steps: int
    generate_s: float
    train_s: float
    scorers: int = 2
    run_id: str = "simulated"
    requests: Requests = field(default_factory=Requests)
    stop: StopToken = field(default_factory=StopToken)

    def __post_init__(self) -> None:
        self.config = self._config()
        assert self.config.dataset is not None
        self._prompts = load_prompts(self.config.dataset, seed=0)

    def _config(self) -> RunConfig:
        values = {
            "run": {"id": self.run_id},
            "steps": self.steps,
            "max_staleness": 1,
            "model": {"vocabulary": "0123456789,=", "hidden_size": 8, "num_layers": 1, "num_heads": 1, "head_dim": 8},
            "dataset": {"path": "python://forge_core.data.sort_digits:prompts", "options": {"size": 2000}},
            "training": {"batch_size": 4 * self.generators, "seq_len": 32},
            "grpo": {"n_samples": 4, "beta": 0.0},
            "rollout": {"shards": self.generators, "max_new_tokens": 8},
            "rewards": {"functions": [{"path": "exact_match"}]},
            "eval": {"prompts": 0},
            "checkpoint": {"interval": 2},
        }
        return load_config(values)

    def equip(self, ctx: RunContext, number: int) -> None:
        """Give ``ctx`` engines that sleep."""
        encode = lambda row: [1, 2, 3, 4]
        ctx._generator = Engine(ctx, self.generate_s, number) if ctx.role == "generator" else None  # type: ignore[assignment]
        ctx.weights = Weights()  # type: ignore[assignment]
        ctx.__dict__ |= {
            "prompts": self._prompts,
            "planner": Planner(self.config, self._prompts, list(range(len(self._prompts))), encode),
            "tokenizer_digest": "none",
            "turns": NoTurns(),
            "rewards": Grader(),
            "trainer": Ranks(ctx, self.ranks if ctx.role == "trainer" else 1, self.train_s),
        }

    def run(self) -> dict[str, Any]:
        """Begin the run, let all roles work until its last step, and say what they asked of the store."""
        self._begin()
        wanted = [("trainer", 0)]
        wanted += [("scorer", n) for n in range(self.scorers)] + [("generator", n) for n in range(self.generators)]
        roles = [Role(self, *each) for each in wanted]
        self.requests.counts.clear()
        started = time.monotonic()
        with ThreadPoolExecutor(len(roles)) as pool:
            running = [pool.submit(role.run_to_the_end) for role in roles]
            ended = wait(running, return_when=FIRST_EXCEPTION).done
            self.stop.set("the first role that ended did so by an error")
            for future in ended:
                future.result()
        return self._summary(time.monotonic() - started)

    def _begin(self) -> None:
        store = Store(self.backend)
        create_run(store, self.config)
        prefix = layout.weights(self.run_id, 0, "first")
        files = {f"model-{rank}.safetensors": random.randbytes(WEIGHTS_BYTES) for rank in range(self.ranks)}
        manifest = store.publish(prefix, files, request="version 0")
        entry = {
            "version": 0, "weights": prefix, "weights_digest": manifest.content, "state_digest": "0", "model": {},
            "metrics": {}, "started_at": now(), "finished_at": now(),
        }  # fmt: skip
        store.put_new_json(layout.ledger_init(self.run_id), entry)

    def _summary(self, seconds: float) -> dict[str, Any]:
        counts, steps = self.requests.counts, self.steps
        verbs = Counter[str]()
        roles: dict[str, Counter[str]] = {}
        for (role, verb, kind), number in counts.items():
            verbs[verb] += number
            roles.setdefault(role, Counter())[f"{verb} {kind}"] += number
        cost = {verb: number * USD[verb] / steps for verb, number in verbs.items()}
        return {
            "seconds_per_step": round(seconds / steps, 2),
            "requests": sum(verbs.values()),
            "requests_per_second": round(sum(verbs.values()) / seconds, 1),
            "requests_per_step": {verb: round(number / steps, 1) for verb, number in sorted(verbs.items())},
            "claims_tried": self.requests.claims,
            "claim_collisions": self.requests.collisions,
            "usd_per_step": round(sum(cost.values()), 6),
            "usd_per_step_by_verb": {verb: round(usd, 6) for verb, usd in sorted(cost.items())},
            "requests_per_step_by_role": {
                role: {kind: round(number / steps, 1) for kind, number in kinds.most_common()}
                for role, kinds in sorted(roles.items())
            },
        }


def simulate(uri: str, **shape: Any) -> dict[str, Any]:
    """A simulation over the store ``uri``."""
    return Simulation(_backend(uri), **shape).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generators", type=int, default=64)
    parser.add_argument("--scorers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--generate-s", type=float, default=12.0)
    parser.add_argument("--train-s", type=float, default=4.0)
    shape = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder, seaweedfs(Path(folder)) as server:
        os.environ.update(server.environment)
        result = simulate(f"s3://{BUCKET}/simulation", **shape)
    write("store_simulation", {"machine": provenance(), "shape": shape, "prices_usd": USD, **result})


if __name__ == "__main__":
    main()
