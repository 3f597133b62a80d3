"""The store in an S3 bucket (``s3://bucket/prefix``), on any server that enforces conditional PUT.

- ``create`` is one PutObject with ``If-None-Match: *``. The writer's nonce travels in the object's metadata, and in the
  body where that is JSON: a writer that is told 412 reads it back, and its own nonce means that it had won and only
  the reply was lost. 409 (two conditional writes at once) is tried again.
- ``write`` uses ``pipe_file`` and ``put_file``, which commit whole objects only.
- Existence is a HEAD of the full key, never a listing of a prefix.
- Passing failures (5xx, time-outs, resets) are tried again with back-off by every operation: all are idempotent.
- The clock is the server's: the ``Date`` of its replies and the times that it gives to objects. Both count seconds.
- Credentials, region and endpoint come from the usual AWS settings (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...).
"""

from __future__ import annotations

import builtins
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import botocore.exceptions
import s3fs
from fsspec.asyn import sync
from s3fs.core import S3_RETRYABLE_ERRORS

from forge_core.store.backend import Unfinished
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
_UPLOAD_GONE = "NoSuchUpload"  # a repeated completion whose first reply was lost: uploading again ends it
_CONTINUATION = {
    "list_objects_v2": ("ContinuationToken",),
    "list_multipart_uploads": ("KeyMarker", "UploadIdMarker"),
}
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

    def write(self, path: str, data: bytes | Path, *, given: bool = False) -> None:
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

    def list(self, folder: str) -> dict[str, int]:
        pages = self._pages("list_objects_v2", folder)
        found = {item["Key"].removeprefix(self.prefix): item["Size"] for page in pages for item in page["Contents"]}
        return dict(sorted(found.items()))

    def total(self) -> int:
        return sum(item["Size"] for page in self._pages("list_objects_v2", "") for item in page["Contents"])

    def folders(self, folder: str) -> builtins.list[str]:
        pages = self._pages("list_objects_v2", folder, Delimiter="/")
        below = [item["Prefix"].rstrip("/") for page in pages for item in page["CommonPrefixes"]]
        return sorted(prefix.rpartition("/")[2] for prefix in below)

    def delete(self, path: str) -> None:
        self._request("delete_object", path)

    def now(self) -> float:
        page = self._list_page("list_objects_v2", "", MaxKeys=1)
        return parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def written_at(self, path: str) -> float:
        # Whole seconds, rounded down: rounded up here, so that no age is ever too high.
        return self._request("head_object", path)["LastModified"].timestamp() + 1.0

    def unfinished(self) -> builtins.list[Unfinished]:
        uploads = (item for page in self._pages("list_multipart_uploads", "") for item in page["Uploads"])
        return [self._unfinished(item) for item in uploads]

    def discard(self, unfinished: Unfinished) -> None:
        with suppress(NotFound):  # finished, or discarded by somebody else
            self._request("abort_multipart_upload", unfinished.path, UploadId=unfinished.handle)

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

    def _request(self, method: str, path: str, **more: Any) -> Any:
        request = lambda: self._fs.call_s3(method, Bucket=self.bucket, Key=self.prefix + path, **more)
        return self._call(path, request)

    def _list_page(self, method: str, folder: str, **more: Any) -> Any:
        prefix = self.prefix + (f"{folder}/" if folder else "")
        return self._call(folder, partial(self._fs.call_s3, method, Bucket=self.bucket, Prefix=prefix, **more))

    def _pages(self, method: str, folder: str, **more: Any) -> Iterator[Any]:
        """Every page of a listing, with all that one may lack."""
        while True:
            page = self._list_page(method, folder, **more)
            yield {"Contents": (), "CommonPrefixes": (), "Uploads": (), **page}
            if not page.get("IsTruncated"):
                return
            more |= {begin: page[f"Next{begin}"] for begin in _CONTINUATION[method]}

    def _unfinished(self, upload: dict[str, Any]) -> Unfinished:
        path, handle, size = upload["Key"].removeprefix(self.prefix), upload["UploadId"], 0
        with suppress(NotFound):  # it was finished meanwhile
            parts = self._request("list_parts", path, UploadId=handle).get("Parts", ())  # a thousand, 50 MiB each
            size = sum(part["Size"] for part in parts)
        return Unfinished(path, handle, size, upload["Initiated"].timestamp())

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
        passing = _status(error) in _PASSING_STATUS or _code(error) == _UPLOAD_GONE
        return passing or isinstance(error, S3_RETRYABLE_ERRORS)

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
        if code == "RequestTimeTooSkewed":
            return StoreError(
                f"{where}: S3 refused ({code}): set this machine's clock (NTP); `forge doctor` compares it"
            )
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
            f"{where}: S3 failed ({code or type(error).__name__}: {error}): check the server (its log, and whether its "
            "disks or the bucket are full: `forge gc` makes room), the endpoint (AWS_ENDPOINT_URL) and the region "
            "(AWS_DEFAULT_REGION)"
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
