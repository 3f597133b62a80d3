"""A run: its record, its plans, and the work of each stage on the store."""

from forge_core.runs.record import RunRef

__all__ = ["RunRef"]
