"""Prefect flows and the ``forge`` command."""
