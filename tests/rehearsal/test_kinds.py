"""Which ranks are rehearsed, and how much work each has: by hand, without rehearsing."""

import pickle
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarlhf.config import TrainConfig
from megarlhf.layout import MeshLayout
from megarlhf.parallel.batching import Batching
from megarlhf.parallel.packing.partition import ForwardCost
from megarlhf.rehearsal.fake_device.fake_collectives import gathered
from megarlhf.rehearsal.fakes.batches import RankLoad, recorded_batches
from megarlhf.rehearsal.kinds import Kind, choose_ranks, complete_pipelines, first_rank, named_ranks, stages_of
from megarlhf.rollout.rewards.batch import RewardResult


def load(cost: float, longest: int = 10) -> RankLoad:
    return RankLoad(cost, tokens=int(cost), longest=longest, micro_batches=1)


# Ranks of the actor: tp fastest, then dp, then pp. rank = tp + 2 dp + 6 pp.
ACTOR = MeshLayout(tp=2, pp=2, dp=3)


def test_the_most_the_least_and_the_largest() -> None:
    """Of three data-parallel ranks the second has the most work, the third the least, the first the largest
    micro-batch. Each comes with both stages."""
    loads = {"train/actor": [load(5, longest=99), load(7), load(3)]}
    kinds = choose_ranks({"actor": ACTOR}, "actor", loads)
    assert first_rank({"actor": ACTOR}, "actor") == 0
    whys = [next(why for why in ("largest", "most work", "least work") if why in kind.why) for kind in kinds]
    assert [kind.rank for kind in kinds] == [0, 2, 4, 6, 8, 10]
    assert whys == ["largest", "most work", "least work"] * 2
    assert {kind.stages for kind in kinds} == {(("actor", 0),), (("actor", 1),)}
    assert {kind.stands_for for kind in kinds} == {6}
    assert complete_pipelines([kind.rank for kind in kinds], ACTOR) == [0, 2, 4, 6, 8, 10]


def test_the_last_of_context_parallel_ranks_is_rehearsed() -> None:
    """rank = cp + 3 dp + 6 pp: of three neighbours the last, on each stage; they stand for all of their stage."""
    mesh = MeshLayout(cp=3, pp=2, dp=2)
    kinds = choose_ranks({"actor": mesh}, "actor", {"train/actor": [load(5), load(7)]})
    assert first_rank({"actor": mesh}, "actor") == 2
    assert [(kind.rank, kind.stands_for) for kind in kinds] == [(2, 6), (5, 6), (8, 6), (11, 6)]
    assert complete_pipelines([kind.rank for kind in kinds], mesh) == [2, 5, 8, 11]


def test_the_busiest_expert_is_rehearsed() -> None:
    """Expert-parallel neighbours are cp x dp; the first of them has the first expert."""
    mesh = MeshLayout(cp=2, pp=2, dp=2, ep=2)
    kinds = choose_ranks({"actor": mesh}, "actor", {"train/actor": [load(5), load(7)]}, busy_expert=True)
    assert [kind.rank for kind in kinds if "busiest expert" in kind.why] == [0, 4]
    assert complete_pipelines([kind.rank for kind in kinds], mesh) == [0, 1, 3, 4, 5, 7]
    assert 0 not in [kind.rank for kind in choose_ranks({"actor": mesh}, "actor", {"train/actor": [load(5), load(7)]})]


def test_the_largest_is_that_of_training() -> None:
    """What is only scored leaves no activations."""
    loads = {
        "train/actor": [load(5, longest=99), load(7), load(3)],
        "score/actor": [load(5), load(7, longest=999), load(3)],
    }
    assert [kind.rank for kind in choose_ranks({"actor": ACTOR}, "actor", loads) if "largest" in kind.why] == [0, 6]


def test_equal_work_needs_one_pipeline() -> None:
    kinds = choose_ranks({"actor": ACTOR}, "actor", {"train/actor": [load(5)] * 3})
    assert len(kinds) == 2
    assert kinds[1].rank - kinds[0].rank == 6


