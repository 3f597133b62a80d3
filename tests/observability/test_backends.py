"""Each backend with its real package, from the rows of the store; and what becomes of a run whose backend fails."""

from __future__ import annotations

import json
import logging
import os
import pty
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from forge_core.config import ConfigError, load_config, validate_for_training
from forge_core.config.metric_sections import MODULES, MetricLoggingSection, metric_problems
from forge_core.observability import backends
from forge_core.observability.backends import get_logger_backend_class
from forge_core.observability.metric_log import MetricLog
from forge_core.observability.metrics import Collector, Metric, record_metric
from forge_core.observability.reductions import Reduce
from forge_core.store import Ledger, Store, StoreError, digest, layout, open_store
from tests.docs.documents import ROOT
from tests.observability.wandb_server import wandb_server
from tests.store.entries import RUN, entry, init_entry

CREATED = "2026-01-01T00:00:00.000+00:00"
NAME = f"{RUN}-{digest([RUN, CREATED])[:8]}"


@pytest.fixture
def store() -> Store:
    opened = open_store(f"memory://{os.urandom(8).hex()}")
    Ledger(opened, RUN).commit_init(init_entry())
    return opened


def commit(store: Store, batch: int, log: MetricLog | None = None, **recorded: Any) -> None:
    """A step whose metrics are ``reward/mean`` = batch / 10, with what trainer ranks recorded."""
    ledger = Ledger(store, RUN)
    changes = {"recorded": recorded["ranks"]} if recorded else {}
    step = entry(batch, ledger.previous(batch), metrics={"reward/mean": batch / 10, "loss": 1.0}, **changes)
    assert ledger.commit(step)
    if log is not None:
        log.commit(step)


def ranks() -> dict[str, Any]:
    collector = Collector()
    for rank in (0, 1):
        collector.push(Metric("own/value", float(rank), rank=rank))
    collector.push(Metric("own/table", {"text": "t", "reward": 1.0}, Reduce.SAMPLE))
    return collector.drain()


def metric_log(store: Store, role: str | None = None, **section: Any) -> MetricLog:
    log = MetricLog(store, RUN, CREATED, load_config({"metric_logging": section}), role, store)
    log.open()
    return log


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_json_lines_have_every_step_once_however_often_the_run_is_started(store: Store, tmp_path: Path):
    section = {"jsonl": {"folder": str(tmp_path)}}
    file = tmp_path / f"{NAME}.jsonl"
    for first in (0, 2):
        log = metric_log(store, **section)
        for batch in (first, first + 1):
            commit(store, batch, log)
        log.close()
    commit(store, 4)  # by a process that died before it told anybody
    with file.open("a") as half:
        half.write('{"step": 4, "val')
    metric_log(store, **section).close()
    assert [line["step"] for line in lines(file)] == [0, 1, 2, 3, 4]
    assert [line["values"]["reward/mean"] for line in lines(file)] == [0.0, 0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("global_reduce", {"own/value": 0.5}),
        ("per_rank_reduce", {"trainer.0/own/value": 0.0, "trainer.1/own/value": 1.0}),
        ("per_rank_no_reduce", {}),  # each value was shown when it was recorded
    ],
)
def test_the_mode_decides_what_is_shown_of_ranks(store: Store, tmp_path: Path, mode: str, expected: dict[str, float]):
    log = metric_log(store, jsonl={"folder": str(tmp_path), "logging_mode": mode})
    commit(store, 0, log, ranks=ranks())
    log.close()
    (line,) = lines(tmp_path / f"{NAME}.jsonl")
    assert {key: value for key, value in line["values"].items() if "own" in key} == expected
    assert line["values"]["reward/mean"] == 0.0
    assert line["tables"] == {"own/table": [{"text": "t", "reward": 1.0}]}


def test_values_that_are_not_reduced_are_shown_at_once_by_the_process_that_records_them(store: Store, tmp_path: Path):
    log = metric_log(store, "scorer", jsonl={"folder": str(tmp_path), "logging_mode": "per_rank_no_reduce"})
    for value in (1.0, 3.0):
        record_metric("own/value", value)
    file = tmp_path / f"{NAME}-scorer-{os.getpid()}.jsonl"
    deadline = time.monotonic() + 10
    while not (file.exists() and len(lines(file)) == 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [(line["key"], line["value"]) for line in lines(file)] == [("own/value", 1.0), ("own/value", 3.0)]
    log.close()


@pytest.mark.engine  # imports for seconds
def test_tensorboard_goes_on_after_its_last_step(store: Store, tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for batch in (0, 1):
        log = metric_log(store, tensorboard={"folder": str(tmp_path)})
        commit(store, batch, log)
        log.close()
    events = EventAccumulator(str(tmp_path / NAME)).Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("reward/mean")] == [(0, 0.0), (1, 0.1)]


@pytest.mark.engine  # imports for seconds
def test_wandb_offline_is_one_run_that_goes_on(store: Store, tmp_path: Path):
    for batch in (0, 1):
        log = metric_log(store, wandb={"mode": "offline", "folder": str(tmp_path)})
        commit(store, batch, log, ranks=ranks())
        log.close()
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))  # of each start one
    assert len(files) == 2
    assert {file.name for file in files} == {f"run-{NAME}.wandb"}, "both starts have one id"
    assert all(file.stat().st_size for file in files)
    assert (tmp_path / "wandb" / f"forge-{NAME}.txt").read_text() == "1"


