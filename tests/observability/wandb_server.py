"""What W&B's own client needs of a server to run online: it keeps runs, their history and their summary, and lets a run
that it knows be resumed. It has no artifacts, which tables are. The client is the real one; only the service at the
other end, which nobody can install, is this."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer(ThreadingHTTPServer):
    """``runs``: by id, the ``project``, the lines of the ``history`` and the ``summary``."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.runs: dict[str, dict[str, Any]] = {}

    def query(self, text: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertBucket" in text:
            return {"upsertBucket": self._upserted(variables)}
        if "RunResumeStatus" in text:
            return {"model": {"id": "p", "name": "", "entity": _ENTITY, "bucket": self._bucket(variables["name"])}}
        if "createRunFiles" in text:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if "viewer" in text:
            teams: dict[str, Any] = {"edges": []}
            viewer = {"id": "u", "username": "me", "email": "me@example.org", "admin": False, "flags": "{}"}
            return {"viewer": {**viewer, "entity": "me", "teams": teams, "apiKeys": teams}, "serverInfo": None}
        return {}

    def stream(self, run_id: str, files: dict[str, dict[str, Any]]) -> None:
        run = self.runs[run_id]
        if part := files.get("wandb-history.jsonl"):
            run["history"][part["offset"] :] = part["content"]
        if part := files.get("wandb-summary.json"):
            run["summary"] = part["content"][-1]

    def _upserted(self, variables: dict[str, Any]) -> dict[str, Any]:
        name, new = variables["name"], variables["name"] not in self.runs
        run = self.runs.setdefault(name, {"history": [], "summary": "{}", "config": "{}"})
        run |= {"project": variables["project"], "config": variables.get("config") or run["config"]}
        project = {"id": "p", "name": run["project"], "entity": _ENTITY}
        return {
            "inserted": new,
            "bucket": {"id": f"b-{name}", "name": name, "config": run["config"], "project": project},
        }

    def _bucket(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None:
            return None
        counts = {"historyLineCount": len(run["history"]), "logLineCount": 0, "eventsLineCount": 0}
        tails = {"historyTail": json.dumps(run["history"][-1:]), "eventsTail": "[]"}
        known = {"summaryMetrics": run["summary"], "config": run["config"], "tags": [], "wandbConfig": '{"t": 1}'}
        return {"id": "b", "name": name, "displayName": name, **counts, **tails, **known}


_ENTITY = {"id": "e", "name": "me"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer

    def do_POST(self) -> None:
        body = json.loads(self._body() or b"{}")
        if self.path.startswith("/graphql"):
            return self._reply({"data": self.server.query(body["query"], body.get("variables") or {})})
        if found := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            self.server.stream(found[1], body.get("files", {}))
        self._reply({"limits": {}})

    def do_PUT(self) -> None:
        self._body()
        self._reply({})

    def do_GET(self) -> None:
        self._reply({})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        return gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body

    def _reply(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that is done resets connections
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
