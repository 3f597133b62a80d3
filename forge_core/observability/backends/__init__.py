"""Where metrics are shown besides the store. One file a backend; a package is imported when its backend is opened.

Invariants:
- A backend is opened, used and closed by one thread of its own, so it may be slow or fail: the run does not wait.
- It is told of each step once, in order; after a restart it says which step was its last (``last_step``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from forge_core.observability.metrics import Metric

BACKENDS = {
    "console": "console:ConsoleBackend",
    "wandb": "wandb_backend:WandbBackend",
    "tensorboard": "tensorboard_backend:TensorBoardBackend",
    "mlflow": "mlflow_backend:MlflowBackend",
    "jsonl": "jsonl:JsonlBackend",
    "prometheus": "prometheus:PrometheusBackend",
    "custom": "custom:CustomBackend",
}


@dataclass(frozen=True)
class Origin:
    """Whose metrics they are. ``name`` is unique among all stores and the same whenever the run goes on; ``role``: of
    a process that does a part of the run; empty: of the one that trains. ``config``: of the run, plain."""

    run_id: str
    name: str
    role: str
    config: Mapping[str, Any]


class Backend(Protocol):
    """``section``: its part of the configuration."""

    def __init__(self, section: Any, origin: Origin) -> None: ...

    def last_step(self) -> int | None:
        """The last step that it was told of, by whatever process (-1: none); None: it only shows what is new."""
        ...

    def log(self, step: int, values: Mapping[str, float], tables: Mapping[str, list[dict[str, Any]]]) -> None:
        """A committed step: its values and tables by key."""
        ...

    def log_value(self, metric: Metric) -> None:
        """One value, as it was recorded."""
        ...

    def close(self) -> None: ...


def get_logger_backend_class(name: str) -> type[Backend]:
    """The class of a backend. Raises ValueError for an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"metric backend {name!r} does not exist: use one of {', '.join(BACKENDS)}")
    module, _, cls = BACKENDS[name].partition(":")
    found: type[Backend] = getattr(import_module(f"{__name__}.{module}"), cls)
    return found
