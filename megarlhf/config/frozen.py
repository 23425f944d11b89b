"""Base class and number types of all sections of the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]

_VARIABLE = re.compile(r"\$(?:\{\w+\}|[A-Za-z_]\w*)")


class FrozenModel(BaseModel):
    """Base of every section: immutable, no unknown keys, finite numbers, documented field by field."""

    refused: ClassVar[frozenset[str]] = frozenset()
    """Keys of nested sections that are refused here, such as `data.validation`. They are not in the reference."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def changed(self, *names: str) -> list[str]:
        """Fields whose value differs from the default, of `names` or of all."""
        fields = type(self).model_fields
        return [name for name in names or fields if getattr(self, name) != fields[name].default]

    @field_validator("*", mode="before")
    @classmethod
    def _empty_list(cls, value: Any, info: ValidationInfo) -> Any:
        """Take a list without a value (`key:`, `key=`) as left out."""
        field = cls.model_fields[str(info.field_name)]
        unset = value is None and get_origin(field.annotation) is tuple and isinstance(field.default, tuple)
        return field.default if unset else value

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Turn a boolean into text, which a number field refuses. pydantic would take true for 1."""
        if cls.model_fields[str(info.field_name)].annotation is bool:
            return value
        if isinstance(value, list):
            return [str(part).lower() if isinstance(part, bool) else part for part in value]
        return str(value).lower() if isinstance(value, bool) else value

    @field_validator("*", mode="after")
    @classmethod
    def _expand_home(cls, value: Any) -> Any:
        """Replace `~` in a path by the home directory, like a shell. Variables are refused."""
        if isinstance(value, Path) and (variable := _VARIABLE.search(str(value))) and not value.exists():
            raise ValueError(
                f"{value}: environment variables such as {variable[0]} are not expanded in a configuration; write the "
                "whole path, or give it on the command line without single quotes, where the shell expands it"
            )
        try:
            return value.expanduser() if isinstance(value, Path) else value
        except RuntimeError as error:
            raise ValueError(f"{value}: {error}; write the whole path") from None
