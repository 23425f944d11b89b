"""Reaching the published functions of other projects, and what is asked of all of them.

What stands in for packages that need a GPU is in `importable`; none of the functions that are called reaches it.
"""

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from tests.peers.inputs import Inputs

ABSENT = ("flash_attn", "deepspeed", "ring_flash_attn")
"""Packages that OpenRLHF imports at the top and that need a GPU to be built."""


class _Absent(ModuleType):
    """Has every attribute; calling one does nothing."""

    def __getattr__(self, name: str) -> Any:
        return MagicMock(name=name)


class _AbsentFinder(MetaPathFinder, Loader):
    """Finds modules of packages that are not there."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def importable(name: str) -> Any:
    """The module of this name."""
    if name.startswith("openrlhf") and not any(isinstance(finder, _AbsentFinder) for finder in sys.meta_path):
        sys.meta_path.append(_AbsentFinder())
    return importlib.import_module(name)


def gradient(inputs: Inputs, loss_of: Callable[[Tensor], Tensor], grid_NT: Tensor) -> list[float]:
    """The loss and its gradient at each response token."""
    grid_NT = grid_NT.clone().requires_grad_()
    loss = loss_of(grid_NT)
    (gradient_NT,) = torch.autograd.grad(loss, grid_NT)
    return [float(loss), *inputs.tokens(gradient_NT).tolist()]


def adaptive(make: Callable[[], Any], inputs: Inputs) -> list[float]:
    made, coefs = make(), []
    for measured in inputs.rewards_N.abs().tolist()[:5]:
        made.update(measured, 12)
        coefs.append(float(made.value))
    return coefs
