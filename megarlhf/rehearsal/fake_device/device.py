"""The device without numbers: every operation on it is observed, and none is computed.

Tensors of the device are fake (shape, dtype, device). Tensors of the host are real, so lengths, masks and packing are
computed as in a real run. Known values of device tensors are followed on the host (`fake_device/known_values.py`). An
unknown value that is read is assumed, if the place is listed (`fake_device/assumptions.py`), or ends the rehearsal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.parallel.device_memory import resize
from megarlhf.rehearsal.fake_device.assumptions import Assumptions
from megarlhf.rehearsal.fake_device.known_values import Known
from megarlhf.rehearsal.fake_device.ledger import Ledger
from megarlhf.rehearsal.fake_device.result_cache import ResultsByShape
from megarlhf.rehearsal.fake_device.routing import Routing, in_router
from megarlhf.rehearsal.fake_device.scratch import of_message, of_operation
from megarlhf.rehearsal.fake_device.strides import with_torch_strides
from megarlhf.rehearsal.fake_device.torch_patches import (
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    storage_key,
)
from megarlhf.rehearsal.fake_device.trees import tensors_in, with_tensors

aten = torch.ops.aten


class Counter(Protocol):
    """Counter of operations: `meter.Meter`."""

    def operation(self, func: Any, args: Sequence[Any], out: Any, tensors: Sequence[Tensor]) -> Any:
        """`tensors`: device tensors that are read and written. Returns a cost for `repeat`."""

    def repeat(self, cost: Any) -> None:
        """Count the same operation on the same shapes."""


class MessageHandler(Protocol):
    """Messages between ranks: `timeline.messages.Wire`."""

    def call(self, func: Any, args: Sequence[Any], over: Callable[[], None]) -> Any:
        """Issue a collective. `over` is called when it has ended."""


class FakeDevice(TorchDispatchMode):
    """Dispatch mode that is active while the program runs."""

    def __init__(
        self, device: torch.device, ledger: Ledger, wire: MessageHandler, assumptions: Assumptions, counter: Counter
    ) -> None:
        super().__init__()
        self.device, self.ledger, self.wire, self.assumptions = device, ledger, wire, assumptions
        self.counter = counter
        self.routing = Routing()
        self.known = Known()
        self.reducing: Any = None
        """Operation of the current all_reduce."""
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.results = ResultsByShape(self.fake)
        ledger.on_freed = self.known.freed  # type: ignore[method-assign]
        self._special: dict[Any, Callable[..., Any]] = {
            torch.ops.prim.device.default: lambda args, kwargs: args[0].fake_device,
            aten._local_scalar_dense.default: lambda args, kwargs: self.scalar(args[0]),
            aten.equal.default: self._equal,
            aten.nonzero.default: lambda args, kwargs: self.known_tensor(self._values_of(args[0]).nonzero()),
            aten.masked_select.default: self._masked_select,
            resize.default: lambda args, kwargs: self._resized(*args),
        }

    # --- dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunction():  # asking a tensor for its shape would call Python otherwise
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        inputs = tensors_in(args)
        if kwargs:
            inputs += tensors_in(kwargs.values())
        fakes = [x for x in inputs if isinstance(x, FakeTensor)]
        if func.namespace == "c10d":
            return self._communicate(func, args, fakes)
        onto = self._is_mine(kwargs.get("device"))
        if not fakes and not onto:
            return self._on_host(func, args, kwargs)
        if (special := self._special.get(func)) is not None:
            return special(args, kwargs)
        if func is aten._to_copy.default and kwargs.get("device") is not None and not onto:
            return self._to_host(args[0], kwargs)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            values = self.known.twin(args[1])
            return args[0].copy_(self._assumed(args[1]) if values is None else values)
        if (finite := _answer_if_finite(func, args)) is not None and self.known.twin(args[0]) is None:
            return self._finite(args[0], finite)
        if func in _INDEXING:
            args = (args[0], self._without_masks(args[1]), *args[2:])
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            kwargs = {**kwargs, "output_size": int(self._values_of(args[0]).sum())}
        return self._run(func, args, kwargs, fakes)

    def _run(self, func: Any, args: Any, kwargs: Any, fakes: Sequence[Tensor]) -> Any:
        key = self.results.key(func, args, kwargs)
        recipe = None if key is None else self.results.get(key)
        if key is not None and recipe is not None:
            out, made = self.results.make(recipe, key.tensors)
        else:
            out = self._compute_shapes(func, args, kwargs, fakes)
            if out is None and func._schema.returns:
                return self._by_values(func, args, kwargs)
            made = _fakes_in(out)
        for tensor in made:
            if self._is_mine(tensor.fake_device):
                self.ledger.record(tensor)
        if key is not None and recipe is None:
            recipe = self.results.keep(key, out)
        if recipe is not None and recipe.cost is not None:
            self.counter.repeat(recipe.cost)
        elif not func.is_view:
            cost = self.counter.operation(func, args, out, [*fakes, *_fakes_in(out)])
            if recipe is not None:
                recipe.cost = cost
        self._follow(func, args, kwargs, out, _written(func, args, kwargs))
        return out

    def _compute_shapes(self, func: Any, args: Any, kwargs: Any, fakes: Sequence[Tensor]) -> Any:
        """The result by FakeTensorMode; None where its shape depends on values."""
        with self.fake:
            if func is aten._to_copy.default and not fakes:
                # Not `func`, which would compute a small tensor, on the CPU without an index.
                return torch.empty_like(args[0], dtype=kwargs.get("dtype"), device=self.device)
            try:
                out = func(*args, **kwargs)
            except DynamicOutputShapeException:
                out = None
            return with_torch_strides(func, args, kwargs, out)

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any, written: Sequence[Tensor]) -> None:
        """Handle the memory that the kernel itself takes, and known values of the result. The experts of tokens are
        stated."""
        if self.device.type == "cpu":
            self.ledger.momentary(of_operation(func, args), "activations")
        self.known.follow(func, args, kwargs, out, written)
        if func is aten.topk.default and self.known.twin(args[0]) is None and in_router():
            num_tokens, num_experts = args[0].shape
            self.known.set_twin(out[1], self.routing.experts_of(num_tokens, num_experts, out[1].size(1)))

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if not func.is_view:
            for tensor in tensors_in((out,)):
                if not isinstance(tensor, FakeTensor):
                    self.ledger.record_host(tensor)
        return out

    def _is_mine(self, device: Any) -> bool:
        if device is None:
            return False
        device = torch.device(device)
        if self.device.type == "cpu":
            return device == self.device
        return bool(device.type == self.device.type)

    # --- values

    def scalar(self, tensor: Tensor) -> Any:
        """Number for the host: known or assumed."""
        values = self.known.twin(tensor)
        if values is not None:
            return values.item()
        answer = self.assumptions.number(f"a number of a tensor of {str(tensor.dtype).removeprefix('torch.')}")
        return _as(tensor.dtype, answer)

    def address(self, tensor: Tensor) -> int:
        """Replacement of a tensor's address."""
        return storage_key(tensor) + int(tensor.storage_offset()) * tensor.element_size()

    def known_tensor(self, values: Tensor) -> Tensor:
        """Device tensor with known values."""
        with self.fake:
            fake = torch.empty(values.shape, dtype=values.dtype, device=self.device)
        self.ledger.record(fake)
        self.known.set_twin(fake, values)
        return fake

    def _assumed(self, tensor: Tensor) -> Tensor:
        name = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        answer = _as(tensor.dtype, self.assumptions.number(f"the numbers of a tensor {name}"))
        return torch.full(tensor.shape, answer, dtype=tensor.dtype, device="cpu")

    def _to_host(self, tensor: Tensor, kwargs: Any) -> Tensor:
        values = self.known.twin(tensor)
        values = self._assumed(tensor) if values is None else values.clone()
        return values if kwargs.get("dtype") is None else values.to(kwargs["dtype"])

    def _values_of(self, tensor: Tensor) -> Tensor:
        values = self.known.twin(tensor)
        return self._assumed(tensor) if values is None else values

    def _by_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        return with_tensors(func(*with_tensors(args, self._values_of), **kwargs), self.known_tensor)

    def _equal(self, args: Any, kwargs: Any) -> bool:
        first, second = (self.known.twin(x) for x in args)
        if first is not None and second is not None:
            return bool(torch.equal(first, second))
        return bool(self.assumptions.number("whether two tensors are equal"))

    def _masked_select(self, args: Any, kwargs: Any) -> Tensor:
        mask = self._values_of(args[1]).expand(torch.broadcast_shapes(args[0].shape, args[1].shape))
        count = int(mask.sum())
        with self.fake:
            out = torch.empty(count, dtype=args[0].dtype, device=self.device)
        self.ledger.record(out)
        if self.device.type != "cpu":
            # ATen/native/cuda/IndexKernel.cpp, masked_select_out_cuda_impl: by index, and so by `nonzero` of the mask.
            self.ledger.momentary(8 * mask.dim() * count, "activations")
        self.counter.operation(aten.masked_select.default, args, out, [*_fakes_in(args), out])
        if (values := self.known.twin(args[0])) is not None:
            self.known.set_twin(out, values.masked_select(mask))
        return out

    def _resized(self, tensor: Tensor, nbytes: int) -> None:
        """Give back a storage's memory, or take it again. The storage itself stays."""
        if nbytes:
            self.ledger.resume(tensor)
        else:
            self.ledger.suspend(tensor)

    def _finite(self, tensor: Tensor, answer: bool) -> Tensor:
        """Answer to a question about unknown values, as if all were finite."""
        self.assumptions.note("whether numbers are finite", "they are", "unknown numbers are taken to be finite")
        return self.known_tensor(torch.full(tensor.shape, answer, dtype=torch.bool, device="cpu"))

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        flat: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                positions = self._values_of(index).nonzero().unbind(1)
                flat += [
                    self.known_tensor(part.contiguous()) if isinstance(index, FakeTensor) else part
                    for part in positions
                ]
            else:
                flat.append(index)
        return flat

    # --- messages

    def _communicate(self, func: Any, args: Any, fakes: Sequence[Tensor]) -> Any:
        """Count a collective. Ranks that are not rehearsed are taken to send the same as this one, where that is
        known."""
        name = func._schema.name.removeprefix("c10d::")
        self._answer(name, args)
        gloo_bytes = of_message(name, args) if self.device.type == "cpu" and fakes else 0
        return self.wire.call(func, args, self.ledger.hold(gloo_bytes, "buffers"))

    def _answer(self, name: str, args: Any) -> None:
        if name == "allreduce_":
            for tensor in args[0]:
                self._reduced(tensor, dist.ProcessGroup.unbox(args[1]).size())
        elif name in ("allgather_", "_allgather_base_"):
            outputs = args[0] if name == "allgather_" else [[args[0]]]
            inputs = args[1] if name == "allgather_" else [args[1]]
            for into, own in zip(outputs, inputs, strict=True):
                for tensor in into:
                    self._gathered(tensor, own)
        elif name == "gather_":
            for into, own in zip(args[0], args[1], strict=False):
                for tensor in into:
                    self._gathered(tensor, own)
        elif name == "alltoall_base_":
            self._exchanged(args[0], args[1])
        elif name not in ("broadcast_", "barrier", "send"):
            for tensor in tensors_in((args[0],)):
                self.known.forget(tensor)

    def _reduced(self, tensor: Tensor, size: int) -> None:
        values = self.known.twin(tensor)
        if values is None:
            return
        if self.reducing == dist.ReduceOp.SUM:
            values.mul_(size)
        elif self.reducing not in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG):
            self.known.forget(tensor)

    def _exchanged(self, into: Tensor, own: Tensor) -> None:
        """Known values of an all-to-all. Where this rank sends nothing, and so the others, they are zeros."""
        values = self.known.twin(own)
        if values is None:
            self.known.forget(into)
            return
        flat = values.reshape(-1) if values.numel() else values.new_zeros(1)
        copies = flat.repeat(-(-into.numel() // flat.numel()))[: into.numel()].view(into.shape)
        if (before := self.known.twin(into)) is not None:  # a view's, perhaps: the whole holds it too
            before.copy_(copies)
        elif isinstance(into, FakeTensor):
            self.known.set_twin(into, copies)

    def _gathered(self, into: Tensor, own: Tensor) -> None:
        values = self.known.twin(own)
        if values is None:
            self.known.forget(into)
            return
        copies = values.reshape(-1).repeat(into.numel() // max(1, values.numel())).view(into.shape)
        if isinstance(into, FakeTensor):
            self.known.set_twin(into, copies)
        else:
            into.copy_(copies)


_INDEXING = (
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten._index_put_impl_.default,
)


def _fakes_in(value: Any) -> list[FakeTensor]:
    return [x for x in tensors_in((value,)) if isinstance(x, FakeTensor)]


def _answer_if_finite(func: Any, args: Any) -> bool | None:
    """Answer of a comparison for finite numbers, if it asks for NaN or infinity; None for any other operation."""
    if func in (aten.isnan.default, aten.isinf.default):
        return False
    if func in (aten.ne.Tensor, aten.eq.Tensor) and args[0] is args[1]:
        return bool(func is aten.eq.Tensor)
    if func in (aten.ne.Scalar, aten.eq.Scalar) and isinstance(args[1], float) and math.isinf(args[1]):
        return bool(func is aten.ne.Scalar)
    return None


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    if not func._schema.is_mutable:
        return []
    written: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += [x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Tensor)]
    return written


def _as(dtype: torch.dtype, answer: float) -> Any:
    if dtype == torch.bool:
        return bool(answer)
    return float(answer) if dtype.is_floating_point else int(answer)
