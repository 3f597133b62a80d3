"""Which versions a run evaluates, which entry of the ledger records each, and how far engines may go until it is there.

Invariants:
- The schedule is a function of the configuration and of the entries before, so a resumed run, or one in roles, records
  what another would. What one entry records no other does, also where the configuration changed in between.
- An evaluation has as long as the window lasts: that of version ``v`` is recorded by step ``v + S``, or before the next
  one is due, or by the last step. Only that step waits for it. A change at a resume that would leave it to no step is
  refused.
- No engine moves past a version whose evaluation is due and not there, since it could not go back: batches that need a
  newer version wait. The step that records the evaluation needs no such batch, so nothing waits in a circle.
"""

from __future__ import annotations

from collections.abc import Collection

from forge_core.config import ConfigError, RunConfig
from forge_core.store import Ledger, Store, layout

RECORDED = ("eval/version", "eval/before/version")  # metrics of an entry that name the versions it records


def evaluation_due(config: RunConfig, version: int) -> bool:
    """Whether ``version`` is evaluated: the initial one, and every ``eval.interval``. The last version is evaluated as
    a candidate, before the last step commits."""
    due = version == 0 or (config.eval.interval > 0 and version % config.eval.interval == 0)
    return due and config.eval.prompts > 0


def recorded_by(config: RunConfig, version: int) -> int:
    """The training step whose entry records the evaluation of ``version``, and that waits for it before it commits."""
    ahead, interval = config.max_staleness, config.eval.interval
    return min(version + (min(ahead, interval - 1) if interval else ahead), config.steps - 1)


def evaluated_by(config: RunConfig, batch: int, recorded: Collection[int] = ()) -> list[int]:
    """The versions whose evaluation step ``batch`` waits for, and records: one, and in the last step the last too.
    ``recorded``: those that entries before have."""
    last = [batch + 1] if batch + 1 == config.steps and config.eval.prompts > 0 else []
    return [v for v in unrecorded(config, batch, recorded) if recorded_by(config, v) == batch] + last


def unrecorded(config: RunConfig, head: int, recorded: Collection[int] = ()) -> list[int]:
    """The versions up to the newest (``head``) whose evaluation is due and that a step from ``head`` on records."""
    window = range(max(0, head - config.max_staleness), head + 1)
    due = [v for v in window if evaluation_due(config, v) and recorded_by(config, v) >= head]
    return [v for v in due if v not in recorded]


class Evaluations:
    """The evaluations of a run as this process knows them. Entries and evaluations never change, so what was found once
    is not asked for again. Weights are known by what the ledger says of them: they themselves may be gone."""

    def __init__(self, store: Store, run_id: str, ledger: Ledger, config: RunConfig) -> None:
        self._store, self._run_id, self._ledger, self._config = store, run_id, ledger, config
        self._recorded: dict[int, list[int]] = {}  # by batch
        self._weights: dict[int, str] = {}  # by version
        self._there: set[str] = set()  # prefixes

    def unrecorded(self, head: int) -> list[int]:
        """The versions up to the newest (``head``) whose evaluation is due and that no entry records yet."""
        return unrecorded(self._config, head, self._recorded_before(head))

    def recorded_in(self, batch: int) -> list[int]:
        """The versions whose evaluation step ``batch`` waits for, and records."""
        return evaluated_by(self._config, batch, self._recorded_before(batch))

    def newest_allowed(self, head: int) -> int:
        """The version that no engine may move past: the first one without its evaluation, or the newest (``head``)."""
        missing = (v for v in self.unrecorded(head) if not self.is_there(v, self.weights(v)))
        return next(missing, head)

    def weights(self, version: int) -> str:
        """Content digest of the weights of a committed version."""
        if version not in self._weights:
            self._weights[version] = self._ledger.required(version - 1)["weights_digest"]
        return self._weights[version]

    def is_there(self, version: int, weights: str) -> bool:
        """Whether the evaluation of ``version``, with these weights, is stored."""
        prefix = layout.evaluation(self._run_id, version, weights)
        if prefix not in self._there and self._store.published(prefix):
            self._there.add(prefix)
        return prefix in self._there

    def _recorded_before(self, head: int) -> set[int]:
        """What the entries record that may have recorded a version which is open at ``head``."""
        first = min(unrecorded(self._config, head), default=head + 1)
        return {version for batch in range(max(0, first - 1), head) for version in self._recorded_in(batch)}

    def _recorded_in(self, batch: int) -> list[int]:
        if batch not in self._recorded:
            metrics = self._ledger.required(batch)["metrics"]
            self._recorded[batch] = [metrics[name] for name in RECORDED if name in metrics]
        return self._recorded[batch]


def check_change(store: Store, run_id: str, before: RunConfig, config: RunConfig) -> None:
    """Raise ConfigError when a run that goes on with ``config`` instead of ``before`` would not record an evaluation
    that is open, or would owe one of a version whose weights are gone."""
    ledger = Ledger(store, run_id)
    head = ledger.head()
    open_, wanted = (Evaluations(store, run_id, ledger, c).unrecorded(head) for c in (before, config))
    lost = [v for v in open_ if v not in wanted and config.eval.prompts > 0]
    if lost:
        raise ConfigError(
            f"max_staleness, eval.interval, steps: the evaluation of version {lost[0]} is not recorded yet, and with "
            f"this change no step would: let the next one do so with `forge resume {run_id} steps={head + 1} "
            "--allow-config-change steps`, then make this change"
        )
    gone = [v for v in wanted if v not in open_ and not store.published(ledger.weights_prefix(v))]
    if gone:
        raise ConfigError(
            f"max_staleness, eval.interval: with this change version {gone[0]} is to be evaluated, whose weights are "
            f"deleted (weights.keep): max_staleness={head - gone[0] - 1}, or another eval.interval, leaves it out"
        )
    if (before.max_staleness, before.rollout.version) != (config.max_staleness, config.rollout.version):
        _check_samplers(store, ledger, head, config)


def _check_samplers(store: Store, ledger: Ledger, head: int, config: RunConfig) -> None:
    """Raise ConfigError when batches are to be sampled by versions (``rollout.version: oldest``) that are gone."""
    if config.rollout.version != "oldest" or head < 0:
        return
    samplers = range(max(0, head - config.max_staleness), head)
    gone = [v for v in samplers if not store.published(ledger.weights_prefix(v))]
    if gone:
        raise ConfigError(
            f"max_staleness: is {config.max_staleness}, so that batch {head} would be sampled by version {samplers[0]} "
            f"(rollout.version=oldest), but the weights of version {gone[-1]} are deleted (weights.keep): "
            f"max_staleness={head - gone[-1] - 1} is the largest that works now, and rollout.version=newest needs none"
        )
