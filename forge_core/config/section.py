"""What every section of a configuration has in common."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values cannot be changed after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes ``True`` for 1; in a file ``batch_size: true`` is a mistake."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float, int | None, float | None):
            raise ValueError("true and false are not numbers")
        return value


def kind(default: str) -> Any:
    """The tag of a section that is one of several, by its ``name``, for a pydantic ``Discriminator``.

    Tags are in angle brackets, which cannot be part of a key, so that messages can leave them out. A section without a
    name, or with a value that is no section, is looked at as ``default``.
    """

    def tag(value: Any) -> str:
        name = value.get("name", default) if isinstance(value, dict) else getattr(value, "name", default)
        return f"<{name}>"

    return tag
