"""SQL over the tables of runs, from the store alone: ``query`` for one question, ``RunTables`` for several."""

from forge_core.query.errors import QueryError
from forge_core.query.runs import RunTables, query

__all__ = ["QueryError", "RunTables", "query"]
