"""How workers share the suite: files with rank processes in two of them, all others in the third.

Rank processes are forked from a server that has imported Megatron and vLLM, and stay alive between tests. Those of
vLLM are apart, so files that use them run one after the other in one worker, before its part of the other files with
ranks. What takes longest comes first, and a worker that is through helps the others, so that none waits at the end.
"""

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from tests.suite.cpu_seconds import TABLE

VLLM_RANKS, RANKS, OTHERS = "files with rank processes that run vLLM", "files with rank processes", "other files"
ORDERS = ((VLLM_RANKS, RANKS, OTHERS), (RANKS, OTHERS, VLLM_RANKS), (OTHERS, RANKS, VLLM_RANKS))
"""What the first worker takes, as long as there is any, the second, and all further ones."""

FIXTURE = re.compile(r"^def \w+\(\s*(?:\w+, )*(?:vllm_|fresh_)?ranks(?:, \w+)*\s*\)(?: ->|:)", re.MULTILINE)
"""A test or fixture with ranks among its arguments, none of which has an annotation."""


@functools.cache
def kind(file: str) -> str:
    """By what the functions of the file ask for: a file with ranks would start a server in a third worker."""
    text = (Path(__file__).parents[2] / file).read_text()
    if "RankPool" not in text and not FIXTURE.search(text):
        return OTHERS
    return VLLM_RANKS if "vllm_ranks" in text else RANKS


def next_file(worker: int, files: list[str]) -> str:
    """The first of `files` of the kind that a worker prefers."""
    order = ORDERS[min(worker, len(ORDERS) - 1)]
    return min(files, key=lambda file: order.index(kind(file)))


class Lanes:
    """For xdist; without it tests run in pytest's order."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if hasattr(config, "workerinput"):
            items.sort(key=lambda item: -TABLE.get(_file(item.nodeid), 0))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: Any, log: Any) -> Any:
        from xdist.scheduler import LoadScopeScheduling

        class ByKind(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return _file(nodeid)

            def _assign_work_unit(self, node: Any) -> None:
                self.workqueue.move_to_end(next_file(self.nodes.index(node), list(self.workqueue)), last=False)
                super()._assign_work_unit(node)

        config.option.loadscopereorder = False
        return ByKind(config, log)


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]
