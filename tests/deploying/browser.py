"""Headless Chromium, driven over the DevTools protocol: what a user sees of the Prefect UI, and screenshots of it."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = "chromium"
WAIT_S = 60.0


class Page:
    """One tab. ``wait_for`` looks until the page shows what is expected, as a reader would."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._calls = 0

    def call(self, method: str, **parameters: Any) -> Any:
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while (message := json.loads(self._socket.recv(WAIT_S))).get("id") != self._calls:
            pass  # an event
        assert "error" not in message, message
        return message["result"]

    def evaluate(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def text(self) -> str:
        """The visible text, and the values of the input fields."""
        fields = "[...document.querySelectorAll('input, textarea')].map(e => e.value)"
        return str(self.evaluate(f"[document.body.innerText, ...{fields}].join('\\n')"))

    def wait_for(self, *words: str) -> str:
        deadline = time.monotonic() + WAIT_S
        while missing := [word for word in words if word not in (text := self.text())]:
            assert time.monotonic() < deadline, f"the page does not show {missing}:\n{text}"
            time.sleep(0.2)
        return text

    def click(self, words: str) -> None:
        """Click on the smallest element whose text is ``words``."""
        script = f"""(() => {{
            const found = [...document.querySelectorAll('a, button, label, [role], span, div')]
                .filter(e => e.innerText?.trim() === {json.dumps(words)});
            found.at(-1)?.click();
            return found.length; }})()"""
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"nothing says {words!r}:\n{self.text()}"
            time.sleep(0.2)

    def screenshot(self, file: Path, settle_s: float = 1.0) -> None:
        """What is in the window, once its transitions are over."""
        time.sleep(settle_s)
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(profile: Path, width: int = 1280, height: int = 900) -> Iterator[Page]:
    """A browser with one page; it ends with the block."""
    program = shutil.which(CHROMIUM)
    assert program, "chromium is missing: make system-deps"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [program, *flags, *quiet, "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [*command, f"--window-size={width},{height}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with connect(_first_page(profile), max_size=None, proxy=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(20)


def _first_page(profile: Path) -> str:
    """Address of the tab's socket."""
    written = profile / "DevToolsActivePort"
    deadline = time.monotonic() + WAIT_S
    while not written.exists():
        assert time.monotonic() < deadline, "chromium did not start"
        time.sleep(0.1)
    port = written.read_text().splitlines()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=WAIT_S) as reply:
        pages = [tab for tab in json.load(reply) if tab["type"] == "page"]
    return str(pages[0]["webSocketDebuggerUrl"])
