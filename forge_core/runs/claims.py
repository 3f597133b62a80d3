"""Claims: which process works on which shard, of several that could. Advice, never safety (DESIGN section 2).

Invariants:
- Exactly one process gets claim ``n`` of a shard (``put_new``). When its holder gives no sign of life for
  ``timeout_s`` on the observer's own clock, or has said that it ended, anyone may take claim ``n + 1``.
- Two processes may still work on one shard (a holder that was only slow): the first manifest wins, so nothing is lost
  and nothing counted twice.
- Whoever was found alive is not asked for again before a fifth of ``timeout_s`` (or what is left of it) has passed:
  idle processes would otherwise read every claim and heartbeat at every look.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable

from forge_core.runs.heartbeat import Unchanged, read_heartbeat
from forge_core.store import NotFound, Store, layout

NO_CLAIM = (-1, None)
LOOKS = 5  # at a holder, in the time after which it loses its claim


class Claims:
    """The claims of the process ``name``, which has a heartbeat of that name."""

    def __init__(
        self, store: Store, run_id: str, name: str, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._run_id, self._name, self._timeout_s = store, run_id, name, timeout_s
        self.turn = zlib.crc32(name.encode())  # where this process begins to look; equal in every run of it
        self._clock, self._unchanged = clock, Unchanged(clock)
        self._newest: dict[str, tuple[int, str | None]] = {}  # folder -> number and holder of the newest claim known
        self._look_again: dict[str, float] = {}  # folder that another holds -> when to look

    def held(self, folder: str) -> bool:
        """Whether another process is known to hold ``folder``. Asks nobody."""
        return self._clock() < self._look_again.get(folder, -math.inf)

    def take(self, folder: str) -> bool:
        """Claim the shard whose claims lie in ``folder``; False while it is another's."""
        if self.held(folder):
            return False
        holder = self._holder(folder)
        if holder == self._name:
            return True
        left_s = 0.0 if holder is None else self._timeout_s - self._silence(folder, holder)
        if left_s > 0.0:
            self._look_again[folder] = self._clock() + min(left_s, self._timeout_s / LOOKS)
            return False
        number = self._newest.get(folder, NO_CLAIM)[0] + 1
        won = self._store.put_new_json(layout.claim(folder, number), {"worker": self._name})
        if won:
            self._newest[folder] = (number, self._name)
        return won

    def _holder(self, folder: str) -> str | None:
        """Who has the newest claim. Claims are only ever added, so the last known one is where to look on from."""
        number, holder = self._newest.get(folder, NO_CLAIM)
        while (claim := self._read(folder, number + 1)) is not None:
            number, holder = self._newest[folder] = number + 1, claim
        return holder

    def _read(self, folder: str, number: int) -> str | None:
        try:
            return str(self._store.read_json(layout.claim(folder, number))["worker"])
        except NotFound:
            return None

    def _silence(self, folder: str, holder: str) -> float:
        """Seconds since the last sign of life of ``holder``; infinite when it has said that it ended."""
        beat = read_heartbeat(self._store, self._run_id, holder)
        if beat is not None and beat["ended"]:
            return math.inf
        return self._unchanged.seconds((folder, holder), None if beat is None else beat["beat"])
