"""When a run is worth a look: the thresholds of its alarms. An alarm never stops a run; null switches one off."""

from __future__ import annotations

from pydantic import Field

from forge_core.config.section import Section


class AnyAlarms(Section):
    silent_minutes: float | None = Field(
        30.0, gt=0, description="Minutes without a new object of the run, while nobody has stopped it."
    )
    disk_versions: float | None = Field(
        10.0,
        gt=0,
        description="A store of plain files is nearly full when it has room for fewer published versions of the "
        "weights than this (a checkpoint is as large as six to eight of them).",
    )
    bucket_gib: float | None = Field(
        None, gt=0, description="GiB from which a bucket is nearly full: it does not say itself how much it takes."
    )


class AlarmSection(AnyAlarms):
    flat_reward: int | None = Field(
        100,
        ge=4,
        description="Training steps whose second half has no better mean reward than the first: the reward is flat.",
    )
    flat_reward_gain: float = Field(
        0.1, ge=0, description="By how much it must be better, in standard deviations of the rewards of a batch."
    )
    entropy: float | None = Field(
        0.02, gt=0, lt=1, description="The entropy has collapsed below this share of what it was in the first steps."
    )
    kl: float | None = Field(
        1.0, gt=0, description="KL to the reference model, in nats per token, in three steps in a row."
    )
    mismatch: float | None = Field(
        1.0,
        gt=0,
        description="Mean difference of sampler and trainer log-probabilities, in nats per token, in three steps in a "
        "row. It grows with the age of the episodes; for a limit on every single step see loss.mismatch_alarm.",
    )


class SftAlarmSection(AnyAlarms):
    loss_rise: float | None = Field(
        0.5,
        gt=0,
        description="Nats per token that the training loss is above its lowest in the newest 100 steps, in three steps "
        "in a row.",
    )
