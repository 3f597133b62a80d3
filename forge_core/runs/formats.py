"""The store format: one number for everything of a run that a release must understand to go on with it.

Invariants:
- ``run.json`` and every recorded change carry the number, so a release knows before it reads anything else of a run
  whether it may. A run without one was made before the number existed and has format 1.
- The number grows when an older release would misread a run, not when something is added that it may ignore.
- A release reads ``OLDEST`` to ``STORE_FORMAT`` and writes ``STORE_FORMAT``; docs/upgrading.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError

from forge_core.config import ConfigError, RunConfig
from forge_core.config.explain import problems_of
from forge_core.config.sft_config import SftConfig

STORE_FORMAT = 1  # layout, plans, ledger, manifests, Parquet schemas, checkpoints
OLDEST = 1
FORMAT_KEY = "format"
SFT = "sft"  # the kind of a supervised run


class UnreadableRun(ConfigError):
    """Another release can go on with this run, not this one. Nothing is wrong with what is stored."""


def check_format(run_id: str, body: Mapping[str, Any]) -> None:
    """Raise UnreadableRun unless this release reads the format of ``body``, a ``run.json`` or a recorded change."""
    found = body.get(FORMAT_KEY, 1)
    if isinstance(found, int) and OLDEST <= found <= STORE_FORMAT:
        return
    newer = not isinstance(found, int) or found > STORE_FORMAT
    raise UnreadableRun(
        f"run {run_id!r} was made by {made_by(body)} with store format {found}; this release reads "
        f"{'up to ' + str(STORE_FORMAT) if newer else 'from ' + str(OLDEST) + ' on'}: "
        + (f"upgrade to {made_by(body)} or later" if newer else f"go on with it in {made_by(body)}")
    )


def stored_config(run_id: str, body: Mapping[str, Any], flow: str) -> RunConfig:
    """The configuration in ``body``, of a run of the kind ``flow`` (see ``RunRecord``). Raises UnreadableRun when this
    release knows other keys than the one that wrote it."""
    try:
        return cast(RunConfig, (SftConfig if flow == SFT else RunConfig).model_validate(body["config"]))
    except ValidationError as error:
        problems = [*problems_of(error), f"go on with it in {made_by(body)}"]
        source = f"run {run_id!r} was made by {made_by(body)}, whose configuration this release does not read"
        raise UnreadableRun(problems, source) from error


def made_by(body: Mapping[str, Any]) -> str:
    """``forge-rl 0.1.0``: the release that wrote ``body``."""
    return next((name for name in body.get("code", {}) if name.startswith("forge-rl ")), "another release of forge-rl")
