"""Everything of Forge that knows nothing of Prefect; importable and testable alone."""
