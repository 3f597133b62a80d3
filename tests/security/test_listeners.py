"""Servers that Forge starts listen on the loopback interface, unless told otherwise."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.arguments import parser
from flows.server import ServerHandle
from forge_core.training.launch import RankOptions, Rendezvous, rank_environment, torchrun

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
RANK = """
import sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    open(sys.argv[1], "w").close()
time.sleep(600)
"""


def listening(pid: int) -> list[str]:
    """The addresses on which a process and all that it started accept connections."""
    process = psutil.Process(pid)
    found = []
    for one in [process, *process.children(recursive=True)]:
        found += [c.laddr.ip for c in one.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return found


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[int]:
    """Two ranks that have met, started as the trainer starts its own: the pid of their launcher."""
    (tmp_path / "rank.py").write_text(RANK)
    rendezvous, options = Rendezvous("listeners"), RankOptions()
    command = torchrun(rendezvous, 2, options)
    command = [
        *command[: command.index("forge_core.training.rank_main") - 1],
        str(tmp_path / "rank.py"),
        str(tmp_path / "met"),
    ]
    environment = {**os.environ, **{k: v for k, v in rank_environment(rendezvous, options).items() if v}}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "met").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    yield process.pid
    os.killpg(process.pid, 9)
    for child in psutil.Process().children(recursive=True):
        if child.pid != process.pid and str(tmp_path) in " ".join(child.cmdline()):
            child.kill()
    process.wait()


@pytest.mark.engine
def test_the_ranks_of_a_trainer_and_their_launcher(ranks: int) -> None:
    found = listening(ranks)
    assert len(found) >= 2, "the launcher serves a rendezvous and a store"
    assert set(found) <= LOOPBACK


@pytest.mark.server
def test_the_prefect_server(prefect_server: ServerHandle) -> None:
    found = listening(os.getpid())
    assert found
    assert set(found) <= LOOPBACK


def test_forge_server_listens_elsewhere_only_when_told_so() -> None:
    assert parser().parse_args(["server"]).host == "127.0.0.1"
