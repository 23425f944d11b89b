"""Which ranks a role may be on, and what is told where it may not. All of it before a process group exists.

Not covered: that such a run trains (tests/distributed/test_role_ranks.py).
"""

import pytest
import torch.distributed as dist

from megarlhf.config import GenerateConfig, RMConfig, SFTConfig
from megarlhf.layout import MeshLayout
from megarlhf.planning.preflight import preflight
from tests.planning.configs import TRAIN, rl, role


def anchored(paths, **parallel):
    """PPO with this layout of the reference."""
    model = role(paths, **parallel)
    return rl(paths, reference=model, algo={"kl": {"coef": 0.1}}, train={"mini_batch_samples": 24})


@pytest.mark.parametrize(
    "parallel, world_size, layout",
    [
        ({"ranks": 2}, 4, MeshLayout(dp=2)),
        ({"ranks": [1, 3], "tp": 2}, 4, MeshLayout(tp=2, first=1)),
        ({"ranks": [2, 4], "pp": 2}, 4, MeshLayout(pp=2, first=2)),
        ({"ranks": 4}, 4, MeshLayout(dp=4)),
    ],
)
def test_a_role_that_is_only_read_may_be_on_some_ranks(paths, parallel, world_size, layout):
    cfg = anchored(paths, **parallel)
    assert cfg.reference.parallel.layout(world_size, "reference") == layout
    assert list(layout.ranks) == list(range(layout.first, layout.first + layout.world_size))
    words = {name: words for name, _, words in preflight("rl", cfg, world_size).roles}["reference"]
    assert ("of 4" in words) == (layout.world_size < 4), words


@pytest.mark.parametrize(
    "parallel, words",
    [
        (
            {"ranks": 8},
            r"reference\.parallel\.ranks = 8 goes up to rank 7, and the run has 4 rank\(s\), 0 to 3; start 8",
        ),
        ({"ranks": [2, 6]}, r"reference\.parallel\.ranks = \[2, 6\] goes up to rank 5, and the run has 4"),
        ({"ranks": 3, "tp": 2}, r"reference\.parallel\.ranks are 3 ranks, .* = 2 x 1 x 1 = 2; name 2 or 4 ranks"),
        ({"ranks": 3, "cp": 2}, r"reference\.parallel\.ranks are 3 ranks, .* = 1 x 2 x 1 = 2; name 2 or 4 ranks"),
        ({"ranks": 1, "pp": 2}, r"reference\.parallel\.ranks are 1 ranks, .* = 1 x 1 x 2 = 2; name 2 ranks"),
    ],
)
def test_ranks_that_are_not_there_or_do_not_divide_are_refused(paths, parallel, words):
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=words):
        preflight("rl", anchored(paths, **parallel), 4)


@pytest.mark.parametrize("ranks", [0, -1, [2, 2], [3, 1], [-1, 2], [0, 1, 2], "all", True])
def test_what_names_no_ranks_is_refused(paths, ranks):
    with pytest.raises(ValueError, match="ranks"):
        anchored(paths, ranks=ranks)


@pytest.mark.parametrize("name", ["actor", "critic", "sft", "rm", "generate"])
def test_a_role_that_is_trained_or_sampled_from_is_on_all_ranks(paths, name):
    part = role(paths, ranks=1)
    tree = {"run": {"dir": "r"}, "data": {"train": paths["train"]}}
    made = {
        "actor": lambda: rl(paths, actor=part),
        "critic": lambda: rl(paths, critic=part),
        "sft": lambda: SFTConfig.model_validate({**tree, "actor": part, "train": TRAIN}),
        "rm": lambda: RMConfig.model_validate({**tree, "reward_model": part, "train": TRAIN}),
        "generate": lambda: GenerateConfig.model_validate({**tree, "actor": part}),
    }
    trained = {"sft": "actor", "rm": "reward_model", "generate": "actor"}.get(name, name)
    with pytest.raises(ValueError, match=rf"{trained}\.parallel\.ranks = 1, and {trained} is trained or sampled from"):
        made[name]()
