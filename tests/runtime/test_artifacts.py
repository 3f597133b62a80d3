from __future__ import annotations

import base64
import json
import socket
import time
import urllib.request
from typing import Any

import pytest

from flows.server import ServerHandle
from forge_core.observability.best_effort import BestEffort
from tests.runtime.entries import learning_run

pytestmark = pytest.mark.server


def artifacts_of(server: ServerHandle, flow_run_id: str) -> dict[str, Any]:
    body = json.dumps({"artifacts": {"flow_run_id": {"any_": [flow_run_id]}}}).encode()
    request = urllib.request.Request(
        f"{server.url}/artifacts/filter", data=body, headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as reply:
        return {artifact["key"]: artifact for artifact in json.load(reply)}


def test_a_flow_run_shows_progress_table_and_figures(prefect_server: ServerHandle) -> None:
    from prefect import flow, runtime

    from flows.artifacts import RunArtifacts

    entries = learning_run(30)
    effort = BestEffort(limit_s=10)
    seen: dict[str, Any] = {}

    @flow
    def trains() -> None:
        seen["id"] = runtime.flow_run.id
        artifacts = RunArtifacts(effort, runtime.flow_run.id, "Run_7.b", total=60)
        started = time.perf_counter()
        for entry in entries:
            artifacts.step(entry)
        seen["seconds per step"] = (time.perf_counter() - started) / len(entries)
        artifacts.finish(entries)
        assert effort.close(timeout=30)

    trains()
    assert (effort.failed, effort.dropped) == (0, 0)
    assert seen["seconds per step"] < 0.005
    shown = artifacts_of(prefect_server, seen["id"])
    assert set(shown) == {f"run-7-b-{what}" for what in ("progress", "steps", "reward", "stability")}
    assert shown["run-7-b-progress"]["data"] == 50.0
    rows = json.loads(shown["run-7-b-steps"]["data"])
    assert len(rows) == 30
    assert rows[-1] | {"reward": "0.765", "step": "30"} == rows[-1]
    kind, image = shown["run-7-b-reward"]["data"].split(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(image).startswith(b"\x89PNG")
    assert len(image) > 10_000


def test_figures_are_drawn_while_the_run_goes_on_but_not_at_every_step(
    prefect_server: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows import artifacts as module

    monkeypatch.setattr(module, "UPDATE_S", 0.0)
    monkeypatch.setattr(module, "FIGURES_S", 0.0)
    sent: list[str] = []
    monkeypatch.setattr(module.RunArtifacts, "_put", lambda self, client, kind, what, data: sent.append(what))
    effort = BestEffort(limit_s=30)
    artifacts = module.RunArtifacts(effort, "00000000-0000-0000-0000-000000000001", "run-9", total=60)
    for entry in learning_run(20):
        artifacts.step(entry)
        time.sleep(0.02)
    assert effort.close(timeout=30)
    assert (effort.failed, sent.count("reward")) == (0, 1), "a drawing is followed by fifty times its length without"


def test_a_server_that_accepts_and_never_answers_does_not_slow_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.client import orchestration

    from flows import artifacts as module

    monkeypatch.setattr(module, "UPDATE_S", 0.0)  # an update at every step
    effort = BestEffort(limit_s=0.2)
    artifacts = module.RunArtifacts(effort, "00000000-0000-0000-0000-000000000001", "run-8", total=60)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/api"
        monkeypatch.setattr(
            orchestration,
            "get_client",
            lambda httpx_settings, **_: orchestration.SyncPrefectClient(url, httpx_settings=httpx_settings),
        )
        times = []
        for entry in learning_run(40):
            started = time.perf_counter()
            artifacts.step(entry)
            times.append(time.perf_counter() - started)
            time.sleep(0.01)
        artifacts.finish(learning_run(40))
        started = time.perf_counter()
        assert not effort.close(timeout=0.2)
        assert time.perf_counter() - started < 1
    assert sorted(times)[20] < 0.005
    assert effort.dropped > 0
