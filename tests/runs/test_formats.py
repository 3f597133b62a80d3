"""Which release reads which run: told by the number in ``run.json``, before anything else of the run is read."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flows.cli import main
from forge_core.config import ConfigError, load_config
from forge_core.data_model import SCHEMA_VERSION
from forge_core.runs.formats import OLDEST, STORE_FORMAT
from forge_core.runs.record import create_run, load_run, resume_check, resume_run
from forge_core.store import Store, layout, open_store
from tests.docs.documents import ROOT, table_rows

UPGRADING = ROOT / "docs" / "upgrading.md"
RUN, NEXT = "night", "forge-rl 9.9.9"


@pytest.fixture
def store(tmp_path) -> Store:
    store = open_store(str(tmp_path / "store"))
    create_run(store, load_config(ROOT / "configs" / "quickstart.yaml", {"run.id": RUN}))
    return store


def rewritten(store: Store, **values: Any) -> None:
    """``run.json`` as another release would have written it; None: without the key."""
    key = layout.run_json(RUN)
    body = {k: v for k, v in (store.read_json(key) | values).items() if v is not None}
    store.delete(key)
    store.put_new_json(key, body)


def test_a_new_run_records_the_format(store: Store):
    assert store.read_json(layout.run_json(RUN))["format"] == STORE_FORMAT


def test_a_run_made_before_formats_had_numbers_is_read(store: Store):
    rewritten(store, format=None)
    assert load_run(store, RUN).config.run.id == RUN


def test_a_run_of_a_newer_format_names_the_release_to_upgrade_to(store: Store):
    rewritten(store, format=STORE_FORMAT + 1, code={NEXT: "0"}, config={"a key of": "the future"})
    with pytest.raises(ConfigError) as raised:
        load_run(store, RUN)
    assert str(raised.value) == (
        f"run 'night' was made by forge-rl 9.9.9 with store format {STORE_FORMAT + 1}; this release reads up to "
        f"{STORE_FORMAT}: upgrade to forge-rl 9.9.9 or later"
    )


def test_a_format_that_is_older_than_all_that_are_read_says_where_to_go_on(store: Store):
    rewritten(store, format=OLDEST - 1)
    with pytest.raises(ConfigError, match=rf"reads from {OLDEST} on: go on with it in forge-rl \d"):
        load_run(store, RUN)


def test_a_run_that_a_newer_release_went_on_with_is_the_newer_ones(store: Store):
    body = store.read_json(layout.run_json(RUN))
    store.put_new_json(layout.config_change(RUN, 0), {**body, "format": STORE_FORMAT + 1, "code": {NEXT: "0"}})
    with pytest.raises(ConfigError, match=r"made by forge-rl 9\.9\.9 with store format"):
        load_run(store, RUN)


def test_configuration_keys_that_this_release_does_not_know_are_named(store: Store):
    config = store.read_json(layout.run_json(RUN))["config"]
    rewritten(store, config={**config, "telepathy": True}, code={NEXT: "0"})
    with pytest.raises(ConfigError, match=r"made by forge-rl 9\.9\.9(.|\n)*telepathy: unknown key"):
        load_run(store, RUN)


def test_the_next_release_resumes_a_run_of_this_one_when_told_to_and_leaves_a_record(store: Store):
    rewritten(store, code={"forge-rl 0.0.1": "0"})
    record = load_run(store, RUN)
    with pytest.raises(ConfigError, match=r"forge-rl 0\.0\.1(.|\n)*--allow-code-change"):
        resume_check(store, record, record.config)
    resume_run(store, record, record.config, allow_code=True)
    change = store.read_json(layout.config_change(RUN, 0))
    assert (change["format"], "forge-rl 0.0.1" in change["code"]) == (STORE_FORMAT, False)


def test_one_unreadable_run_hides_no_other(store: Store, capfd: pytest.CaptureFixture[str]):
    rewritten(store, format=STORE_FORMAT + 1)
    create_run(store, load_config(ROOT / "configs" / "quickstart.yaml", {"run.id": "mine"}))
    assert main(["runs", "--store", store.uri]) == 0
    out, err = capfd.readouterr()
    assert "mine" in out
    assert "upgrade to" in err
    assert main(["gc", "--store", store.uri]) == 0
    assert "nothing of it was touched" in capfd.readouterr().err
    assert main(["gc", RUN, "--store", store.uri]) == 2
    assert main(["rm", RUN, "--yes", "--store", store.uri]) == 0


def test_the_document_has_this_release_and_its_formats():
    row = table_rows(UPGRADING, "release")[-1]
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    reads = str(STORE_FORMAT) if OLDEST == STORE_FORMAT else f"{OLDEST} to {STORE_FORMAT}"
    assert row == [version, str(STORE_FORMAT), reads, str(SCHEMA_VERSION)]
