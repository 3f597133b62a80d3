"""Every way to stop a real run ends it within ten seconds, wherever it is, and leaves it resumable.

A start of ``forge`` takes some ten seconds of imports on two cores, and every case needs one: the module takes about
three minutes.
"""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flows.server import ServerHandle
from flows.stopping import request_stop
from forge_core.config import load_config
from forge_core.data_model import GenerationRequest, SamplingParams
from forge_core.generation.hf import HFGenerator
from forge_core.models.scratch import create
from forge_core.store import open_store
from tests.faults.processes import Forge, write_config
from tests.faults.stored import Stored
from tests.runs.harness import TINY

pytestmark = [pytest.mark.server, pytest.mark.engine]

EPISODES, NEW_TOKENS = 512, 4000
# With thousands of characters an untrained model hardly ever samples <eos>: responses run to the limit.
LETTERS = TINY["model"]["vocabulary"] + "".join(chr(0x4E00 + i) for i in range(5000))
ENDLESS: dict[str, Any] = TINY | {
    "model": TINY["model"] | {"vocabulary": LETTERS, "max_position_embeddings": 4096},
    "training": TINY["training"] | {"batch_size": EPISODES, "seq_len": 4096, "token_budget": 4096},
    "rollout": {"max_new_tokens": NEW_TOKENS, "shards": 1},
    "eval": {"prompts": 0},
}


def set_cancelling(server: ServerHandle, flow_run_id: str) -> None:
    """What the Cancel button of the Prefect UI does."""
    api(server, f"/flow_runs/{flow_run_id}/set_state", {"state": {"type": "CANCELLING"}})


def api(server: ServerHandle, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)


def flow_run_id(forge: Forge) -> str:
    return forge.wait_until(lambda: forge.printed(r"flow-run/([0-9a-f-]{36})"))[1]


def check_stopped(forge: Forge, server: ServerHandle, act: Callable[[], object]) -> None:
    """``act`` ends the run within ten seconds: status 130, flow run Cancelled, nothing left alive."""
    run = flow_run_id(forge)
    started = time.monotonic()
    act()
    status = forge.wait(60)
    seconds = time.monotonic() - started
    print(f"ended {seconds:.1f} s after the stop")
    assert status == 130, forge.output
    assert seconds < 10, forge.output
    assert "forge resume tiny" in forge.output
    assert forge.orphans() == []
    assert api(server, f"/flow_runs/{run}")["state"]["type"] == "CANCELLED"


