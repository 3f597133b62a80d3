"""The object store: immutable objects, plans, the ledger and retention. See ``store`` for what it guarantees."""

from forge_core.store.digests import canonical_json, content_digest, digest
from forge_core.store.errors import CorruptObject, IdentityError, LedgerError, NotFound, StoreError
from forge_core.store.ledger import Ledger, entry_digest
from forge_core.store.manifest import File, Manifest, folder_files
from forge_core.store.published import Opener, Published
from forge_core.store.store import Store, open_store

__all__ = [
    "CorruptObject",
    "File",
    "IdentityError",
    "Ledger",
    "LedgerError",
    "Manifest",
    "NotFound",
    "Opener",
    "Published",
    "Store",
    "StoreError",
    "canonical_json",
    "content_digest",
    "digest",
    "entry_digest",
    "folder_files",
    "open_store",
]
