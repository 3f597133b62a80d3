"""One rank of a trainer, as ``torchrun`` starts it (see ``launch.torchrun``).

Invariants:
- All ranks run the same commands in the same order. The leading rank, the first one on the owner's host, gets them from
  the owner and broadcasts them; what each rank returns is gathered there.
- An error of any rank reaches the owner at once, through the launcher's key-value store, even while other ranks wait
  for the failed one in a collective. After an error no rank does anything more.
- No wait is endless: the leading rank repeats itself while nothing is to be done, so a lost host ends the others too.
- A rank whose owner is gone ends.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from forge_core.algorithms.losses.base import Loss as AdaptiveLoss
from forge_core.collector import collect_seldom
from forge_core.devices import work_on
from forge_core.engine_thread import set_torch_state
from forge_core.observability.memory import OutOfMemory
from forge_core.observability.metrics import Outbox
from forge_core.processes.channel import Channel
from forge_core.stop import Stopped, StopToken
from forge_core.store import open_store
from forge_core.training.rank_protocol import SHARED_OUT, SOCKET, STOPPABLE, Answer, Command, Failed, Ready, StopCommand
from forge_core.training.stored import StoredTrainer, TrainerSpec

PING_S = 10.0  # the leading rank broadcasts at least this often
WATCH_S = 0.1  # between two looks at what other ranks reported
LINGER_S = 5.0  # a failed rank waits this long to be ended, so that its exit is not taken for the failure


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    path = os.environ.pop(SOCKET, None)
    owner = Owner(path) if path and os.environ["LOCAL_RANK"] == "0" else None
    set_torch_state(args.threads)
    peers = Peers(args, leads=owner is not None)
    board = Board(peers.rank)
    try:
        if owner is not None:
            board.watch(owner.send)
            owner.send(Ready(peers.pids, peers.ranks))
        serve(peers, owner, args.threads)
    except BaseException as error:
        traceback.print_exc()
        board.report(error)
        time.sleep(LINGER_S)
        os._exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--init-timeout-s", type=float, required=True)
    return parser


def serve(peers: Peers, owner: Owner | None, threads: int) -> None:
    """Run commands until this process is ended."""
    trainer: RankTrainer | None = None
    outbox = Outbox()
    while True:
        given = owner.next_command() if owner is not None else None
        command = peers.broadcast(given and given[0])
        if command is None:
            continue
        token = given[1] if given else StopToken()
        if command.spec is not None:
            trainer = RankTrainer(command.spec, peers, threads)
        result, stopped = run(trainer, command, token)
        told = result if owner is not None or command.method in SHARED_OUT else None
        answers = peers.gather((told, outbox.taken()))
        if owner is not None:
            results, recorded = zip(*answers, strict=True)
            owner.send(Answer(command.number, list(results), stopped, recorded))


def run(trainer: RankTrainer | None, command: Command, token: StopToken) -> tuple[Any, bool]:
    """The result of a command, or that it was stopped (by all ranks at the same micro-batch)."""
    if trainer is None:
        raise RuntimeError(f"{command.method} came before setup")
    if command.loss_state is not None:
        cast(AdaptiveLoss, trainer.loss).load_state(command.loss_state)
    stop = {"stop": token} if command.method in STOPPABLE else {}
    try:
        return getattr(trainer, command.method)(*command.arguments, **command.keywords, **stop), False
    except Stopped:
        return None, True


class RankTrainer(StoredTrainer):
    """The trainer of one rank; the ranks of a host share local copies of stored objects."""

    def __init__(self, spec: TrainerSpec, peers: Peers, threads: int) -> None:
        self._peers = peers
        store, loss = open_store(spec.store), spec.make_loss()
        super().__init__(store, spec.model, spec.settings, loss, device=str(peers.device), threads=threads)

    def folder(self, prefix: str) -> Path:
        first = os.environ["LOCAL_RANK"] == "0"
        return Path(self._peers.from_first_of_host(str(super().folder(prefix)) if first else None))


class Peers:
    """The ranks as one of them sees them. ``pids`` are those of this host. Commands and results have groups of their
    own beside the collectives of training: a rank takes a command within ``--timeout-s``, or it is lost; a result may
    take as long as loading and storing take."""

    def __init__(self, args: argparse.Namespace, *, leads: bool) -> None:
        patient = timedelta(seconds=max(args.init_timeout_s, args.timeout_s, 3 * PING_S))
        self.device = _own_device(args.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", timeout=patient)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._commands, self._results = (dist.new_group(backend="gloo", timeout=patient) for _ in range(2))
        host = int(os.environ["GROUP_RANK"])
        everyone = self._all_gather((leads, host, os.getpid()))
        self._leader = [leading for leading, _, _ in everyone].index(True)
        self._hosts = [number for _, number, _ in everyone]
        self._host = host
        self.pids = {rank: pid for rank, (_, number, pid) in enumerate(everyone) if number == host}
        if leads:
            _set_pg_timeout(timedelta(seconds=args.timeout_s), self._commands)

    def broadcast(self, command: Command | None) -> Command | None:
        """The leading rank's ``command``, on every rank."""
        box = [command]
        dist.broadcast_object_list(box, src=self._leader, group=self._commands)
        return box[0]

    def gather(self, result: Any) -> list[Any]:
        """The results of all ranks on the leading one; elsewhere an empty list."""
        results = [None] * self.ranks if self.rank == self._leader else None
        dist.gather_object(result, results, dst=self._leader, group=self._results)
        return results or []

    def from_first_of_host(self, value: Any) -> Any:
        """What the first rank of this host gave."""
        return self._all_gather(value)[self._hosts.index(self._host)]

    def _all_gather(self, value: Any) -> list[Any]:
        values = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._results)
        return values


