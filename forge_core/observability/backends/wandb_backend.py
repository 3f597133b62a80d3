"""Metrics in Weights & Biases: one of its runs for a run of Forge, which goes on when that does.

The id is made from the run's name and the time of its creation, so two runs named alike in two stores stay two. Charts
have the training step (``step``) as their axis. Offline, a file beside the data says how far it got, since every start
writes a folder of its own; ``wandb sync`` puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.config.metric_sections import WandbSection
from forge_core.files import write_whole
from forge_core.observability.backends import Origin
from forge_core.observability.metrics import Metric


class WandbBackend:
    def __init__(self, section: WandbSection, origin: Origin) -> None:
        import wandb

        self._wandb: Any = wandb
        if section.mode == "online" and not wandb.login(prompt=False):  # it would ask at the terminal, from a thread
            raise RuntimeError(
                "there is no key of Weights & Biases here: set WANDB_API_KEY, or use metric_logging.wandb.mode=offline"
            )
        if section.folder:
            Path(section.folder).expanduser().mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=section.project,
            entity=section.entity,
            group=section.group or origin.run_id,
            name=f"{origin.run_id} {origin.role}".rstrip(),
            id=None if origin.role else origin.name,
            resume=None if origin.role else "allow",
            job_type=origin.role or "train",
            mode=section.mode,
            dir=section.folder and str(Path(section.folder).expanduser()),
            config=dict(origin.config),
            settings=wandb.Settings(console="off", silent=True, init_timeout=60),
            reinit="create_new",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._offline = section.mode == "offline"
        self._reached = Path(self._run.dir).parent.parent / f"forge-{origin.name}.txt"

    def last_step(self) -> int:
        if self._offline:
            return int(self._reached.read_text()) if self._reached.exists() else -1
        return int(self._run.summary.get("step", -1))

    def log(self, step: int, values: Mapping[str, float], tables: Mapping[str, list[dict[str, Any]]]) -> None:
        shown = {key: self._table(rows) for key, rows in tables.items()}
        self._run.log({**values, **shown, "step": step})
        if self._offline:
            write_whole(self._reached, str(step))

    def log_value(self, metric: Metric) -> None:
        self._run.log({f"values/{metric.key}": metric.value})

    def close(self) -> None:
        self._run.finish()

    def _table(self, rows: list[dict[str, Any]]) -> Any:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        return self._wandb.Table(columns=columns, data=[[row.get(name) for name in columns] for row in rows])
