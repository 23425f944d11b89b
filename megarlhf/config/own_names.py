"""Names in the configuration that are one of ours, or the import path of the user's own code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from megarlhf.own_code.load import is_path, unknown_name

OwnPath = Annotated[str, Field(json_schema_extra={"format": "own"})]
"""Import path of user code, `package.module:name`."""


def known_or_own(key: str, *known: str) -> AfterValidator:
    """Validator that takes the known names and import paths. `key`: the key of the configuration, for messages."""
    return AfterValidator(lambda name: require_known_or_own(key, name, known))


def require_known_or_own(key: str, name: str, known: Sequence[str]) -> str:
    """Raises: ValueError for a name that is neither known nor an import path."""
    if name not in known and not is_path(name):
        raise ValueError(unknown_name(f"{key} =", name, known))
    return name if name in known else require_path(name)


def require_path(name: str) -> str:
    """Raises: ValueError for a text that is no import path `package.module:name`."""
    module, _, attribute = name.partition(":")
    if not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"{name!r} is no import path; write package.module:name, such as mine:function")
    return name


PathOnly = Annotated[OwnPath, AfterValidator(require_path)]
"""Import path where none of our own names can stand."""
