"""A real HTTP server that speaks OpenAI's chat protocol, and answers as a test tells it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    text: str = "Good.\nScore: 5"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    delay_s: float = 0.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # of connections that are made at once; with 5 some are reset


class JudgeServer:
    """``answer(request, number)`` says what comes back; ``requests`` are the bodies, ``keys`` the Authorization
    headers; ``most`` is how many were in flight at once."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Answer]):
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._http = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _enter(self, body: dict[str, Any], key: str | None) -> int:
        with self._lock:
            self.requests.append(body)
            self.keys.append(key)
            self._now += 1
            self.most = max(self.most, self._now)
            return len(self.requests)

    def _leave(self) -> None:
        with self._lock:
            self._now -= 1

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = server._enter({**body, "path": self.path}, self.headers.get("Authorization"))
                try:
                    answer = server.answer(body, number)
                    time.sleep(answer.delay_s)
                finally:
                    server._leave()
                self._send(answer)

            def _send(self, answer: Answer) -> None:
                message = {"role": "assistant", "content": answer.text}
                completion = {
                    "object": "chat.completion",
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
                }
                data = json.dumps(completion).encode() if answer.body is None else answer.body
                self.send_response(answer.status)
                for name, value in {"Content-Length": str(len(data)), **answer.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        return Handler