STEPS_ONLINE = """
import sys
from forge_core.store import open_store
from tests.observability.test_backends import commit, metric_log
store = open_store(sys.argv[1])
log = metric_log(store, wandb={"project": "sums"})
for batch in map(int, sys.argv[2:]):
    commit(store, batch, log)
log.close()
"""


@pytest.mark.engine  # imports for seconds
def test_wandb_online_has_one_run_with_every_step_once_however_often_it_is_started(tmp_path: Path):
    store = open_store(str(tmp_path / "store"))
    Ledger(store, RUN).commit_init(init_entry())
    with wandb_server() as server:
        key = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40, "WANDB_ERROR_REPORTING": "false"}
        environment = {**os.environ, **key, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

        def start(*batches: str) -> None:
            command = [sys.executable, "-c", STEPS_ONLINE, str(tmp_path / "store"), *batches]
            subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=60)

        start("0", "1")
        commit(store, 2)  # by a process that died before it had sent this
        start("3")
    assert server.runs.keys() == {NAME}
    run = server.runs[NAME]
    history = [json.loads(line) for line in run["history"]]
    assert [(row["step"], round(row["reward/mean"], 3)) for row in history if "step" in row] == [
        (0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3),
    ]  # fmt: skip
    assert (run["project"], json.loads(run["summary"])["step"]) == ("sums", 3)


ONLINE = """
from forge_core.config.metric_sections import WandbSection
from forge_core.observability.backends import Origin, get_logger_backend_class
get_logger_backend_class("wandb")(WandbSection(), Origin("run", "run-1", "", {}))
"""


@pytest.mark.engine  # imports for seconds
def test_wandb_without_a_key_fails_and_asks_nothing_at_the_terminal(tmp_path: Path):
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**clean, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", ONLINE], cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # the end, of a terminal
            while part := os.read(ours, 4096):
                said += part
                assert b"choice" not in said, process.kill()
        assert process.wait(30) == 1
    os.close(ours)
    assert b"set WANDB_API_KEY, or use metric_logging.wandb.mode=offline" in said.replace(b"\r\n", b"")


