"""Make docs/images/report.png: the report of a small real run, in light colours, as a browser shows it.

    forge train configs/quickstart.yaml run.id=first steps=24 training.batch_size=256 eval.interval=6 max_staleness=2
    PYTHONPATH=. python scripts/report_picture.py ./forge-store first

Needs chromium (make system-deps).
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from forge_core.report import write_report
from forge_core.store import open_store
from tests.deploying.browser import browser

TARGET = Path(__file__).parents[1] / "docs" / "images" / "report.png"
SHOWN = ("reward", "stages", "gantt")  # a picture of all of it would be unreadable
WIDTH = 1100


def main(store: str, run_id: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = write_report(open_store(store, probe=False), [run_id], Path(folder) / "report")
        with browser(Path(folder) / "profile", width=WIDTH) as page:
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
            page.open(made.page.as_uri())
            page.wait_for("all keys")  # the last words of the page
            keep = ", ".join(f"figure.{name}" for name in SHOWN)
            page.evaluate(f"document.body.replaceChildren(...document.querySelectorAll('{keep}'))")
            height = page.evaluate("document.documentElement.scrollHeight")
            page.call(
                "Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False
            )
            TARGET.write_bytes(base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
