"""A hook of MkDocs: a list begins at its first item, with or without an empty line before it.

Docstrings are written so (``Invariants:`` and then the items), and it is how most readers of Markdown take it.
"""

from __future__ import annotations

import re

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig

ITEM = re.compile(r"(?:[-*]|\d+\.) ")


class _Lists(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        made: list[str] = []
        before, within = "", False  # the line before; whether it belongs to a list
        for line in lines:
            item = ITEM.match(line) is not None
            if item and not within and before.strip():
                made.append("")
            within = item or (within and (not line.strip() or line.startswith(" ")))
            made.append(line)
            before = line
        return made


class _Extension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Lists(md), "lists", 20)  # after fenced code was taken out


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(_Extension())  # type: ignore[arg-type]
    return config