@pytest.mark.engine  # imports for seconds
def test_mlflow_has_one_run_that_goes_on(store: Store, tmp_path: Path):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    status = lambda: client.search_runs([client.get_experiment_by_name("forge").experiment_id])[0].info.status
    for batch in (0, 1):
        log = metric_log(store, mlflow={"tracking_uri": uri})
        commit(store, batch, log)
        deadline = time.monotonic() + 60
        while not (client.get_experiment_by_name("forge") and status() == "RUNNING") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert status() == "RUNNING"
        log.close()
        assert status() == "FINISHED"
    (run,) = client.search_runs([client.get_experiment_by_name("forge").experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward/mean")] == [
        (0, 0.0),
        (1, 0.1),
    ]
    assert run.data.params["training.batch_size"] == "64"


def test_prometheus_serves_the_newest_values_and_writes_them_to_a_file(store: Store, tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = metric_log(store, prometheus={"port": port, "textfile": str(tmp_path)})
    commit(store, 0, log)
    commit(store, 1, log)
    wanted = f'forge_metric{{key="reward/mean",role="trainer",run="{RUN}"}} 0.1'
    deadline, served = time.monotonic() + 10, ""
    while wanted not in served and time.monotonic() < deadline:
        try:
            served = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        except httpx.ConnectError:
            time.sleep(0.05)
    assert wanted in served
    (file,) = tmp_path.glob("*.prom")
    assert wanted in file.read_text()
    log.close()
    assert not file.exists()


def test_the_console_shows_the_keys_that_were_asked_for(store: Store, capsys: pytest.CaptureFixture[str]):
    log = metric_log(store, console={"show": ["reward/"]})
    commit(store, 0, log)
    log.close()
    shown = capsys.readouterr().err
    assert "reward/mean" in shown
    assert "rl_trainer/loss" not in shown


def test_a_backend_that_fails_warns_once_at_once_and_the_others_go_on(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("no folder")
    section = {"jsonl": {"folder": str(tmp_path / "file")}, "tensorboard": {"folder": str(tmp_path / "tb")}}
    with caplog.at_level(logging.WARNING, "forge"):
        log = metric_log(store, **section)
        for batch in range(3):
            commit(store, batch, log)
        deadline = time.monotonic() + 30.0
        while "metric_logging" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "metric_logging" in caplog.text, "it is said at once, not at the end"
        log.close()
    (warning,) = [r.message for r in caplog.records if "metric_logging" in r.message]
    assert warning.startswith("metric_logging.jsonl failed, the run goes on: ")
    assert list((tmp_path / "tb" / NAME).iterdir())
    assert store.exists(layout.metrics(RUN, 2))


def test_a_step_whose_metrics_cannot_be_made_is_skipped_with_a_warning_until_the_next_process(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    section = {"jsonl": {"folder": str(tmp_path)}}
    damaged = f"{layout.episodes(RUN, 0, 0, 0)}manifest.json"
    store.put_new(damaged, b"torn")
    with caplog.at_level(logging.WARNING, "forge"):
        log = metric_log(store, **section)
        for batch in range(4):
            commit(store, batch, log)
        log.close()
    own = [message[:24] for message in caplog.messages if RUN in message]
    assert own == [f"step {batch} of {RUN} has no m" for batch in (0, 1)]
    stored = lambda: [store.exists(layout.metrics(RUN, batch)) for batch in range(4)]
    assert stored() == [False, False, True, True]  # step 1 compares itself with the step before
    assert [line["step"] for line in lines(tmp_path / f"{NAME}.jsonl")] == [2, 3]
    store.delete(damaged)
    metric_log(store, **section).close()
    assert all(stored())


def test_steps_wait_for_a_store_that_does_not_answer(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = metric_log(store, jsonl={"folder": str(tmp_path)})
    commit(store, 0, log)

    def unreachable(key: str, data: bytes) -> bool:
        raise StoreError(f"{key}: no server answers")

    with monkeypatch.context() as broken:
        time.sleep(0.2)
        broken.setattr(store, "put_new", unreachable)
        commit(store, 1, log)
        time.sleep(0.2)
    commit(store, 2, log)
    log.close()
    assert [line["step"] for line in lines(tmp_path / f"{NAME}.jsonl")] == [0, 1, 2]


def test_a_backend_that_hangs_delays_nobody(store: Store, monkeypatch: pytest.MonkeyPatch):
    """The console, whose reader has stopped reading."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    with suppress(BrokenPipeError), os.fdopen(writer, "w", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)
        monkeypatch.setattr("forge_core.observability.metric_log.CLOSE_S", 3.0)
        log = metric_log(store, console={})
        began = time.monotonic()
        for batch in range(3):
            commit(store, batch, log)
        assert time.monotonic() - began < 1.0
        log.close()
        assert time.monotonic() - began < 15.0
        assert store.exists(layout.metrics(RUN, 2))
        monkeypatch.undo()
        os.close(reader)  # ends the thread


def test_a_package_that_is_missing_is_named_with_the_extra_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MODULES, "mlflow", "not_installed_anywhere")
    config = load_config({"metric_logging": {"mlflow": {}}})
    with pytest.raises(ConfigError, match=r"metric_logging\.mlflow: needs .*pip install 'forge-rl\[metrics\]'"):
        validate_for_training(config)
    assert metric_problems(MetricLoggingSection()) == []


def test_the_section_of_the_original_guide_loads_and_mistakes_are_named():
    guide = {"wandb": {"project": "grpo-training", "group": "exp", "logging_mode": "global_reduce"}}
    config = load_config({"metric_logging": {**guide, "console": {"logging_mode": "global_reduce"}}})
    assert [name for name, _ in config.metric_logging.backends] == ["console", "wandb"]
    assert all(dict(section) for _, section in config.metric_logging.backends), "Prefect takes sections apart like this"
    for section, key in (
        ({"console": {"logging_mode": "all"}}, "metric_logging.console.logging_mode"),
        ({"prometheus": {}}, "metric_logging.prometheus needs a port"),
        ({"wandbb": {}}, "metric_logging.wandbb"),
    ):
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            load_config({"metric_logging": section})


def test_every_backend_of_the_configuration_has_a_class():
    assert MetricLoggingSection.model_fields.keys() == backends.BACKENDS.keys()
    assert all(get_logger_backend_class(name) for name in backends.BACKENDS)
    with pytest.raises(ValueError, match="use one of console, wandb"):
        get_logger_backend_class("paper")
