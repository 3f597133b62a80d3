"""Services: routing, sessions, deaths and restarts, concurrency, metrics and the verbs."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge_core import gpu_leases
from forge_core.processes import ChildGroup
from forge_core.services import (
    ActorDied,
    ActorError,
    ForgeActor,
    RemoteTraceback,
    ServiceInterface,
    ServiceUnavailable,
    shutdown,
)
from forge_core.services.config import ServiceConfig
from forge_core.services.gpus import GpuPool
from forge_core.services.metrics import ReplicaMetrics
from forge_core.services.routing import LeastLoadedRouter, RoundRobinRouter, SessionRouter
from tests.services.actors import BadInit, BadSetup, Counter, DiesWhenStarted, Ends, Meeting, Refused

pytestmark = pytest.mark.server

FAST = {"restart_backoff_s": 0.05, "health_poll_rate": 0.05}


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``test`` and end what it started; no process may be left."""

    async def whole() -> None:
        try:
            await test()
        finally:
            await shutdown()

    before = set(psutil.Process().children())
    asyncio.run(whole())
    assert set(psutil.Process().children()) <= before


async def eventually(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def healthy(service: ServiceInterface) -> int:
    return service.get_metrics().service.healthy_replicas


async def pids(service: ServiceInterface) -> list[int]:
    return [place[0] for place in await service.place.fanout()]


def test_stateless_calls_go_round_and_fanout_reaches_every_replica() -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=3).as_service(10)
        assert await service.increment.fanout() == [11, 11, 11]
        for _ in range(6):
            await service.increment.route()
        assert await service.call_all("current") == [13, 13, 13]
        assert len(set(await pids(service)) | {os.getpid()}) == 4

    run(test)


def test_a_session_stays_on_its_replica_and_tasks_have_their_own() -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=2).as_service()

        async def four() -> tuple[list[int], int]:
            async with service.session():
                return [await service.increment.route() for _ in range(4)], (await service.place.route())[0]

        (first, here), (second, there) = await asyncio.gather(four(), four())
        assert here != there
        assert first == second == [1, 2, 3, 4]
        session = await service.start_session()
        assert await service.increment.route(sess_id=session) == await service.increment.route(sess_id=session) - 1
        assert service.get_metrics().service.total_sessions == 1
        await service.terminate_session(session)
        await service.terminate_session("never heard of")
        assert service.get_metrics().service.total_sessions == 0

    run(test)


def test_idle_sessions_are_spread_over_the_replicas() -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=3, threads=True).as_service()
        for _ in range(9):  # one after the other: at the time of each, no replica has anything to do
            await service.current.route(sess_id=await service.start_session())
        replicas = service.get_metrics().replicas.values()
        assert [replica.assigned_sessions for replica in replicas] == [3, 3, 3]

    run(test)


def test_a_request_while_the_death_of_its_replica_is_noticed_goes_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = ChildGroup.errors

    def slow(group: ChildGroup, count: int = 5) -> list[str]:
        time.sleep(0.5)  # in the thread that notices: a log on a slow disk
        return errors(group, count)

    async def test() -> None:
        service = await Counter.options(num_replicas=2, max_retries=1, **FAST).as_service()
        victim = (await pids(service))[0]
        monkeypatch.setattr(ChildGroup, "errors", slow)
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 0.8
        while time.monotonic() < deadline:
            await asyncio.gather(*(service.place.route() for _ in range(4)))
            await asyncio.sleep(0.01)
        await eventually(lambda: healthy(service) == 2)

    run(test)


