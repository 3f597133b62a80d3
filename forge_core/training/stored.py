"""A trainer whose model, checkpoints and weights lie in a store: one process of one or of many ranks.

Invariants:
- Ranks share the store and nothing else. Each writes its own share of weights and checkpoints and uploads it itself;
  whoever has all shares publishes the object (``Store.publish_uploaded``).
- One rank alone uploads the whole object, by the same functions.
- Running out of memory is an ``OutOfMemory`` that names the settings to lower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forge_core.algorithms.ops import Totals
from forge_core.data_model import ForwardBackwardResult, OptimStepResult
from forge_core.devices import free_cached_memory
from forge_core.observability.memory import SETTINGS, memory_guard, model_sizes
from forge_core.stop import StopToken
from forge_core.store import File, Store, folder_files
from forge_core.temporary import temporary_folder
from forge_core.training.packing import Sample
from forge_core.training.settings import TrainerSettings
from forge_core.training.trainer import Loss, Samples, TitanTrainer
from forge_core.weights.host_cache import Lease, lease_published


@dataclass(frozen=True)
class TrainerSpec:
    """What to train, as it travels to the ranks: ``store`` is a root, ``model`` the prefix of a published model folder,
    ``make_loss`` a picklable function that makes the loss."""

    store: str
    model: str
    settings: TrainerSettings
    make_loss: Callable[[], Any]


class StoredTrainer(TitanTrainer):
    """``model``: the prefix of the model folder in ``store``; the rest as for ``TitanTrainer``."""

    def __init__(
        self,
        store: Store,
        model: str,
        settings: TrainerSettings,
        loss: Loss,
        *,
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        super().__init__(Path(model), settings, loss, device=device, threads=threads)
        self.store, self.model = store, model
        self._leases: dict[str, Lease] = {}

    def setup(self) -> None:
        with self._guard():
            self.model_dir = self.folder(self.model)
            super().setup()

    def warm_up(self, sample: Sample, place: int, *, temperature: float) -> bool:
        with self._guard():
            return super().warm_up(sample, place, temperature=temperature)

    def train_samples(
        self, samples: Samples, *, totals: Totals, temperature: float, stop: StopToken | None = None
    ) -> tuple[ForwardBackwardResult, OptimStepResult]:
        with self._guard():
            return super().train_samples(samples, totals=totals, temperature=temperature, stop=stop)

    def logprobs_samples(
        self, samples: Samples, *, temperature: float, stop: StopToken | None = None
    ) -> list[list[float]]:
        with self._guard():
            return super().logprobs_samples(samples, temperature=temperature, stop=stop)

    def alive(self) -> bool:
        """Whether there are ranks to call: always, since this process is the one."""
        return True

    def upload_weights(self, prefix: str, kept: Path | None = None) -> tuple[File, ...]:
        """Upload this rank's share of the current weights in HF format, below ``prefix``. Afterwards the files are in
        the folder ``kept``, if this host has it."""
        kept = kept if kept is not None and kept.is_dir() else None
        uploaded: list[File] = []

        def upload(path: Path) -> None:
            """While others are written."""
            uploaded.extend(self.store.upload(prefix, {path.name: path}, given=True))

        with _room(kept) as folder:
            with self._guard():
                self.push_weights(folder, upload)
            files, there = folder_files(folder), {file.name for file in uploaded}
            rest = {name: path for name, path in files.items() if name not in there}
            uploaded.extend(self.store.upload(prefix, rest, given=True))
            if kept is not None:
                for name, path in files.items():
                    path.rename(kept / name)
        return tuple(uploaded)

    def upload_adapter(self, prefix: str) -> tuple[File, ...]:
        """Upload the adapter that is trained, below ``prefix``; the first rank has all of it."""
        with temporary_folder("adapter") as folder:
            with self._guard():
                self.push_adapter(folder)
            return self.store.upload(prefix, folder_files(folder), given=True)

    def upload_checkpoint(self, prefix: str, extra: dict[str, Any]) -> tuple[File, ...]:
        """Upload this rank's share of a checkpoint, below ``prefix``."""
        with temporary_folder("checkpoint") as folder:
            with self._guard():
                self.save(folder, extra)
            return self.store.upload(prefix, folder_files(folder), given=True)

    def load_checkpoint(self, prefix: str) -> dict[str, Any]:
        """Go back to the published checkpoint ``prefix`` and return its ``extra``."""
        with self._guard():
            extra = self.load(self.folder(prefix))
        self._release(prefix)  # all ranks have read it: loading ends with a collective
        return extra

    def state_digest(self) -> str:
        with self._guard():
            return super().state_digest()

    def folder(self, prefix: str) -> Path:
        """This host's folder of the published object ``prefix``, until ``cleanup``."""
        self._leases[prefix] = lease_published(self.store, prefix)
        return self._leases[prefix].folder

    def free_cached(self) -> None:
        """Give the GPU what this process keeps of freed memory."""
        free_cached_memory()

    def cleanup(self) -> None:
        super().cleanup()
        for prefix in [*self._leases]:
            self._release(prefix)

    def _guard(self) -> AbstractContextManager[None]:
        return memory_guard("trainer", SETTINGS["trainer"], self._sizes)

    def _sizes(self) -> dict[str, int]:
        if self._model is None or self._optimizer is None:
            return {}
        return model_sizes([*self._masters.parameters.values(), *self._masters.copies], [self._optimizer.state])

    def _release(self, prefix: str) -> None:
        if (lease := self._leases.pop(prefix, None)) is not None:
            lease.release()


@contextmanager
def _room(kept: Path | None) -> Iterator[Path]:
    """A folder for files that go to ``kept``: inside it, since renaming works on one file system only."""
    if kept is None:
        with temporary_folder("weights") as folder:
            yield folder
        return
    with TemporaryDirectory(prefix="share-", dir=kept) as inside:
        yield Path(inside)
