"""Time limits of our own, apart from those of a network.

Invariant: whoever has waited for as long as a setting says raises ``Overdue``; waiting for as long again is no remedy,
so no task is tried again after it. A timeout of a socket or of a client library is a plain ``TimeoutError``, and is.
"""

from __future__ import annotations


class Overdue(TimeoutError):
    """What was waited for did not happen within a time that a setting gives."""
