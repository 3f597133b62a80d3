"""A real run with secrets in its environment: none is found in anything that it wrote, printed or told Prefect."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.server import ServerHandle
from forge_core.store import Ledger, Store, open_store
from tests.cli.conftest import Result, run_forge
from tests.fixtures_s3 import S3Server

pytestmark = [pytest.mark.engine, pytest.mark.server]

PLANTED = {
    "HF_TOKEN": "hf_planted0123456789abcdef",
    "JUDGE_API_KEY": "planted-judge-key-4711-0815",
    "RESULTS_DATABASE_URL": "postgresql://forge:planted-database-password@db:5432/results",
    "WANDB_API_KEY": "planted-wandb-key-31415926",
}
REWARD = """
import logging, os

class Judge:
    def __init__(self, api_key, database):
        assert api_key == os.environ["JUDGE_API_KEY"] and "planted-database-password" in database
        self.api_key, self.database, self.count = api_key, database, 0

    def grade(self, prompt, completion, metadata):
        self.count += 1
        if self.count % 4 == 0:
            raise RuntimeError(f"POST https://judge/?key={self.api_key} failed; results go to {self.database}")
        return float(completion[:1] in "01234")
"""
SMALL = ("steps=1", "training.batch_size=16", "warm_start.steps=2", "eval.prompts=4")


@pytest.fixture(scope="module")
def secrets(s3_server: S3Server) -> list[str]:
    return [*PLANTED.values(), "planted-database-password", s3_server.secret_key]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    assert run_forge(folder, "new", "demo").status == 0
    (folder / "demo" / "my_reward.py").write_text(REWARD)
    config = folder / "demo" / "config.yaml"
    options = "{api_key: '${oc.env:JUDGE_API_KEY}', database: '${oc.env:RESULTS_DATABASE_URL}'}"
    named = f"    - path: my_reward.py:Judge\n      options: {options}"
    config.write_text(config.read_text().replace("    - path: my_reward.py:MyReward", named))
    return folder / "demo"


@pytest.fixture(scope="module")
def store(s3_store_uri: str) -> Store:
    return open_store(f"{s3_store_uri}/planted")


@pytest.fixture(scope="module")
def trained(folder: Path, prefect_server: ServerHandle, store: Store) -> Result:
    result = run_forge(folder, "train", "config.yaml", "run.id=planted", f"store={store.uri}", *SMALL, **PLANTED)
    assert result.status == 0, result.err
    return result


def test_what_the_process_printed(trained: Result, secrets: list[str]) -> None:
    assert "step 1/1" in trained.err
    assert [s for s in secrets if s in trained.out + trained.err] == []


def test_every_object_in_the_store(trained: Result, store: Store, secrets: list[str], tmp_path: Path) -> None:
    assert Ledger(store, "planted").head() == 1
    keys, errors = store.list("runs/planted"), []
    for key in keys:
        data = store.read(key)
        text = data.decode("latin-1")
        if key.endswith(".parquet"):
            (tmp_path / "table").write_bytes(data)
            text += str(rows := pq.read_table(tmp_path / "table").to_pylist())
            errors += [row["error"] for row in rows if row.get("error")]
        assert [s for s in secrets if s in text] == [], key
    assert any("key=<JUDGE_API_KEY> failed; results go to <RESULTS_DATABASE_URL>" in e for e in errors)


def test_everything_that_prefect_was_told(trained: Result, secrets: list[str]) -> None:
    files = [f for f in Path(os.environ["FORGE_HOME"]).rglob("*") if f.is_file()]
    assert any(b"planted" in f.read_bytes() for f in files), "the run's id, at least, is in the database"
    assert [(f, s) for f in files for s in secrets if s.encode() in f.read_bytes()] == []


def test_the_printed_configuration(folder: Path, secrets: list[str]) -> None:
    shown = run_forge(folder, "config", "config.yaml", **PLANTED)
    assert (shown.status, "${oc.env:JUDGE_API_KEY}" in shown.out) == (0, True)
    assert [s for s in secrets if s in shown.out + shown.err] == []


def test_a_prefect_secret_block_reaches_a_worker_by_its_environment_alone(prefect_server: ServerHandle) -> None:
    """As docs/security.md says: the deployment has the block's name, the worker looks its value up for each run."""
    from prefect.blocks.system import Secret
    from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

    placeholder = "{{ prefect.blocks.secret.judge-api-key }}"

    async def environment() -> dict[str, str | None]:
        await Secret(value=PLANTED["JUDGE_API_KEY"]).save("judge-api-key", overwrite=True)
        template, values = ProcessWorker.get_default_base_job_template(), {"env": {"JUDGE_API_KEY": placeholder}}
        job: Any = await ProcessJobConfiguration.from_template_and_values(template, values)
        return dict(job.env)

    assert asyncio.run(environment())["JUDGE_API_KEY"] == PLANTED["JUDGE_API_KEY"]
    document = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text()
    assert placeholder in document
