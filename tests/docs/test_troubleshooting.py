"""docs/troubleshooting.md: the messages that it quotes are those of the source, and its commands exist."""

from __future__ import annotations

import argparse
import ast
import re
from functools import cache
from pathlib import Path

import pytest

from flows.cli import parser
from tests.docs.documents import DOCUMENTS, ROOT, blocks, quoted

DOCUMENT = ROOT / "docs" / "troubleshooting.md"
QUOTED = [line for block in blocks(DOCUMENT) if block.language == "text" for line in block.text.splitlines()]
PLACEHOLDERS = re.compile(r"%[-.\d]*[a-z]|\{[^{}]*\}")  # of logging and of str.format
SYMPTOMS = (  # those of torchforge's guide, and what its users ask for most
    *("Not enough GPUs", "Memory runs out", "Weights reach the generator slowly", "The policy collapses"),
    *("The reward stays flat", "Nothing happens", "The id is taken", "It cannot be installed", "The loss is not"),
    *("HF_TOKEN", "Resuming is refused", "A role is stuck", "It was killed", "The Prefect server is gone"),
    *("The disk or the bucket is full", "The UI shows a run that is long dead", "the answers get worse"),
)


@cache
def messages() -> str:
    """Every text of the source, one a line, with ``…`` for what is put in."""
    found = [(ROOT / "Makefile").read_text()]
    for package in ("forge_core", "tasks", "flows"):
        for file in (ROOT / package).rglob("*.py"):
            tree = ast.parse(file.read_text())
            found += [_text(node) for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)]
    return "\n".join(found)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return PLACEHOLDERS.sub("…", node.value) if isinstance(node.value, str) else ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)


@pytest.mark.parametrize("line", QUOTED)
def test_what_is_quoted_is_what_forge_prints(line: str):
    assert len(line.replace("…", "")) >= 14, "too little to be found by"
    assert line in messages()


def test_every_symptom_has_a_heading():
    headings = "\n".join(re.findall(r"^##+ (.*)$", DOCUMENT.read_text(), flags=re.M))
    assert [symptom for symptom in SYMPTOMS if symptom not in headings] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_command_within_a_sentence_exists_with_its_options(document: Path):
    (choices,) = [action.choices for action in parser()._actions if isinstance(action, argparse._SubParsersAction)]
    for text in quoted(document):
        if text.startswith("forge ") and "COMMAND" not in text:
            command = text.split()[1]
            assert command in choices, text
            assert set(re.findall(r"(?<!\S)\[?(--[\w-]+)", text)) <= choices[command]._option_string_actions.keys(), (
                text
            )
