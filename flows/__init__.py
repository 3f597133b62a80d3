"""Prefect flows and the ``forge`` command. Whoever imports it logs no secret of the environment."""

from forge_core.redaction import redact_logs

redact_logs()
