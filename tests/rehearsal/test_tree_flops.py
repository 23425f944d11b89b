"""A rehearsed GPU counts of rows with trees what is computed: operations, tokens, and work by rank.

The same of a CPU that computes is in tests/distributed/test_tree_flops.py. Not covered: seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarlhf.rehearsal.job import RankRecord
from megarlhf.rehearsal.lengths import Constant, Uniform
from tests.rehearsal.jobs import DENSE, job_tree, records_of, request_of

PROMPT, RESPONSE, SAMPLES, GROUPS = 24, 40, 4, 4
LAYERS, HIDDEN = DENSE["num_hidden_layers"], DENSE["hidden_size"]
WEIGHTS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * DENSE["intermediate_size"])
VOCABULARY = HIDDEN * DENSE["vocab_size"]


def record_of(folder: Path, *, share: bool, ragged: bool = False, **changes: Any) -> RankRecord:
    """Of one rank of GRPO, a step of one mini-batch; a group fits into a micro-batch."""
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
    request = request_of("rl", tree, folder, world_size=1, steps=1, **lengths)
    (record,) = records_of(request, folder / "standing_in", 0)
    return record


@pytest.mark.parametrize("share", [True, False])
def test_operations_are_those_of_the_formula(share: bool, tmp_path: Path) -> None:
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
        (work,) = record.shares[phase]
        assert work.tokens == tokens
        assert work.cost == 2 * tokens * WEIGHTS + attention
    assert record.tokens[1, "train/actor"] == GROUPS * SAMPLES * (PROMPT + RESPONSE)
    assert (record.again_seconds.get((1, "train/actor"), 0.0) > 0) == share


def test_ragged_trees_and_their_share_of_the_work(tmp_path: Path) -> None:
    """The cost by which ranks are chosen is what is counted, but for the vocabulary."""
    shared, apart = (record_of(tmp_path / str(each), share=each, ragged=True) for each in (True, False))
    labels = set()
    for record in (shared, apart):
        (work,) = record.shares["train/actor"]
        counted = record.flops[1, "train/actor", "matmul"] + record.flops[1, "train/actor", "attention"]
        rest, remainder = divmod(counted - 3 * work.cost, 3 * 2 * VOCABULARY)
        assert remainder == 0
        labels.add(rest)
    assert len(labels) == 1, "as many log-probs of responses"
    assert shared.shares["train/actor"][0].tokens < apart.shares["train/actor"][0].tokens
    assert shared.tokens == apart.tokens, "by which tokens_per_second is told"
