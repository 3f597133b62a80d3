"""Tokenizing in this process or in several others, always in order.

Guarantees:
- ``submit`` and ``result`` give the same documents whatever the number of workers.
- Workers end with ``close``, and by themselves within seconds of a parent that was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Protocol

from forge_core.data.documents import Drawn
from forge_core.data.encoding import Document, Encoder

Job = tuple[Drawn, str]  # an example and its masking
_encoder: Encoder | None = None  # of a worker process


class EncodingPool(Protocol):
    """``submit`` returns a call that waits for the documents of ``jobs``. ``ahead``: calls worth having open."""

    ahead: int

    def submit(self, jobs: Sequence[Job]) -> Callable[[], list[Document]]: ...
    def close(self) -> None: ...


def encoding_pool(encoder: Encoder, workers: int) -> EncodingPool:
    """A pool of ``workers`` processes; 0: this one."""
    return _Processes(encoder, workers) if workers else _Here(encoder)


class _Here:
    ahead = 1

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def submit(self, jobs: Sequence[Job]) -> Callable[[], list[Document]]:
        return lambda: _encode_all(self._encoder, jobs)

    def close(self) -> None:
        """Nothing runs."""


class _Processes:
    def __init__(self, encoder: Encoder, workers: int) -> None:
        self.ahead = 4 * workers
        context = multiprocessing.get_context("spawn")  # threads of this process, such as torch's, forbid a fork
        self._pool = ProcessPoolExecutor(workers, context, _begin, (encoder, os.getpid()))

    def submit(self, jobs: Sequence[Job]) -> Callable[[], list[Document]]:
        return self._pool.submit(_encode_here, jobs).result

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _begin(encoder: Encoder, parent: int) -> None:
    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: a killed one tells nobody, and its pipes stay open here."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _encode_here(jobs: Sequence[Job]) -> list[Document]:
    assert _encoder is not None
    return _encode_all(_encoder, jobs)


def _encode_all(encoder: Encoder, jobs: Sequence[Job]) -> list[Document]:
    return [encoder(drawn.example, masking) for drawn, masking in jobs]
