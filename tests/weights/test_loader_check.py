"""A loader and a table are compared: a loader that follows the right table against right and wrong ones. Not covered:
real loaders (tests/distributed/test_vllm_families.py), devices other than a CPU."""

from dataclasses import replace

import pytest
import torch

from megarlhf.architectures.placements import logical_tensors, vllm_placements
from megarlhf.placement import Box
from megarlhf.weights.checks.loader_check import _Numbers, check_loader, sample_tensors
from megarlhf.weights.transport.storages import view
from tests.refuses import missing_names
from tests.weights.cases import empty, tiny

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CPU = torch.device("cpu")


class Loader:
    """Fills live parameters by a table, as an engine's own loader would."""

    def __init__(self, placements, live, padding=None):
        self.placements, self.live, self.padding = placements, live, padding
        self.seen = []

    def __call__(self, tensors):
        for name, tensor in tensors:
            self.seen.append(name)
            for placement in self.placements.placements:
                if placement.tensor == name:
                    if self.padding is not None:
                        whole = self.live[placement.storage].view(-1)
                        whole[whole.isnan()] = self.padding
                    slices = tuple(map(slice, placement.box.start, placement.box.stop))
                    view(placement, self.live).copy_(tensor[slices])


def setup(dtype=torch.bfloat16, tp=2, tp_rank=1, **changes):
    arch = tiny(**changes)
    placements = vllm_placements(arch, tp=tp, tp_rank=tp_rank, rank=5)
    return arch, placements, empty([placements], dtype)[5]


def altered(placements, tensor, **changes):
    new = tuple(replace(p, **changes) if p.tensor == tensor else p for p in placements.placements)
    assert new != placements.placements
    return replace(placements, placements=new)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", [None, 0.0])
def test_a_right_table_has_no_problem(dtype, padding):
    """Padding that the loader leaves alone or zeroes is no problem either; every tensor was fed, digit by digit."""
    arch, placements, live = setup(dtype)
    assert placements.padding(), "no padding was compared"
    load = Loader(placements, live, padding)
    tensors = sample_tensors(arch)
    assert check_loader(placements, live, load, tensors, dtype) == []
    numel = sum(torch.Size(shape).numel() for shape in tensors.values())
    digits = 1 if dtype == torch.float32 else 2
    assert (digits - 1) * 14 < numel.bit_length() <= digits * (dtype.itemsize * 8 - 2)
    assert load.seen == list(tensors) * digits


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numbers_of_all_elements_differ_and_are_plain_values(dtype):
    """Both digits of 20,000 elements of two tensors: exact in the dtype, positive, normal; no pair of digits twice."""
    numbers = _Numbers({"a": (100, 100), "b": (10000,)}, dtype)
    assert numbers.num_digits == (1 if dtype == torch.float32 else 2)
    digits = range(numbers.num_digits)
    drawn = [torch.cat([numbers.whole(name, digit, CPU).view(-1) for name in "ab"]) for digit in digits]
    pairs = torch.stack(drawn, dim=1).double()
    assert pairs.isfinite().all()
    assert pairs.min() >= torch.finfo(dtype).tiny
    assert len(pairs.unique(dim=0)) == 20000
    box = Box((7, 20), (9, 60))
    assert torch.equal(numbers.of_box("a", box, 0, CPU), numbers.whole("a", 0, CPU)[7:9, 20:60])
    assert numbers.element(numbers.number("a", (99, 99))) == "a[99, 99]"
    assert numbers.element(10000) == "b[0]"
    assert numbers.element(20000) is None


def test_an_element_that_differs_in_the_second_digit_only_is_named():
    """16,384 rows of one element further on, a bf16 tensor holds the same first digit."""
    tensors = {"t": (40000, 1)}
    _arch, placements, _ = setup()
    shape = (100, 1)
    placements = replace(placements, storages={"s": shape}, tensors=tensors)
    box = {"tensor": "t", "storage": "s", "box": Box((3, 0), (103, 1)), "offset": 0, "strides": (1, 1)}
    right = replace(placements.placements[0], **box)
    wrong = replace(right, box=Box((3 + (1 << 14), 0), (103 + (1 << 14), 1)))
    live = {"s": torch.zeros(shape, dtype=torch.bfloat16)}
    load = Loader(replace(placements, placements=(right,)), live)
    (problem,) = check_loader(replace(placements, placements=(wrong,)), live, load, tensors, torch.bfloat16)
    assert not missing_names(problem, "s[0, 0]", "the table says t[16387, 0]", "put t[3, 0]", "100 of 100 elements")


def test_what_the_loader_does_not_fill_is_nothing():
    arch, placements, live = setup()
    norm = "model.norm.weight"
    load = Loader(replace(placements, placements=tuple(p for p in placements.placements if p.tensor != norm)), live)
    (problem,) = check_loader(placements, live, load, sample_tensors(arch), torch.bfloat16)
    assert not missing_names(problem, f"the table says {norm}[0]", "put nothing")


def test_values_that_were_not_given_are_told():
    """A loader that computes: some families' store their norms less one."""
    arch, placements, live = setup(torch.float32)
    load = Loader(placements, live)

    def computes(tensors):
        load(tensors)
        live["model.norm.weight"].neg_()

    (problem,) = check_loader(placements, live, computes, sample_tensors(arch), torch.float32)
    assert not missing_names(problem, "model.norm.weight[0]", "value", "not given")


def test_tables_that_contradict_themselves_or_the_model_are_told_without_loading():
    arch, placements, live = setup()
    load = Loader(placements, live)
    tensors = sample_tensors(arch)
    twice = altered(placements, "model.layers.0.self_attn.k_proj.weight", offset=0)
    (problem,) = check_loader(twice, live, load, tensors, torch.bfloat16)
    assert not missing_names(problem, "model.layers.0.self_attn.qkv_proj.weight", "placed twice")
    lost = {name: value for name, value in live.items() if name != "lm_head.weight"}
    (problem,) = check_loader(placements, lost, load, tensors, torch.bfloat16)
    assert not missing_names(problem, "lm_head.weight", "missing")
    whole = {name: value.to(torch.int8) if "norm" in name else value for name, value in live.items()}
    problems = check_loader(placements, whole, load, tensors, torch.bfloat16)
    assert len(problems) == sum("norm" in name for name in placements.select(tensors).storages)
    assert not missing_names(" ".join(problems), "model.norm.weight", "torch.int8", "floating point")
    assert load.seen == []


def test_a_loader_that_raises_is_told():
    arch, placements, live = setup()

    def fails(tensors):
        raise KeyError("model.layers.0.self_attn.q_proj.weight")

    (problem,) = check_loader(placements, live, fails, sample_tensors(arch), torch.bfloat16)
    assert not missing_names(problem, "loader failed", "KeyError: 'model.layers.0.self_attn.q_proj.weight'")


def test_three_layers_and_all_else_are_sampled():
    arch = tiny(num_hidden_layers=7)
    sampled = sample_tensors(arch)
    outside = {name for name in logical_tensors(arch) if ".layers." not in name}
    assert outside <= sampled.keys()
    assert {name.split(".")[2] for name in sampled.keys() - outside} == {"0", "3", "6"}
