"""Sums of gradients and gathers of weights that run beside the backward and the forward change no bit.

With gloo, whose messages run in threads of their own. Not covered: NCCL's streams.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from megarlhf.runtime import Runtime
from tests.distributed.jobs import sft_steps
from tests.distributed.tiny import write_family

STEPS = 3
OPTIM = {"lr": 1e-3, "clip_grad": 0.0}
"""Not clipped: the norm is a sum over what each rank has of the buckets, in another order with other buckets."""
BUCKET = 2_000
"""Elements, so that the tiny models have several buckets."""


@contextmanager
def counting(counts: dict[str, int]) -> Iterator[None]:
    """Small buckets; how many sums begin before the backward is over, and how many gathers are waited for by a
    forward."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    from megarlhf.parallel import step

    made, start, finish, gathered = (
        step.DistributedDataParallelConfig, Group.start_grad_sync, Group.finish_grad_sync, Group.finish_param_sync,
    )  # fmt: skip
    finishing = []

    def started(self: Any, *args: Any, **named: Any) -> None:
        counts["in backward"] += not finishing
        start(self, *args, **named)

    def finished(self: Any, *args: Any, **named: Any) -> None:
        finishing.append(self)
        finish(self, *args, **named)
        finishing.pop()

    def waited(self: Any, *args: Any, **named: Any) -> None:
        counts["in forward"] += self.param_gather_handle is not None
        gathered(self, *args, **named)

    step.DistributedDataParallelConfig = partial(made, bucket_size=BUCKET)  # type: ignore[misc, assignment]
    Group.start_grad_sync, Group.finish_grad_sync, Group.finish_param_sync = started, finished, waited
    try:
        yield
    finally:
        step.DistributedDataParallelConfig = made  # type: ignore[misc]
        Group.start_grad_sync, Group.finish_grad_sync, Group.finish_param_sync = start, finish, gathered


def steps_counted(runtime: Runtime, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """`sft_steps`, and how much ran beside something else."""
    counts = {"in backward": 0, "in forward": 0}
    with counting(counts):
        return sft_steps(runtime, config, STEPS), counts


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dp2": ("llama", 2, {}),
    "tied, dp2": ("qwen2", 2, {}),
    "pp2 x dp2": ("llama", 4, {"pp": 2}),
    "pp2 vpp2 x dp2, filled up": ("llama", 4, {"pp": 2, "vpp": 2}),
    "tp2 x dp2": ("llama", 4, {"tp": 2}),
    "ep2 of dp4": ("qwen3_moe", 4, {"ep": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overlap_changes_no_bit(layout, ranks, data, tmp_path) -> None:
    family, world_size, parallel = LAYOUTS[layout]
    model = write_family(tmp_path / family, family)

    def run(overlap: bool) -> tuple[dict[str, Any], list[dict[str, int]]]:
        switches = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), overlap)
        role = {"model": {"path": str(model), "dtype": "bf16"}, "parallel": parallel, "optim": OPTIM | switches}
        config = {
            "run": {"dir": "unused"},
            "actor": role,
            "data": {"train": str(data["sft"])},
            "train": {
                "num_steps": STEPS, "mini_batch_samples": 8, "micro_batch_samples": 4 if "vpp" in parallel else 2,
            },
        }  # fmt: skip
        by_rank = ranks.run(world_size, steps_counted, config)
        return by_rank[0][0], [counts for _, counts in by_rank]

    (apart, none), (beside, counts) = run(False), run(True)
    # Not those of the first step, in which Megatron-Core learns what to wait for. Later stages have one bucket each,
    # whose sum falls into the pipeline's bubble.
    for kind in ("in backward", "in forward"):
        assert all(each[kind] >= STEPS - 1 for each in counts), counts
        assert counts[0][kind] >= 4 * (STEPS - 1), counts
    assert all(each == {"in backward": 0, "in forward": 0} for each in none)
    assert beside["loss"] == apart["loss"]
    np.testing.assert_allclose(beside["grad_norm"], apart["grad_norm"], rtol=1e-6)
    for name, weight in apart["weights"].items():
        np.testing.assert_array_equal(beside["weights"][name], weight, err_msg=name)
