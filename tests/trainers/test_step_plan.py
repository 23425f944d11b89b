"""The plan of a step, and columns on their way into its micro-batches and back, on meshes without process groups.

Not covered: roles that compute (tests/distributed), and how well micro-batches are balanced (test_packing.py).
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarlhf.columns import Ragged
from megarlhf.config import MicroBatchConfig
from megarlhf.experience import Experience
from megarlhf.layout import MeshLayout
from megarlhf.parallel.batching import Batching
from megarlhf.parallel.mesh import Mesh
from megarlhf.parallel.packing.partition import ForwardCost
from megarlhf.rollouts import Rollouts, Stretches, VersionRuns
from megarlhf.trainers.experience.batches import micro_batches, per_token_of
from megarlhf.trainers.experience.plan import StepPlan
from tests.refuses import refuses
from tests.tables import make_rollouts, ragged

PADDED = MicroBatchConfig(micro_batch_samples=2)
PACKED = MicroBatchConfig(max_tokens_per_micro_batch=24, share_prompts=False)
TREES = MicroBatchConfig(max_tokens_per_micro_batch=24, share_prompts=True)


def role(rank=0, **sizes):
    layout = MeshLayout(**sizes)
    runtime = SimpleNamespace(rank=rank, world_size=layout.world_size, device=torch.device("cpu"))
    mesh = Mesh(layout=layout, position=layout.coordinates(rank), groups=None, runtime=runtime)

    def batching(micro):
        return Batching(mesh=mesh, cost=ForwardCost(1.0, 0.0), micro=micro, share=micro.share_prompts)

    return SimpleNamespace(mesh=mesh, batching=batching)


def table(prompts=((1, 2), (1, 2), (3,), (3,))):
    """Four samples of two prompts, with responses of one to four tokens."""
    sampled = ragged([5], [6] * 2, [7] * 3, [8] * 4, dtype=torch.int64)
    logprobs = Ragged(torch.zeros(10), sampled.lengths_N)
    rollouts = make_rollouts(sampled, logprobs, torch.ones(4, dtype=torch.bool))
    return Experience(tuple(map(torch.tensor, prompts)), torch.tensor([0, 0, 1, 1]), rollouts)


def samples_of(by_rank):
    return [[n for layout in layouts for n in layout.sequences] for layouts in by_rank]


def test_each_mini_batch_is_planned_by_itself_and_once_for_roles_that_pack_alike():
    plan = StepPlan(table(), PADDED, [[[0, 1], [2, 3]], [[3, 0], [1, 2]]])
    assert plan.mini_batches == [[0, 1], [2, 3]]
    assert plan.updates == [[0, 1], [2, 3], [3, 0], [1, 2]]
    actor, critic, elsewhere = role(dp=2), role(rank=1, dp=2), role(tp=2)
    by_rank = plan.layouts_by_rank(actor, plan.updates)
    assert samples_of(by_rank) == [[0, 2, 3, 1], [1, 3, 0, 2]]
    again = plan.layouts_by_rank(critic, plan.updates)
    assert all(one is other for a, b in zip(by_rank, again, strict=True) for one, other in zip(a, b, strict=True))
    assert plan.own_layouts(critic, plan.updates) == by_rank[1]
    assert samples_of(plan.layouts_by_rank(elsewhere, plan.updates)) == [[0, 1, 2, 3, 3, 0, 1, 2]]


def test_a_whole_plan_is_one_mini_batch_of_all_samples():
    plan = StepPlan.whole(table(), PADDED)
    assert list(map(list, plan.updates)) == [[0, 1, 2, 3]]
    assert samples_of(plan.layouts_by_rank(role(), plan.updates)) == [[0, 1, 2, 3]]


def test_a_column_is_with_the_last_stages_that_train_on_the_sample_in_any_pass():
    """dp 2 x pp 2: ranks 2 and 3 compute losses. Samples 1 and 2 change the rank in the second pass."""
    first, both = [[0, 1, 2, 3]], [[0, 2, 1, 3]]
    sharding = StepPlan(table(), PADDED, [first]).sharding([role(dp=2, pp=2)])
    assert sharding.resident_WN.int().tolist() == [[0] * 4, [0] * 4, [1, 1, 0, 0], [0, 0, 1, 1]]
    sharding = StepPlan(table(), PADDED, [first, both]).sharding([role(dp=2, pp=2)])
    assert sharding.resident_WN.int().tolist() == [[0] * 4, [0] * 4, [1, 1, 1, 0], [0, 1, 1, 1]]
    critic = role(dp=4)
    sharding = StepPlan(table(), PADDED, [first]).sharding([role(dp=2, pp=2), critic])
    assert sharding.resident_WN.int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]]
    assert sharding.traffic.received_W.tolist() == [0] * 4


def test_nothing_is_sharded_where_every_rank_needs_all():
    plan = StepPlan.whole(table(), PADDED)
    assert plan.sharding([role()]) is None
    assert plan.sharding([role(tp=2)]) is None


def test_shared_prompts_are_counted_and_must_be_the_same():
    plan = StepPlan.whole(table(), TREES)
    assert plan.shares_prompts(role())
    assert plan.prompts_computed(role(), range(4)) == {"prompts_computed": 2.0, "prompts_saved": 2.0}
    assert StepPlan.whole(table(), PACKED).prompts_computed(role(), range(4)) == {
        "prompts_computed": 4.0,
        "prompts_saved": 0.0,
    }
    with refuses("samples 0 and 1", "two prompts", error=AssertionError):
        StepPlan.whole(table(prompts=((1, 2), (1, 9), (3,), (3,))), TREES).layouts_by_rank(role(), [range(4)])


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def two_stretches():
    """Sampled tokens are below 100, observed ones 900 to 905. Sample 1 has one stretch, the others two or three."""
    sampled = ragged([10, 11, 12], [20, 21], [30, 31], [40, 41, 42, 43], dtype=torch.int64)
    observed = ragged([900, 901, 902], [], [903], [904, 905], dtype=torch.int64)
    lengths = ragged([2, 3, 1], [2], [1, 1, 1], [1, 1, 2, 1, 1], dtype=torch.int64)
    rollouts = Rollouts(
        responses=sampled,
        logprobs=Ragged(torch.zeros(11), sampled.lengths_N),
        finished_N=torch.ones(4, dtype=torch.bool),
        versions=VersionRuns.constant(0, sampled.lengths_N),
        stretches=Stretches(lengths, observed),
    )
    prompts = tuple(map(torch.tensor, ([1, 2], [1, 2], [3], [3])))
    values = Ragged(torch.arange(11.0) + 0.5, sampled.lengths_N)
    return Experience(prompts, torch.tensor([0, 0, 1, 1]), rollouts, {"values": values})


@pytest.mark.parametrize("micro", [PADDED, PACKED, TREES], ids=["padded", "packed", "trees"])
def test_a_column_of_two_stretches_goes_into_micro_batches_and_back(one_rank, micro):
    experience, actor = two_stretches(), role()
    passes = [[[3, 0], [1, 2]], [[0, 1, 2, 3]]]
    plan = StepPlan(experience, micro, passes)
    weights_N = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    batches = micro_batches(actor, experience, plan, plan.mini_batches, ["values"], weights_N)
    sampled, values = experience.rollouts.responses.rows(), experience.columns["values"].rows()
    seen = []
    for batch in batches:
        mask_BS, samples = batch.columns["response_mask"], batch.layout.sequences
        assert batch.tokens_BS[mask_BS].tolist() == [token for n in samples for token in sampled[n].tolist()]
        assert batch.columns["values"][mask_BS].tolist() == [value for n in samples for value in values[n].tolist()]
        assert not batch.columns["values"][~mask_BS].any()
        expected = torch.cat([weights_N[n].expand(len(sampled[n])) for n in samples])
        assert torch.equal(batch.columns["loss_weights"][mask_BS], expected)
        left_out = batch.tokens_BS[~mask_BS].tolist()
        seen += [token for token in left_out if token >= 900]
    assert sorted(seen) == list(range(900, 906)), "observed tokens are read, and no column has a value for them"
    back = per_token_of(actor, experience, plan, plan.mini_batches, [batch.columns["values"] for batch in batches])
    assert torch.equal(back.values_T, experience.columns["values"].values_T)
    assert torch.equal(back.lengths_N, experience.response_lengths_N)
