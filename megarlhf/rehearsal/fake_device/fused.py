"""Kernels without an operation of torch: they read and write their arguments and allocate nothing.

Each is an operation of torch's dispatcher without a result, so that the rehearsed device counts it as one kernel with
its own bytes and, for a product, its FLOPs.

Legend: R rows, I and O widths of a product.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "megarlhf_rehearsal"
SCHEMAS = (
    # Called `mm`, because that is what it is to the meter of work.
    "mm(Tensor(a!) into, Tensor left, Tensor right) -> ()",
    "pass_over(Tensor[] read, Tensor(a!)[] written) -> ()",
)


@cache
def _operations() -> Any:
    """Operations, defined at their first use, and their library, which has to live as long as they do."""
    library = torch.library.Library(NAMESPACE, "DEF")
    for schema in SCHEMAS:
        name = library.define(schema)
        library.impl(name, lambda *args: None, "CompositeExplicitAutograd")
    return getattr(torch.ops, NAMESPACE), library


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left @ right, the sum in the dtype of `into`. [O, I], [O, R], [R, I]"""
    _operations()[0].mm(into, left, right)


def pass_over(read: list[Tensor], written: list[Tensor]) -> None:
    """One kernel that is bound by memory."""
    _operations()[0].pass_over(read, written)
