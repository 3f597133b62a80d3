"""A child process that speaks vLLM's part of the protocol without vLLM, and fails as it is told to.

    python -m tests.generation.stand_in FOLDER FD

FOLDER/faults has words, one for each start (the last one for all further starts): ``well`` does what it is asked,
``endless`` ends requests only when told to, ``oom`` dies while it generates, ``update`` dies when it gets new weights,
``abort`` when it is told to end requests, ``silent`` never does so, ``start`` cannot start, ``late`` starts when FOLDER
has a file ``go``. FOLDER/starts gets the word and the pid of each start.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from forge_core.processes.channel import Channel


def main(folder: Path, fd: int) -> None:
    channel = Channel(socket.socket(fileno=fd))
    start = channel.receive()
    fault = next_fault(folder)
    version = start["version"]
    if fault == "start":
        die(channel, "RuntimeError: no such device")
    while fault == "late" and not (folder / "go").exists():
        time.sleep(0.02)
    channel.send(("ready", {"max_model_len": 64}))
    while True:
        kind, body = channel.receive()
        if kind == "generate" and fault == "oom":
            print("(EngineCore pid=1) ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
            die(channel, "RuntimeError: the process of vLLM's engine is gone")
        elif kind == "generate" and fault in ("well", "late", "update"):
            for request in body:
                done(channel, request["id"], "stop", version)
        elif kind == "abort" and fault == "abort":
            die(channel, "RuntimeError: told to end")
        elif kind == "abort" and fault != "silent":
            for name in body:
                done(channel, name, "abort", version)
        elif kind == "shutdown":
            return
        elif kind == "update":
            if fault == "update":
                os._exit(1)
            version = body["version"]
            channel.send(("reply", (body["call"], {"load": 0.1})))
        elif kind in ("sleep", "wake"):
            channel.send(("reply", (body["call"], None)))


def next_fault(folder: Path) -> str:
    with (folder / "starts").open("a") as starts:
        fcntl.flock(starts, fcntl.LOCK_EX)  # engines start side by side
        words = (folder / "faults").read_text().split()
        (folder / "faults").write_text(" ".join(words[1:] or words))
        starts.write(f"{words[0]} {os.getpid()}\n")
    return words[0]


def done(channel: Channel, name: str, reason: str, version: int) -> None:
    result: dict[str, Any] = {"id": name, "tokens": [5], "logprobs": [-1.0], "reason": reason, "spans": [(version, 0)]}
    channel.send(("done", [result]))


def die(channel: Channel, reason: str) -> NoReturn:
    sys.stdout.flush()
    channel.send(("died", reason))
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
