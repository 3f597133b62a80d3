"""Why a sandbox could not be made."""

from __future__ import annotations


class SandboxError(RuntimeError):
    """There is no sandbox to run code in, or it could not be watched. The message says what to do."""
