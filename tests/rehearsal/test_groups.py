"""How many process groups the ranks of a large job make, counted as a rehearsal counts them.

Not covered: groups of vLLM's; the time that a communicator takes.
"""

from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from megarlhf.layout import MeshLayout
from megarlhf.parallel.mesh import GroupCache, build_mesh
from megarlhf.planning.machine import nodes
from megarlhf.planning.machine.nodes import RankFacts
from megarlhf.rehearsal.fake_device import torch_patches
from megarlhf.rehearsal.job import runtime_of
from megarlhf.runtime import Runtime

WORLD, PER_NODE = 512, 8
CALLS, MEMBERSHIPS = 64, 16
FLAT = MeshLayout(tp=8, pp=8, dp=8)
ORDERED = replace(FLAT, order=(0, 4, 1, 5, 2, 6, 3, 7))
"""As engines of four ranks ask for it."""


def counted(runtime: Runtime, rank: int, layouts: list[MeshLayout]) -> tuple[int, int]:
    """Calls and memberships of a rank of 512 that has been looked at with its node and has roles of these layouts."""
    dist.destroy_process_group()
    torch_patches.join(rank, WORLD, "cpu")
    there = runtime_of(rank, WORLD, PER_NODE, runtime.device)
    facts = [RankFacts(node=str(each // PER_NODE), rank=each, versions={}, open_files=1e6) for each in range(WORLD)]
    quiet = dict.fromkeys(("_require_sum", "_require_passed"), mock.DEFAULT)
    with torch_patches.count_groups() as made, mock.patch.multiple(nodes, **quiet):
        nodes._check_sums(facts, there)
        cache = GroupCache(there)
        for layout in layouts:
            mesh = build_mesh(layout, there, cache)
            assert mesh.is_member == (rank in layout.ranks)
    dist.destroy_process_group()
    return made.calls, made.memberships


@pytest.mark.parametrize(
    ("layouts", "calls"),
    [
        ([FLAT] * 4, 9),
        ([ORDERED] * 4, 9),
        ([FLAT, FLAT, FLAT, MeshLayout(tp=8, first=8)], 9),
        ([FLAT, FLAT, FLAT, MeshLayout(tp=8, dp=64)], 10),
    ],
    ids=["four alike", "in the order of engines", "a reward model on a node", "a reward model without stages"],
)
def test_a_rank_of_512_makes_few_groups(layouts, calls, ranks) -> None:
    """The first rank, one between, and the last: no call makes a group for others, and both bounds hold."""
    found = []
    for rank in (0, 9, WORLD - 1):
        made, member = ranks.run(1, counted, rank, layouts)[0]
        found.append((made, member))
    assert found == [(calls, calls)] * 3
    assert calls <= MEMBERSHIPS <= CALLS
