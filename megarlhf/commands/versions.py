"""`megarlhf --version`: of megarlhf and of the libraries whose version matters to a run. Imports none of them."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megarlhf.packages import PACKAGES, version_of


class ShowVersions(argparse.Action):
    """An option that prints them and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(versions())
        parser.exit()


def versions() -> str:
    """A line for each."""
    try:
        ours: str | None = version("megarlhf")
    except PackageNotFoundError:  # run from its source
        ours = None
    found = {"megarlhf": ours, "python": platform.python_version()}
    found |= {name: version_of(name) for name in PACKAGES}
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {each or 'not installed'}" for name, each in found.items())