def _own_device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    work_on(device)
    return device


class Owner:
    """The leading rank's end of the socket. A thread reads it, so that a stop arrives while a command runs."""

    def __init__(self, path: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._channel = Channel(connection)
        self._commands: queue.SimpleQueue[tuple[Command, StopToken]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="owner", daemon=True).start()

    def send(self, message: Ready | Answer | Failed) -> None:
        self._channel.send(message)

    def next_command(self) -> tuple[Command, StopToken] | None:
        """The next command and its stop token; None when there was none for a while."""
        try:
            return self._commands.get(timeout=PING_S)
        except queue.Empty:
            return None

    def _read(self) -> None:
        number, token = -1, StopToken()
        while True:
            try:
                message = self._channel.receive()
            except (EOFError, OSError):
                os._exit(1)  # the owner is gone
            if isinstance(message, Command):
                number, token = message.number, StopToken()
                self._commands.put((message, token))
            elif isinstance(message, StopCommand) and message.number == number:
                token.set(message.reason)


class Board:
    """Where a failed rank says so: the key-value store of the launcher, over a connection of its own."""

    def __init__(self, rank: int) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._rank = rank
        self._store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        self._key = f"forge/{os.environ['TORCHELASTIC_RUN_ID']}/failed"

    def report(self, error: BaseException) -> None:
        """Only the first report stands: the errors that follow from it are of no interest."""
        text = "".join(traceback.format_exception_only(error)).strip()
        try:
            self._store.compare_set(self._key, "", json.dumps([self._rank, text, isinstance(error, OutOfMemory)]))
        except Exception as gone:  # the launcher ended: its owner knows already
            print(f"cannot report the error: {gone}", file=sys.stderr)

    def watch(self, tell: Callable[[Failed], None]) -> None:
        """Call ``tell`` once with the first report of any rank."""
        threading.Thread(target=self._watch, args=(tell,), name="board", daemon=True).start()

    def _watch(self, tell: Callable[[Failed], None]) -> None:
        while not self._store.check([self._key]):
            time.sleep(WATCH_S)
        tell(Failed(*json.loads(self._store.get(self._key))))


if __name__ == "__main__":
    collect_seldom()
    main()
