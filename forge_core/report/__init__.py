"""What a run did, for people: a page of pictures, tables and samples, and the state of a run that goes on.

Everything comes from stored objects alone, so it is there while a run goes on, after it crashed, and years later.
"""

from forge_core.report.writing import Written, write_report

__all__ = ["Written", "write_report"]