def test_work_of_all_roles_counts() -> None:
    """The reward model (dp 6) scores in a phase of its own name, `reward`; its second and third rank, positions of the
    actor's second, have most to score. A phase of nobody's is not counted."""
    layouts = {"actor": ACTOR, "reward_model": MeshLayout(tp=1, pp=2, dp=6)}
    loads = {
        "train/actor": [load(5), load(5), load(5)],
        "reward": [load(0), load(0), load(9), load(9), load(0), load(0)],
        "eval": [load(0), load(0), load(900)],
    }
    most = [kind.rank for kind in choose_ranks(layouts, "actor", loads) if "most" in kind.why]
    assert most == [2, 8]


def test_every_combination_of_stages_is_there() -> None:
    """A critic in four stages beside an actor in one: ranks beyond the actor's pipeline are added."""
    layouts = {"actor": MeshLayout(tp=2, pp=1, dp=4), "critic": MeshLayout(tp=2, pp=4, dp=1)}
    kinds = choose_ranks(layouts, "actor", {"train/actor": [load(1), load(4), load(2), load(2)]})
    assert [(kind.rank, dict(kind.stages)["critic"]) for kind in kinds] == [(0, 0), (2, 1), (4, 2), (6, 3)]
    assert sum(kind.stands_for for kind in kinds) == 8
    assert ["stages" in kind.why for kind in kinds] == [False, False, True, True]


def test_ranks_by_name() -> None:
    """Twice named is once rehearsed; of one stage alone no pipeline is whole."""
    kinds = named_ranks([9, 1, 9], {"actor": ACTOR})
    assert kinds == [Kind(1, (("actor", 0),), 6, "asked for"), Kind(9, (("actor", 1),), 6, "asked for")]
    assert complete_pipelines([1, 9], ACTOR) == []
    assert complete_pipelines([1, 7], ACTOR) == [1, 7]
    assert stages_of(11, {"actor": ACTOR, "critic": MeshLayout(tp=12, pp=1, dp=1)}) == (("actor", 1), ("critic", 0))


def batching_of(dp: int, per_token: float, per_pair: float, share: bool = False, **micro: int) -> Batching:
    mesh: Any = SimpleNamespace(
        layout=MeshLayout(tp=1, pp=1, dp=dp), coordinates=SimpleNamespace(dp=0), own=lambda by_dp: by_dp[0]
    )
    cost = ForwardCost(per_token=per_token, per_pair=per_pair)
    return Batching(mesh, cost, TrainConfig(num_steps=1, **micro), share=share)


def test_shares_by_hand() -> None:
    """Two data-parallel ranks, packed: [5] and [3, 1] tokens at a cost of 2 a token and 1 a pair (n (n + 1) / 2). Two
    calls in a phase add up; afterwards nothing is seen."""
    batching = batching_of(2, 2.0, 1.0, mini_batch_samples=3, max_tokens_per_micro_batch=5)
    lengths = torch.tensor([5, 3, 1])
    loads: dict[str, list[RankLoad]] = {}
    tokens: Counter[tuple[int, str]] = Counter()
    with recorded_batches(lambda: (1, "train/actor"), loads, tokens):
        batching.layouts([[0], [1], [2]], lengths)
        once = list(loads["train/actor"])
        batching.layouts([[0], [1], [2]], lengths)
    batching.layouts([[0], [1], [2]], lengths)
    long, short = sorted(once, key=lambda each: -each.cost)
    assert (long.cost, long.tokens, long.micro_batches) == (2 * 5 + 15, 5, 1)
    assert (short.cost, short.tokens, short.micro_batches) == ((2 * 3 + 6) + (2 * 1 + 1), 4, 1)
    assert long.longest >= 5
    assert loads["train/actor"] == [each + each for each in once]
    assert tokens == {(1, "train/actor"): 2 * (5 + 3 + 1)}
    assert (once[0] + once[0]).cost == 2 * once[0].cost
    assert (once[0] + once[0]).longest == once[0].longest


