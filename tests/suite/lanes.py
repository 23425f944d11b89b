"""How workers share the suite: files with rank processes, one after the other, beside all others.

Rank processes are forked from a server that has imported Megatron and vLLM, and stay alive between tests. Files whose
ranks run vLLM have processes of their own, so they run in one worker and the other files with ranks in another. What
takes longest comes first, so that no worker waits for another at the end.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.suite.cpu_seconds import TABLE

RANKS, VLLM_RANKS = "files with rank processes", "files with rank processes that run vLLM"


@functools.cache
def lane(file: str) -> str:
    """The files that share a worker; one that uses ranks without naming their type would start a second server."""
    text = (Path(__file__).parents[2] / file).read_text()
    if "RankPool" not in text:
        return file
    return VLLM_RANKS if "vllm_ranks" in text else RANKS


class Lanes:
    """For xdist; without it tests run in pytest's order."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if hasattr(config, "workerinput"):
            items.sort(key=self._rank_of)

    def _rank_of(self, item: pytest.Item) -> tuple[int, int]:
        file = item.nodeid.split("::")[0]
        if (shared := lane(file)) in (RANKS, VLLM_RANKS):
            return (RANKS, VLLM_RANKS).index(shared), 0
        return 2, -TABLE.get(file, 0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: Any, log: Any) -> Any:
        from xdist.scheduler import LoadScopeScheduling

        class ByLane(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return lane(nodeid.split("::")[0])

        config.option.loadscopereorder = False
        return ByLane(config, log)
