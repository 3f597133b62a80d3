"""The site as it is built: strictly, complete, every link leads somewhere, no other host is asked, legible."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

from forge_core import data, data_model, environments, query, report, rewards, services, store
from forge_core.algorithms.losses import CORRECTIONS, LOSSES
from forge_core.environments import resolve as environment_names
from tests.deploying.browser import Page, browser
from tests.docs.documents import ROOT

DOCS = ROOT / "docs"
PACKAGES = (data, data_model, environments, query, report, rewards, services, store)
NAMES = {  # besides what the packages export; not imported here, since some load torchtitan
    *(f"forge_core.algorithms.{name}" for name in ("advantages.group_advantages", "advantages.gae", "ops.compute_kl")),
    *(f"forge_core.generation.{name}" for name in ("base.Generator", "hf.HFGenerator", "vllm.VLLMGenerator")),
    *("forge_core.training.trainer.TitanTrainer", "forge_core.training.rank_group.RankGroup"),
    *(f"forge_core.observability.{name}" for name in ("metrics.record_metric", "tracing.trace", "backends.Backend")),
    *(f"forge_core.runs.{name}" for name in ("record.RunRef", "context.RunContext", "stages.ShardRef")),
    *(f"tasks.{name}" for name in ("rollout", "score", "refill", "reference", "evaluate", "train", "initialise")),
    *(f"flows.{name}" for name in ("grpo.grpo", "grpo.grpo_resume", "sft.sft", "redo.rescore", "redo.retrain_from")),
    *(f"flows.{name}" for name in ("evaluate.evaluate", "retrain.retrain", "distributed.grpo_distributed")),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as ``make docs`` does: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


class _Read(HTMLParser):
    """What a page links to, what it loads, and which anchors it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.loads.add(found["src"])
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loads.add(found["href"])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, _Read]:
    return {page: _Read(page) for page in sorted(site.rglob("*.html"))}


def test_every_document_is_in_the_navigation_once():
    class Loader(yaml.SafeLoader):
        pass

    def entries(part: object) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
            yield from entries(one)

    named = sorted(entries(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    documents = [str(file.relative_to(DOCS)) for kind in ("*.md", "*.ipynb") for file in DOCS.rglob(kind)]
    assert named == sorted([*documents, "source/CHANGELOG.md", "source/CONTRIBUTING.md"])


@pytest.mark.server
def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path, pages: dict[Path, _Read]):
    lost = []
    for page, read in pages.items():
        for link in read.links:
            parts = urlsplit(link)
            if parts.scheme or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            if not target.exists() or (parts.fragment and known and unquote(parts.fragment) not in known.anchors):
                lost.append(f"{page.relative_to(site)}: {link}")
    assert lost == []
    assert len(pages) > 50


@pytest.mark.server
def test_a_page_loads_nothing_from_elsewhere(site: Path, pages: dict[Path, _Read]):
    assert {
        load for read in pages.values() for load in read.loads if urlsplit(load).scheme not in ("", "data")
    } == set()
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//", styles) == []


@pytest.mark.server
def test_a_link_out_of_the_documents_shows_the_file(site: Path):
    assert 'href="source/configs/sft_quickstart.yaml.html"' in (site / "sft.html").read_text()
    shown = re.sub(r"<[^>]+>", "", (site / "source" / "configs" / "sft_quickstart.yaml.html").read_text())
    assert (ROOT / "configs" / "sft_quickstart.yaml").read_text().splitlines()[0] in shown


@pytest.mark.server
def test_names_in_angle_brackets_are_shown_and_lists_in_docstrings_are_lists(site: Path):
    assert "&lt;file.py&gt;:&lt;name&gt;" in (site / "configuration.html").read_text()
    assert re.search(r"<li>\s*(<p>)?Completions come back in the order", (site / "api" / "generation.html").read_text())


@pytest.mark.server
def test_the_reference_has_every_public_name(pages: dict[Path, _Read]):
    anchors = {anchor for page, read in pages.items() if page.parent.name == "api" for anchor in read.anchors}
    objects = [getattr(package, name) for package in PACKAGES for name in package.__all__]
    objects += [*LOSSES.values(), *CORRECTIONS.values()]
    wanted = NAMES | {f"{o.__module__}.{o.__qualname__}" for o in objects if hasattr(o, "__qualname__")}
    wanted |= {path.replace(":", ".") for path in [*rewards.BUILTINS.values(), *environment_names.BUILTINS.values()]}
    assert wanted - anchors == set()


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()


PAGES = {
    "index.html": ("Where to go", "make quickstart"),
    "concepts.html": ("max_staleness", "One training step"),
    "notebooks/first-run.html": ("Another reward, without sampling anything again", "Completed - 10 training steps"),
    "api/losses.html": ("forge_core.algorithms.losses.grpo.GRPOLoss", "policy_gradient"),
    "troubleshooting.html": ("The policy collapses",),
}


@pytest.mark.server
@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(30, 33, 41)")])
def test_a_browser_shows_it_finds_words_and_asks_nobody_else(scheme: str, ground: str, address: str, tmp_path: Path):
    with browser(tmp_path / "profile") as page:
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for path, words in PAGES.items():
            page.open(f"{address}/{path}")
            page.wait_for(*words)
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground, path
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), path
            asked = page.evaluate("performance.getEntriesByType('resource').map(e => e.name)")
            assert [url for url in asked if not url.startswith((address, "data:"))] == []
            assert page.evaluate("[...document.images].filter(i => i.complete && !i.naturalWidth).length") == 0, path
        assert_the_search_finds(page)


def assert_the_search_finds(page: Page) -> None:
    page.evaluate(
        """(() => { document.querySelector('#__search').checked = true;
            const field = document.querySelector('[data-md-component=search-query]');
            field.focus(); field.value = 'collapses'; field.dispatchEvent(new Event('keyup')); })()"""
    )
    page.wait_for("The policy collapses", "matching document")
