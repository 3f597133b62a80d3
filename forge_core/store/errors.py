"""Errors of the store. Each names the key (or the store) and says what to do."""

from __future__ import annotations


class StoreError(Exception):
    """The store cannot do what was asked: wrong credentials, missing bucket, unwritable folder, unusable key."""


class NotFound(StoreError):
    """There is no object with this key."""

    def __init__(self, uri: str, key: str, detail: str = "no such object") -> None:
        super().__init__(f"{key}: {detail} in the store {uri}")
        self.uri = uri
        self.key = key

    def __reduce__(self) -> tuple[type[NotFound], tuple[str, str]]:
        return type(self), (self.uri, self.key)


class IdentityError(StoreError):
    """The name is taken by an object that was made for a different request."""


class CorruptObject(StoreError):
    """Stored bytes are not what their manifest says, or are not readable as what the key promises."""


class LedgerError(StoreError):
    """The ledger of a run is not an unbroken chain, or an entry does not continue it."""
