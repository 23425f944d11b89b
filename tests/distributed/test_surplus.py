"""Dynamic sampling from a surplus of prompts, with responses in slices: which groups are trained on, by hand from whole
responses of the same seeds; and the same run after a kill.

Bit for bit in fp32 on a CPU. Not covered: engines (tests/distributed/test_slices.py, test_environments.py).
"""

from pathlib import Path
from typing import Any

from megarlhf.observe.records.metrics import read_metrics
from tests.distributed.interrupted_jobs import command_until
from tests.distributed.test_dynamic_sampling import REWARD
from tests.distributed.test_resume import ENGINE, TRAIN, assert_refused, rows, weights
from tests.distributed.test_slices import SAME_WEIGHTS, assert_equal, killed, run, tree

OWN, SURPLUS, GROUP = 4, 3, 4
"""Prompts of a step, those beside them, and samples of each."""
DYNAMIC = {"surplus": SURPLUS, "reward_range": [0.0, 0.7]}


def config(models: dict[str, Path], data: dict[str, Path], advantage: str, **keys: Any) -> dict[str, Any]:
    """Four steps. A micro-batch is a group, so that its numbers depend on no other."""
    cfg = tree(models, data, engine="megatron", **keys)
    del cfg["reward_model"]
    cfg["rewards"] = [REWARD]
    cfg["train"] |= {"epochs_per_step": 1, "shuffle": "none", "micro_batch_samples": GROUP}
    cfg["algo"] |= {"advantage": advantage, "dynamic_sampling": DYNAMIC}
    return cfg


def in_groups(samples: list[Any]) -> list[list[Any]]:
    return [samples[n : n + GROUP] for n in range(0, len(samples), GROUP)]


def by_hand(step: dict[str, Any]) -> tuple[list[int], dict[str, int]]:
    """Groups of all that a step draws that are trained on, and the counts of the others."""
    rewards = in_groups(step["columns"]["rewards"])
    lengths = [sum(map(len, responses)) for responses in in_groups(step["columns"]["responses"])]
    useful = [n for n, values in enumerate(rewards) if 0 < sum(values) / GROUP < 0.7 and len(set(values)) == 2]
    others = [n for n in range(OWN + SURPLUS) if n not in useful]
    chosen = sorted(useful[:OWN] + others[: max(0, OWN - len(useful))])
    return chosen, {
        "groups_drawn": OWN + SURPLUS,
        "groups_dropped": len(others),
        "groups_filled_up": max(0, OWN - len(useful)),
        "groups_unused": max(0, len(useful) - OWN),
        "tokens_unused": sum(lengths) - sum(lengths[n] for n in chosen),
        "sampling_rounds": 1,
    }


def of_groups(columns: dict[str, Any], groups: list[int]) -> dict[str, Any]:
    """Columns of chosen groups, by token or by sample."""
    samples = [GROUP * group + n for group in groups for n in range(GROUP)]
    ends, lengths = [0], list(map(len, columns["responses"]))
    for length in lengths:
        ends.append(ends[-1] + length)
    chosen: dict[str, Any] = {}
    for name, values in columns.items():
        if len(values) == len(lengths):
            chosen[name] = [values[n] for n in samples]
        elif len(values) == ends[-1]:
            chosen[name] = [value for n in samples for value in values[ends[n] : ends[n + 1]]]
        else:
            assert values == [], name
            chosen[name] = []
    return chosen


def test_the_groups_trained_on_are_those_of_whole_responses_by_hand(ranks, one_layer, data, tmp_path) -> None:
    """ReMax, whose greedy responses are drawn in slices too. All 7 prompts of a step, own and others, are drawn whole
    by a sampler that chooses them as the rule says. The same prompts on two ranks."""
    cfg = config(one_layer, data, "remax")
    cfg["actor"]["optim"] = SAME_WEIGHTS
    sliced = run(ranks, 1, cfg, tmp_path / "sliced", "rollout.slices=3")
    assert_equal(run(ranks, 1, cfg, tmp_path / "whole"), sliced)
    two = run(ranks, 2, cfg, tmp_path / "two", "rollout.slices=3", "algo.advantage=group_relative")
    cfg["algo"]["dynamic_sampling"] = {}
    cfg["train"] |= {"prompts_per_step": OWN + SURPLUS, "mini_batch_samples": GROUP * (OWN + SURPLUS)}
    cfg["train"]["sampler"] = "tests.distributed.own_functions:four_and_three_others"
    drawn, _ = run(ranks, 1, cfg, tmp_path / "drawn")
    seen = set()
    for step, whole in enumerate(drawn):
        chosen, counts = by_hand(whole)
        expected, actual = of_groups(whole["columns"], chosen), sliced[0][step]["columns"]
        assert actual.keys() == expected.keys() >= {"greedy_rewards", "old_logprobs", "advantages"}
        for name in expected:
            assert actual[name] == expected[name], (step, name)
        for name in ("prompts", "responses", "finished", "rewards"):
            assert two[0][step]["columns"][name] == expected[name], (step, name)
        for _, metrics in (sliced, two):
            assert {name: metrics[step + 1][name] for name in counts} == counts
        seen |= {name for name, count in counts.items() if count} | {"surplus"} & {"surplus" * (chosen[-1] >= OWN)}
    assert seen == {*counts, "surplus"}, "some case did not occur"


def test_a_run_that_is_cut_off_goes_on_with_the_surplus_in_flight(ranks, one_layer, data, tmp_path) -> None:
    """ReMax, weights that change, two ranks: cut off while the third step draws greedy responses, and in the training
    of a later one."""
    cfg = config(one_layer, data, "remax", slices=3)
    cfg["checkpoint"] = {"every_updates": 1, "every_minutes": 0, "background": False}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ranks.run(2, "command", *killed(cfg, whole))
    argv = killed(cfg, cut)
    for owner, method, calls in ((ENGINE, "generate", 6), (TRAIN, "step", 2)):
        outcome, said = ranks.run(2, command_until, calls, owner, method, *argv)[0]
        assert outcome == "killed", said
    change = f"algo.dynamic_sampling.surplus={SURPLUS - 1}"
    assert_refused(
        ranks, cut, [*argv, change, "run.allow_changes=true"], "algo.dynamic_sampling.surplus", "3 -> 2", "begun"
    )
    ranks.run(2, "command", *argv)
    assert rows(cut) == rows(whole)
    assert weights(cut) == weights(whole)
    assert any(row["groups_dropped"] > row["groups_filled_up"] for row in read_metrics(whole)[1:])
