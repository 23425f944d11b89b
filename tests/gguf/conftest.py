"""A small Llama and a sound GGUF file of it. Imported where it is used, since the package gguf may be missing."""

import pytest


@pytest.fixture(scope="module")
def llama():
    from tests.gguf.gguf_files import small_llama

    return small_llama()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A sound file."""
    from tests.gguf.gguf_files import small_file

    return small_file(tmp_path_factory.mktemp("gguf") / "small.gguf")
