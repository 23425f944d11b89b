"""How workers share the suite: files with rank processes, one after the other, beside all others.

Rank processes are forked from a server that has imported Megatron and vLLM, and stay alive between tests. One worker
has them. What takes longest comes first, so that no worker waits for the other at the end.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.suite.cpu_seconds import TABLE

RANKS = "files with rank processes"


@functools.cache
def lane(file: str) -> str:
    """The files that share a worker; one that uses ranks without naming their type would start a second server."""
    path = Path(__file__).parents[2] / file
    return RANKS if "RankPool" in path.read_text() else file


class Lanes:
    """For xdist; without it tests run in pytest's order."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if hasattr(config, "workerinput"):
            items.sort(key=self._rank_of)

    def _rank_of(self, item: pytest.Item) -> tuple[bool, int]:
        file = item.nodeid.split("::")[0]
        return lane(file) != RANKS, 0 if lane(file) == RANKS else -TABLE.get(file, 0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: Any, log: Any) -> Any:
        from xdist.scheduler import LoadScopeScheduling

        class ByLane(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return lane(nodeid.split("::")[0])

        config.option.loadscopereorder = False
        return ByLane(config, log)
