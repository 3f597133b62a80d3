"""Where metrics are shown besides the store, which always has them: any of these, at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field, model_validator

from forge_core.config.section import Section

Mode = Literal["global_reduce", "per_rank_reduce", "per_rank_no_reduce"]
MODULES = {"wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow", "prometheus": "prometheus_client"}


class BackendSection(Section):
    logging_mode: Mode = Field(
        "global_reduce",
        description="global_reduce: one value a step, over all ranks and processes; per_rank_reduce: one for each of "
        "them; per_rank_no_reduce: every value that code records, at once, by the process that records it.",
    )


class ConsoleSection(BackendSection):
    show: list[str] = Field(
        [], description="Beginnings of the keys that are shown, such as reward/ or loss. Empty: all, without time/."
    )


class WandbSection(BackendSection):
    project: str = Field("forge", description="Project of Weights & Biases.")
    entity: str | None = Field(None, description="User or team. Left out: that of the key in WANDB_API_KEY.")
    group: str | None = Field(None, description="Group of the run. Left out: its run id.")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: written to a folder, for wandb sync later."
    )
    folder: str | None = Field(None, description="Folder of its files. Left out: WANDB_DIR, or ./wandb.")


class TensorBoardSection(BackendSection):
    folder: str = Field("tensorboard", description="Folder of the event files; each run has one of its own in it.")


class MlflowSection(BackendSection):
    tracking_uri: str = Field(
        "sqlite:///mlflow.db", description="Tracking server or database of MLflow, such as http://host:5000."
    )
    experiment: str = Field("forge", description="Experiment, made if it does not exist.")


class JsonlSection(BackendSection):
    folder: str = Field("metrics", description="Folder of the files; each run has one of its own: a line a step.")


class PrometheusSection(BackendSection):
    port: int | None = Field(
        None, ge=1, le=65535, description="Port on which each process serves its newest metrics. Left out: none."
    )
    host: str = Field("127.0.0.1", description="Address that the port is opened on.")
    textfile: str | None = Field(
        None, description="Folder for a file of each process, for the textfile collector of the node exporter."
    )

    @model_validator(mode="after")
    def _somewhere(self) -> PrometheusSection:
        if self.port is None and self.textfile is None:
            raise ValueError("metric_logging.prometheus needs a port, such as port: 9400, or a folder: textfile")
        return self


class CustomBackendSection(BackendSection):
    path: str = Field(
        ..., description="A class of yours, as <file.py>:<name> or <module>:<name>, where this machine offers code."
    )
    options: dict[str, Any] = Field({}, description="Arguments of the class, by name.")


class MetricLoggingSection(Section):
    console: ConsoleSection | None = Field(None, description="A table of each step on the terminal.")
    wandb: WandbSection | None = Field(None, description="Weights & Biases (extra metrics).")
    tensorboard: TensorBoardSection | None = Field(None, description="Event files of TensorBoard (extra metrics).")
    mlflow: MlflowSection | None = Field(None, description="MLflow (extra metrics).")
    jsonl: JsonlSection | None = Field(None, description="A file with a JSON object for each step.")
    prometheus: PrometheusSection | None = Field(None, description="Newest values for Prometheus (extra metrics).")
    custom: CustomBackendSection | None = Field(None, description="A backend of your own.")

    @property
    def backends(self) -> Iterator[tuple[str, BackendSection]]:
        """Those that are asked for."""
        for name in type(self).model_fields:
            if (section := getattr(self, name)) is not None:
                yield name, section


def metric_problems(section: MetricLoggingSection) -> list[str]:
    """Backends whose package is not installed here."""
    return [
        f"metric_logging.{name}: needs the package {MODULES[name]}, which is not installed: pip install "
        f"'forge-rl[metrics]', or leave it out: ~metric_logging.{name}"
        for name, _ in section.backends
        if name in MODULES and find_spec(MODULES[name]) is None
    ]
