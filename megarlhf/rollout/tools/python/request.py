"""The request of a call, for type checkers: nothing imports this module when it runs."""

from __future__ import annotations

from typing import TypedDict


class GuardRequest(TypedDict):
    """GuardRequest to a guard."""

    code: str
    limits: dict[str, float]
    parent: int
    """Process that asks."""
    base: str
    """Folder in which the call's own folder is made."""
    root: str
    """Entry of `sys.path` with this package, which the code must not see."""
    libraries: list[str]
    """Folders of installed packages."""
    protections: list[str]
    """Names of the protections of `isolation.py` that are to be used."""
