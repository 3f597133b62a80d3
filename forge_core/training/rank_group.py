"""A trainer whose ranks are processes of their own, behind the methods of ``StoredTrainer``.

Invariants:
- The ranks are one ``torchrun`` command in a guarded child group: however this process ends, so do they.
- A rank that dies or raises ends the group: the call in progress raises, within two seconds, ``ChildDied`` or
  ``RankError`` with the end of the log, and every later call raises ``ChildDied``. ``setup`` starts afresh. (Only the
  leading rank can report an error: while it hangs, another one's is known by its end, ``LINGER_S`` later.)
- A rank that has waited for another for ``comm.timeout_s`` names that limit, and one out of memory is an
  ``OutOfMemory``.
- A stop token set during a training call ends it on all ranks at the same micro-batch, and the ranks stay usable; one
  set while they start or load ends them.
- Calls come from one thread at a time.
"""

from __future__ import annotations

import itertools
import os
import re
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from forge_core.algorithms.losses.base import Loss
from forge_core.algorithms.ops import Totals
from forge_core.data_model import ForwardBackwardResult, OptimStepResult
from forge_core.observability.memory import OutOfMemory
from forge_core.observability.metrics import replay
from forge_core.processes import ChildDied, ChildGroup
from forge_core.processes.channel import Channel
from forge_core.stop import Stopped, StopToken
from forge_core.store import File, open_store
from forge_core.training.launch import RankOptions, Rendezvous, rank_environment, torchrun
from forge_core.training.packing import Sample
from forge_core.training.rank_protocol import SOCKET, STOPPABLE, Answer, Command, Failed, Ready, StopCommand
from forge_core.training.stored import TrainerSpec
from forge_core.training.trainer import Samples

POLL_S = 0.1
SETTLE_S = 1.0  # after an error of one rank: time to see whether another one was killed, which would explain it
LOG_LINES = 25
TORCH_LINES = 200  # of the log's end, to look for what torch says
_ENDED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")  # what torchrun logs
_WAITED = re.compile(r"Timed out waiting \d+ms|Application timeout caused|collective operation timeout")  # gloo, NCCL


class RankError(RuntimeError):
    """A rank of the trainer raised an error; the group has ended."""


class RankOutOfMemory(RankError, OutOfMemory):
    """A rank of the trainer needs more memory than there is."""


