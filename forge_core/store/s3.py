"""The store in an S3 bucket (``s3://bucket/prefix``), on any server that enforces conditional PUT.

- ``create`` is one PutObject with ``If-None-Match: *``. The writer's nonce travels in the object's metadata, and in the
  body where that is JSON: a writer that is told 412 reads it back, and its own nonce means that it had won and only
  the reply was lost. 409 (two conditional writes at once) is tried again.
- ``write`` uses ``pipe_file`` and ``put_file``, which commit whole objects only.
- Existence is a HEAD of the full key, never a listing of a prefix.
- Passing failures (5xx, time-outs, resets) are tried again with back-off by every operation: all are idempotent.
- Credentials, region and endpoint come from the usual AWS settings (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...).
"""

from __future__ import annotations

import builtins
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import botocore.exceptions
import s3fs
from fsspec.asyn import sync
from s3fs.core import S3_RETRYABLE_ERRORS

from forge_core.store.errors import NotFound, StoreError

T = TypeVar("T")
ATTEMPTS = 5
FIRST_WAIT_S = 0.2
_CONFIG = {
    "connect_timeout": 5,  # seconds
    "read_timeout": 60,  # seconds
    "max_pool_connections": 50,
    "retries": {"mode": "standard", "total_max_attempts": 3},  # of one part of a large file; `_call` repeats the whole
    # Digests are in the manifests, and several S3-compatible servers do not know these headers.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
_UNREACHABLE = (botocore.exceptions.ConnectionError, botocore.exceptions.ConnectTimeoutError)
_NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
)
_FAILURES = (OSError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, *S3_RETRYABLE_ERRORS)
_PASSING_STATUS = (408, 409, 429, 500, 502, 503, 504)
_CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE)"


@lru_cache(maxsize=4)
def _file_system(process: int, settings: tuple[tuple[str, str], ...]) -> s3fs.S3FileSystem:
    """One client for all stores with the same AWS settings: making one takes a good part of a second."""
    # A cached listing would hide the keys of other writers; s3fs's own cache of clients would hide changed settings.
    file_system = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, config_kwargs=_CONFIG)
    file_system.retries = 1  # `_call` is the only one that repeats
    return file_system


class S3Backend:
    longest_poll_s = 2.0
    folder: Path | None = None

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        settings = ((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
        self._fs = _file_system(os.getpid(), tuple(sorted(settings)))
        self._reached = False

    def create(self, path: str, body: bytes, nonce: str) -> bool:
        try:
            put = lambda: self._fs.pipe_file(self._url(path), body, mode="create", Metadata={"nonce": nonce})
            self._call(path, put)
        except _Exists:
            return self._holds(path, nonce)
        return True

    def write(self, path: str, data: bytes | Path) -> None:
        if isinstance(data, Path):
            self._call(path, lambda: self._fs.put_file(str(data), self._url(path)))
        else:
            self._call(path, lambda: self._fs.pipe_file(self._url(path), data))

    def read(self, path: str) -> bytes:
        return self._call(path, lambda: self._fs.cat_file(self._url(path)))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        try:
            return self._call(path, lambda: self._fs.cat_file(self._url(path), start=start, end=end))
        except _BeyondEnd:
            return b""

    def download(self, path: str, target: Path) -> None:
        self._call(path, lambda: self._fs.get_file(self._url(path), str(target)))

    def exists(self, path: str) -> bool:
        try:
            self._request("head_object", path)
        except NotFound:
            return False
        return True

    def list(self, folder: str) -> builtins.list[str]:
        prefix = self.prefix + (f"{folder}/" if folder else "")
        found: list[str] = []
        more: dict[str, str] = {}
        while True:
            page = self._call(
                folder, partial(self._fs.call_s3, "list_objects_v2", Bucket=self.bucket, Prefix=prefix, **more)
            )
            found.extend(item["Key"].removeprefix(self.prefix) for item in page.get("Contents", ()))
            if not page.get("IsTruncated"):
                return sorted(found)
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, path: str) -> None:
        self._request("delete_object", path)

    def cache_root(self) -> Path:
        return Path(tempfile.gettempdir())

    def _holds(self, path: str, nonce: str) -> bool:
        """Whether the stored object is the one that carries ``nonce``."""

        async def read() -> bool:
            reply = await self._fs._call_s3("get_object", Bucket=self.bucket, Key=self.prefix + path)
            async with reply["Body"] as stream:
                body = await stream.read()
            return reply["Metadata"].get("nonce") == nonce or nonce.encode() in body

        return self._call(path, lambda: sync(self._fs.loop, read))

    def _url(self, path: str) -> str:
        return f"{self.bucket}/{self.prefix}{path}"

    def _request(self, method: str, path: str) -> Any:
        request = lambda: self._fs.call_s3(method, Bucket=self.bucket, Key=self.prefix + path)
        return self._call(path, request)

    def _call(self, path: str, operation: Callable[[], T]) -> T:
        """Run ``operation``, again after passing failures, and translate what it raises."""
        for attempt in range(ATTEMPTS):
            try:
                result = operation()
            except _FAILURES as error:
                if attempt + 1 == ATTEMPTS or not self._passing(error):
                    raise self._translated(path, error) from error
                time.sleep(FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.5))
            else:
                self._reached = True
                return result
        raise AssertionError("unreachable")

    def _passing(self, error: Exception) -> bool:
        if isinstance(error, _UNREACHABLE):
            return self._reached  # a server that never answered is more likely a wrong address
        return _status(error) in _PASSING_STATUS or isinstance(error, S3_RETRYABLE_ERRORS)

    def _translated(self, path: str, error: Exception) -> Exception:
        status, code, where = _status(error), _code(error), f"{path} in the store {self.uri}"
        if code == "NoSuchBucket":
            return StoreError(
                f"the bucket {self.bucket} of the store {self.uri} does not exist: create it, or set "
                "store=s3://<an existing bucket>/<prefix>"
            )
        if status == 404:
            return NotFound(self.uri, path)
        if status == 412:
            return _Exists(path)
        if status == 416:
            return _BeyondEnd(path)
        if status in (401, 403):
            return StoreError(
                f"{where}: S3 refused ({code}: {error}): check {_CREDENTIALS}, and that this user may "
                f"read, write, list and delete in the bucket {self.bucket}"
            )
        if isinstance(error, _NO_CREDENTIALS):
            return StoreError(f"{where}: there are no S3 credentials ({error}): set {_CREDENTIALS}")
        if isinstance(error, _UNREACHABLE):
            return StoreError(f"{where}: no S3 server answers ({error}): check AWS_ENDPOINT_URL and the network")
        return StoreError(
            f"{where}: S3 failed ({code or type(error).__name__}: {error}): check the server, the "
            "endpoint (AWS_ENDPOINT_URL) and the region (AWS_DEFAULT_REGION)"
        )


class _Exists(Exception):
    """The server answered 412: there is an object with this key."""


class _BeyondEnd(Exception):
    """The server answered 416: the object ends before the range begins."""


def _response(error: Exception) -> dict[str, Any]:
    """The S3 reply behind ``error``: s3fs hides the botocore error in ``__cause__``."""
    return getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}


def _status(error: Exception) -> int | None:
    return _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")


def _code(error: Exception) -> str:
    return _response(error).get("Error", {}).get("Code", "")
