"""Calls of the Prefect server that may fail: asked once, with a short timeout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.settings import Settings

_made: tuple[Settings, Settings] | None = None  # Prefect's present settings, and those without retries


@contextmanager
def client_asking_once(timeout_s: float) -> Iterator[SyncPrefectClient]:
    """A client that repeats no request; within the block Prefect's settings are without retries."""
    from prefect.client.orchestration import get_client
    from prefect.context import SettingsContext, get_settings_context

    present = get_settings_context()
    with (
        SettingsContext(profile=present.profile, settings=_without_retries(present.settings)),
        get_client(sync_client=True, httpx_settings={"timeout": timeout_s}) as client,
    ):
        yield client


def _without_retries(settings: Settings) -> Settings:
    """Made once: Prefect reads its files and the whole environment again for every copy, which takes 60 ms."""
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

    global _made
    made = _made
    if made is None or made[0] is not settings:
        _made = made = (settings, settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 0}))
    return made[1]
