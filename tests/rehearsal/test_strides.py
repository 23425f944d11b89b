"""Tensors of the device have the strides that real ones have: torch chooses its kernels by them.

Not covered: every operation; those here are what layers, losses and packing are made of.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.rehearsal.devices import a_device

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(x.shape),
    "view as": lambda x: x.view_as(x),
    "reshape": lambda x: x.reshape(x.shape),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(-1, (2, -1)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.squeeze(1),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "select": lambda x: x[:, 0],
    "slice": lambda x: x[1:, :, 2:],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "split": lambda x: x.split([1, x.size(0) - 1])[1],
    "contiguous": lambda x: x.contiguous(),
    "contiguous across": lambda x: x.transpose(0, 1).contiguous(),
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(torch.bfloat16),
    "float": lambda x: x.float(),
    "zeros like": lambda x: torch.zeros_like(x),
    "ones like": lambda x: torch.ones_like(x),
    "full like": lambda x: torch.full_like(x, 2.0),
    "empty like": lambda x: torch.empty_like(x),
    "new": lambda x: x.new_zeros(x.shape),
    "times a vector": lambda x: x * x[0, 0],
    "plus itself across": lambda x: x + x.transpose(0, 1).contiguous().transpose(0, 1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "silu": lambda x: nn.functional.silu(x),
    "norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "layer norm": lambda x: nn.functional.layer_norm(x, x.shape[-1:]),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "product": lambda x: x.flatten(0, 1) @ x[0].t(),
    "product of a batch": lambda x: x @ x[0].t(),
    "index": lambda x: x[torch.tensor([1, 0]).to(x.device)],
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 0]).to(x.device)),
    "embedding": lambda x: nn.functional.embedding(torch.tensor([[1, 0]]).to(x.device), x[:, 0]),
}
INPUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "contiguous": ((6, 3, 8), (24, 8, 1)), "rows beside each other": ((6, 3, 8), (8, 48, 1)),
    "one row": ((6, 1, 8), (8, 48, 1)), "one position": ((1, 3, 8), (8, 8, 1)),
    "columns first": ((6, 3, 8), (1, 6, 18)),
}  # fmt: skip


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_strides_and_shapes_are_those_of_torch(name, given) -> None:
    """The second time the device remembers them."""
    shape, stride = INPUTS[given]
    operation = OPERATIONS[name]
    try:
        real = operation(torch.empty_strided(shape, stride).fill_(1.0))
    except (RuntimeError, IndexError) as error:
        pytest.skip(f"torch refuses it: {error}")
    with a_device() as device:
        for _ in range(2):
            told = operation(torch.empty_strided(shape, stride, device=device.device))
            assert (told.shape, told.stride()) == (real.shape, real.stride())
            assert told.storage_offset() == real.storage_offset()