def test_the_generation_that_is_stopped_would_take_more_than_a_minute(tmp_path: Path) -> None:
    create(load_config(ENDLESS).model, 3, tmp_path / "model")  # type: ignore[arg-type]
    engine = HFGenerator(lambda version: tmp_path / "model", version=0, threads=1)
    sampling = SamplingParams(1.0, max_new_tokens=NEW_TOKENS)
    requests = [GenerationRequest(str(i), (2, 3, 4, 5), i, sampling, 0) for i in range(EPISODES)]
    seconds = 6.0
    longest = max(len(c.token_ids) for c in engine.generate(requests, deadline_s=seconds))
    engine.shutdown()
    print(f"{longest} of {NEW_TOKENS} tokens in {seconds:.0f} s, and later tokens take longer")
    assert longest / NEW_TOKENS < seconds / 60


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run for all ways to stop: that each of them finds it resumable is part of the test."""
    folder = tmp_path_factory.mktemp("endless")
    write_config(folder, ENDLESS)
    return folder


@pytest.mark.parametrize("way", ["Ctrl-C", "SIGTERM", "forge stop", "Cancel in the UI"])
def test_a_run_that_generates_stops_within_ten_seconds_and_is_resumable(
    way: str, endless: Path, prefect_server: ServerHandle, started: Callable[..., Forge]
) -> None:
    run = Stored(endless / "store")
    new = not run.folder.exists()
    arguments = ("train", endless / "run.yaml") if new else ("resume", "tiny", "--store", endless / "store")
    forge = started(*arguments, folder=endless)
    forge.wait_until(lambda: (run.folder / "plans/00000000/00000000.json").exists())
    forge.wait_until(lambda: running(prefect_server, "rollout", forge), poll_s=0.2)
    time.sleep(3)
    act: dict[str, Callable[[], object]] = {
        "Ctrl-C": lambda: forge.signal_group(signal.SIGINT),
        "SIGTERM": lambda: forge.process.send_signal(signal.SIGTERM),
        "forge stop": lambda: request_stop(open_store(str(endless / "store")), "tiny"),
        "Cancel in the UI": lambda: set_cancelling(prefect_server, flow_run_id(forge)),
    }
    check_stopped(forge, prefect_server, act[way])
    assert not list(run.folder.glob("episodes/**/manifest.json")), "it was in the middle of the first shard"


@pytest.mark.parametrize("way", ["Ctrl-C", "Cancel in the UI"])
def test_a_run_whose_engine_is_vllms_stops_with_it(
    way: str, tmp_path: Path, prefect_server: ServerHandle, started: Callable[..., Forge]
) -> None:
    """The engine is a child in a session of its own: no signal of a terminal reaches it."""
    generator = {"backend": "vllm", "threads": 1, "engine_args": {"max_num_seqs": 16}}
    model = ENDLESS["model"] | {"hidden_size": 64, "head_dim": 32}
    forge = started("train", write_config(tmp_path, ENDLESS | {"model": model, "generator": generator}))
    forge.wait_until(lambda: "init engine" in engine_log(forge), poll_s=0.2)
    forge.wait_until(lambda: running(prefect_server, "rollout", forge), poll_s=0.2)
    time.sleep(5)
    act: dict[str, Callable[[], object]] = {
        "Ctrl-C": lambda: forge.signal_group(signal.SIGINT),
        "Cancel in the UI": lambda: set_cancelling(prefect_server, flow_run_id(forge)),
    }
    check_stopped(forge, prefect_server, act[way])
    assert not list(Stored(tmp_path / "store").folder.glob("episodes/**/manifest.json")), "it was in the first shard"


def engine_log(forge: Forge) -> str:
    """What vLLM's engine has said so far; its output is a file."""
    for pid in forge.left():
        with suppress(OSError):
            if b"forge_core.generation.vllm_engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return Path(f"/proc/{pid}/fd/1").resolve().read_text(errors="replace")
    return ""


@pytest.mark.parametrize("stage", ["warm start", "training"])
def test_a_run_stops_within_ten_seconds_in_the_middle_of(
    stage: str, tmp_path: Path, prefect_server: ServerHandle, started: Callable[..., Forge]
) -> None:
    """Nothing half done is committed: no version 0, or no training step."""
    dataset = {"path": "python://forge_core.data.sort_digits:demonstrations", "options": {"size": 200}}
    long = {
        "warm start": {"warm_start": {"dataset": dataset, "steps": 1_000_000}},
        "training": {"training": TINY["training"] | {"epochs_per_batch": 1_000_000}},
    }
    forge = started("train", write_config(tmp_path, TINY | long[stage]))
    run = Stored(tmp_path / "store")
    begun: dict[str, Callable[[], object]] = {
        "warm start": lambda: forge.printed(r"warm start: step \d"),
        "training": lambda: running(prefect_server, "train", forge),
    }
    forge.wait_until(begun[stage], poll_s=0.2)
    time.sleep(2)
    check_stopped(forge, prefect_server, lambda: forge.process.send_signal(signal.SIGINT))
    assert run.ledger.head() == (-1 if stage == "warm start" else 0)
    assert not list(run.folder.glob("training/*")), "nothing of the step was published"


def running(server: ServerHandle, name: str, forge: Forge) -> bool:
    """Whether a task whose name begins with ``name`` runs now."""
    tasks = {"name": {"like_": f"{name} "}, "state": {"type": {"any_": ["RUNNING"]}}}
    body = {"task_runs": tasks, "flow_runs": {"id": {"any_": [flow_run_id(forge)]}}}
    try:
        return bool(api(server, "/task_runs/filter", body))
    except OSError:  # the server has no core for an answer
        return False
