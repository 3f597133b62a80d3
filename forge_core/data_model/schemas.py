"""Arrow schemas of the four episode tables and of the metrics (a public contract: DESIGN section 4).

Invariants: column names and types never change within a schema version; the version travels in the schema's
metadata under ``forge.schema_version``; a table is written deterministically, so equal rows give equal bytes.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA_VERSION = 1
_METADATA = {b"forge.schema_version": str(SCHEMA_VERSION).encode()}

VERSION_SPAN = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])

EPISODES = pa.schema(
    [
        ("episode_id", pa.string()),  # <run_id>/<batch>/<group>/<sample>, numbers zero-padded to eight digits
        ("group_id", pa.string()),
        ("sample_index", pa.int32()),
        ("prompt_id", pa.string()),
        ("messages", pa.string()),  # JSON: [{"role", "content"}]
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.bool_())),  # true: sampled by the policy; false: written by a tool
        ("response_logprobs", pa.list_(pa.float32())),  # the sampler's, at the temperature used
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("version_spans", pa.list_(VERSION_SPAN)),
        ("target", pa.string()),
        ("task", pa.string()),
        ("metadata", pa.string()),  # JSON
        ("sampling", pa.string()),  # JSON
        ("created_at", pa.timestamp("us", tz="UTC")),
    ],
    metadata=_METADATA,
)

REWARDS = pa.schema(
    [
        ("episode_id", pa.string()),
        ("reward", pa.float64()),  # null when scoring failed
        ("components", pa.map_(pa.string(), pa.float64())),
        ("status", pa.string()),  # ok | error | timeout
        ("error", pa.string()),
    ],
    metadata=_METADATA,
)

REFERENCE = pa.schema([("episode_id", pa.string()), ("ref_logprobs", pa.list_(pa.float32()))], metadata=_METADATA)

TRAINING = pa.schema(
    [
        ("episode_id", pa.string()),
        ("advantage", pa.float64()),
        ("age", pa.int32()),  # training steps between the version that sampled and the version trained
        ("trained", pa.bool_()),
        ("dropped", pa.string()),  # reason, or null
        ("loss_tokens", pa.int32()),
    ],
    metadata=_METADATA,
)

METRICS = pa.schema(
    [
        ("step", pa.int64()),  # training step, from 0: its number in the ledger
        ("version", pa.int64()),  # the policy version that it made: step + 1
        ("key", pa.string()),
        ("value", pa.float64()),  # null: unknown
        ("reduction", pa.string()),  # mean | sum | max | min | std | last | sample
        ("count", pa.int64()),  # recorded values that it was reduced from; null for what the step measured itself
        ("source", pa.string()),  # null: all ranks and processes; else the one that recorded, such as trainer.1
        ("sample", pa.string()),  # JSON: a row of a table (reduction sample)
        ("time", pa.timestamp("ms", tz="UTC")),  # of the step's commit
    ],
    metadata=_METADATA,
)


def to_parquet(rows: list[dict], schema: pa.Schema) -> bytes:
    """Rows (dicts keyed by column) as the bytes of one Parquet file; a missing column is an error."""
    missing = [name for name in schema.names if rows and name not in rows[0]]
    if missing:
        raise KeyError(f"rows lack the columns {missing} of the schema")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def from_parquet(data: bytes, schema: pa.Schema, name: str) -> list[dict]:
    """Rows of a Parquet file, after checking its schema version; ``name`` is used in errors."""
    table = pq.read_table(pa.BufferReader(data))
    found = (table.schema.metadata or {}).get(b"forge.schema_version", b"none").decode()
    if found != str(SCHEMA_VERSION):
        raise ValueError(f"{name} has schema version {found}; this release of Forge reads version {SCHEMA_VERSION}")
    if table.schema.names != schema.names:
        raise ValueError(f"{name} has the columns {table.schema.names}; expected {schema.names}")
    return table.cast(schema).to_pylist()