def test_many_sessions_at_once_outlive_the_deaths_of_replicas() -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=3, max_retries=3, **FAST).as_service()
        seen: list[list[int]] = []

        async def one() -> None:
            async with service.session():
                places = []
                for _ in range(20):
                    places.append((await service.place.route())[0])
                    await asyncio.sleep(0.05)
            seen.append(places)

        async def kill_two() -> None:
            for victim in (await pids(service))[:2]:
                await asyncio.sleep(0.3)
                os.kill(victim, signal.SIGKILL)

        await asyncio.gather(kill_two(), *(one() for _ in range(100)))
        moves = [sum(a != b for a, b in itertools.pairwise(places)) for places in seen]
        assert sorted(map(len, seen)) == [20] * 100, "no request was lost, none failed"
        assert 30 <= sum(moves) <= 200, "sessions of a replica that died move, once for each death, and no others do"
        assert max(moves) <= 2
        await eventually(lambda: healthy(service) == 3)
        summary = service.get_metrics()
        assert [replica.active_requests + replica.queue_depth for replica in summary.replicas.values()] == [0, 0, 0]
        assert summary.service.total_sessions == 0

    run(test)


def only_in_this_process(monkeypatch: pytest.MonkeyPatch) -> object:
    module = types.ModuleType("only_in_this_process")
    exec("class Only: pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.Only()


def test_what_an_actor_raises_is_raised_to_the_caller_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=2).as_service()
        with pytest.raises(ValueError, match="no good") as caught:
            await service.fail.route("no good")
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "actors.py" in str(caught.value.__cause__)
        assert "raise ValueError(text)" in str(caught.value.__cause__)
        with pytest.raises(Refused, match=r"no \(7\)") as refused:
            await service.refuse.route()
        assert refused.value.code == 7
        with pytest.raises(ActorError, match="Local: cannot travel"):
            await service.fail_locally.route()
        with pytest.raises(TypeError, match="pickle"):
            await service.unpicklable.route()
        with pytest.raises(ActorError, match="the answer cannot be read here: ModuleNotFoundError"):
            await service.only_here.route()
        with pytest.raises(ModuleNotFoundError, match="only_in_this_process"):
            await service.fail.route(only_in_this_process(monkeypatch))
        with pytest.raises(ValueError, match="all of them"):
            await service.fail.fanout("all of them")
        with pytest.raises(TypeError, match="pickle"):
            await service.current.route(asyncio.get_running_loop())
        assert healthy(service) == 2
        assert [replica.failed_requests for replica in service.get_metrics().replicas.values()] == [5, 4]
        assert await service.increment.fanout() == [1, 1]

    run(test)


@pytest.mark.parametrize("threads", [True, False])
def test_what_would_end_the_callers_event_loop_is_raised_as_an_error_of_the_actor(threads: bool) -> None:
    async def test() -> None:
        service = await Ends.options(threads=threads).as_service()
        for method, why in (
            ("no_more_rows", "StopIteration"),
            ("cancelled", "CancelledError: enough"),
            ("exits", "SystemExit: 3"),
            ("interrupted", "KeyboardInterrupt"),
            ("exits_in_a_coroutine", "SystemExit: 3"),
        ):
            with pytest.raises(ActorError, match=why):
                await asyncio.wait_for(getattr(service, method).route(), 20)
            assert await asyncio.wait_for(service.still_there.route(), 20)

    run(test)


def test_a_request_whose_replica_dies_is_done_elsewhere_and_the_replica_comes_back(tmp_path: Path) -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=2, **FAST).as_service(5)
        before = await pids(service)
        survivor = await service.die_unless.route(tmp_path / "died")
        assert survivor in before
        await eventually(lambda: healthy(service) == 2)
        after = await pids(service)
        assert len(set(before) & set(after)) == 1
        assert sorted(await service.current.fanout()) == [5, 5]
        assert sum(replica.restarts for replica in service.get_metrics().replicas.values()) == 1

    run(test)


def test_a_session_moves_when_its_replica_dies(tmp_path: Path) -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=2, restart_backoff_s=30.0).as_service()
        async with service.session():
            first = (await service.place.route())[0]
            second = await service.die_unless.route(tmp_path / "died")
            assert second != first
            assert (await service.place.route())[0] == second

    run(test)


