"""Seconds of a step's rollout from what the engines have to generate: by hand. How long one engine takes by the
roofline is not here (`test_pricing.py`)."""

from typing import Any

import pytest
import torch

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.rehearsal.cost_model.decoding import EngineShape, RolloutTime, RolloutWork, Sequences
from megarlhf.rehearsal.cost_model.engine_time import estimate, shape_of
from megarlhf.rehearsal.result import RolloutRow
from tests.rehearsal.jobs import DENSE, EXPERTS, write_model

ENGINES = RolloutWork([Sequences([4, 4], [10, 30]), Sequences([4], [20]), Sequences([], [])])
SHAPE = EngineShape(
    ranks=(0,), weight_bytes=1, flops_per_token=1.0, cache_bytes_per_token=1, num_layers=1, hidden_size=1, query_size=1,
    dtype="bfloat16", itemsize=2,
)  # fmt: skip


class ATokenASecond:
    """A price by which an engine takes a second for each token of its longest response."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def decode_seconds(
        self, shape: EngineShape, work: RolloutWork, cache_bytes: int, **options: Any
    ) -> tuple[list[RolloutTime], list[int]]:
        self.asked.append((work, cache_bytes, options))
        longest = [max(each.responses, default=0) for each in work.engines]
        times = [
            RolloutTime(prefill=0.0, decode=float(tokens), overhead=0.0, steps=tokens, most_running=len(each.responses))
            for tokens, each in zip(longest, work.engines, strict=True)
        ]
        return times, []


def test_a_stated_speed() -> None:
    """40, 20 and no tokens at 5 a second."""
    options = {"tokens_per_second": 5.0, "max_running": 8}
    found, _ = estimate(ENGINES, SHAPE, 99, ATokenASecond(), **options)
    assert found == RolloutRow(slowest=8.0, fastest=0.0, tokens=60, most_running=0, computed=12)


def test_a_stated_speed_with_a_queue() -> None:
    """Three engines have 40, 20 and no tokens; pieces of 15, 15, 3 + 3 and 4 go to the one with the least so far:
    the third (15), the third (30), the second (26), the second (30)."""
    queue = [Sequences([4], [15]), Sequences([4], [15]), Sequences([4, 4], [3, 3]), Sequences([4], [4])]
    work = RolloutWork(ENGINES.engines, queue, most=2)
    options = {"tokens_per_second": 5.0, "max_running": 8}
    found, owners = estimate(work, SHAPE, 99, ATokenASecond(), **options)
    assert owners == [2, 2, 1, 1]
    assert found == RolloutRow(slowest=8.0, fastest=6.0, tokens=100, most_running=0, computed=32)


def test_by_the_roofline() -> None:
    """Every engine is asked for, with what bounds it."""
    price = ATokenASecond()
    found, _ = estimate(ENGINES, SHAPE, 99, price, tokens_per_second=None, max_running=8)
    assert found == RolloutRow(slowest=30.0, fastest=0.0, tokens=60, most_running=2, computed=12)
    assert price.asked == [(ENGINES, 99, {"max_running": 8})]


def test_no_engine() -> None:
    found, _ = estimate(RolloutWork([]), SHAPE, 1, ATokenASecond(), tokens_per_second=1.0, max_running=1)
    assert found == RolloutRow(slowest=0.0, fastest=0.0, tokens=0, most_running=0)


@pytest.mark.parametrize("tp, groups", [(1, 4), (2, 2)])
def test_the_shape_of_an_engine(tp, groups, tmp_path) -> None:
    """2 layers, 4 heads of 16 and as many KV heads, MLP of 96, 512 words, by hand; bf16."""
    arch = architecture_from_hf(write_model(tmp_path / "dense", DENSE))
    shape = shape_of(arch, tp, 6, torch.bfloat16, 1234)
    assert shape.ranks == tuple(range(6, 6 + tp))
    assert shape.cache_bytes_per_token == 2 * 2 * groups * 16 * 2
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 96) + 512 * 64
    assert shape.flops_per_token == 2 * weights / tp
    assert (shape.query_size, shape.num_layers, shape.hidden_size) == (64 // tp, 2, 64)
    assert (shape.weight_bytes, shape.dtype, shape.itemsize) == (1234, "bfloat16", 2)


def test_experts_of_a_token_and_shared_heads(tmp_path) -> None:
    """A token computes two of four experts (MLP of 32) and the router; of two KV heads each of four ranks has one."""
    arch = architecture_from_hf(write_model(tmp_path / "experts", {**EXPERTS, "num_key_value_heads": 2}))
    shape = shape_of(arch, 4, 0, torch.float32, 0)
    weights = 2 * (2 * 64 * 64 + 2 * 64 * 2 * 16 + 2 * 3 * 64 * 32 + 64 * 4) + 512 * 64
    assert shape.flops_per_token == 2 * weights / 4
    assert shape.cache_bytes_per_token == 2 * 2 * 1 * 16 * 4
