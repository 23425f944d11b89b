"""A role on some of the ranks only: the run computes what it computes with the role on all of them.

Not covered: NCCL.
"""

import numpy as np
import pytest

from megarlhf.layout import MeshLayout
from megarlhf.parallel.mesh import GroupCache, build_mesh
from megarlhf.runtime import Runtime
from tests.distributed.compare import assert_weights_equal
from tests.distributed.test_rl_layouts import config

GRPO = {"advantage": "group_relative", "kl": {"coef": 0.05, "placement": "loss", "estimator": "k3"}}


def made_groups(runtime: Runtime, layouts: list[MeshLayout]) -> list[list[int]]:
    """The tensor-parallel group of each layout, after a collective in it."""
    import torch
    import torch.distributed as dist

    cache, found = GroupCache(runtime), []
    for layout in layouts:
        group = build_mesh(layout, runtime, cache).groups.tp
        if group is None:
            found.append([])
            continue
        total = torch.tensor([runtime.rank])
        dist.all_reduce(total, group=group)
        assert int(total) == sum(dist.get_process_group_ranks(group))
        found.append(dist.get_process_group_ranks(group))
    return found


def test_groups_are_made_by_ranks_that_are_in_different_numbers_of_them(ranks) -> None:
    """The first and the last of four stages have a group that the others have not, and so have the ranks of a part."""
    layouts = [MeshLayout(pp=4), MeshLayout(tp=2, first=1), MeshLayout(tp=2, dp=2), MeshLayout(tp=4)]
    found = ranks.run(4, made_groups, layouts)
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3]]
    part: list[list[int]] = [[], [1, 2], [1, 2], []]
    assert found == [[[rank], part[rank], pairs[rank], [0, 1, 2, 3]] for rank in range(4)]


@pytest.mark.parametrize(
    "world_size, layout, alone, algo",
    [
        (2, {}, {"ranks": 1}, {}),
        (2, {}, {"ranks": [1, 2]}, GRPO),
        (4, {"tp": 2, "sequence_parallel": False}, {"tp": 2, "sequence_parallel": False, "ranks": [2, 4]}, {}),
    ],
    ids=["ppo_first_of_2", "grpo_second_of_2", "ppo_last_two_of_4_tp2"],
)
def test_a_step_is_that_with_every_role_on_all_ranks(world_size, layout, alone, algo, ranks, two_layers, data) -> None:
    """Reward model and reference on a part of the ranks: samples, rewards, columns, losses and weights."""
    everywhere = config(two_layers, data["prompts"], layout, **algo)
    expected = ranks.run(world_size, "rl_step", everywhere)
    partly = config(two_layers, data["prompts"], layout, **algo)
    for role in ("reward_model", "reference"):
        partly[role] = {**partly[role], "parallel": alone}
    found = ranks.run(world_size, "rl_step", partly)
    for actual, whole in zip(found[:1], expected[:1], strict=True):
        assert actual["responses"] == whole["responses"]
        np.testing.assert_allclose(actual["rewards"], whole["rewards"], atol=1e-6, rtol=0)
        assert set(actual["columns"]) == set(whole["columns"])
        for name, column in whole["columns"].items():
            np.testing.assert_allclose(actual["columns"][name], column, atol=2e-6, err_msg=name)
        for name in ("policy_loss", "loss", "actor_grad_norm", "reward_mean", "kl"):
            np.testing.assert_allclose(
                actual["metrics"][name], whole["metrics"][name], rtol=1e-5, atol=1e-6, err_msg=name
            )
        for role, weights in whole["weights"].items():
            assert_weights_equal(actual["weights"][role], weights, what=role)
