"""The Forge home: the folder of this user on this machine for all that is no result, such as logs and databases."""

from __future__ import annotations

import os
from pathlib import Path


def forge_home(home: Path | None = None) -> Path:
    """``home``, else ``FORGE_HOME``, else ``~/.forge``."""
    return Path(home or os.environ.get("FORGE_HOME") or Path.home() / ".forge").expanduser().absolute()
