"""What the documents say is so: names, links, tables, and how each command is covered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from flows.cli import parser
from flows.commands import COMMANDS
from forge_core.config import RunConfig, load_config
from forge_core.config.keys import key_fields, keys_of
from forge_core.config.sft_config import SftConfig
from forge_core.data_model import EPISODES, REFERENCE, REWARDS, TRAINING
from forge_core.store.ledger import ENTRY_KEYS
from tests.docs.documents import DOCUMENTS, MIGRATING, ROOT, blocks, commands, links, quoted, quoted_as_ours, table_rows
from tests.docs.journey import NOT_RUN, journey

CLI, STORE = ROOT / "docs" / "cli.md", ROOT / "docs" / "store.md"
every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@every_document
def test_links_lead_to_files_that_exist(document: Path):
    assert [link for link in links(document) if not (document.parent / link).exists()] == []


@every_document
def test_configuration_keys_in_backticks_exist(document: Path):
    named = quoted(document) if document != MIGRATING else quoted_as_ours(document)
    words = [word.split(":")[0].split("=")[0] for word in named]
    sections = {*RunConfig.model_fields, *SftConfig.model_fields}
    keys = [w for w in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", w) and w.split(".")[0] in sections]
    files = (".py", ".md", ".json", ".yaml", ".yml", ".parquet", ".jsonl")
    with keys_of(SftConfig):
        supervised = set(key_fields())
    assert [key for key in keys if key not in {*key_fields(), *supervised} and not key.endswith(files)] == []


@every_document
def test_yaml_examples_are_configurations(document: Path):
    for block in blocks(document):
        if block.language == "yaml":
            load_config(yaml.safe_load(block.text))


@every_document
def test_every_command_is_run_or_has_a_reason_why_not(document: Path):
    run = {step.text for step in journey()}
    found = [c for block in blocks(document) if block.language == "bash" for c in commands(block)]
    assert [c for c in found if c not in run and c not in NOT_RUN] == []


def test_every_reason_not_to_run_a_command_is_about_one_that_is_there():
    found = {c for d in DOCUMENTS for block in blocks(d) if block.language == "bash" for c in commands(block)}
    assert NOT_RUN.keys() - found == set()
    assert all(NOT_RUN.values())


def test_the_table_of_commands_is_complete_and_each_line_parses():
    rows = [row[0].strip("`").replace("\\|", "|") for row in table_rows(CLI, "command")]
    assert {row.split()[1] for row in rows} == COMMANDS.keys()
    for row in rows:
        words = re.sub(r"\[[^\]]*\]", "", row).split()[1:]
        assert parser().parse_args(words).command == words[0]


def test_the_statuses_are_those_of_the_command():
    from flows import cli

    documented = {int(row[0]) for row in table_rows(CLI, "status")}
    assert documented == {cli.OK, cli.FAILED, cli.BAD_INPUT, cli.STOPPED}


def test_the_tables_of_the_store_have_the_columns_that_are_stored():
    documented = {row[0]: re.findall(r"`([a-z_]+)`(?: \(|,|$)", row[1]) for row in table_rows(STORE, "table")}
    schemas = {"episodes": EPISODES, "rewards": REWARDS, "reference": REFERENCE, "training": TRAINING}
    assert documented == {name: schema.names for name, schema in schemas.items()}


def test_the_ledger_table_has_every_key():
    documented = {key for row in table_rows(STORE, "key") for key in re.findall(r"`(\w+)`", row[0])}
    assert documented == ENTRY_KEYS
