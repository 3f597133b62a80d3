"""Which rollout shards are finished, so that an engine that samples with a pinned version moves on in time."""

from __future__ import annotations

import threading

from forge_core.stop import StopToken


class Untracked:
    """Stands in for a ShardTracker where shards of one batch are sampled by several processes, each in order."""

    def begin(self, batch: int) -> None:
        pass

    def finish(self, batch: int, shard: int) -> None:
        pass

    def wait_before(self, batch: int, stop: StopToken) -> None:
        pass


class ShardTracker:
    """Which rollout shards this process has finished; lets a pinned version wait for all older work.

    With ``rollout.version: oldest`` the engine may move on only when every batch that samples an older version is
    generated.
    """

    def __init__(self, shards: int) -> None:
        self._shards, self._first = shards, 0
        self._finished: dict[int, set[int]] = {}
        self._changed = threading.Condition()

    def begin(self, batch: int) -> None:
        """Batches before ``batch`` were finished before this process started."""
        self._first = batch

    def finish(self, batch: int, shard: int) -> None:
        with self._changed:
            self._finished.setdefault(batch, set()).add(shard)
            while len(self._finished.get(self._first, ())) == self._shards:
                del self._finished[self._first]
                self._first += 1
            self._changed.notify_all()

    def wait_before(self, batch: int, stop: StopToken) -> None:
        """Wait until every shard of every batch before ``batch`` is finished."""
        with self._changed:
            while self._first < batch:
                stop.check()
                self._changed.wait(0.2)
