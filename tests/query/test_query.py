"""Questions about runs: the right rows, from any store, whatever else lies there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pytest

from flows.cli import BAD_INPUT, main
from forge_core.config import ConfigError, load_config
from forge_core.data_model import REWARDS, to_parquet
from forge_core.query import QueryError, RunTables, query
from forge_core.query.files import shard_files
from forge_core.runs.record import create_run
from forge_core.store import Ledger, Store, StoreError, layout, open_store
from tests.query.example import RUN, example_run

COUNT = "SELECT count(*) AS n FROM rewards"


@pytest.fixture
def store() -> Store:
    return example_run(open_store(f"memory://{os.urandom(8).hex()}"))


def numbers(store: Store, sql: str, *runs: str) -> list[dict[str, Any]]:
    return query(runs or [RUN], sql, store=store).to_pylist()


def check_all_tables(store: Store) -> None:
    with RunTables(store, [RUN]) as tables:
        rows = {name: tables.arrow(f"SELECT count(*) AS n FROM {name}").to_pylist()[0]["n"] for name in TABLES}
        joined = tables.arrow(
            "SELECT sum(reward) AS reward, count(*) AS n FROM episodes JOIN rewards USING (episode_id, run_id, batch) "
            "JOIN training USING (episode_id) JOIN reference USING (episode_id)"
        ).to_pylist()
    assert rows.pop("metrics") > 60
    assert rows == {"episodes": 48, "rewards": 48, "reference": 48, "training": 48, "ledger": 4, "weights": 4}
    assert joined == [{"reward": 14.75, "n": 48}]


TABLES = ("episodes", "rewards", "reference", "training", "ledger", "metrics", "weights")


def test_every_table_of_a_store_in_memory(store: Store):
    check_all_tables(store)


def test_every_table_of_a_store_in_a_folder(tmp_path: Path):
    check_all_tables(example_run(open_store(str(tmp_path))))


@pytest.mark.server
def test_every_table_of_a_store_on_s3(s3_store_uri: str):
    check_all_tables(example_run(open_store(f"{s3_store_uri}-queries")))


def test_several_runs_are_asked_together_and_all_of_a_store_without_a_name(store: Store):
    example_run(store, "second", steps=2)
    sql = "SELECT run_id, max(batch) AS last FROM episodes GROUP BY run_id ORDER BY run_id"
    both = [{"run_id": RUN, "last": 2}, {"run_id": "second", "last": 1}]
    assert numbers(store, sql, RUN, "second") == query([], sql, store=store).to_pylist() == both
    assert numbers(store, sql, "second") == both[1:]


def test_answers_are_arrow_or_pandas_and_take_parameters(store: Store):
    with RunTables(store, [RUN]) as tables:
        assert isinstance(tables.arrow(COUNT), pa.Table)
        frame = tables.pandas(
            "SELECT reward FROM rewards WHERE batch = $batch AND reward > $least", {"batch": 2, "least": 0.5}
        )
        assert isinstance(frame, pandas.DataFrame)
        assert sorted(frame["reward"]) == [0.625, 0.625, 1.0, 1.0, 1.0, 1.0]
        assert tables.arrow(f"{COUNT} WHERE batch = ?", [1]).to_pylist() == [{"n": 16}]


def test_what_a_killed_or_a_losing_writer_left_is_no_row(store: Store):
    rows = [{"episode_id": "stray", "reward": 9.0, "components": [], "status": "ok", "error": None}]
    data = to_parquet(rows, REWARDS)
    store.upload(layout.rewards(RUN, 0, 0, 0), {"rewards.parquet": data})  # lost the race
    store.upload(layout.rewards(RUN, 9, 0, 0), {"rewards.parquet": data})  # died before its manifest
    assert numbers(store, f"{COUNT} WHERE reward = 9") == [{"n": 0}]
    assert numbers(store, COUNT) == [{"n": 48}]


def test_of_two_tries_of_a_step_the_one_counts_that_was_committed(store: Store):
    for batch in (1, 7):  # a committed step, and one that was not committed
        store.publish(layout.training(RUN, batch, "lost"), {"training.parquet": b"never read"}, request="other")
    assert numbers(store, "SELECT count(*) AS n FROM training") == [{"n": 48}]


def test_an_evaluation_without_a_graded_answer_is_a_version_without_a_reward(store: Store):
    ledger = Ledger(store, RUN)
    newest = ledger.entry(2)
    assert newest is not None
    ungraded = {**newest["metrics"], "eval/version": 3.0}
    ungraded.pop("eval/reward/mean", None)
    assert ledger.commit({**newest, "batch": 3, "version_in": 3, "version_out": 4, "metrics": ungraded,
                          "previous": ledger.previous(3)})  # fmt: skip
    sql = "SELECT version, eval_reward FROM weights WHERE version = 3"
    assert numbers(store, sql) == [{"version": 3, "eval_reward": None}]


def test_a_run_that_has_just_begun_has_empty_tables(store: Store):
    create_run(store, load_config({"run": {"id": "new"}, "rewards": {"functions": [{"path": "exact_match"}]}}))
    for name in TABLES:
        assert query(["new"], f"SELECT * FROM {name}", store=store).num_rows == 0
    sql = "SELECT sum(response_tokens) AS n, any_value(run_id) AS r FROM episodes"
    assert numbers(store, sql, "new") == [{"n": None, "r": None}]


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT rewrd FROM rewards", 'Candidate bindings: "reward"'),
        ("SELECT * FROM epsodes", 'Did you mean "episodes"'),
        ("SELECT * FROM nothing", "the tables are episodes, rewards, reference, training, ledger, metrics, weights"),
        ("SELEC 1", 'syntax error at or near "SELEC"'),
        ("", "give one SELECT"),
        ("SELECT 1; SELECT 2", "give one SELECT"),
        ("COPY (SELECT 1) TO 'file.csv'", "give one SELECT"),
        ("CREATE TABLE t AS SELECT 1", "give one SELECT"),
        ("DROP VIEW rewards", "give one SELECT"),
        ("INSTALL httpfs", "give one SELECT"),
        ("SELECT * FROM rewards WHERE reward > $1", "parameter"),
    ],
)
def test_wrong_sql_is_bad_input_that_says_what_is_wrong(store: Store, sql: str, said: str):
    with pytest.raises(QueryError) as error:
        query([RUN], sql, store=store)
    assert said.lower() in str(error.value).lower()
    assert "--sql: " in str(error.value)


@pytest.mark.parametrize(
    "source",
    ["read_text('/etc/hostname')", "read_csv('/etc/passwd')", "glob('/etc/*')", "'/etc/passwd'",
     "read_parquet('https://example.org/x.parquet')", "read_text('{folder}/outside')"],
)  # fmt: skip
@pytest.mark.parametrize("place", ["memory", "folder"])
def test_nothing_but_the_store_is_read(place: str, source: str, tmp_path: Path):
    (tmp_path / "outside").write_text("secret")
    uri = f"memory://{os.urandom(8).hex()}" if place == "memory" else str(tmp_path / "store")
    store = example_run(open_store(uri))
    with pytest.raises(QueryError):
        query([RUN], f"SELECT * FROM {source.format(folder=tmp_path)}", store=store)
    assert numbers(store, COUNT) == [{"n": 48}]


def test_a_store_below_a_folder_called_runs_or_like_a_column_keeps_its_names(tmp_path: Path):
    store = example_run(open_store(str(tmp_path / "runs" / "forge" / "task=math" / "store")))
    for table in ("episodes", "rewards", "reference", "training", "metrics"):
        assert numbers(store, f"SELECT DISTINCT run_id FROM {table}") == [{"run_id": RUN}]


def test_variables_of_python_are_no_tables(store: Store):
    secret = pa.table({"a": [1]})
    with pytest.raises(QueryError, match="secret does not exist"):
        query([RUN], "SELECT * FROM secret", store=store)
    assert secret.num_rows == 1


def test_a_run_or_a_store_that_is_not_there_is_named(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="'other' does not exist"):
        query(["other"], "SELECT 1", store=store)
    monkeypatch.chdir(tmp_path)
    assert main(["query", "--sql", "SELECT 1"]) == BAD_INPUT
    with pytest.raises(StoreError, match="unknown"):
        query([RUN], "SELECT 1", store="unknown://x")


def test_another_schema_version_is_refused(store: Store):
    wrong = REWARDS.with_metadata({b"forge.schema_version": b"2"})
    rows = [{"episode_id": "e", "reward": 1.0, "components": [], "status": "ok", "error": None}]
    create_run(store, load_config({"run": {"id": "later"}, "rewards": {"functions": [{"path": "exact_match"}]}}))
    store.publish(layout.rewards("later", 0, 0, 0), {"rewards.parquet": to_parquet(rows, wrong)}, request="r")
    with pytest.raises(QueryError, match="has schema version 2; this release of Forge reads version 1"):
        query(["later"], COUNT, store=store)


def test_the_command_prints_a_table_or_lines_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    example_run(open_store(str(tmp_path)))
    words = ["query", RUN, "--store", str(tmp_path), "--sql", "SELECT batch, text, '[b]' AS mark FROM episodes LIMIT 1"]
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[3] == "| 0     | answer 0 0 0 | [b]  |"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"batch": 0, "text": "answer 0 0 0", "mark": "[b]"}


def test_thousands_of_shards_are_found_quickly(store: Store, timed: Callable[[], float]):
    for batch in range(1000):
        for shard in range(4):
            for name in ("manifest.json", "rewards-0123456789ab.parquet"):
                store.put_new(layout.rewards("wide", batch, 0, shard) + name, b"x")
    began = timed()
    assert len(shard_files(store, "wide", "rewards")) == 4000
    assert timed() - began < 1.0


@pytest.fixture
def timed() -> Callable[[], float]:
    return time.process_time  # of this process: the machine may be busy


def asked(tmp_path: Path, sql: str, *flags: str) -> int:
    return main(["query", "--store", str(tmp_path), "--sql", sql, *flags])


def test_columns_of_one_name_are_all_shown_and_an_object_cannot_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    example_run(open_store(str(tmp_path)))
    assert asked(tmp_path, "SELECT 1 AS a, 2 AS a, 3 AS b") == 0
    assert capsys.readouterr().out.splitlines()[3] == "| 1 | 2 | 3 |"
    assert asked(tmp_path, "SELECT 1 AS a, 2 AS a", "--json") == 2
    assert "several columns of the answer are named a" in capsys.readouterr().err


def test_texts_and_headers_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    example_run(open_store(str(tmp_path)))
    assert asked(tmp_path, "SELECT '[/x] :smile:' AS \"[red]a[/y]\", list_sort([2, 1])[1]") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split("|")[1].strip() == "[red]a[/y]"
    assert lines[1].split("|")[2].strip() == "list_sort(list_value(2, 1))[1]"
    assert lines[3].split("|")[1].strip() == "[/x] :smile:"


def test_numbers_of_json_are_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    example_run(open_store(str(tmp_path)))
    sql = "SELECT sum(batch) AS n, 'nan'::DOUBLE AS x, [1.5, 'inf'::DOUBLE] AS xs, 0.25 AS d FROM ledger"
    assert asked(tmp_path, sql, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"n": 3, "x": None, "xs": [1.5, None], "d": 0.25}
