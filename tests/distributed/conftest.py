"""Rank processes and tiny models for the distributed tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.distributed.tiny import write_data, write_reward_model, write_tiny_llama


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to four ranks, shared by all tests."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def fresh_ranks() -> Iterator[RankPool]:
    """Ranks for one test alone: vLLM keeps state of its own in a process."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny Llamas: two sets of weights, untied and tied; a reward model with the trunk of `other`."""
    root = tmp_path_factory.mktemp("models")
    models = {
        "plain": write_tiny_llama(root / "plain", seed=0),
        "rope": write_tiny_llama(root / "rope", seed=4, llama3_rope=True),
        "other": write_tiny_llama(root / "other", seed=1),
        "tied": write_tiny_llama(root / "tied", seed=2, tied=True),
        "tied_other": write_tiny_llama(root / "tied_other", seed=3, tied=True),
    }
    return models | {"scorer": write_reward_model(root / "scorer", models["other"])}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """JSON lines: sft, pairs, prompts."""
    return write_data(tmp_path_factory.mktemp("data"))
