"""What a reader's browser makes of a report: it renders in light and dark, asks nobody, and runs nothing."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from forge_core.report import write_report
from forge_core.store import open_store
from tests.deploying.browser import Page, browser
from tests.query import example
from tests.query.example import RUN, example_run

pytestmark = pytest.mark.server
SECTIONS = ("Summary", "Reward", "Time per stage", "Throughput", "Timeline", "Samples", "Configuration")
HEARD: list[str] = []


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of a server that notes what it is asked for."""

    class Noting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            HEARD.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Noting)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()


def test_a_report_renders_asks_nobody_and_runs_nothing(listener: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hostile = (
        f"</pre></article><script>window.hacked = 1</script><img src='{listener}/image' onerror='window.hacked = 1'>"
        f"<style>body {{ background: url({listener}/style) }}</style><iframe src='{listener}/frame'></iframe>"
    )
    monkeypatch.setattr(example, "text_of", lambda *_: hostile)
    made = write_report(example_run(open_store(f"memory://{os.urandom(8).hex()}")), [RUN], tmp_path / "out")
    with browser(tmp_path / "profile") as page:
        for scheme in ("light", "dark"):
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            page.open(made.page.as_uri())
            page.wait_for(*SECTIONS, "<script>window.hacked = 1</script>")
            assert page.evaluate("typeof window.hacked") == "undefined"
            assert page.evaluate("performance.getEntriesByType('resource').length") == 0
            assert page.evaluate("document.querySelectorAll('figure svg').length") == 5
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            check_legible(page, dark=scheme == "dark")
    assert HEARD == []


def check_legible(page: Page, *, dark: bool) -> None:
    """Texts of the page and of its figures stand out from the ground (WCAG AA), and the ground is the scheme's."""
    ground = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (ground < 0.05) if dark else (ground > 0.9)
    fills = page.evaluate("[...document.querySelectorAll('figure svg text')].map(e => getComputedStyle(e).fill)")
    texts = {*fills, page.evaluate("getComputedStyle(document.body).color")}
    on_ground = [luminance(colour) for colour in texts if abs(luminance(colour) - ground) > 1e-3]  # else: on a bar
    contrasts = [(max(x, ground) + 0.05) / (min(x, ground) + 0.05) for x in on_ground]
    assert len(contrasts) >= 2
    assert min(contrasts) >= 4.5


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
