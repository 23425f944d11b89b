"""Private interfaces of torch and Triton that a rehearsal uses, and patches of both. No other file of it has any.
Patches of Megatron-Core are in `fake_device/megatron_patches.py`.

Interfaces, with the reason for each:
  FakeTensorMode, FakeTensor                   tensors with a shape, a dtype and a device, and no numbers
  in_kernel_invocation_manager, _make_subclass    the same made by hand, ten times faster: `fake_device/result_cache.py`
  _set_only_lift_cpu_tensors                   torch.tensor(...) on the host stays real beside them
  _setup_privateuseone_for_python_backend      a device that is no CPU, without a compiler. Autograd aborts on fake
                                               `cuda` tensors where torch has no CUDA
  _create_fake_pg, FakeStore                   a process group that reaches nobody
  _disable_current_modes                       a tensor is made beside the modes, to ask torch for its strides
  TorchDispatchMode, tree_flatten              every operation is seen, with the tensors in its arguments
  DisableTorchFunction, _DisableTorchDispatch  asking a tensor for its shape calls nobody
  UntypedStorage._cdata                        key of the memory that tensors share
  Work.boxed                                   a collective's handle, made here, so that waiting for it is observed
  varlen._varlen_attn, _varlen_attn_backward   attention's kernels one by one

Patches inside `patched`, with the reason for each:
  dist.broadcast_object_list, scatter_object_list, all_gather_object
                                                     objects of other ranks come from the rehearsal
  dist.all_reduce                                    the dispatcher passes its operation on as an opaque object
  nn.Module.to                                       moves parameters without a dispatched operation
  triton JITFunction.run                             a kernel is counted instead of compiled
  kernels.linear_logprob.logits_again_into           its work was done before
"""

from __future__ import annotations

import contextlib
import importlib.util
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.nn.attention.varlen import _varlen_attn as varlen_attn
from torch.nn.attention.varlen import _varlen_attn_backward as varlen_attn_backward
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_flatten
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from torch.utils.flop_counter import flop_registry

from megarlhf.kernels import linear_logprob
from megarlhf.rehearsal.fake_device.megatron_patches import OptimizerKernels, megatron_patched

TESTED = "2.13"
"""Version of torch whose private interfaces were checked."""
DEVICE = "rehearsal"
"""Name of the device that replaces a GPU."""
Kind = Literal["gpu", "cpu"]
BACKENDS: Mapping[str, str] = {"gpu": "rehearsal", "cpu": "rehearsal_on_cpu"}
"""Backend by kind of device. A process registers it once."""

__all__ = [
    "BACKENDS",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "Hooks",
    "Kind",
    "NumberedWork",
    "SequentialMLP",
    "TorchDispatchMode",
    "device_of",
    "flop_registry",
    "tree_flatten",
    "varlen_attn",
    "varlen_attn_backward",
    "without_modes",
]


def address_of(storage: torch.UntypedStorage) -> int:
    """Key of a piece of memory, while it lives."""
    return int(storage._cdata)


def storage_key(tensor: Tensor) -> int:
    """Key of a tensor's memory, while it lives."""
    return address_of(tensor.untyped_storage())


def after_this_backward(call: Callable[[], None]) -> None:
    """Call a function when the current backward is over, also one inside of another backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def onednn_multiplies_bf16() -> bool:
    """Whether oneDNN can multiply bf16 on this processor."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def require_tested_torch() -> None:
    """Refuse a torch whose private interfaces were not checked. Raises: RuntimeError."""
    if not torch.__version__.startswith(TESTED + "."):
        raise RuntimeError(
            f"a rehearsal uses private interfaces of torch and is checked with version {TESTED}, found "
            f"{torch.__version__}; install torch {TESTED}, or extend megarlhf/rehearsal/fake_device/torch_patches.py"
        )


class _Absent(_DummyBackendModule):
    """Module `torch.rehearsal`. If it were available, FakeTensorMode would compute constants on it."""

    def is_available(self) -> bool:
        return False


def device_of(kind: Kind) -> torch.device:
    """The device whose tensors hold no numbers. A process has one kind.

    `gpu`: a device type of its own, so that the program takes the paths of a GPU. `cpu`: the CPU with an index, which
    no real tensor has, so that the program takes the paths of a CPU and tensors of host and device are told apart.
    """
    if kind == "cpu":
        return torch.device("cpu", 0)
    if torch._C._get_privateuse1_backend_name() != DEVICE:
        _setup_privateuseone_for_python_backend(DEVICE, _Absent())
    return torch.device(DEVICE, 0)