class RankGroup:
    """``ranks``: processes to start on this host (on others, ``forge join`` starts them). ``loss``: the owner's, whose
    state goes to all ranks with each call. ``logs``: a folder for the log file of each start. ``scratch``: a prefix for
    objects that are deleted at once. ``environment``: what the ranks' adds to this process's, such as their GPUs.
    ``stop``: ends starting and loading."""

    def __init__(
        self,
        spec: TrainerSpec,
        ranks: int,
        *,
        loss: Loss | None,
        logs: Path,
        scratch: str,
        rendezvous: Rendezvous,
        options: RankOptions,
        environment: Mapping[str, str | None] | None = None,
        stop: StopToken | None = None,
    ) -> None:
        self._spec, self._ranks, self._loss, self._scratch = spec, ranks, loss, scratch
        self._logs, self._rendezvous, self._options = logs, rendezvous, options
        self._environment, self._stop = dict(environment or {}), stop
        self._numbers, self._starts = itertools.count(), itertools.count()
        self._log = logs
        self._pids: dict[int, int] = {}
        self._group: ChildGroup | None = None
        self._channel: Channel | None = None
        self._connection: socket.socket | None = None

    # What a trainer does ------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Start the ranks, let them meet, load the model."""
        self.cleanup()
        self._start()
        self._call("setup", spec=self._spec, stop=self._stop)

    def alive(self) -> bool:
        """Whether the ranks can be called."""
        return self._group is not None and self._group.alive() and not self._missing()

    def warm_up(self, sample: Sample, place: int, *, temperature: float) -> bool:
        """See ``TitanTrainer.warm_up``."""
        return self._first("warm_up", sample, place, temperature=temperature)

    def train_samples(
        self, samples: Samples, *, totals: Totals, temperature: float, stop: StopToken | None = None
    ) -> tuple[ForwardBackwardResult, OptimStepResult]:
        """One optimizer step (see ``TitanTrainer.train_samples``)."""
        return self._first("train_samples", samples, stop=stop, totals=totals, temperature=temperature)

    def logprobs_samples(
        self, samples: Samples, *, temperature: float, stop: StopToken | None = None
    ) -> list[list[float]]:
        """Log-probabilities of the counted tokens of each sample."""
        return self._first("logprobs_samples", samples, stop=stop, temperature=temperature)

    def state_digest(self) -> str:
        """Digest of the parameters. Raises RankError where ranks that hold the same ones hold different numbers."""
        return self._first("state_digest")

    def upload_weights(self, prefix: str, kept: Path | None = None) -> tuple[File, ...]:
        """All ranks upload their shares of the weights; returns the files of all. Those of the ranks of this host are
        in the folder ``kept`` afterwards."""
        return self._shares("upload_weights", prefix, kept)

    def upload_adapter(self, prefix: str) -> tuple[File, ...]:
        """All ranks help to gather the adapter, the first one uploads it."""
        return self._shares("upload_adapter", prefix)

    def upload_checkpoint(self, prefix: str, extra: dict[str, Any]) -> tuple[File, ...]:
        """All ranks upload their shares of a checkpoint; returns the files of all."""
        return self._shares("upload_checkpoint", prefix, extra)

    def load_checkpoint(self, prefix: str) -> dict[str, Any]:
        """All ranks go back to a published checkpoint; returns its ``extra``."""
        return self._first("load_checkpoint", prefix, stop=self._stop)

    def free_cached(self) -> None:
        """All ranks give their GPUs what they keep of freed memory."""
        self._call("free_cached")

    def push_weights(self, folder: Path) -> None:
        """Write the whole model to ``folder`` of this host, by way of the store, which is all that the ranks share."""
        store = open_store(self._spec.store)
        files = self.upload_weights(self._scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            (folder / file.name).write_bytes(store.read(file.key))
            store.delete(file.key)

    def get_status(self) -> dict[str, Any]:
        """That of the leading rank, and the number of ``ranks``."""
        if not self.alive():
            return {"ready": False, "ranks": 0}
        results = self._call("get_status")
        return {**next(result for result in results if result), "ranks": len(results)}

    def cleanup(self) -> None:
        """End the ranks. Idempotent."""
        if self._channel is not None:
            self._channel.close()
        if self._group is not None:
            self._group.kill()
        self._group = self._channel = self._connection = None
        self._pids = {}

    # How ----------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._log = self._logs / f"trainer-{next(self._starts)}.log"
        folder = Path(tempfile.mkdtemp(prefix="forge-ranks-"))  # readable by this user alone
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / "socket"))
                listener.listen(1)
                environment = {**rank_environment(self._rendezvous, self._options), **self._environment}
                self._group = ChildGroup(
                    "trainer ranks",
                    torchrun(self._rendezvous, self._ranks, self._options),
                    log=self._log,
                    env={**environment, SOCKET: str(folder / "socket")},
                )
                deadline = time.monotonic() + self._options.init_timeout_s
                self._wait(listener, deadline=deadline, stop=self._stop)
                self._connection = listener.accept()[0]
        finally:
            shutil.rmtree(folder)
        self._channel = Channel(self._connection)
        ready = self._receive(deadline=deadline, stop=self._stop)
        assert isinstance(ready, Ready)
        self._pids = ready.pids

    def _first(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """The leading rank's result (the others return None)."""
        return next((r for r in self._call(method, *arguments, **keywords) if r is not None), None)

    def _shares(self, method: str, *arguments: Any) -> tuple[File, ...]:
        return tuple(file for share in self._call(method, *arguments) for file in share)

    def _call(
        self,
        method: str,
        *arguments: Any,
        stop: StopToken | None = None,
        spec: TrainerSpec | None = None,
        **keywords: Any,
    ) -> list[Any]:
        if not self.alive():
            self._end(ChildDied(f"the trainer's ranks are gone: its next use starts them again (log: {self._log})"))
        assert self._channel is not None
        number, state = next(self._numbers), None if self._loss is None else self._loss.state()
        try:
            self._channel.send(Command(number, method, arguments, keywords, state, spec))
        except OSError:
            self._died()
        answer = self._receive(stop=stop, number=number if method in STOPPABLE else None)
        assert isinstance(answer, Answer)
        assert answer.number == number
        for rank, metrics in enumerate(answer.recorded):
            replay(metrics, rank)
        if answer.stopped:
            raise Stopped((stop and stop.reason) or "unknown")
        return answer.results

    def _receive(
        self, *, deadline: float | None = None, stop: StopToken | None = None, number: int | None = None
    ) -> Any:
        assert self._channel is not None
        assert self._connection is not None
        self._wait(self._connection, deadline=deadline, stop=stop, number=number)
        try:
            message = self._channel.receive()
        except (EOFError, OSError):
            self._died()
        if isinstance(message, Failed):
            self._failed(message)
        return message

    def _wait(
        self,
        source: socket.socket,
        *,
        deadline: float | None = None,
        stop: StopToken | None = None,
        number: int | None = None,
    ) -> None:
        """Return when ``source`` has something to read; raise when a rank is gone or time is up. A stop is forwarded to
        the command ``number``; without one it ends the ranks."""
        while not select.select([source], [], [], POLL_S)[0]:
            if self._group is None or not self._group.alive() or self._missing():
                self._died()
            if deadline is not None and time.monotonic() > deadline:
                limit = f"comm.init_timeout_s={self._options.init_timeout_s:g}"
                self._end(ChildDied(f"the trainer's ranks did not meet within {limit}; {self._log_end()}"))
            if stop is not None and stop.is_set():
                reason, stop = stop.reason or "unknown", None
                if number is None or self._channel is None:
                    self._end(Stopped(reason))
                self._channel.send(StopCommand(number, reason))

    def _missing(self) -> list[int]:
        """Ranks of this host whose process is gone."""
        return [rank for rank, pid in self._pids.items() if not _exists(pid)]

    def _failed(self, failed: Failed) -> NoReturn:
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            if self._missing():
                self._died()
            time.sleep(POLL_S / 2)
        kind = RankOutOfMemory if failed.out_of_memory else RankError
        self._end(kind(f"rank {failed.rank} of the trainer: {failed.error}{_limit(failed.error)}; {self._log_end()}"))

    def _died(self) -> NoReturn:
        deadline = time.monotonic() + SETTLE_S
        while not (found := self._first_dead()) and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
        limit = _limit(self._group.tail(TORCH_LINES)) if self._group and self._pids else ""
        who = found or "the ranks of the trainer"
        self._end(ChildDied(f"{who} ended without being asked to{limit}; {self._log_end()}"))

    def _first_dead(self) -> str | None:
        """The rank that ended first, by the launcher's log."""
        names = {pid: rank for rank, pid in self._pids.items()}
        for status, pid in _ENDED.findall(self._group.tail(TORCH_LINES) if self._group else ""):
            if int(pid) in names:
                how = f"signal {-int(status)}" if int(status) < 0 else f"exit status {status}"
                return f"rank {names[int(pid)]} of the trainer (process {pid}, {how})"
        return None

    def _log_end(self) -> str:
        return f"the end of {self._log}:\n{self._group.tail(LOG_LINES) if self._group else ''}"

    def _end(self, error: Exception) -> NoReturn:
        self.cleanup()
        raise error


def _limit(text: str) -> str:
    """The setting to name where torch says that a rank has waited for too long."""
    return " (a rank waited for another for comm.timeout_s)" if _WAITED.search(text) else ""


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
