"""Requests to a chat endpoint that speaks OpenAI's protocol.

Guarantees:
- A request that may succeed later (no answer, 408, 409, 425, 429, 5xx, a reply that cannot be used) is made again, with
  back-off, at most ``retries`` times; ``Retry-After`` is heeded. Anything else fails at once.
- At most ``concurrency`` requests are in flight, whoever asks.
- The key is read from the environment when a request is made; it is part of no error, log or return value.
- A redirect is not followed: the text would go somewhere else.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx

from forge_core.redaction import is_key_name, redact

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
_AGAIN = frozenset({408, 409, 425, 429})
_Read = TypeVar("_Read")
Messages = Sequence[dict[str, str]]


class ChatError(Exception):
    """A request that failed for good. ``outage``: it might have succeeded at another time."""

    def __init__(self, message: str, outage: bool = False):
        super().__init__(message)
        self.outage = outage


class _TryAgain(Exception):
    """This try failed; the text says why. ``after_s``: what the server asks to wait."""

    def __init__(self, message: str, after_s: float = 0.0):
        super().__init__(message)
        self.after_s = after_s


class ChatClient:
    """One endpoint and model. Belongs to one event loop."""

    def __init__(
        self,
        base_url: str,
        body: dict[str, Any],
        *,
        api_key_env: str | None,
        concurrency: int,
        retries: int,
        timeout_s: float,
    ):
        """``body``: what every request has besides its messages. Raises ValueError for a key that cannot be had."""
        check_key_name(api_key_env)
        self._url, self._body, self._key_name = base_url.rstrip("/") + "/chat/completions", body, api_key_env
        self._retries, self._timeout_s = retries, timeout_s
        self._places = asyncio.Semaphore(concurrency)
        self._http = httpx.AsyncClient(limits=httpx.Limits(max_connections=concurrency), timeout=timeout_s)

    async def ask(self, messages: Messages, read: Callable[[str], _Read], tally: Counter[str]) -> _Read:
        """What ``read`` makes of the reply; it raises ValueError for one that cannot be used. ``tally`` counts
        ``requests``, ``retried``, ``prompt_tokens`` and ``reply_tokens``. Raises ChatError."""
        for attempt in range(self._retries + 1):
            try:
                async with self._places:
                    return read(await self._reply(messages, tally))
            except (_TryAgain, ValueError) as error:
                if attempt == self._retries:
                    raise ChatError(redact(str(error)), outage=isinstance(error, _TryAgain)) from None
                tally["retried"] += 1
                backoff = min(FIRST_BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(backoff, getattr(error, "after_s", 0.0)))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await self._http.aclose()

    async def _reply(self, messages: Messages, tally: Counter[str]) -> str:
        tally["requests"] += 1
        try:  # httpx limits the wait between bytes; a server that trickles must not hold a place for ever
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.post(
                    self._url, json={**self._body, "messages": list(messages)}, headers=self._headers()
                )
        except (httpx.TransportError, TimeoutError) as error:
            late = isinstance(error, httpx.TimeoutException | TimeoutError)
            why = f"no answer within {self._timeout_s:g} s" if late else str(error) or "the connection was lost"
            raise _TryAgain(f"{self._url}: {type(error).__name__}: {why}") from None
        if response.status_code != httpx.codes.OK:
            raise self._refusal(response)
        return self._content(response, tally)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {os.environ[self._key_name]}"} if self._key_name else {}

    def _refusal(self, response: httpx.Response) -> Exception:
        status, text = response.status_code, f"{self._url} answered {response.status_code}: {response.text[:300]}"
        if status not in _AGAIN and status < 500:
            return ChatError(redact(text))
        asked = response.headers.get("Retry-After", "")
        return _TryAgain(text, min(float(asked), LONGEST_BACKOFF_S) if asked.isdigit() else 0.0)

    def _content(self, response: httpx.Response, tally: Counter[str]) -> str:
        try:
            reply = response.json()
            usage = reply.get("usage") or {}
            tally["prompt_tokens"] += usage.get("prompt_tokens") or 0
            tally["reply_tokens"] += usage.get("completion_tokens") or 0
            return redact(reply["choices"][0]["message"]["content"] or "")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _TryAgain(f"{self._url}: no chat completion: {type(error).__name__}: {response.text[:300]}") from None


def check_key_name(name: str | None) -> None:
    """Raise ValueError unless ``name`` is a variable that is set and whose value is kept out of messages. The text of
    the error holds no part of ``name``: somebody may have put the key itself there."""
    if name is None:
        return
    if not is_key_name(name):
        raise ValueError("api_key_env must be the name of an environment variable that ends in _API_KEY, not the key")
    if not os.environ.get(name):
        raise ValueError(f"the environment variable {name} (api_key_env) is not set")
