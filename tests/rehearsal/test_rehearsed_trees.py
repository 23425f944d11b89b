"""A rehearsed GPU counts of rows with trees what is computed: operations, tokens, and work by rank; and the host waits
for it no more often than without them.

The same of a CPU that computes is in tests/distributed/test_tree_flops.py. Not covered: seconds.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megarlhf.rehearsal.cost_model.pricing import Pricing
from megarlhf.rehearsal.fake_device.device import FakeDevice
from megarlhf.rehearsal.fake_device.origins import callers
from megarlhf.rehearsal.fake_device.torch_patches import FakeTensor
from megarlhf.rehearsal.fakes.inputs import stand_in
from megarlhf.rehearsal.fakes.lengths import Constant, Uniform
from megarlhf.rehearsal.job import RankRecord
from megarlhf.rehearsal.program import Rank
from megarlhf.rehearsal.request import Request
from tests.apart import apart
from tests.rehearsal.jobs import DENSE, job_of, job_tree, records_of, request_of

PROMPT, RESPONSE, SAMPLES, GROUPS = 24, 40, 4, 4
LAYERS, HIDDEN = DENSE["num_hidden_layers"], DENSE["hidden_size"]
WEIGHTS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * DENSE["intermediate_size"])
VOCABULARY = HIDDEN * DENSE["vocab_size"]


def request(folder: Path, *, share: bool, ragged: bool = False, **changes: Any) -> Request:
    """GRPO on one rank, a step of one mini-batch; a group fits into a micro-batch."""
    tree = job_tree("rl", folder)
    del tree["reward_model"], tree["critic"]
    tree |= {"rewards": [{"kind": "rule", "rule": "exact_match"}]}
    tree["algo"] = {"advantage": "group_relative", "kl": {"coef": 0.05}}
    tree["actor"] |= changes
    tree["rollout"]["num_samples_per_prompt"] = SAMPLES
    tree["train"] |= {"prompts_per_step": GROUPS, "mini_batch_samples": GROUPS * SAMPLES, "share_prompts": share}
    tree["train"]["max_tokens_per_micro_batch"] = PROMPT + SAMPLES * RESPONSE
    lengths = {
        "prompt_lengths": Uniform(3, PROMPT) if ragged else Constant(PROMPT),
        "response_lengths": Uniform(2, RESPONSE) if ragged else Constant(RESPONSE),
    }
    return request_of("rl", tree, folder, world_size=1, steps=1, **lengths)


def record_of(folder: Path, **how: Any) -> RankRecord:
    (record,) = records_of(request(folder, **how), folder / "standing_in", 0)
    return record


@pytest.mark.parametrize("share", [True, False])
def test_operations_are_those_of_the_formula(share, tmp_path) -> None:
    """Twice a weight for each token of a tree, four times a channel for each pair that is attended to, the vocabulary
    on rows of responses; in training three times as much. What is computed again is not counted."""
    record = record_of(tmp_path, share=share, recompute="full" if share else "none")
    copies = 1 if share else SAMPLES
    tokens = GROUPS * (copies * PROMPT + SAMPLES * RESPONSE)
    pairs = copies * PROMPT * (PROMPT + 1) // 2 + SAMPLES * (PROMPT * RESPONSE + RESPONSE * (RESPONSE + 1) // 2)
    products = 2 * tokens * WEIGHTS + 2 * GROUPS * SAMPLES * RESPONSE * VOCABULARY
    attention = 4 * GROUPS * pairs * LAYERS * HIDDEN
    for phase, passes in (("train/actor", 3), ("score/reference", 1)):
        assert record.flops[1, phase, "matmul"] == passes * products, phase
        assert record.flops[1, phase, "attention"] == passes * attention, phase
        (work,) = record.loads[phase]
        assert work.tokens == tokens
        assert work.cost == 2 * tokens * WEIGHTS + attention
    assert record.tokens[1, "train/actor"] == GROUPS * SAMPLES * (PROMPT + RESPONSE)
    assert (record.recomputed_seconds.get((1, "train/actor"), 0.0) > 0) == share


def test_ragged_trees_and_their_share_of_the_work(tmp_path) -> None:
    """The cost by which ranks are chosen is what is counted, but for the vocabulary."""
    shared, apart = (record_of(tmp_path / str(each), share=each, ragged=True) for each in (True, False))
    labels = set()
    for record in (shared, apart):
        (work,) = record.loads["train/actor"]
        counted = record.flops[1, "train/actor", "matmul"] + record.flops[1, "train/actor", "attention"]
        rest, remainder = divmod(counted - 3 * work.cost, 3 * 2 * VOCABULARY)
        assert remainder == 0
        labels.add(rest)
    assert len(labels) == 1, "as many log-probs of responses"
    assert shared.loads["train/actor"][0].tokens < apart.loads["train/actor"][0].tokens
    assert shared.tokens == apart.tokens, "by which tokens_per_second is told"


READS = ("_local_scalar_dense", "equal", "masked_select", "nonzero", "repeat_interleave")


def file_of_caller() -> str:
    """The file below `parallel/`, or the name of a file elsewhere."""
    path: str = callers()[0][0]
    _, below, inside = path.partition("megarlhf/parallel/")
    return inside if below else path.rpartition("/")[2]


def reads_and_copies(folder: Path, share: bool) -> tuple[int, Counter[str], Counter[str]]:
    """Of a rank's training: micro-batches, and by file what the host reads from the device, or learns a shape by, and
    what it copies there."""
    reads, copies = Counter[str](), Counter[str]()
    dispatch = FakeDevice._dispatch

    def noted(self: FakeDevice, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._overloadpacket.__name__
        of_device = any(isinstance(x, FakeTensor) for x in args)
        if self.wire.phase == "train/actor" and (name in READS or "unique" in name) and of_device:
            reads[file_of_caller()] += 1
        if self.wire.phase == "train/actor" and name == "_to_copy" and kwargs.get("device") and not of_device:
            copies[file_of_caller()] += 1
        return dispatch(self, func, args, kwargs)

    FakeDevice._dispatch = noted  # type: ignore[method-assign]
    asked = request(folder, share=share)
    lengths = {"prompt_lengths": asked.prompt_lengths, "response_lengths": asked.response_lengths}
    stood = stand_in(asked.cfg, folder / "standing_in", steps=1, **lengths)
    assert asked.response_lengths is not None
    record = Rank(job_of(asked, stood.cfg), Pricing(asked.hardware, 8)).run()
    return record.loads["train/actor"][0].micro_batches, reads, copies


def test_trees_let_the_host_read_nothing_more(tmp_path) -> None:
    """Where segments begin, twice, and who predicts whom are copied to the device for each micro-batch with trees."""
    (micro, reads, copies), (more, reads_apart, copies_apart) = (
        apart(reads_and_copies, tmp_path / str(share), share) for share in (True, False)
    )
    assert micro == GROUPS < more
    assert {name: count / micro for name, count in reads.items() if name != "step.py"} == {
        name: count / more for name, count in reads_apart.items() if name != "step.py"
    }
    assert reads["step.py"] == reads_apart["step.py"] > 0, "sums of a loss, once a mini-batch"
    assert copies["packing/trees.py"] == 2 * micro
    assert copies["micro_batch.py"] / micro == copies_apart["micro_batch.py"] / more + 1
    assert copies["packing/rows.py"] / micro == copies_apart["packing/rows.py"] / more