def test_tries_are_bounded() -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=3, max_retries=1, restart_backoff_s=30.0).as_service()
        with pytest.raises(ActorDied, match=r"Counter_[012] ended"):
            await service.die.route()
        assert healthy(service) == 1

    run(test)


def test_requests_wait_for_the_only_replica_to_come_back() -> None:
    async def test() -> None:
        service = await Counter.options(max_retries=0, **FAST).as_service()
        with pytest.raises(ActorDied):
            await service.die.route()
        assert await service.increment.route() == 1
        with pytest.raises(ActorDied):
            await service.die.route()
        assert await service.increment.fanout() == [1]

    run(test)


def test_restarts_have_growing_pauses_and_an_end(tmp_path: Path) -> None:
    async def test() -> None:
        settings = {"restart_backoff_s": 0.1, "max_restarts": 3, "max_retries": 0}
        service = await DiesWhenStarted.options(**settings).as_service(tmp_path / "mark")
        start = time.monotonic()
        with pytest.raises(ActorDied):
            await service.die.route()
        with pytest.raises(ServiceUnavailable, match="DiesWhenStarted_0 is FAILED"):
            await service.die.route()
        assert time.monotonic() - start > 0.1 + 0.2 + 0.4
        assert service.get_metrics_summary()["replicas"][0]["state"] == "FAILED"

    run(test)


def test_a_fanout_leaves_no_replica_out_silently(tmp_path: Path) -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=2, **FAST).as_service()
        with pytest.raises(ActorDied):
            await service.die.fanout()
        with pytest.raises(ActorDied):
            await service.die_unless.fanout(tmp_path / "died")  # one of the two has an answer
        assert await service.increment.fanout() == [1, 1]
        gone = await DiesWhenStarted.options(max_restarts=1, restart_backoff_s=0.05).as_service(tmp_path / "mark")
        with pytest.raises(ActorDied):
            await gone.die.fanout()
        with pytest.raises(ServiceUnavailable, match="DiesWhenStarted_0 is FAILED"):
            await gone.die.fanout()

    run(test)


def test_setup_runs_again_after_a_restart_under_the_same_name(tmp_path: Path) -> None:
    async def test() -> None:
        service = await Counter.options(mesh_name="counting", max_retries=0, **FAST).as_service(0, tmp_path / "log")
        for _ in range(2):
            with pytest.raises(ActorDied, match=r"^counting_0 "):
                await service.die.route()
        await service.current.route()
        assert len((tmp_path / "log").read_text().splitlines()) == 3

    run(test)


def test_a_replica_that_answers_no_ping_is_started_again() -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=2, health_timeout_s=1.0, **FAST).as_service()
        (frozen, _) = await pids(service)
        os.kill(frozen, signal.SIGSTOP)
        await eventually(lambda: service.get_metrics().replicas[0].restarts == 1)
        assert frozen not in await pids(service)

    run(test)


def test_a_replica_that_reads_nothing_holds_up_neither_the_caller_nor_the_health_checks() -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=2, health_timeout_s=1.0, **FAST).as_service()
        (frozen, alive) = await pids(service)
        os.kill(frozen, signal.SIGSTOP)
        large = asyncio.create_task(service.echo_size.route("x" * 5_000_000))  # more than a socket takes
        start, longest = time.monotonic(), 0.0
        while not large.done():
            before = time.monotonic()
            await asyncio.sleep(0.02)
            longest = max(longest, time.monotonic() - before)
        assert await large == (5_000_000, alive), "it was done elsewhere"
        assert longest < 0.8
        assert time.monotonic() - start < 10

    run(test)


def test_a_busy_replica_is_not_taken_for_dead() -> None:
    async def test() -> None:
        service = await Counter.options(health_timeout_s=0.5, **FAST).as_service()
        pid = await service.block.route(1.0)
        assert (await service.place.route())[0] == pid

    run(test)


