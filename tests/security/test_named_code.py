"""A store names code and never supplies it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from forge_core.config import ConfigError, load_config
from forge_core.data.importing import ObjectPathError, check_place, load_object, source_file
from forge_core.runs.code import check_named_code
from forge_core.runs.context import RunContext
from forge_core.runs.record import create_run, load_run, resume_check
from forge_core.runs.redo_setup import rescore_of
from forge_core.store import Store, layout, open_store

REWARD = "def grade(prompt, completion, metadata):\n    return 1.0\n"
BOMB = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n" + REWARD


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, the working directory, with ``mine.py``; ``elsewhere`` beside it is nobody's."""
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "home" / "mine.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.delenv("FORGE_CODE_PATH", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "home"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def run_with(store: Store, path: str, run_id: str = "r") -> None:
    create_run(store, load_config({"run": {"id": run_id}, "rewards": {"functions": [{"path": path}]}}))


def planted(store: Store, path: str, code: dict[str, str], **sections: Any) -> None:
    """A ``run.json`` that somebody with access to the store has written; ``sections``: more of its configuration."""
    config = load_config({"run": {"id": "planted"}, "rewards": {"functions": [{"path": "exact_match"}]}})
    body = config.model_dump(mode="json")
    body["rewards"]["functions"][0]["path"] = path
    body |= sections
    run_with(store, "exact_match", "as-a-pattern")
    pattern = store.read_json(layout.run_json("as-a-pattern"))
    store.put_new_json(layout.run_json("planted"), {**pattern, "run_id": "planted", "config": body, "code": code})


def opened(store: Store, run_id: str) -> RunContext:
    return RunContext(store, load_run(store, run_id))


