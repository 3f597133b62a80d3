"""A hook of MkDocs: files outside of docs/ that documents link to become pages of the site.

So one and the same relative link, such as ``../configs/quickstart.yaml``, works where the repository is browsed and in
the site. Markdown files of the root keep their form; all others are shown as they are, in a code block.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = "source"  # folder of the site for what lies outside of docs/
ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file that a document links to outside of docs/."""
    documents = [(file.src_uri, file.content_string) for file in files.documentation_pages() if _is_markdown(file)]
    waiting = {*ALWAYS, *(path for uri, text in documents for path in _outside(uri, text))}
    while waiting:
        path = waiting.pop()
        page = _page_of(path)
        if files.get_file_from_path(page) is None:
            text = _shown(path)
            files.append(File.generated(config, page, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
            waiting |= set(_outside(page, text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files outside of docs/, and those of such files, to their pages."""
    uri = page.file.src_uri
    folder = posixpath.dirname(uri)

    def turned(found: re.Match[str]) -> str:
        return posixpath.relpath(_uri_of(_target(uri, found[1])), folder or ".") + (found[2] or "")

    return LINK.sub(turned, markdown) if _is_markdown(page.file) else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of a notebook to documents, which Jupyter and a repository's pages follow as they are."""
    return html if _is_markdown(page.file) else re.sub(r'(href="(?![a-z]+:)[^"#]+)\.md(?=["#])', r"\1.html", html)


def _outside(uri: str, text: str) -> list[str]:
    """Paths from the root of the repository of what a page links to outside of docs/."""
    targets = [_target(uri, found[1]) for found in LINK.finditer(text)]
    return [target for target in targets if not target.startswith("docs/")]


def _target(uri: str, link: str) -> str:
    """Where a link of the page ``uri`` leads, as a path from the root of the repository."""
    origin = uri.removeprefix(f"{PAGES}/") if uri.startswith(f"{PAGES}/") else f"docs/{uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _uri_of(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else _page_of(path)


def _page_of(path: str) -> str:
    return f"{PAGES}/{path}" if path.endswith(".md") else f"{PAGES}/{path}.md"


def _shown(path: str) -> str:
    if not (ROOT / path).is_file():
        raise PluginError(f"a document links to {path}, which is no file of this repository")
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return text
    language = {"py": "python", "yaml": "yaml", "json": "json"}.get(path.rpartition(".")[2], "text")
    return f"# {path}\n\n````{language}\n{text}\n````\n"


def _is_markdown(file: File) -> bool:
    return file.src_uri.endswith(".md")
