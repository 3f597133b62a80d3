"""A proxy in front of the real S3 server that makes chosen requests fail, or wait, and counts range reads.

A fault is taken by the first request that it matches, so a list of three faults of one kind fails three requests.
Range reads wait while ``gate`` is closed (``clear``).
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Fault:
    """What happens to one request of ``method`` whose path holds ``part``.

    ``forward``: the server gets the request. ``status``: the client gets this, with ``body``, instead of the server's
    answer; None: the client gets no answer, the connection breaks. ``silent_s``: so long nothing happens first.
    ``cut``: the connection breaks in the middle of the server's answer.
    """

    method: str
    part: str
    forward: bool
    status: int | None = None
    body: bytes = b""
    silent_s: float = 0.0
    cut: bool = False


class FaultyProxy:
    def __init__(self, endpoint: str) -> None:
        self.target = urlsplit(endpoint).netloc
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.ranges: list[str] = []
        self.ranges_at_once = 0
        self._ranges_now = 0
        self._lock = threading.Lock()

    @contextmanager
    def counted(self, path: str, range_header: str | None) -> Iterator[None]:
        """Count a request for a range of ``path`` while it is open, and let it wait at the gate."""
        if range_header is None:
            yield
            return
        with self._lock:
            self.ranges.append(path)
            self._ranges_now += 1
            self.ranges_at_once = max(self.ranges_at_once, self._ranges_now)
        self.gate.wait()
        try:
            yield
        finally:
            with self._lock:
                self._ranges_now -= 1

    def take(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.method == method and fault.part in path:
                    self.faults.remove(fault)
                    return fault
        return None


@contextmanager
def faulty_proxy(endpoint: str) -> Iterator[tuple[FaultyProxy, str]]:
    """The proxy, and the endpoint at which it listens."""
    proxy = FaultyProxy(endpoint)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield proxy, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _handler(proxy: FaultyProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            with proxy.counted(self.path, self.headers.get("Range")):
                self._handle()

        def _handle(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = proxy.take(self.command, self.path)
            answer = self._forwarded(body) if fault is None or fault.forward else None
            if fault is None:
                assert answer is not None
                self._reply(*answer)
            else:
                self._fail(fault, answer)

        def _fail(self, fault: Fault, answer: tuple[int, list[tuple[str, str]], bytes] | None) -> None:
            time.sleep(fault.silent_s)
            if fault.cut and answer is not None:
                status, headers, body = answer
                self._reply(status, headers, body, sent=len(body) // 2)
            if fault.status is not None:
                return self._reply(fault.status, [("Content-Type", "application/xml")], fault.body)
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no end

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any

        def _forwarded(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            server = http.client.HTTPConnection(proxy.target, timeout=30)
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                server.putheader(name, value)
            server.endheaders(body)
            response = server.getresponse()
            answer = response.status, response.getheaders(), response.read()
            server.close()
            return answer

        def _reply(self, status: int, headers: list[tuple[str, str]], body: bytes, sent: int | None = None) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = {name.lower(): value for name, value in headers}.get("content-length", str(len(body)))
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
            self.end_headers()
            self.wfile.write(body[:sent])

        def log_message(self, *args: object) -> None: ...

    return Handler
