"""The storage block that tells deployed runs where the store is.

Invariants: the block holds an address and nothing secret; a worker puts it into a run's environment when that starts
(``prefect.yaml`` refers to it), so whoever edits the block moves the runs that start after that.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from prefect.blocks.core import Block
from pydantic import Field, field_validator

NAME = "default"


class ForgeStore(Block):
    """Where Forge's deployed runs are stored: a folder or a bucket that every worker reaches.

    Raises pydantic's ValidationError for an address with credentials in it.
    """

    _block_type_name = "Forge store"
    _block_type_slug = "forge-store"
    _description = "Where Forge's runs are stored. Workers read it when a run starts."

    uri: str = Field(
        title="Address",
        description="file:///shared/forge or s3://bucket/prefix, without credentials: those are the workers' own.",
    )

    @field_validator("uri")
    @classmethod
    def _without_credentials(cls, uri: str) -> str:
        if problem := credentials_in(uri):
            raise ValueError(problem)
        return uri


def credentials_in(uri: str) -> str | None:
    """What is wrong with an address that everyone who may read the Prefect server's blocks will see."""
    parts = urlsplit(uri)
    if not parts.username and not parts.password:
        return None
    return (
        "the address holds credentials, which every user of the Prefect server could read: give s3://bucket/prefix, "
        "and AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to the workers"
    )