def join(rank: int, world_size: int, kind: Kind) -> None:
    """Make this process a rank of a world without other members."""
    if (backend := BACKENDS[kind]) not in dist.Backend.backend_list:
        devices = ["cpu", DEVICE] if kind == "gpu" else ["cpu"]
        dist.Backend.register_backend(backend, _create_fake_pg, extended_api=True, devices=devices)
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=FakeStore())


def fake_of(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """A new tensor of the device, as `FakeTensor(mode, ...)` makes it, without its checks."""
    return _wrapped(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)


def view_of(mode: FakeTensorMode, of: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> FakeTensor:
    """A view of the memory of a device tensor."""
    elem = torch.empty((0,), dtype=of.dtype, device="meta")
    with in_kernel_invocation_manager(mode):
        elem.set_(of.untyped_storage(), offset, shape, stride)
    return _wrapped(mode, elem, of.fake_device)  # type: ignore[attr-defined]


def _wrapped(mode: FakeTensorMode, elem: Tensor, device: torch.device) -> FakeTensor:
    fake = Tensor._make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(_STATE, _fake_device=device, fake_mode=mode)
    return fake


def _state_of_a_fake_tensor() -> dict[str, Any]:
    with torch._C.DisableTorchFunction():
        mode = FakeTensorMode()
        made = FakeTensor(mode, torch.empty(0, device="meta"), torch.device("cpu"))
    return {name: value for name, value in made.__dict__.items() if name not in ("_fake_device", "fake_mode")}


_STATE = _state_of_a_fake_tensor()


class NumberedWork(dist.Work):
    """Handle of an issued message, which reports that it is waited for."""

    def __init__(self, number: int, waited: Callable[[int], None]) -> None:
        super().__init__()
        self._number, self._waited, self._done = number, waited, False

    def wait(self, timeout: Any = None) -> bool:
        if not self._done:
            self._done = True
            self._waited(self._number)
        return True

    def is_completed(self) -> bool:
        return True


class count_groups:
    """Scope in which the calls that make process groups are counted."""

    def __init__(self) -> None:
        self.calls = self.memberships = 0

    def __enter__(self) -> count_groups:
        self._original = dist.new_group

        def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.memberships += ranks is None or dist.get_rank() in ranks
            return self._original(ranks, *args, **kwargs)

        dist.new_group = new_group
        return self

    def __exit__(self, *exc_info: object) -> None:
        dist.new_group = self._original


@contextlib.contextmanager
def lifting_only_host_tensors() -> Iterator[None]:
    """Scope in which tensors that torch makes from Python numbers stay real until they are moved."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@dataclass(frozen=True)
class Hooks:
    """Callbacks of the patches."""

    device: torch.device
    scalar: Callable[[Tensor], Any]
    """Value of a fake tensor of one element, for the host."""
    address: Callable[[Tensor], int]
    """Replacement of `data_ptr`: equal for tensors at one place of one memory."""
    reducing: Callable[[Any], None]
    """Gets the operation (dist.ReduceOp) of the next all_reduce, and None after it."""
    gathered: Callable[[Any], list[Any] | None]
    """Objects of each rank in `all_gather_object`; None if they equal this rank's."""
    scattered: Callable[[], Any]
    """Object that rank 0 sends to this rank in `scatter_object_list`."""
    launched: Callable[[str, tuple[Any, ...]], None]
    """Gets the name and the arguments of a Triton kernel."""
    attention: Callable[..., Tensor] | None
    """Replacement of torch's attention where the device has no kernel for it."""
    buckets: Any
    """Argument of `megatron_patches.megatron_patched`, as the two below."""
    recomputing: Callable[[bool], None]
    optimizer: OptimizerKernels | None = None


class _Functions(TorchFunctionMode):
    """Mode for Python functions of torch that do not reach the dispatcher, or reach it too late."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self._hooks = hooks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return self._hooks.address(args[0])
        if func is torch.tensor and isinstance(args[0], list | tuple):  # Megatron makes a norm of device scalars
            args = (self._numbers(args[0]), *args[1:])
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == self._hooks.device:
            # On the way of a CPU torch would make it in real memory, whatever the device's number.
            elsewhere = {key: value for key, value in kwargs.items() if key != "device"}
            return func(*args, **elsewhere).to(self._hooks.device)
        attention = self._hooks.attention if func is nn.functional.scaled_dot_product_attention else None
        if attention is not None and isinstance(args[0], FakeTensor):
            return attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _numbers(self, values: Any) -> Any:
        if isinstance(values, list | tuple):
            return [self._numbers(value) for value in values]
        return self._hooks.scalar(values) if isinstance(values, FakeTensor) else values


@contextlib.contextmanager
def patched(hooks: Hooks) -> Iterator[None]:
    """Scope of the patches."""
    require_tested_torch()
    reduce, logits = dist.all_reduce, linear_logprob.logits_again_into

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        hooks.reducing(op)
        try:
            return reduce(tensor, op, *args, **kwargs)
        finally:
            hooks.reducing(None)

    def logits_again_into(*args: Tensor) -> None:
        hooks.recomputing(True)
        try:
            logits(*args)
        finally:
            hooks.recomputing(False)

    def run_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        hooks.launched(self.fn.__name__, (*args, *kwargs.values()))

    with contextlib.ExitStack() as stack:
        stack.enter_context(lifting_only_host_tensors())
        for name, function in {"all_reduce": all_reduce, **_object_collectives(hooks)}.items():
            stack.enter_context(patch.object(dist, name, function))
        stack.enter_context(patch.object(nn.Module, "to", _module_to(nn.Module.to)))
        if hooks.device.type == DEVICE and importlib.util.find_spec("triton") is not None:
            from triton.runtime.jit import JITFunction

            stack.enter_context(patch.object(JITFunction, "run", run_kernel))
        stack.enter_context(patch.object(linear_logprob, "logits_again_into", logits_again_into))
        stack.enter_context(megatron_patched(hooks.buckets, hooks.recomputing, hooks.optimizer))
        stack.enter_context(_Functions(hooks))
        yield


def _object_collectives(hooks: Hooks) -> dict[str, Callable[..., None]]:
    """torch's collectives of Python objects. The objects of other ranks come from the rehearsal."""
    broadcast, gather, rank = dist.broadcast_object_list, dist.all_gather_object, dist.get_rank()

    def broadcast_object_list(objects: list[Any], src: int | None = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("group_src", None)
        broadcast(objects, rank, *args, **kwargs)  # this rank's objects in place of those of `src`

    def scatter_object_list(into: list[Any], values: Any = None, src: int | None = None, **kwargs: Any) -> None:
        """Send the messages of torch's own function. Their content is known."""
        src, is_source = 0 if src is None else src, rank == (0 if src is None else src)
        into[0] = values[rank] if is_source else hooks.scattered()
        sizes = [len(pickle.dumps(value)) for value in (values if is_source else into)]
        dist.broadcast(torch.tensor([max(sizes)]), src)
        for size, dtype in ((max(sizes), torch.uint8), (1, torch.int64)):
            parts = [torch.empty(size, dtype=dtype) for _ in sizes] if is_source else None
            dist.scatter(torch.empty(size, dtype=dtype), parts, src)

    def all_gather_object(into: list[Any], mine: Any, group: Any = None) -> None:
        """Gather objects. A list that comes filled has each rank's. Messages are as long as the longest of them."""
        objects = hooks.gathered(mine) or (None if None in into else list(into))
        if objects is None:
            gather(into, mine, group)
            return
        into[:] = objects
        longest = max(len(pickle.dumps(value)) for value in objects)
        for size, dtype in ((1, torch.int64), (longest, torch.uint8)):
            part = torch.empty(size, dtype=dtype)
            dist.all_gather([torch.empty_like(part) for _ in objects], part, group)

    return {
        "broadcast_object_list": broadcast_object_list,
        "scatter_object_list": scatter_object_list,
        "all_gather_object": all_gather_object,
    }


def _module_to(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Move a module to a device alone, as torch does: parameters that are there stay, the others become fake."""
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.device):
            return original(self, *args, **kwargs)
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, FakeTensor):
                    moved = nn.Parameter(parameter.data.to(args[0]), parameter.requires_grad)
                    moved.__dict__.update(parameter.__dict__)
                    module._parameters[name] = moved
            for name, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, FakeTensor):
                    module._buffers[name] = buffer.to(args[0])
        return self

    return to