def test_a_run_of_the_working_directory_is_opened_from_there_and_from_a_folder_of_the_code_path(
    store: Store, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with(store, "mine.py:grade")
    opened(store, "r").close()
    monkeypatch.chdir(home.parent / "elsewhere")
    with pytest.raises(ConfigError, match=r"home/mine\.py is neither installed nor below a folder of FORGE_CODE_PATH"):
        opened(store, "r")
    monkeypatch.setenv("FORGE_CODE_PATH", f"/nowhere:{home}")
    opened(store, "r").close()


@pytest.mark.parametrize(
    "path", ["{elsewhere}/bomb.py:grade", "{home}/link.py:grade", "{home}/../elsewhere/bomb.py:grade"]
)
def test_a_file_outside_is_not_even_imported(store: Store, home: Path, path: str) -> None:
    elsewhere = home.parent / "elsewhere"
    (elsewhere / "bomb.py").write_text(BOMB)
    (home / "link.py").symlink_to(elsewhere / "bomb.py")
    path = path.format(home=home, elsewhere=elsewhere)
    planted(store, path, {})
    for use in (lambda: opened(store, "planted"), lambda: _resumed(store, "planted", allow_code=True)):
        with pytest.raises(ConfigError, match=r"elsewhere/bomb\.py is neither installed nor"):
            use()
    assert not list(home.parent.rglob("*.ran"))


def _resumed(store: Store, run_id: str, *, allow_code: bool = False) -> None:
    record = load_run(store, run_id)
    resume_check(store, record, record.config, allow_code=allow_code)


def test_a_changed_file_is_named_and_not_imported_unless_that_is_allowed(store: Store, home: Path) -> None:
    run_with(store, "mine.py:grade")
    (home / "mine.py").write_text(BOMB)
    with pytest.raises(ConfigError, match=r"home/mine\.py is not the file that run 'r' recorded.*--allow-code-change"):
        opened(store, "r")
    with pytest.raises(ConfigError, match=r"reward .*/home/mine\.py:grade.*--allow-code-change"):
        _resumed(store, "r")
    assert not list(home.rglob("*.ran"))
    _resumed(store, "r", allow_code=True)


def test_a_digest_that_the_store_supplies_does_not_make_the_standard_library_a_reward(store: Store, home: Path) -> None:
    import hashlib
    import subprocess

    digest = hashlib.sha256(Path(subprocess.__file__).read_bytes()).hexdigest()
    planted(store, "subprocess:Popen", {"reward subprocess:Popen": digest})
    with pytest.raises(ConfigError, match=r"subprocess\.py is neither installed"):
        opened(store, "planted")


@pytest.mark.parametrize(
    ("name", "message"), [("Popen", "is defined in subprocess"), ("system", "is defined in posix"), ("grade", "")]
)
def test_what_a_users_module_only_imports_is_not_its_own(home: Path, name: str, message: str) -> None:
    (home / "mine.py").write_text("from os import system\nfrom subprocess import Popen\n" + REWARD)
    if not message:
        assert load_object(f"mine.py:{name}")("", "", {}) == 1.0
        return
    with pytest.raises(ObjectPathError, match=f"{name} {message}"):
        load_object(f"mine.py:{name}")


def test_looking_for_the_source_of_a_module_imports_no_package_above_it(home: Path) -> None:
    package = home / "a_package_of_mine" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text(BOMB)
    (package / "rewards.py").write_text(BOMB)
    assert source_file("a_package_of_mine.inner.rewards:grade") == package / "rewards.py"
    assert check_place("a_package_of_mine.inner.rewards:grade") == package / "rewards.py"
    assert not list(home.rglob("*.ran"))


def test_forge_itself_and_installed_packages_are_installed(home: Path) -> None:
    assert check_place("forge_core.rewards.exact_match:ExactMatch").name == "exact_match.py"
    assert check_place("yaml:safe_load").name == "__init__.py"
    with pytest.raises(ObjectPathError, match="neither installed"):
        check_place("json:loads")


def test_code_that_makes_prompts_and_losses_is_looked_at_too(store: Store, home: Path) -> None:
    values = {
        "run": {"id": "all"},
        "dataset": {"path": "python://mine.py:rows"},
        "loss": {"name": "custom", "path": "mine.py:loss"},
        "rewards": {"functions": [{"path": "mine.py:grade"}]},
    }
    record = create_run(store, load_config(values))
    assert {name.split()[0] for name in record.code} == {"forge-rl", "dataset", "loss", "reward"}
    (home / "mine.py").write_text(BOMB)
    with pytest.raises(ConfigError) as refused:
        opened(store, "all")
    assert all(key in str(refused.value) for key in ("dataset.path", "loss.path", "rewards.functions"))


def test_grading_again_with_the_parents_reward_takes_it_as_the_store_names_it(store: Store, home: Path) -> None:
    run_with(store, "mine.py:grade")
    (home / "mine.py").write_text(BOMB)
    with pytest.raises(ConfigError, match=r"mine\.py is not the file that run 'r' recorded"):
        rescore_of(store, "r", ["rewards.functions.0.weight=2"])
    assert not list(home.rglob("*.ran"))
    with pytest.raises(ConfigError, match="no complete batch"):  # named by the user: theirs to run
        rescore_of(store, "r", [], ["mine.py:grade"])


BACKEND = """
class Table:
    def __init__(self, origin): ...
    def last_step(self): return None
    def log(self, step, values, tables): ...
    def log_value(self, metric): ...
    def close(self): ...
"""


def shown(path: str = "shown.py:Table") -> dict[str, Any]:
    functions = [{"path": "exact_match"}]
    return {"run": {"id": "r"}, "rewards": {"functions": functions}, "metric_logging": {"custom": {"path": path}}}


def test_a_metric_backend_is_looked_at_too_and_another_one_is_a_choice(store: Store, home: Path) -> None:
    (home / "shown.py").write_text(BACKEND)
    create_run(store, load_config(shown()))
    opened(store, "r").close()
    (home / "shown.py").write_text(BOMB + BACKEND)
    (home / "another.py").write_text(BACKEND)
    with pytest.raises(ConfigError, match=r"metric_logging\.custom\.path: .*shown\.py is not the file that run 'r'"):
        opened(store, "r")
    with pytest.raises(ConfigError, match=r"metric backend .*shown\.py:Table.*--allow-code-change"):
        _resumed(store, "r")
    with pytest.raises(ConfigError, match=r"shown\.py is not the file that run 'r' recorded"):
        rescore_of(store, "r", [], ["mine.py:grade"])
    record = load_run(store, "r")
    resume_check(store, record, load_config(record.config, ["metric_logging.custom.path=another.py:Table"]))
    resume_check(store, record, load_config(record.config, ["~metric_logging.custom"]))
    _resumed(store, "r", allow_code=True)
    assert not list(home.rglob("*.ran"))


def test_a_metric_backend_that_changed_does_not_keep_a_run_from_being_evaluated(store: Store, home: Path) -> None:
    (home / "shown.py").write_text(BACKEND)
    record = create_run(store, load_config(shown()))
    (home / "shown.py").write_text(BOMB)
    check_named_code("r", record.config, record.config, "evaluate", record.code)


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ({"scheduler_cls": "engine_parts.Scheduler"}, "generator.engine_args"),
        ({"logits_processors": ["engine_parts:Processor"]}, "generator.engine_args"),
        ({"structured_outputs_config": {"reasoning_parser_plugin": "engine_parts.py"}}, "generator.engine_args"),
    ],
)
def test_classes_in_vllms_settings_are_looked_at_too(store: Store, home: Path, argument: Any, key: str) -> None:
    (home / "engine_parts.py").write_text(REWARD)  # no name of another test's module, which may still be imported
    values = {"run": {"id": "r"}, "generator": {"backend": "vllm", "engine_args": {"max_num_seqs": 8, **argument}}}
    record = create_run(store, load_config(values))
    assert len(record.code) == 2
    opened(store, "r").close()
    (home / "engine_parts.py").write_text(BOMB)
    with pytest.raises(ConfigError, match=rf"{key}: .*home/engine_parts\.py is not the file that run 'r' recorded"):
        opened(store, "r")
    planted(store, "exact_match", {}, generator={"backend": "vllm", "engine_args": {"worker_cls": "subprocess.Popen"}})
    with pytest.raises(ConfigError, match=r"generator\.engine_args: .*subprocess\.py is neither installed"):
        opened(store, "planted")


@pytest.mark.parametrize("name", ["trust_remote_code", "kv_transfer_config", "log_config_file"])
def test_what_vllm_would_import_unseen_is_refused_of_a_stored_run(store: Store, home: Path, name: str) -> None:
    planted(store, "exact_match", {}, generator={"backend": "vllm", "engine_args": {name: "x"}})
    with pytest.raises(ConfigError, match=rf"generator\.engine_args\.{name}: names code"):
        opened(store, "planted")


def test_the_module_of_an_environment_of_verifiers_is_looked_at_too(store: Store, home: Path) -> None:
    (home / "my_env.py").write_text("def load_environment(): ...")
    options = {"options": {"environment": "owner/my-env"}}
    played = {"path": "verifiers", **options}
    prompts = {"path": "python://forge_core.environments.verifiers:prompts", **options}
    values = {"run": {"id": "r"}, "model": {"vocabulary": "01"}, "dataset": prompts, "environment": played}
    create_run(store, load_config(values))
    opened(store, "r").close()
    (home / "my_env.py").write_text(BOMB)
    with pytest.raises(ConfigError, match=r"options\.environment: .*my_env\.py is not the file that run 'r' recorded"):
        opened(store, "r")
    assert not list(home.rglob("*.ran"))
