"""The documents of the project, cut into what can be checked: fenced blocks, commands, links, names in backticks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MIGRATING = ROOT / "docs" / "migrating.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@dataclass(frozen=True)
class Block:
    document: str
    language: str
    text: str


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document, in order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), flags=re.M | re.S)
    return [Block(document.name, language, text) for language, text in fenced]


def commands(block: Block) -> list[str]:
    """The commands of a bash block, one a line, without comments."""
    lines = [re.sub(r"\s+#.*$", "", line).strip() for line in block.text.splitlines()]
    return [line for line in lines if line]


def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S)


def quoted(document: Path) -> list[str]:
    """What stands in backticks outside of blocks."""
    return re.findall(r"`([^`\n]+)`", prose(document))


def quoted_as_ours(document: Path) -> list[str]:
    """The same without the first column of tables, which has the names of another system."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^\|[^|]*\|", "|", prose(document), flags=re.M))


def links(document: Path) -> list[str]:
    """Targets of links to other files."""
    return [t.split("#")[0] for t in re.findall(r"\]\(([^)]+)\)", prose(document)) if not t.startswith(("http", "#"))]


def table_rows(document: Path, heading: str) -> list[list[str]]:
    """The cells of the table below ``| heading |``."""
    text = document.read_text()
    body = text[text.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body]
