"""Poison: what no copy has written is named, padding is not. Not covered: a whole update (test_vllm_families.py)."""

import torch

from megarlhf.architectures.placements import hf_placements, vllm_placements
from megarlhf.weights.checks.poison import poison, storages_with_nan
from megarlhf.weights.plan.copy_plan import make_plan
from tests.refuses import missing_names
from tests.weights.cases import copy_in_memory, empty, random_logical, tiny


def test_what_is_left_is_named_and_padding_is_zero():
    arch = tiny()
    ranks = [vllm_placements(arch, tp=1, tp_rank=0, rank=0)]
    live = empty(ranks, torch.float32, 0.0)
    poison(live[0])
    assert all(value.isnan().all() for value in live[0].values())
    copy_in_memory(make_plan([hf_placements(arch, rank=9)], ranks), {9: random_logical(arch)}, live)
    padding = ranks[0].padding()["lm_head.weight"]
    assert sum(stop - start for start, stop in padding) == int(live[0]["lm_head.weight"].isnan().sum()) > 0
    assert storages_with_nan(ranks[0], live[0]) == []
    assert all((live[0]["lm_head.weight"].view(-1)[start:stop] == 0).all() for start, stop in padding)
    live[0]["model.norm.weight"][1:3] = torch.nan
    size = live[0]["model.norm.weight"].numel()
    (problem,) = storages_with_nan(ranks[0], live[0])
    assert not missing_names(problem, "model.norm.weight", f"2 of {size} elements")
