"""`megarlhf --version`: versions of megarlhf and of the libraries that matter to a run. Imports none of them."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megarlhf.packages import PACKAGES, version_of


class ShowVersions(argparse.Action):
    """An option that prints versions and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(versions())
        parser.exit()


def versions() -> str:
    """One line for each package."""
    try:
        ours: str | None = version("megarlhf")
    except PackageNotFoundError:  # run from its source
        ours = None
    installed = {"megarlhf": ours, "python": platform.python_version()}
    installed |= {name: version_of(name) for name in PACKAGES}
    width = max(map(len, installed))
    return "\n".join(f"{name:<{width}}  {number or 'not installed'}" for name, number in installed.items())
