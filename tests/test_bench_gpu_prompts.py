"""The GPU benchmark of shared prompts, rehearsed on a CPU: what it computes, its form, its figures.

Not covered: CUDA events, the kernels of a GPU, its memory, and what the figures are.
"""

import json
from typing import Any

import pytest

from benchmarks import gpu_prompts
from benchmarks.gpu_prompts_work import (
    MIXES,
    PER_PROMPT,
    PHASES,
    Sizes,
    attention_pairs,
    flops,
    workload_of,
    write_model,
)
from benchmarks.gpu_timing import Deadline
from tests.apart import apart


def rehearsed(out: str) -> None:
    gpu_prompts.main(["--rehearse", "--out", out])
    gpu_prompts.main(["--rehearsed", "--out", out])


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("rehearsal") / "result.json"
    apart(rehearsed, str(out))
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_both_sides_train_the_same_and_one_shares(result) -> None:
    assert result["rehearsal"]
    assert result["finished"]
    assert {"commit", "torch", "device", "command"} <= result["machine"].keys()
    assert result["way"].startswith("merged")
    assert result["attention"].keys() == MIXES.keys()
    assert all(value > 0 for found in result["attention"].values() for value in found["ms"].values())
    (found,) = result["mixes"].values()
    assert found["grad_norms_differ_by"] < 1e-5
    shared, unshared = found["ways"]["shared"], found["ways"]["unshared"]
    assert (shared["prompts_computed"], unshared["prompts_computed"]) == (4, 4 * PER_PROMPT)
    for way in (shared, unshared):
        assert len(way["rounds"]) == 2
        assert way["seconds"]["median"] == pytest.approx(sum(way["rounds"]) / 2)
        assert all(way["by_phase"][phase]["min"] > 0 for phase in PHASES)
        assert way["rehearsed_bytes"] > 0
        assert way["peak_bytes"] is None
    ratio = unshared["seconds"]["median"] / shared["seconds"]["median"]
    assert found["unshared_over_shared"] == pytest.approx(ratio)
    assert found["share_of_flop_ratio"] == pytest.approx(ratio / found["flop_ratio"])


def test_operations_and_pairs_by_hand(tmp_path) -> None:
    """Two layers, hidden 64: a token takes 2 x 2 x (64 (2 x 64 + 2 x 32) + 3 x 64 x 96) operations in the layers. 1:1
    of 16 tokens and 8 responses: 256 tokens unshared, 144 shared; 8 x 528 pairs against 136 + 8 x 392."""
    sizes = Sizes(model="tiny", prompts=1, shrink=32)
    model = write_model(tmp_path, "tiny")
    assert [len(each) for each in (workload_of(sizes, "1_1").prompts[0], workload_of(sizes, "1_1").responses[0])] == [
        16,
        16,
    ]
    a_token, a_pair, head = 4 * (64 * 192 + 3 * 64 * 96), 8 * 64, 2 * 64 * 256 * 8 * 16
    for side, tokens, pairs in (("shared", 144, 136 + 8 * 392), ("unshared", 256, 8 * 528)):
        found = flops(model, sizes, "1_1", side)
        assert found["train"] == 3 * (a_token * tokens + head) + 3.5 * a_pair * pairs
        assert found["score"] == a_token * tokens + head + a_pair * pairs
        assert found["all"] == found["train"] + found["score"]
    assert attention_pairs(sizes, "1_1") == pytest.approx(8 * 528 / (136 + 8 * 392))


class Trainer:
    """Takes so many seconds by side."""

    def __init__(self) -> None:
        self.sides: list[str] = []

    def round(self, mix: str, side: str) -> dict[str, Any]:
        self.sides.append(side)
        seconds = {"shared": 1.0, "unshared": 3.0}[side] + 10.0 * (len(self.sides) <= 2)
        by_phase = dict.fromkeys(PHASES, seconds / 3)
        return {"seconds": seconds, "by_phase": by_phase, "peak_bytes": 100 * len(side), "grad_norm": float(len(side)),
                "prompts_computed": 1}  # fmt: skip


def test_rounds_go_to_and_fro_and_the_first_is_not_counted() -> None:
    """Shared 1 s, unshared 3 s; 1.5 times fewer operations: a ratio of 3 is twice that of operations."""
    trainer, operations = Trainer(), {side: dict.fromkeys(("score", "train", "all"), n) for side, n in
                                      (("shared", 2.0), ("unshared", 3.0))}  # fmt: skip
    rounds = gpu_prompts.measured(trainer, "1_1", 2, Deadline(60.0))  # type: ignore[arg-type]
    assert trainer.sides == ["shared", "unshared", "unshared", "shared", "shared", "unshared"]
    assert not isinstance(rounds, str)
    found = gpu_prompts.summary(rounds, operations)
    assert (found["unshared_over_shared"], found["flop_ratio"], found["share_of_flop_ratio"]) == (3.0, 1.5, 2.0)
    assert found["ways"]["shared"]["flops_per_second"] == 2.0
    assert found["shared_memory_over_unshared"] == 6 / 8
    assert found["grad_norms_differ_by"] == pytest.approx(8 / 6 - 1)
    assert gpu_prompts.measured(Trainer(), "1_1", 2, Deadline(11.0)) == "no time left"  # type: ignore[arg-type]
