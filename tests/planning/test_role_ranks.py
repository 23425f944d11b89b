"""Which ranks a role may be on, and what is told where it may not. All of it before a process group exists. Not
covered: that such a run trains (tests/distributed/test_role_ranks.py)."""

import pytest

from megarlhf.layout import MeshLayout
from megarlhf.planning.preflight import preflight
from tests.planning.configs import rl, role
from tests.refuses import refuses


def anchored(paths, **parallel):
    model = role(paths, **parallel)
    return rl(paths, reference=model, algo={"kl": {"coef": 0.1}}, train={"mini_batch_samples": 24})


@pytest.mark.parametrize("parallel, world_size, layout", [
    ({"ranks": 2}, 4, MeshLayout(dp=2)),
    ({"ranks": [1, 3], "tp": 2}, 4, MeshLayout(tp=2, first=1)),
    ({"ranks": [2, 4], "pp": 2}, 4, MeshLayout(pp=2, first=2)),
    ({"ranks": 4}, 4, MeshLayout(dp=4)),
])  # fmt: skip
def test_a_role_that_is_only_read_may_be_on_some_ranks(paths, parallel, world_size, layout):
    cfg = anchored(paths, **parallel)
    assert cfg.reference.parallel.layout(world_size, "reference") == layout
    assert list(layout.ranks) == list(range(layout.first, layout.first + layout.world_size))
    words = {name: words for name, _, words in preflight("rl", cfg, world_size).roles}["reference"]
    assert ("of 4" in words) == (layout.world_size < 4), words


@pytest.mark.parametrize("ranks", [0, -1, [2, 2], [3, 1], [-1, 2], [0, 1, 2], "all", True])
def test_what_names_no_ranks_is_refused(paths, ranks):
    with refuses("ranks"):
        anchored(paths, ranks=ranks)
