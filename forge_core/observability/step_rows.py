"""The rows of the metrics table of one training step: a pure function of what the store holds.

Invariants:
- Everything comes from the step's ledger entry, the entry before, and the manifests of the shards that both consumed;
  all of these stay for ever. So the rows can be made at any time, by anybody, and are always the same.
- One row for each key and source; rows are in the order of keys, then sources.
- A rate or share that cannot be known (the process began with this step) is null, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from forge_core.observability.catalogue import DROPPED, LOOP, TRAINER, known, names
from forge_core.observability.entries import STAGES, seconds
from forge_core.observability.reductions import Reduce, State, merged
from forge_core.store import NotFound, Opener

Entry = Mapping[str, Any]
Row = dict[str, Any]
SPANS = {
    "episodes": "policy_generation",
    "rewards": "reward_evaluation",
    "reference": "reference_model_calculate_logprobs",
}


@dataclass(frozen=True)
class Shards:
    """Provenance of the shards of one step, by stage (``episodes``, ``rewards``, ``reference``), in plan order."""

    of: dict[str, list[dict[str, Any]]]

    @classmethod
    def read(cls, store: Opener, entry: Entry) -> Shards:
        found = {
            stage: [_provenance(store, prefix) for prefix in prefixes] for stage, prefixes in entry["shards"].items()
        }
        return cls(found)

    def values(self, stage: str, key: str) -> list[float]:
        return [float(one[key]) for one in self.of.get(stage, []) if key in one]

    def seconds(self, stage: str) -> float:
        return sum(self.values(stage, "seconds"))

    @property
    def end(self) -> float | None:
        """When the last response was there, in seconds since 1970."""
        return max(self.values("episodes", "finished_at_s"), default=None)

    @property
    def processes(self) -> set[str]:
        return {one.get("process", "") for one in self.of.get("episodes", [])}

    def busy(self, since: float = float("-inf")) -> float:
        """Seconds after ``since`` in which any engine sampled."""
        spans = sorted(
            (max(since, one["finished_at_s"] - one["seconds"]), one["finished_at_s"])
            for one in self.of.get("episodes", [])
            if "finished_at_s" in one
        )
        total, until = 0.0, since
        for start, end in spans:
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total


def _provenance(store: Opener, prefix: str) -> dict[str, Any]:
    """What is known of a shard; nothing, where somebody has deleted it."""
    try:
        return store.open_published(prefix).manifest.provenance or {}
    except NotFound:
        return {}


@dataclass(frozen=True)
class Step:
    """A committed step with what its rows are made of; ``before``: the entry before (or that of version 0)."""

    entry: Entry
    before: Entry
    shards: Shards
    shards_before: Shards | None

    @property
    def supervised(self) -> bool:
        return not self.entry["shards"]["episodes"]


def step_rows(step: Step) -> list[Row]:
    """All rows of the step, ready for ``to_parquet``."""
    entry = step.entry
    runs = "sft" if step.supervised else "grpo"
    rows = [*_measured(_values(step, runs), runs), *_recorded(step)]
    common = {
        "step": entry["batch"],
        "version": entry["version_out"],
        "time": datetime.fromisoformat(entry["finished_at"]),
    }
    return [
        {**common, **row} for row in sorted(rows, key=lambda row: (row["key"], row["source"] or "", row["reduction"]))
    ]


def _measured(values: Mapping[str, float | None], runs: str) -> Iterator[Row]:
    for key, value in values.items():
        spec = known(key, runs)
        reduction = spec.reduction if spec else "last"
        yield {"key": key, "value": value, "reduction": reduction, "count": None, "source": None, "sample": None}


def _values(step: Step, runs: str) -> dict[str, float | None]:
    entry, renamed = step.entry, names(runs)
    values: dict[str, float | None] = {renamed.get(key, key): value for key, value in entry["metrics"].items()}
    counts = entry["episodes"]
    values |= {"episodes/planned": counts["planned"], "episodes/trained": counts["trained"]}
    values |= {f"{DROPPED}/{reason}": n for reason, n in counts["dropped"].items()}
    values[f"{DROPPED}/total"] = sum(counts["dropped"].values())
    values |= _timing(step)
    if runs == "sft":
        return values | {"data/tokens": entry["tokens"]}
    tokens = {"generator/generate/sum_tokens_generated": entry["tokens"]}
    return values | tokens | {"buffer/sample/max_sampled_policy_age": entry["max_age"]} | _stages(step)


def _timing(step: Step) -> dict[str, float | None]:
    """What the trainer did and waited for between two commits."""
    metrics = step.entry["metrics"]
    period, waited = _since_before(step, "finished_at"), _since_before(step, "started_at")
    train, whole = metrics.get("time/train", 0.0), metrics.get("time/step", 0.0)
    parts = ("time/train", "time/publish", "time/eval", "time/validation")
    own = max(0.0, whole - sum(metrics.get(part, 0.0) for part in parts))
    found: dict[str, float | None] = {
        f"{TRAINER}/waiting_for_buffer/duration_avg_s": waited,
        "trainer/idle_share": None if not period or waited is None else max(0.0, waited) / period,
        "orchestration/step_s": own,
    }
    handover = 0.0
    if not step.supervised:
        handed = found["orchestration/handover_s"] = _handover(step)
        handover = handed or 0.0
    found["orchestration/share"] = (own + handover) / period if period else None
    flops, peak = metrics.get("trainer/model_flops", 0.0), metrics.get("time/peak_flops")
    found["trainer/tflops_per_second"] = _per_second(flops / 1e12, train)
    if peak:
        found["trainer/mfu"] = _per_second(flops / peak, train)
    if not step.supervised:
        found["trainer/tokens_per_second"] = _per_second(metrics.get("trainer/tokens", 0.0), train)
    return found


def _since_before(step: Step, moment: str) -> float | None:
    """Seconds from the commit before to a ``moment`` of this step; None where another process made that commit."""
    if step.before.get("attempt") != step.entry["attempt"]:
        return None
    return max(0.0, seconds(step.entry[moment]) - seconds(step.before["finished_at"]))


def _handover(step: Step) -> float | None:
    """From the moment when all that the step needs was there to its start."""
    if step.before.get("attempt") != step.entry["attempt"]:
        return None
    inputs = [at for stage in STAGES for at in step.shards.values(stage, "finished_at_s")]
    ready = max([seconds(step.before["finished_at"]), *inputs])
    return max(0.0, seconds(step.entry["started_at"]) - ready)


def _stages(step: Step) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    tokens = step.entry["tokens"]
    for stage, role in STAGES.items():
        spans = step.shards.values(stage, "seconds")
        if spans:
            found[f"{LOOP}/{SPANS[stage]}/duration_avg_s"] = sum(spans) / len(spans)
            found[f"{LOOP}/{SPANS[stage]}/duration_max_s"] = max(spans)
            busy = step.shards.busy() if stage == "episodes" else sum(spans)
            found[f"{role}/tokens_per_second"] = _per_second(tokens, busy)
    found["generator/waiting/duration_max_s"] = max(step.shards.values("episodes", "waited_seconds"), default=0.0)
    found["generator/idle_share"] = _generator_idle(step)
    return found


def _generator_idle(step: Step) -> float | None:
    before, end = step.shards_before, step.shards.end
    if before is None or before.end is None or end is None or step.shards.processes != before.processes:
        return None
    period = end - before.end
    return max(0.0, 1.0 - step.shards.busy(before.end) / period) if period > 0 else None


def _per_second(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


# What code recorded ---------------------------------------------------------------------------------------------------


def recorded_states(step: Step) -> dict[str, list[Mapping[str, State]]]:
    """The states that each rank and process left, by source, such as ``trainer.<rank>`` and ``scorer.<shard>``."""
    found: dict[str, list[Mapping[str, State]]] = {}
    for rank, states in step.entry.get("recorded", {}).items():
        found.setdefault(f"trainer.{rank}", []).append(states)
    for stage, role in STAGES.items():
        for prefix, one in zip(step.entry["shards"][stage], step.shards.of[stage], strict=True):
            shard = int(prefix.rstrip("/").rpartition("-")[2])
            for states in one.get("recorded", {}).values():
                found.setdefault(f"{role}.{shard}", []).append(states)
    return found


def _recorded(step: Step) -> Iterator[Row]:
    """A row over all sources, and where there are several, one for each."""
    sources = recorded_states(step)
    yield from _reduced([states for all_ in sources.values() for states in all_], None)
    for source, states in sources.items():
        yield from _reduced([_numbers(one) for one in states], source)


def _numbers(states: Mapping[str, State]) -> dict[str, State]:
    return {key: state for key, state in states.items() if state["reduction"] != Reduce.SAMPLE.value}


def _reduced(states: Sequence[Mapping[str, State]], source: str | None) -> Iterator[Row]:
    for one in merged(states):
        row = {"key": one.key, "reduction": one.reduction.value, "count": one.count, "source": source}
        if one.reduction is Reduce.SAMPLE:
            yield from ({**row, "value": _score(sample), "sample": json.dumps(sample)} for sample in one.value)
        else:
            yield {**row, "value": one.value, "sample": None}


def _score(sample: Mapping[str, Any]) -> float | None:
    found = sample.get("reward", sample.get("score"))
    return float(found) if isinstance(found, int | float) else None


def whole(rows: Iterable[Row]) -> dict[str, float]:
    """The value of each key over all sources, where it is known: what ``global_reduce`` logs."""
    return {row["key"]: row["value"] for row in rows if row["source"] is None and _is_number(row)}


def by_source(rows: Iterable[Row]) -> dict[str, float]:
    """``whole``, with the values of each source below its name where there are any: what ``per_rank_reduce`` logs."""
    rows = list(rows)
    split = {row["key"] for row in rows if row["source"] is not None}
    return {
        f"{row['source']}/{row['key']}" if row["source"] else row["key"]: row["value"]
        for row in rows
        if _is_number(row) and (row["source"] is not None or row["key"] not in split)
    }


def _is_number(row: Row) -> bool:
    return row["value"] is not None and row["reduction"] != Reduce.SAMPLE.value
