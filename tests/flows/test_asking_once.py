"""The Prefect server is asked once where an answer is not worth waiting for."""

from __future__ import annotations

import httpx
import pytest
from prefect.context import get_settings_context
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, Settings, temporary_settings

from flows.asking_once import client_asking_once

NOWHERE = "http://127.0.0.1:9/api"  # the port "discard": nobody answers


def test_a_request_that_fails_is_not_repeated_and_the_settings_come_back() -> None:
    with temporary_settings({PREFECT_API_URL: NOWHERE, PREFECT_CLIENT_MAX_RETRIES: 4}):
        with client_asking_once(1.0) as client:
            assert PREFECT_CLIENT_MAX_RETRIES.value() == 0
            assert str(client.api_url).startswith(NOWHERE)
            with pytest.raises(httpx.ConnectError):
                client.request("GET", "/health")
        assert PREFECT_CLIENT_MAX_RETRIES.value() == 4


def test_settings_are_copied_once_and_again_when_they_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Settings] = []
    copy = Settings.copy_with_update

    def counted(self: Settings, *args: object, **options: object) -> Settings:
        copied.append(self)
        return copy(self, *args, **options)  # type: ignore[arg-type]

    for port in (9, 10):
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}):
            monkeypatch.setattr(Settings, "copy_with_update", counted)
            for _ in range(3):
                with client_asking_once(1.0) as client:
                    assert str(client.api_url).startswith(f"http://127.0.0.1:{port}/")
            assert copied.pop() is get_settings_context().settings
            assert copied == []
            monkeypatch.setattr(Settings, "copy_with_update", copy)
