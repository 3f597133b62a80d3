"""Claims: which generator samples which shard. Advice, never safety (DESIGN section 2).

Invariants:
- Exactly one process gets claim ``n`` of a shard (``put_new``). When its holder gives no sign of life for
  ``timeout_s`` on the observer's own clock, or has said that it ended, anyone may take claim ``n + 1``.
- Two processes may still sample one shard (a holder that was only slow): the first manifest wins, so nothing is lost
  and nothing counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from forge_core.runs.heartbeat import Unchanged, read_heartbeat
from forge_core.store import NotFound, Store, layout


class Claims:
    """The claims of the process ``name``, which has a heartbeat of that name."""

    def __init__(
        self, store: Store, run_id: str, name: str, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._run_id, self._name, self._timeout_s = store, run_id, name, timeout_s
        self._unchanged = Unchanged(clock)
        self._newest: dict[str, int] = {}  # folder -> number of the newest claim known

    def take(self, folder: str) -> bool:
        """Claim the shard whose claims lie in ``folder``; False while it is another's."""
        holder = self._holder(folder)
        if holder is not None and not self._gone(folder, holder):
            return holder == self._name
        number = self._newest.get(folder, -1) + 1
        won = self._store.put_new_json(layout.claim(folder, number), {"worker": self._name})
        if won:
            self._newest[folder] = number
        return won

    def _holder(self, folder: str) -> str | None:
        """Who has the newest claim. Claims are only ever added, so the last known one is where to look on from."""
        holder, number = None, self._newest.get(folder, 0)
        while (claim := self._read(folder, number)) is not None:
            holder, self._newest[folder] = claim, number
            number += 1
        return holder

    def _read(self, folder: str, number: int) -> str | None:
        try:
            return str(self._store.read_json(layout.claim(folder, number))["worker"])
        except NotFound:
            return None

    def _gone(self, folder: str, holder: str) -> bool:
        beat = read_heartbeat(self._store, self._run_id, holder)
        if beat is not None and beat["ended"]:
            return True
        seen = None if beat is None else beat["beat"]
        silent = self._unchanged.seconds((folder, holder), seen)
        return holder != self._name and silent >= self._timeout_s
