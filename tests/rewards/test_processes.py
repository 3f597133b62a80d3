"""Grading processes: real ones, with rewards that hang, die, print and are slow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from forge_core.config.reward_sections import RewardFunction
from forge_core.rewards import RewardActor, RewardError, RewardItem
from forge_core.stop import Stopped, StopToken

pytestmark = pytest.mark.server  # many processes

SOURCE = """
import os, subprocess, sys, time

def grade(prompt, completion, metadata):
    if completion == "hang":
        while True:
            pass
    if completion == "sleep":
        time.sleep(600)
    if completion == "child":
        subprocess.run([sys.executable, "-c", "import time; time.sleep(600)", metadata["marker"]])
    if completion == "die":
        os._exit(7)
    if completion == "kill":
        os.kill(os.getpid(), 11)
    if completion == "print":
        print("not part of the protocol", flush=True)
    if completion == "read":
        return len(sys.stdin.read())
    if completion == "modules":
        return float(any(name in sys.modules for name in ("pydantic", "numpy", "pyarrow", "yaml")))
    if completion == "nan":
        return float("nan")
    if completion == "process":
        time.sleep(0.1)
        return os.getpid()
    return float(completion)

class Counting:
    made = 0

    def __init__(self):
        type(self).made += 1

    def grade(self, prompt, completion, metadata):
        return type(self).made

def broken(prompt):
    return 0.0
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    (tmp_path / "process_rewards.py").write_text(SOURCE)
    return tmp_path / "process_rewards.py"


@pytest.fixture
def make(reward_file: Path) -> Iterator:
    actors: list[RewardActor] = []

    def make_actor(*names: str, **options) -> RewardActor:
        functions = [RewardFunction(path=f"{reward_file}:{name}" if name != "exact_match" else name) for name in names]
        actors.append(RewardActor(functions, **options))
        return actors[-1]

    yield make_actor
    for actor in actors:
        actor.close()


def items(*completions: object, **metadata: object) -> list[RewardItem]:
    return [RewardItem("p", str(completion), dict(metadata)) for completion in completions]


def graders(older: frozenset[int] = frozenset()) -> list[psutil.Process]:
    """The grading processes of this process, but for those in ``older`` (pids)."""
    children = [child for child in psutil.Process().children() if child.pid not in older]
    return [child for child in children if "forge_core.rewards.worker" in " ".join(child.cmdline())]


@pytest.fixture(autouse=True)
def _only_this_tests_graders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests before may have left grading processes to runs that are still open."""
    older = frozenset(child.pid for child in graders())
    monkeypatch.setattr(f"{__name__}.graders", partial(graders, older))


def test_a_hanging_grade_costs_its_own_item_only(make):
    actor = make("grade", timeout_s=0.5, workers=1)
    before = graders()
    graded = actor.grade_many(items(1, "hang", 2, 3))
    assert [g.reward for g in graded] == [1.0, None, 2.0, 3.0]
    assert [g.status for g in graded] == ["ok", "timeout", "ok", "ok"]
    assert graded[1].error == "grade: took longer than its timeout_s=0.5 s"
    assert not any(process.is_running() for process in before)
    assert len(graders()) == 1


def test_a_timeout_kills_what_the_grade_started(make, tmp_path: Path):
    graded = make("grade", timeout_s=0.5).grade_many(items("child", marker=str(tmp_path)))
    assert graded[0].status == "timeout"
    started = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or [])]
    assert psutil.wait_procs(started, timeout=5)[1] == []  # killed, but the kernel may still be ending them


def test_a_process_that_dies_is_an_error_of_its_item(make):
    graded = make("grade").grade_many(items(1, "die", 2, "kill", 3))
    assert [g.reward for g in graded] == [1.0, None, 2.0, None, 3.0]
    assert [g.status for g in graded] == ["ok", "error", "ok", "error", "ok"]
    assert graded[1].error == "grade: the grading process ended (exit status 7)"
    assert graded[3].error == "grade: the grading process ended (signal 11)"


def test_exceptions_and_nan_are_null_with_their_text(make):
    graded = make("grade").grade_many(items("abc", "nan", 4))
    assert [g.reward for g in graded] == [None, None, 4.0]
    assert (graded[0].error or "").startswith("grade: ValueError: could not convert string to float: 'abc' (process_re")
    assert "not finite" in (graded[1].error or "")


def test_printing_and_reading_do_not_disturb_the_messages(make, capfd: pytest.CaptureFixture[str]):
    graded = make("grade").grade_many(items("print", "read", 5))
    assert [g.reward for g in graded] == [None, 0.0, 5.0]
    assert "not part of the protocol" in capfd.readouterr().err


def test_printing_fails_no_grade_when_nobody_reads_it(make):
    """As after the death of the worker that reads what the run and its grading processes print."""
    kept, (reader, writer) = os.dup(2), os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    try:
        graded = make("grade").grade_many(items("print", "print", 5))
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)
    assert [g.reward for g in graded] == [None, None, 5.0]
    assert all("could not convert string to float: 'print'" in str(g.error) for g in graded[:2])


def test_several_processes_keep_the_order_and_share_the_work(make):
    actor = make("grade", workers=3)
    assert [g.reward for g in actor.grade_many(items(*range(200)))] == [float(i) for i in range(200)]
    assert len({g.reward for g in actor.grade_many(items(*["process"] * 24))}) == 3


def test_calls_from_several_threads_get_their_own_grades(make):
    actor = make("grade", workers=2)
    results: dict[int, list[float | None]] = {}

    def call(number: int) -> None:
        results[number] = [g.reward for g in actor.grade_many(items(*range(number * 100, number * 100 + 50)))]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [float(i) for i in range(n * 100, n * 100 + 50)] for n in range(4)}


def test_a_grading_process_loads_no_package(make):
    assert make("grade").grade_many(items("modules"))[0].reward == 0.0


def test_a_class_is_made_once_per_process(make):
    graded = make("Counting", "exact_match", workers=1).grade_many(items(*range(5), answer="3"))
    assert [g.components for g in graded] == [{"Counting": 1.0, "exact_match": float(i == 3)} for i in range(5)]


def test_built_in_rewards_run_here_unless_workers_are_asked_for(make):
    make("exact_match")
    assert graders() == []
    actor = make("exact_match", workers=1)
    assert len(graders()) == 1
    assert actor.grade_many(items("4", answer="4"))[0].reward == 1.0


def test_a_reward_that_cannot_be_used_is_an_error_at_once(make, reward_file: Path):
    with pytest.raises(RewardError, match=r"process_rewards\.py:broken cannot be called as"):
        make("broken")
    with pytest.raises(RewardError, match="has no 'grad'"):
        make("grad")
    reward_file.write_text("import os\nos._exit(5)\n")
    with pytest.raises(RewardError, match=r"ended \(exit status 5\) while importing .*process_rewards\.py:grade"):
        make("grade")
    assert graders() == []


def test_a_replacement_that_cannot_start_is_an_error_not_a_hang(make, reward_file: Path):
    actor = make("grade", workers=1)
    reward_file.write_text("1 / 0\n")
    assert actor.grade_many(items("die"))[0].status == "error"
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        actor.grade_many(items(1, 2))


def test_a_stop_ends_the_wait_for_a_long_grade(make):
    actor, stop = make("grade", timeout_s=600.0), StopToken()
    threading.Timer(0.2, stop.set, ["Ctrl-C"]).start()
    start = time.monotonic()
    with pytest.raises(Stopped, match="Ctrl-C"):
        actor.grade_many(items("sleep", 1), stop=stop)
    actor.close()
    assert time.monotonic() - start < 5
    assert graders() == []


def test_a_closed_actor_refuses_to_grade(make):
    actor = make("grade")
    actor.close()
    with pytest.raises(RewardError, match="closed"):
        actor.grade_many(items(1))


def test_grading_processes_die_with_a_killed_parent(reward_file: Path):
    script = (
        "from forge_core.config.reward_sections import RewardFunction\n"
        "from forge_core.rewards import RewardActor, RewardItem\n"
        f"actor = RewardActor([RewardFunction(path={str(reward_file) + ':grade'!r})], timeout_s=600)\n"
        "print('ready', flush=True)\n"
        "actor.grade_many([RewardItem('p', 'hang')])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    time.sleep(0.2)  # let the grade begin
    workers = psutil.Process(parent.pid).children()
    assert len(workers) == 1
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []


COMPONENTS = """
import os, time

