"""``torchrun`` for the ranks of one host: its key/value stores listen on the loopback interface only.

``python -m forge_core.training.loopback_run`` takes the arguments of ``torchrun``. Torch binds the stores of a launcher
to every interface, without a password, and the rendezvous keeps its state in one of them as a pickle: whoever
reaches the port could run code. Here they get a socket that is bound already.
"""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
_TCPStore = dist.TCPStore


class LoopbackStore(_TCPStore):
    """A ``TCPStore`` whose server, if it is one, listens on loopback."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, **options: Any
    ) -> None:
        if is_master:
            listener = socket.create_server((LOOPBACK, port))
            port = listener.getsockname()[1]
            options |= {"master_listen_fd": listener.detach(), "multi_tenant": False}
        super().__init__(host_name, port, world_size, is_master, **options)


def main() -> None:
    dist.TCPStore = LoopbackStore  # type: ignore[assignment,misc]  # before the modules that take it from there are imported
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