def test_what_sequences_share_is_work_once() -> None:
    """A prompt of 4 with responses of 2 and 3: 4 + 2 + 3 tokens, 10 + (4 x 2 + 3) + (4 x 3 + 6) pairs. What is told of
    the step are tokens of whole sequences."""
    batching = batching_of(1, 2.0, 1.0, share=True, mini_batch_samples=2, max_tokens_per_micro_batch=16)
    loads: dict[str, list[RankLoad]] = {}
    tokens: Counter[tuple[int, str]] = Counter()
    with recorded_batches(lambda: (1, "train/actor"), loads, tokens):
        (layout,) = batching.layouts([[0, 1]], torch.tensor([6, 7]), shared=[4], divisible=True)
    assert layout.parents == (-1, 0, 0)
    work = RankLoad(cost=2 * 9 + 39, tokens=9, longest=layout.columns, micro_batches=1)
    assert loads["train/actor"] == [work]
    assert tokens == {(1, "train/actor"): 13}


def test_padding_is_no_work() -> None:
    """Two rows of one micro-batch are as long as the longest sequence; tokens are those of the sequences."""
    batching = batching_of(1, 1.0, 0.0, mini_batch_samples=2, micro_batch_samples=2)
    loads: dict[str, list[RankLoad]] = {}
    tokens: Counter[tuple[int, str]] = Counter()
    with recorded_batches(lambda: (1, "train/actor"), loads, tokens):
        layouts = batching.layouts([[0], [1]], torch.tensor([4, 2]))
    columns = layouts[0].columns
    assert loads["train/actor"] == [RankLoad(cost=6.0, tokens=6, longest=2 * columns, micro_batches=1)]
    assert columns >= 4


@pytest.mark.parametrize("own", [[RewardResult(value=3.0), RewardResult(value=4.0)], []])
def test_outcomes_of_other_ranks(own) -> None:
    """Seven samples on three ranks: 3, 2 and 2, each with what this rank says, or anything where it has none."""
    said = gathered((own, 7), 3)
    assert said is not None
    assert [count for _, count in said] == [7, 7, 7]
    assert [len(outcomes) for outcomes, _ in said] == [3, 2, 2]
    values = [outcome.value for outcome in said[0][0]]
    assert values == ([3.0, 4.0, 3.0] if own else [1.0] * 3)
    # As many bytes as of outcomes that are not one and the same object.
    assert len(pickle.dumps(said[0])) == len(pickle.dumps(([RewardResult(value=value) for value in values], 7)))


@pytest.mark.parametrize(
    "mine", [None, 3, ("a", 1), ([1], 1), ([RewardResult(value=1.0)] * 2, 1), ([], 0), [RewardResult(value=1.0)]]
)
def test_whatever_else_is_said_alike(mine) -> None:
    assert gathered(mine, 3) is None


def test_ranks_that_have_nothing_of_a_role_are_a_kind() -> None:
    """A reward model on the last two of four ranks of an actor in two stages: its share counts for these two only."""
    layouts = {"actor": MeshLayout(pp=2, dp=2), "reward_model": MeshLayout(dp=2, first=2)}
    assert stages_of(0, layouts) == (("actor", 0), ("reward_model", None))
    assert stages_of(3, layouts) == (("actor", 1), ("reward_model", 0))
    kinds = choose_ranks(layouts, "actor", {"train/actor": [load(5), load(5)], "reward": [load(0), load(9)]})
    found = [(kind.rank, dict(kind.stages)["reward_model"], kind.stands_for) for kind in kinds]
    assert found == [(1, None, 2), (3, 0, 2)]
    # Nothing of it is cut where a rank has nothing of it.
    assert complete_pipelines([1, 3], layouts["reward_model"]) == [1, 3]
    assert complete_pipelines([0, 2], MeshLayout(pp=2, first=2)) == [0]
