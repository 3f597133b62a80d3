"""SQL over the tables of one or several runs, with DuckDB, local or on S3.

    from forge_core.query import query

    query(["first"], "SELECT batch, avg(reward) FROM rewards GROUP BY batch ORDER BY batch").to_pandas()

Tables: ``episodes``, ``rewards``, ``reference``, ``training``, ``ledger``, ``metrics``, ``weights``. Those of episodes
join on ``episode_id``; every table has ``run_id``, and those that are made step by step have ``batch`` (see
docs/queries.md).

Invariants:
- Nothing is written: one SELECT is taken, anything else refused.
- Only tables that a question names are looked for in the store, and only columns that it needs are read.
- Nothing is read but the store's objects: no other file, and nothing from the network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from forge_core.data_model import EPISODES, METRICS, REFERENCE, REWARDS, SCHEMA_VERSION, TRAINING
from forge_core.query.errors import QueryError
from forge_core.query.files import metric_files, shard_files, training_files
from forge_core.query.ledger_tables import LEDGER, WEIGHTS, Made, ledger_table, weights_table
from forge_core.query.reading import PROTOCOL, StoreFiles
from forge_core.runs.record import load_run
from forge_core.runs.removal import run_ids
from forge_core.store import Store, layout, open_store

if TYPE_CHECKING:
    import pandas

SCHEMAS = {"episodes": EPISODES, "rewards": REWARDS, "reference": REFERENCE, "training": TRAINING, "metrics": METRICS}
MADE = {"ledger": Made(LEDGER, ledger_table), "weights": Made(WEIGHTS, weights_table)}
TABLES = (*("episodes", "rewards", "reference", "training"), *("ledger", "metrics", "weights"))
PLACE = {  # what a file's path says; constant for all its rows, so it costs nothing a row
    "run_id": "regexp_extract(filename, '(^|/)runs/([^/]+)/[a-z]+(/[^/]+){1,3}$', 2)",
    "batch": "CAST(regexp_extract(filename, '/(\\d{8})[-/.][^/]*(/[^/]*)?$', 1) AS BIGINT)",
    "round": "CAST(regexp_extract(filename, '/(\\d{8})-\\d{8}/[^/]*$', 1) AS BIGINT)",
    "shard": "CAST(regexp_extract(filename, '/\\d{8}-(\\d{8})/[^/]*$', 1) AS BIGINT)",
}
EXTRA = {
    "episodes": ("run_id", "batch", "round", "shard"),
    "rewards": ("run_id", "batch", "round", "shard"),
    "reference": ("run_id", "batch", "round", "shard"),
    "training": ("run_id", "batch"),
    "metrics": ("run_id",),
}
DERIVED = {  # computed where a question names them
    "episodes": {"prompt_tokens": "len(prompt_ids)", "response_tokens": "len(response_mask)"},
    "metrics": {"batch": "step"},
}
MACROS = {
    # Share of a text's words that it has said before: 0 for none, towards 1 for one word again and again.
    "repetition(t)": "1 - len(list_distinct(regexp_split_to_array(trim(t), '\\s+'))) "
    "/ greatest(len(regexp_split_to_array(trim(t), '\\s+')), 1)",
}
REMOTE_THREADS = 16  # where each waits for a server


def query(runs: Sequence[str], sql: str, *, store: Store | str = "./forge-store", parameters: Any = None) -> pa.Table:
    """The answer to one SELECT about ``runs`` (none: all of the store). ``parameters``: values of ``?`` or ``$name``.

    Raises QueryError for wrong SQL, ConfigError for a run that does not exist, StoreError.
    """
    with RunTables(store, runs) as tables:
        return tables.arrow(sql, parameters)


class RunTables:
    """The tables of ``runs`` for any number of questions; each table is as it was when it was first asked about.
    ``threads``: of DuckDB; left out: one a core, and more for a store that is far away."""

    def __init__(self, store: Store | str, runs: Sequence[str] = (), threads: int | None = None) -> None:
        self._store = open_store(store, probe=False) if isinstance(store, str) else store
        named = list(dict.fromkeys(runs))
        self.runs = named or [r for r in run_ids(self._store) if self._store.exists(layout.run_json(r))]
        for run_id in named:
            load_run(self._store, run_id)
        self._known: set[str] = set()
        self._blank = _blank()
        self._files = StoreFiles(self._store)
        self._connection = _connect()
        if self._store.folder is None:
            self._connection.register_filesystem(self._files)
            threads = threads or REMOTE_THREADS
        if threads is not None:
            self._connection.execute(f"SET threads = {threads}")
        _confine(self._connection, str(self._store.folder or f"{PROTOCOL}://"))

    def __enter__(self) -> RunTables:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        self._blank.close()

    def arrow(self, sql: str, parameters: Any = None) -> pa.Table:
        """The answer as an Arrow table. Raises QueryError, StoreError."""
        try:
            self._prepare(sql, parameters)
            answer = self._connection.sql(sql, params=parameters)
            return answer.to_arrow_table()
        except duckdb.Error as error:
            raise QueryError(_explained(error)) from error

    def pandas(self, sql: str, parameters: Any = None) -> pandas.DataFrame:
        """The answer as a pandas frame. Raises as ``arrow``."""
        return self.arrow(sql, parameters).to_pandas()

    def _prepare(self, sql: str, parameters: Any) -> None:
        """Refuse what is no question, or a wrong one; make the tables that it names."""
        statements = self._blank.extract_statements(sql)
        if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
            raise QueryError("--sql: give one SELECT: the store is read, never written")
        self._blank.sql(sql, params=parameters)
        (parsed,) = self._blank.execute("SELECT json_serialize_sql($1)", [sql]).fetchall()[0]
        for name in sorted(_named_tables(json.loads(parsed)) - self._known):
            self._make(name)
            self._known.add(name)

    def _make(self, name: str) -> None:
        if name in MADE:
            self._connection.register(name, MADE[name].make(self._store, self.runs))
            return
        sizes: dict[str, int] = {}
        for run_id in self.runs:
            sizes |= self._found(name, run_id)
        if not sizes:
            self._connection.register(name, _empty(name))
            return
        folder, names = self._store.folder, self._files.add(sizes)
        self._check_version(names[0])
        paths = names if folder is None else [str(folder / key) for key in sizes]
        self._connection.execute(f"SET VARIABLE {name}_files = $1", [paths])
        columns = {**{c: PLACE[c] for c in EXTRA[name]}, **DERIVED.get(name, {}), **dict.fromkeys(SCHEMAS[name].names)}
        shown = ", ".join(f"{body} AS {column}" if body else f'"{column}"' for column, body in columns.items())
        source = f"read_parquet(getvariable('{name}_files'), filename = true, hive_partitioning = false)"
        self._connection.execute(f"CREATE VIEW {name} AS SELECT {shown} FROM {source}")

    def _found(self, name: str, run_id: str) -> Mapping[str, int]:
        if name == "training":
            return training_files(self._store, run_id)
        return metric_files(self._store, run_id) if name == "metrics" else shard_files(self._store, run_id, name)

    def _check_version(self, key: str) -> None:
        with self._files.open(key) as file:
            found = (pq.read_schema(file).metadata or {}).get(b"forge.schema_version", b"none").decode()
        if found != str(SCHEMA_VERSION):
            raise QueryError(f"{key} has schema version {found}; this release of Forge reads version {SCHEMA_VERSION}")


def _named_tables(tree: Any) -> set[str]:
    """The tables of ours that a parsed question names."""
    found: set[str] = set()
    for node in tree if isinstance(tree, list) else tree.values() if isinstance(tree, dict) else ():
        found |= _named_tables(node)
    if isinstance(tree, dict) and tree.get("type") == "BASE_TABLE":
        found |= {tree["table_name"].lower()} & {*TABLES}
    return found


def _blank() -> duckdb.DuckDBPyConnection:
    """Knows the tables' columns and has no rows: whether a question is right is said before the store is looked at."""
    connection = _connect()
    for name in TABLES:
        connection.from_arrow(_empty(name)).create(name)
    _confine(connection)
    return connection


def _connect() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(
        config={"autoinstall_known_extensions": False, "autoload_known_extensions": False,
                "python_enable_replacements": False}
    )  # fmt: skip
    for macro, body in MACROS.items():
        connection.execute(f"CREATE MACRO {macro} AS {body}")
    return connection


def _confine(connection: duckdb.DuckDBPyConnection, *folders: str) -> None:
    """From here on only ``folders`` are read, and no setting is changed."""
    allowed = ", ".join("'" + folder.replace("'", "''") + "'" for folder in folders)
    connection.execute(f"SET allowed_directories = [{allowed}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _empty(name: str) -> pa.Table:
    if name in MADE:
        return MADE[name].schema.empty_table()
    places = [(column, pa.string() if column == "run_id" else pa.int64()) for column in EXTRA[name]]
    derived = [(column, pa.int64()) for column in DERIVED.get(name, {})]
    return pa.schema([*places, *derived, *SCHEMAS[name]]).empty_table()


def _explained(error: duckdb.Error) -> str:
    text = str(error).strip()
    if "Table with name" in text:
        text += f"\nthe tables are {', '.join(TABLES)}"
    return f"--sql: {text}"