def test_requests_beyond_the_limit_of_a_replica_wait() -> None:
    async def test() -> None:
        service = await Counter.options(replica_max_concurrent_requests=2).as_service()
        calls = asyncio.gather(*(service.wait.route(0.4) for _ in range(5)))
        seen = []

        def full() -> bool:
            metrics = service.get_metrics().replicas[0]
            seen.append((metrics.active_requests, metrics.queue_depth, metrics.capacity_utilization))
            return seen[-1] == (2, 3, 1.0)

        await eventually(full)
        assert max(active for active, _, _ in seen) == 2
        await calls
        assert service.get_metrics().replicas[0].active_requests == 0

    run(test)


def test_plain_methods_take_turns_and_coroutines_run_side_by_side() -> None:
    async def test() -> None:
        counter = await Counter.as_actor()
        await asyncio.gather(*(counter.slow_increment.call_one() for _ in range(8)))
        assert await counter.current.call_one() == 8
        meeting = await Meeting.options(threads=True).as_actor()
        assert max(await asyncio.gather(*(meeting.meet.call_one() for _ in range(4)))) == 4

    run(test)


def test_the_least_loaded_replica_is_chosen_where_that_is_asked_for() -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=2, routing="least_loaded").as_service()
        slow = asyncio.create_task(service.wait.route(0.5))
        await eventually(lambda: service.get_metrics().replicas[0].active_requests == 1)
        places = {(await service.place.route())[0] for _ in range(4)}
        assert places == {(await pids(service))[1]}
        assert not slow.done()
        await slow

    run(test)


def test_an_actor_of_several_processes_answers_by_rank() -> None:
    async def test() -> None:
        actor = await Counter.options(procs=2).as_actor()
        (here, *first), (there, *second) = await actor.place.call()
        assert (first, second) == ([0, 2], [1, 2])
        assert here != there
        assert (await actor.place.choose())[0] in (here, there)
        with pytest.raises(ValueError, match="has 2 ranks: use call or choose"):
            await actor.place.call_one()
        assert await actor.environment.call("RANK") == ["0", "1"]
        assert len(set(await actor.environment.call("MASTER_PORT"))) == 1
        assert await actor.environment.call("CUDA_VISIBLE_DEVICES") == ["-1", "-1"]
        service = await Counter.options(procs=2, return_first_rank_result=False).as_service()
        assert await service.increment.route() == [1, 1]

    run(test)


def test_verbs_of_the_wrong_kind_name_the_right_ones() -> None:
    async def test() -> None:
        service = await Counter.options(threads=True).as_service()
        for verb in ("call_one", "choose", "call", "broadcast"):
            with pytest.raises(NotImplementedError, match=f"You tried to use {verb} on a service: use (route|fanout)"):
                getattr(service.current, verb)()
        actor = await Counter.options(threads=True).as_actor()
        with pytest.raises(NotImplementedError, match="You tried to use route on an actor"):
            actor.current.route()
        with pytest.raises(AttributeError, match="no public method 'missing'; there are block"):
            service.missing  # noqa: B018

    run(test)


def test_options_make_a_new_class_and_leave_the_old_one() -> None:
    small = Counter.options(num_replicas=2, mesh_name="small")
    large = small.options(num_replicas=4, procs=3)
    assert (Counter.settings.num_replicas, Counter.settings.mesh_name) == (1, None)
    assert (small.settings.num_replicas, small.settings.procs) == (2, 1)
    assert (large.settings.num_replicas, large.settings.procs, large.settings.mesh_name) == (4, 3, "small")
    assert issubclass(large, Counter)
    with pytest.raises(TypeError, match="no setting 'replicas'; there are procs"):
        Counter.options(replicas=2)
    for bad in ({"procs": 0}, {"hosts": 2}, {"routing": "random"}, {"threads": True, "procs": 2}):
        with pytest.raises(ValueError):
            Counter.options(**bad)


