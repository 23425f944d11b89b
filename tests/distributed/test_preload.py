"""Ranks start with what they need: the server that forks them goes on without a word when an import fails."""

import sys

from megarlhf.runtime import Runtime


def _imported(runtime: Runtime) -> set[str]:
    return {"tests.preload", "tests.preload_vllm", "megatron.core", "vllm", "transformers"} & sys.modules.keys()


def test_what_ranks_need_is_imported_before_they_start(fresh_ranks) -> None:
    modules = fresh_ranks.run(1, _imported)
    assert modules == [{"tests.preload", "tests.preload_vllm", "megatron.core", "vllm", "transformers"}]
