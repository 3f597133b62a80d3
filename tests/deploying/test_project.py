"""prefect.yaml and what is refused of such a file, before a server is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli import main
from flows.deploying import check_store
from flows.deploying_automations import SILENCE
from flows.deploying_project import Project, load_project
from flows.store_block import NAME, ForgeStore
from forge_core.config import ConfigError
from tests.docs.documents import ROOT, table_rows

POOLS = {
    "grpo/quickstart": "trainer",
    "grpo/train": "trainer",
    "sft/train": "trainer",
    "grpo-distributed/train": "coordinator",
    "generator/role": "generator",
    "scorer/role": "scorer",
    "reference/role": "reference",
    "trainer/role": "trainer",
    "evaluate/run": "generator",
    "retrain/nightly": "coordinator",
}
FLOW = "from prefect import flow\n@flow\ndef greet(name: str = 'you'):\n    pass\n"


@pytest.fixture(scope="module")
def project() -> Project:
    return load_project(ROOT / "prefect.yaml")


def test_every_deployment_is_there_and_on_the_pool_of_its_role(project: Project):
    assert {d.full_name: d.work_pool.name for d in project.deployments} == POOLS


def test_the_document_lists_them_all(project: Project):
    rows = table_rows(ROOT / "docs" / "operating.md", "deployment")
    assert {row[0].strip("`"): row[1].strip("`") for row in rows} == POOLS


def test_each_job_has_a_heartbeat_that_the_server_waits_for_three_times_and_the_store(project: Project):
    for deployment in project.deployments:
        environment = deployment.work_pool.job_variables["env"]
        assert 3 * int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) == SILENCE.total_seconds()
        assert environment["FORGE_STORE"] == "{{ prefect.blocks.forge-store.default.uri }}"
        assert f".{ForgeStore.get_block_type_slug()}.{NAME}." in environment["FORGE_STORE"]
        assert "forge" in deployment.tags, "else its silence is not noticed"


def test_what_nobody_else_starts_again_after_a_crash_the_server_does(project: Project):
    roles = {d.full_name for d in project.deployments if "role" in d.tags}  # which their coordinator starts again
    assert {d.full_name for d in project.deployments if "restart-after-crash" not in d.tags} == roles


def test_workers_run_in_the_folder_of_the_file(project: Project):
    assert project.pull == [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]


def test_config_is_a_choice_of_the_configurations_of_its_kind(project: Project):
    choices = {d.full_name: d.parameter_schema["properties"].get("config") for d in project.deployments}
    shipped = sorted(f"configs/{file.name}" for file in (ROOT / "configs").glob("*.yaml"))
    runs = [name for name in shipped if "retrain" not in name and "/sft" not in name]
    for name in ("grpo/quickstart", "grpo/train", "grpo-distributed/train", "evaluate/run"):
        assert choices[name]["anyOf"][0]["enum"] == runs
    assert choices["retrain/nightly"]["anyOf"][0]["enum"] == [name for name in shipped if "retrain" in name]
    assert choices["sft/train"]["anyOf"][0]["enum"] == [name for name in shipped if "/sft" in name]


def written(folder: Path, **changes: Any) -> Path:
    """A small project in ``folder``, with changes of its only deployment."""
    (folder / "greeting.py").write_text(FLOW)
    deployment = {"name": "d", "entrypoint": "greeting.py:greet", "description": "", "work_pool": {"name": "p"}}
    tree = {"name": "x", "work_pools": {"p": {"description": ""}}, "pull": [], "deployments": [deployment | changes]}
    file = folder / "prefect.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def test_a_project_of_ones_own_needs_no_more_than_this(tmp_path: Path):
    (deployment,) = load_project(written(tmp_path)).deployments
    assert deployment.full_name == "greet/d"
    assert deployment.parameter_schema["properties"]["name"]["default"] == "you"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"entrypoint": "absent.py:greet"}, "deployment d: entrypoint absent.py:greet"),
        ({"entrypoint": "greeting.py:absent"}, "entrypoint greeting.py:absent"),
        ({"parameters": {"nmae": "x"}}, "greet/d: the flow has no parameter nmae"),
        ({"work_pool": {"name": "q"}}, "greet/d: the work pool q is not one of work_pools"),
        ({"schedules": [{"cron": "0 2 * * *"}]}, "schedules.0.slug: Field required"),
        ({"schedules": [{"cron": "at two", "slug": "s"}]}, "greet/d: schedule s: .*cron"),
        ({"shedules": []}, "shedules: Extra inputs are not permitted"),
        ({"concurrency_limit": {"limit": 0}}, "concurrency_limit.limit"),
    ],
)
def test_a_mistake_is_answered_with_the_file_the_deployment_and_the_key(
    tmp_path: Path, changes: dict[str, Any], said: str
):
    with pytest.raises(ConfigError, match=rf"(?s)prefect\.yaml.*{said}"):
        load_project(written(tmp_path, **changes))


def test_a_flow_that_cannot_be_imported_says_why(tmp_path: Path):
    file = written(tmp_path)
    (tmp_path / "greeting.py").write_text("1 +")
    with pytest.raises(ConfigError, match=r"(?s)greeting\.py:greet.*invalid syntax"):
        load_project(file)


def test_deploying_where_there_is_no_file_or_no_server_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(ConfigError, match=r"there is no .*prefect\.yaml.*--file"):
        load_project(tmp_path / "prefect.yaml")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    assert main(["deploy"]) == 1
    assert "forge server" in capsys.readouterr().err


@pytest.mark.parametrize("uri", ["s3://key:secret@bucket/forge", "s3://key@bucket"])
def test_an_address_with_credentials_is_refused_and_not_repeated(uri: str):
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY") as caught:
        check_store(uri)
    assert "key:" not in str(caught.value)
    assert "secret@" not in str(caught.value)


def test_a_block_that_is_edited_by_hand_takes_no_credentials_either():
    with pytest.raises(ValueError, match="the address holds credentials"):
        ForgeStore(uri="s3://key:secret@bucket/forge")
    assert ForgeStore(uri="s3://bucket/forge").uri == "s3://bucket/forge"