def test_the_body_of_a_class_gives_settings_that_options_change() -> None:
    class Pair(ForgeActor):
        procs, num_replicas, mesh_name = 2, 3, "pairs"

    class Single(Pair):
        procs = 1

    alone = Pair.options(procs=1, routing="least_loaded")
    for actor, procs in ((Pair, 2), (Single, 1), (alone, 1), (alone.options(num_replicas=3), 1)):
        assert (actor.settings.procs, actor.settings.num_replicas, actor.settings.mesh_name) == (procs, 3, "pairs")
        assert (actor.procs, actor.num_replicas) == (procs, 3)

    class Whole(ForgeActor):
        settings = ServiceConfig(procs=2, routing="least_loaded")
        num_replicas = 3

    assert (Whole.procs, Whole.settings) == (2, ServiceConfig(procs=2, num_replicas=3, routing="least_loaded"))
    assert alone.settings.routing == "least_loaded"
    assert (ForgeActor.procs, ForgeActor.settings.num_replicas) == (1, 1)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("procs", 0, "procs is 0"),
        ("hosts", 2, "hosts is 2"),
        ("procs", len, "Bad.procs is the actor's setting"),
        ("num_replicas", "two", "'two' cannot be one"),
        ("procs", None, "None cannot"),
        ("with_gpus", "no", "'no' cannot"),
        ("procs", True, "True cannot"),
        ("settings", 3, "a ServiceConfig"),
    ],
)
def test_a_class_body_with_a_setting_that_cannot_be_is_refused(name: str, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        type("Bad", (ForgeActor,), {name: value})


def test_two_configurations_of_one_class_run_side_by_side() -> None:
    async def test() -> None:
        one, two = await asyncio.gather(
            Counter.options(threads=True).as_service(1), Counter.options(threads=True, num_replicas=2).as_service(2)
        )
        assert (await one.current.fanout(), await two.current.fanout()) == ([1], [2, 2])

    run(test)


@pytest.mark.parametrize("threads", [True, False])
def test_an_actor_that_cannot_be_made_says_why_and_leaves_nothing(threads: bool) -> None:
    async def test() -> None:
        for actor, why in ((BadInit, "the model is missing"), (BadSetup, "the weights are missing")):
            chosen = actor.options(threads=threads, num_replicas=2)
            for start in (chosen.as_service, chosen.as_actor):
                with pytest.raises(RuntimeError, match=why):
                    await start()

    run(test)


def test_a_class_that_a_child_process_cannot_import_is_refused() -> None:
    class Local(ForgeActor):
        def answer(self) -> int:
            return 42

    async def test() -> None:
        with pytest.raises(ValueError, match=r"cannot be imported by a child process.*options\(threads=True\)"):
            await Local.as_actor()
        actor = await Local.options(threads=True).as_actor()
        assert await actor.answer.call_one() == 42

    run(test)


def test_an_actor_on_threads_raises_like_one_in_a_process() -> None:
    async def test() -> None:
        service = await Counter.options(threads=True).as_service()
        with pytest.raises(ValueError, match="no good") as caught:
            await service.fail.route("no good")
        assert "raise ValueError(text)" in str(caught.value.__cause__)
        assert service.get_metrics().replicas[0].failed_requests == 1

    run(test)


def test_a_stopped_service_and_actor_fail_what_is_at_work_and_what_comes() -> None:
    async def test() -> None:
        service = await Counter.as_service()
        waiting = asyncio.create_task(service.wait.route(60.0))
        await eventually(lambda: service.get_metrics().replicas[0].active_requests == 1)
        await service.shutdown()
        await service.shutdown()
        with pytest.raises((ActorDied, ServiceUnavailable)):
            await waiting
        with pytest.raises(ServiceUnavailable, match="Counter_0 is STOPPED"):
            await service.current.route()
        actor = await Counter.launch()
        await Counter.shutdown(actor)
        with pytest.raises(ActorDied):
            await actor.current.call_one()

    run(test)


def test_a_service_that_is_stopped_while_a_replica_is_started_again_leaves_no_process() -> None:
    async def test() -> None:
        for delay in (0.0, 0.01, 0.03, 0.1):
            service = await Counter.options(restart_backoff_s=0.0, health_poll_rate=0.05, max_retries=0).as_service()
            before = set(psutil.Process().children())
            with pytest.raises(ActorDied):
                await service.die.route()
            await asyncio.sleep(delay)
            await service.shutdown()
            assert not set(psutil.Process().children()) - before

    run(test)


def test_the_summary_has_the_known_keys() -> None:
    async def test() -> None:
        service = await Counter.options(num_replicas=2, threads=True).as_service()
        async with service.session():
            await asyncio.gather(*(service.increment.route() for _ in range(3)))
            with pytest.raises(ValueError):
                await service.fail.route("x")
            summary = service.get_metrics_summary()
        assert summary["service"] == {
            "total_sessions": 1,
            "healthy_replicas": 2,
            "total_replicas": 2,
            "total_request_rate": 4 / 60,
            "avg_queue_depth": 0.0,
            "avg_capacity_utilization": 0.0,
            "sessions_per_replica": 0.5,
        }
        first = summary["replicas"][0]
        known = ("total_requests", "successful_requests", "failed_requests", "active_requests", "queue_depth")
        assert [first[key] for key in known] == [4, 3, 1, 0, 0]
        assert {"request_rate", "avg_latency", "assigned_sessions", "capacity_utilization"} <= first.keys()
        assert summary["replicas"][1]["assigned_sessions"] == 0

    run(test)


class Candidate:
    def __init__(self, idx: int, load: int = 0) -> None:
        self.idx, self.load = idx, load


def test_routers_choose_among_the_healthy() -> None:
    three = [Candidate(0, 5), Candidate(1, 0), Candidate(2, 0)]
    round_robin = RoundRobinRouter()
    assert [round_robin.choose(three).idx for _ in range(4)] == [0, 1, 2, 0]
    assert round_robin.choose(three[2:]).idx == 2
    assert LeastLoadedRouter().choose(three).idx == 1
    assigned: dict[str, int] = {}
    sticky = SessionRouter(LeastLoadedRouter())
    assert [sticky.choose(three, "a", assigned).idx for _ in range(2)] == [1, 1]
    assert sticky.choose([three[0], three[2]], "a", assigned).idx == 2
    assert assigned == {"a": 2}


def test_gpus_are_given_out_once_and_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_leases, "SHARED_MEMORY", tmp_path)
    pool, of_another_process = GpuPool(lambda: ["3", "1", "10"]), GpuPool(lambda: ["1", "3", "10"])
    assert pool.take(1) == ("3",)
    assert pool.take(1) == ("1",)
    with pytest.raises(RuntimeError, match=r"Not enough GPUs available: 2 wanted, 1 free$"):
        pool.take(2)
    with pytest.raises(RuntimeError, match=r"2 wanted, 1 free \(2 in use by other processes of Forge"):
        of_another_process.take(2)
    assert of_another_process.take(0) == ()
    pool.release(("3",))
    pool.release(())
    assert of_another_process.take(1) == ("3",)
    of_another_process.release(("3",))
    assert pool.take(2) == ("3", "10")
    assert gpu_leases.busy(("10", "3", "2")) == ("10", "3")
    pool.release(("3", "10"))
    pool.release(("1",))


def test_rates_and_latencies_of_nothing_are_nothing() -> None:
    metrics = ReplicaMetrics()
    assert (metrics.request_rate(), metrics.avg_latency()) == (0.0, 0.0)
    start = metrics.begin()
    metrics.end(start, ok=True)
    assert metrics.request_rate() == 1 / 60
    assert metrics.avg_latency() >= 0.0