def fine(prompt, completion, metadata):
    return 1.0

def slow(prompt, completion, metadata):
    time.sleep(float(completion))
    return 1.0

def dies(prompt, completion, metadata):
    if completion == "0":
        os._exit(3)
    return 1.0
"""


def test_each_reward_has_its_own_timeout_and_a_failed_one_leaves_the_others(tmp_path: Path):
    (tmp_path / "parts.py").write_text(COMPONENTS)
    names = {"fine": None, "slow": 0.5, "dies": None}
    functions = [RewardFunction(path=f"{tmp_path}/parts.py:{n}", timeout_s=t) for n, t in names.items()]
    actor = RewardActor([*functions, functions[0]], timeout_s=60, workers=1)
    try:
        graded, metrics = actor.grade_with_metrics(items("0", "600", "0.01"))
    finally:
        actor.close()
    assert [g.reward for g in graded] == [None, None, 4.0]
    assert graded[0].components == {"fine": 1.0, "slow": 1.0, "fine#2": 1.0}
    assert graded[0].error == "dies: the grading process ended (exit status 3)"
    assert (graded[1].status, graded[1].components) == ("timeout", {"fine": 1.0, "dies": 1.0, "fine#2": 1.0})
    assert graded[1].error == "slow: took longer than its timeout_s=0.5 s"
    assert {k: v for k, v in metrics.items() if "failed" in k} == {
        **dict.fromkeys(("fine/failed", "fine#2/failed"), 0.0),
        **dict.fromkeys(("slow/failed", "dies/failed"), 1.0),
    }
    assert metrics["slow/seconds"] >= 0.5 > metrics["fine/seconds"]
    assert 0 < metrics["grades_per_second"] < 6


def test_little_work_is_done_by_one_process_and_much_by_all(make):
    actor = make("grade", workers=3)
    actor.grade_many(items(*range(20)))
    assert len(graders()) == 1
    actor.grade_many(items(*["process"] * 24))
    assert len(graders()) == 3


def test_a_reward_that_may_hang_is_graded_from_any_thread():
    """Alarms work in main threads only: with them every verdict of another thread would be lost."""
    results: list[float | None] = []

    def grade() -> None:
        actor = RewardActor([RewardFunction(path="math", timeout_s=60)])
        results.extend(g.reward for g in actor.grade_many(items(r"\boxed{\frac{2}{4}}", "3", answer="1/2")))
        actor.close()

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join()
    assert results == [1.0, 0.0]
