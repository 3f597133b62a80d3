"""A metric backend of the user's own: the one of docs/metric-backend.md, and what is refused before a run starts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml

from forge_core.config import ConfigError, RunConfig, load_config
from forge_core.config.sft_loader import load_sft_config
from forge_core.observability.backends.custom import check_backend
from forge_core.store import Store
from tests.docs.documents import ROOT, blocks
from tests.observability.test_backends import RUN, commit, metric_log, store  # noqa: F401  (store: a fixture)

SOURCE, SETTINGS = (b.text for b in blocks(ROOT / "docs" / "metric-backend.md") if b.language in ("python", "yaml"))
FILE = "my_backend.py"
DERIVED = """from forge_core.observability.backends import Backend
class Table(Backend):
    def __init__(self, origin): ...
    def log(self, step, values, tables): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's working directory, with the file that the document shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORGE_CODE_PATH", raising=False)
    (tmp_path / FILE).write_text(SOURCE)
    return tmp_path


def configured(**custom: object) -> RunConfig:
    return load_config({"metric_logging": {"custom": {"path": f"{FILE}:Table", **custom}}})


def test_the_documented_backend_shows_each_step_once_also_in_the_next_process(store: Store, folder: Path):  # noqa: F811
    section = yaml.safe_load(SETTINGS)["metric_logging"]
    for steps in ((0, 1), (2,)):  # two processes
        log = metric_log(store, **section)
        for step in steps:
            commit(store, step, log)
        log.close()
    lines = (folder / f"{RUN}-steps.csv").read_text().splitlines()
    assert lines == ["0,0.0,1.0", "1,0.1,1.0", "2,0.2,1.0"]


def test_a_backend_that_raises_is_one_warning_and_the_steps_are_stored(
    store: Store,  # noqa: F811
    folder: Path,
    caplog: pytest.LogCaptureFixture,
):
    (folder / FILE).write_text(SOURCE.replace("self.file.flush()", "raise OSError('no chat today')"))
    with caplog.at_level(logging.WARNING):
        log = metric_log(store, custom={"path": f"{FILE}:Table"})
        for step in range(3):
            commit(store, step, log)
        log.close()
    said = [record.message for record in caplog.records]
    assert said == ["metric_logging.custom failed, the run goes on: OSError: no chat today"]
    assert len(list(store.list(f"runs/{RUN}/metrics/"))) == 3


def test_the_file_is_written_in_full_so_that_a_run_finds_it_from_any_folder(folder: Path):
    section = {"custom": {"path": f"{FILE}:Table"}}
    for load in (load_config, load_sft_config):
        loaded = load({"metric_logging": section}).metric_logging.custom
        assert loaded is not None
        assert loaded.path == f"{folder / FILE}:Table"


def test_what_is_documented_passes_the_check(folder: Path):
    check_backend(configured(options={"path": "a.csv"}))
    check_backend(load_config({}))
    (folder / "least.py").write_text(DERIVED)
    check_backend(configured(path="least.py:Table"))


@pytest.mark.parametrize(
    ("custom", "source", "said"),
    [
        ({"path": "nothing.py:Table"}, SOURCE, "no such file"),
        ({"path": f"{FILE}:Chart"}, SOURCE, "Chart"),
        ({}, "import nowhere", "importing .*my_backend.* failed"),
        ({}, "class Table:\n    def log(self, step, values, tables): ...", "lacks last_step, log_value, close"),
        ({}, DERIVED.replace("def __init__", "def other"), r"its __init__ takes \(self, origin\)"),
        ({"options": {"colour": "red"}}, SOURCE, r"metric_logging\.custom\.options: .*unexpected keyword"),
    ],
)
def test_what_cannot_work_is_refused_and_named(custom: dict, source: str, said: str, folder: Path):
    (folder / FILE).write_text(source)
    with pytest.raises(ConfigError, match=said) as refused:
        check_backend(configured(**custom))
    assert str(refused.value).count("metric_logging.custom.") >= 1


def test_a_file_that_this_machine_does_not_offer_is_not_imported(folder: Path, monkeypatch: pytest.MonkeyPatch):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / FILE).write_text(f"open({str(folder / 'ran')!r}, 'w')\n" + SOURCE)
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match="FORGE_CODE_PATH"):
        check_backend(configured(path=f"{elsewhere / FILE}:Table"))
    assert not (folder / "ran").exists()
    monkeypatch.setenv("FORGE_CODE_PATH", str(elsewhere))
    check_backend(configured(path=f"{elsewhere / FILE}:Table"))
    assert (folder / "ran").exists()
