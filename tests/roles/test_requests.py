"""What generators ask of the store while others have the work: nothing that they know already."""

from __future__ import annotations

import uuid
from typing import Any

from forge_core.runs.claims import LOOKS, Claims
from forge_core.store import Store, open_store
from tests.roles.test_claims import RUN, SHARD, Clock, beat

TIMEOUT_S = 60.0


class Asked:
    """A backend that counts the requests to it."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.requests = backend, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += name in ("create", "read", "exists", "write")
        return getattr(self._backend, name)


def counted() -> tuple[Store, Asked]:
    asked = Asked(open_store(f"memory://{uuid.uuid4().hex}")._backend)
    return Store(asked), asked  # type: ignore[arg-type]


def test_a_shard_that_a_live_generator_holds_is_not_asked_for_at_every_look():
    (store, asked), clock = counted(), Clock()
    beat(store, "a", 1)
    assert Claims(store, RUN, "a", timeout_s=TIMEOUT_S, clock=clock).take(SHARD)
    other = Claims(store, RUN, "b", timeout_s=TIMEOUT_S, clock=clock)
    assert not other.held(SHARD)
    assert not other.take(SHARD)
    assert other.held(SHARD)
    asked.requests = 0
    for _ in range(100):
        assert not other.take(SHARD)
        clock.now += TIMEOUT_S / LOOKS / 101
    assert asked.requests == 0
    clock.now += TIMEOUT_S / LOOKS
    assert not other.take(SHARD)
    assert asked.requests == 2, "the next claim, and the holder's heartbeat: claims that are known are not read again"


def test_a_claim_that_its_holder_gave_back_is_taken_within_a_fifth_of_the_timeout():
    (store, _), clock = counted(), Clock()
    beat(store, "a", 1)
    assert Claims(store, RUN, "a", timeout_s=TIMEOUT_S, clock=clock).take(SHARD)
    other = Claims(store, RUN, "b", timeout_s=TIMEOUT_S, clock=clock)
    assert not other.take(SHARD)
    beat(store, "a", 2, ended=True)
    clock.now += TIMEOUT_S / LOOKS
    assert other.take(SHARD)


def test_generators_begin_a_batch_at_shards_of_their_own():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    turns = {Claims(store, RUN, f"generator-{n}", timeout_s=TIMEOUT_S).turn % 64 for n in range(64)}
    assert len(turns) > 30
    again = Claims(store, RUN, "generator-0", timeout_s=TIMEOUT_S)
    assert again.turn == Claims(store, RUN, "generator-0", timeout_s=TIMEOUT_S).turn
