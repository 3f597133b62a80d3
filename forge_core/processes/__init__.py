"""Child processes of engines: in sessions of their own, with a log file each, and never left behind."""

from forge_core.processes.group import ChildDied, ChildGroup

__all__ = ["ChildDied", "ChildGroup"]
