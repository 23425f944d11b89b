"""Memory that kernels of a CPU take for themselves, against the profiler. That of gloo: `test_truth.py`."""

import pytest
import torch
from torch import Tensor

from megarlhf.rehearsal.fake_device.scratch import of_operation

aten = torch.ops.aten


def taken(func: object, *args: Tensor) -> int:
    """Bytes that live at most inside the operation, beside its result."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        out = func(*args)  # type: ignore[operator]
    live = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most - out.numel() * out.element_size()


WEIGHT, ROWS, BATCH = torch.randn(64, 96), torch.randn(40, 96), torch.randn(8, 40, 96)
MM: dict[str, tuple[object, tuple[Tensor, ...], tuple[int, ...]]] = {
    "transposed": (aten.mm.default, (ROWS, WEIGHT.t()), ()),
    "cut out of wider ones": (aten.mm.default, (torch.randn(40, 99)[:, :96], torch.randn(96, 70)[:, :64]), ()),
    "every second column": (aten.mm.default, (torch.randn(40, 192)[:, ::2], WEIGHT.t()), (0,)),
    "one row repeated": (aten.mm.default, (torch.randn(1, 96).expand(40, 96), WEIGHT.t()), (0,)),
    "one column repeated": (aten.addmm.default, (torch.randn(64), ROWS, torch.randn(96, 1).expand(96, 64)), (2,)),
}
BMM: dict[str, tuple[object, tuple[Tensor, ...], tuple[int, ...]]] = {
    "a batch transposed": (aten.bmm.default, (BATCH, torch.randn(8, 64, 96).transpose(1, 2)), ()),
    "a batch cut": (aten.bmm.default, (BATCH, torch.randn(8, 96, 70)[:, :, :64]), (1,)),
    "a batch inside": (aten.bmm.default, (torch.randn(40, 8, 96).transpose(0, 1), torch.randn(8, 96, 64)), (0,)),
    "a weight for each row": (aten.bmm.default, (ROWS.unsqueeze(1), WEIGHT.t().expand(40, 96, 64)), (1,)),
    "a small batch": (aten.bmm.default, (torch.randn(2, 4, 10), torch.randn(2, 10, 12)[:, :, :8]), ()),
}
"""Operation, arguments, and which of them are copied: products in bf16, of a batch in bf16 only."""


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bf16 products of oneDNN on this CPU")
@pytest.mark.parametrize("name", [*MM, *BMM])
def test_products_in_bf16_copy_factors_of_other_formats(name) -> None:
    """What they take more than with factors that are copied before: the difference leaves out oneDNN's scratchpads."""
    func, factors, copied = (MM | BMM)[name]
    _require(func, [_in_bf16(x) for x in factors], copied)


@pytest.mark.parametrize("name", [*MM, *BMM])
def test_products_in_fp32_copy_factors_of_other_formats(name) -> None:
    func, factors, copied = (MM | BMM)[name]
    _require(func, list(factors), copied if name in MM else ())


def _in_bf16(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=torch.bfloat16).zero_()


def _require(func: object, given: list[Tensor], copied: tuple[int, ...]) -> None:
    before = [x.contiguous() if n in copied else x for n, x in enumerate(given)]
    expected = sum(given[n].numel() * given[n].element_size() for n in copied)
    assert of_operation(func, given) == expected
    assert taken(func, *given) - taken(func, *before) == expected
