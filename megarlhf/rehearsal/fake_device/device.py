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
from megarlhf.rehearsal.fake_device.result_cache import OperationKey, ResultsByShape
from megarlhf.rehearsal.fake_device.routing import Routing, in_router
from megarlhf.rehearsal.fake_device.scratch import of_message, of_operation
from megarlhf.rehearsal.fake_device.strides import with_strides_of_torch
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

    def again(self, cost: Any) -> None:
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
            aten.nonzero.default: lambda args, kwargs: self.made(self._numbers_of(args[0]).nonzero()),
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
            numbers = self.known.twin(args[1])
            return args[0].copy_(self._assumed(args[1]) if numbers is None else numbers)
        if (finite := _asks_whether_finite(func, args)) is not None and self.known.twin(args[0]) is None:
            return self._finite(args[0], finite)
        if func in _INDEXING:
            args = (args[0], self._without_masks(args[1]), *args[2:])
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            kwargs = {**kwargs, "output_size": int(self._numbers_of(args[0]).sum())}
        return self._run(func, args, kwargs, fakes)

    def _run(self, func: Any, args: Any, kwargs: Any, fakes: Sequence[Tensor]) -> Any:
        key = self.results.key(func, args, kwargs)
        remembered = None if key is None else self.results.get(key)
        if key is None or remembered is None:
            return self._run_first(func, args, kwargs, fakes, key)
        out, new = self.results.make(remembered, key.tensors)
        for tensor in new:
            if self._is_mine(tensor.fake_device):
                self.ledger.see(tensor)
        if remembered.cost is not None:
            self.counter.again(remembered.cost)
        elif not func.is_view:
            self.counter.operation(
                func, args, out, [*fakes, *(x for x in tensors_in((out,)) if isinstance(x, FakeTensor))]
            )
        self._follow(func, args, kwargs, out, _written(func, args, kwargs))
        return out

    def _run_first(self, func: Any, args: Any, kwargs: Any, fakes: Sequence[Tensor], key: OperationKey | None) -> Any:
        """Compute the result's shape by FakeTensorMode."""
        with self.fake:
            if func is aten._to_copy.default and not fakes:
                # Not `func`, which would compute a small tensor, on the CPU without a number.
                out = torch.empty_like(args[0], dtype=kwargs.get("dtype"), device=self.device)
            else:
                try:
                    out = func(*args, **kwargs)
                except DynamicOutputShapeException:
                    out = None
                out = with_strides_of_torch(func, args, kwargs, out)
        if out is None and func._schema.returns:
            return self._by_numbers(func, args, kwargs)
        outputs = [x for x in tensors_in((out,)) if isinstance(x, FakeTensor)]
        written = _written(func, args, kwargs)
        for tensor in outputs:
            if self._is_mine(tensor.fake_device):
                self.ledger.see(tensor)
        remembered = None if key is None else self.results.keep(key, out)
        if not func.is_view:
            cost = self.counter.operation(func, args, out, [*fakes, *outputs])
            if remembered is not None:
                remembered.cost = cost
        self._follow(func, args, kwargs, out, written)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any, written: Sequence[Tensor]) -> None:
        """Handle the memory that the kernel itself takes, and known values of the result. The experts of tokens are
        stated."""
        if self.device.type == "cpu":
            self.ledger.momentary(of_operation(func, args), "activations")
        self.known.follow(func, args, kwargs, out, written)
        if func is aten.topk.default and self.known.twin(args[0]) is None and in_router():
            num_tokens, num_experts = args[0].shape
            self.known.tell(out[1], self.routing.experts_of(num_tokens, num_experts, out[1].size(1)))

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if not func.is_view:
            for tensor in tensors_in((out,)):
                if not isinstance(tensor, FakeTensor):
                    self.ledger.see_host(tensor)
        return out

    def _is_mine(self, device: Any) -> bool:
        if device is None:
            return False
        device = torch.device(device)
        if self.device.type == "cpu":
            return device == self.device
        return bool(device.type == self.device.type)

    # --- numbers

    def scalar(self, tensor: Tensor) -> Any:
        """Number for the host: known or assumed."""
        numbers = self.known.twin(tensor)
        if numbers is not None:
            return numbers.item()
        answer = self.assumptions.number(f"a number of a tensor of {str(tensor.dtype).removeprefix('torch.')}")
        return _as(tensor.dtype, answer)

    def address(self, tensor: Tensor) -> int:
        """Replacement of a tensor's address."""
        return storage_key(tensor) + int(tensor.storage_offset()) * tensor.element_size()

    def made(self, numbers: Tensor) -> Tensor:
        """Device tensor with known values."""
        with self.fake:
            fake = torch.empty(numbers.shape, dtype=numbers.dtype, device=self.device)
        self.ledger.see(fake)
        self.known.tell(fake, numbers)
        return fake

    def _assumed(self, tensor: Tensor) -> Tensor:
        """Values for the host in place of unknown ones, all equal."""
        name = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        answer = _as(tensor.dtype, self.assumptions.number(f"the numbers of a tensor {name}"))
        return torch.full(tensor.shape, answer, dtype=tensor.dtype, device="cpu")

    def _to_host(self, tensor: Tensor, kwargs: Any) -> Tensor:
        numbers = self.known.twin(tensor)
        numbers = self._assumed(tensor) if numbers is None else numbers.clone()
        return numbers if kwargs.get("dtype") is None else numbers.to(kwargs["dtype"])

    def _numbers_of(self, tensor: Tensor) -> Tensor:
        numbers = self.known.twin(tensor)
        return self._assumed(tensor) if numbers is None else numbers

    def _by_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Result whose shape depends on values, which have to be known."""
        numbers = with_tensors(args, self._numbers_of)
        return with_tensors(func(*numbers, **kwargs), self.made)

    def _equal(self, args: Any, kwargs: Any) -> bool:
        first, second = (self.known.twin(x) for x in args)
        if first is not None and second is not None:
            return bool(torch.equal(first, second))
        return bool(self.assumptions.number("whether two tensors are equal"))

    def _masked_select(self, args: Any, kwargs: Any) -> Tensor:
        mask = self._numbers_of(args[1]).expand(torch.broadcast_shapes(args[0].shape, args[1].shape))
        count = int(mask.sum())
        with self.fake:
            out = torch.empty(count, dtype=args[0].dtype, device=self.device)
        self.ledger.see(out)
        if self.device.type != "cpu":
            # ATen/native/cuda/IndexKernel.cpp, masked_select_out_cuda_impl: by index, and so by `nonzero` of the mask.
            self.ledger.momentary(8 * mask.dim() * count, "activations")
        self.counter.operation(
            aten.masked_select.default, args, out, [x for x in args if isinstance(x, FakeTensor)] + [out]
        )
        if (numbers := self.known.twin(args[0])) is not None:
            self.known.tell(out, numbers.masked_select(mask))
        return out

    def _resized(self, tensor: Tensor, nbytes: int) -> None:
        """Give back a storage's memory, or take it again. The storage itself stays."""
        if nbytes:
            self.ledger.take_again(tensor)
        else:
            self.ledger.leave_off(tensor)

    def _finite(self, tensor: Tensor, answer: bool) -> Tensor:
        """Answer to a question about unknown values, as if all were finite."""
        self.assumptions.note("whether numbers are finite", "they are", "unknown numbers are taken to be finite")
        return self.made(torch.full(tensor.shape, answer, dtype=torch.bool, device="cpu"))

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Masks replaced by the positions where they are true."""
        flat: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                positions = self._numbers_of(index).nonzero().unbind(1)
                flat += [self.made(each.contiguous()) if isinstance(index, FakeTensor) else each for each in positions]
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
        numbers = self.known.twin(tensor)
        if numbers is None:
            return
        if self.reducing == dist.ReduceOp.SUM:
            numbers.mul_(size)
        elif self.reducing not in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG):
            self.known.forget(tensor)

    def _exchanged(self, into: Tensor, own: Tensor) -> None:
        """Known values of an all-to-all. Where this rank sends nothing, and so the others, they are zeros."""
        numbers = self.known.twin(own)
        if numbers is None:
            self.known.forget(into)
            return
        flat = numbers.reshape(-1) if numbers.numel() else numbers.new_zeros(1)
        copies = flat.repeat(-(-into.numel() // flat.numel()))[: into.numel()].view(into.shape)
        if (before := self.known.twin(into)) is not None:  # a view's, perhaps: the whole holds it too
            before.copy_(copies)
        elif isinstance(into, FakeTensor):
            self.known.tell(into, copies)

    def _gathered(self, into: Tensor, own: Tensor) -> None:
        numbers = self.known.twin(own)
        if numbers is None:
            self.known.forget(into)
            return
        copies = numbers.reshape(-1).repeat(into.numel() // max(1, numbers.numel())).view(into.shape)
        if isinstance(into, FakeTensor):
            self.known.tell(into, copies)
        else:
            into.copy_(copies)


_INDEXING = (
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten._index_put_impl_.default,
)


def _asks_whether_finite(func: Any, args: Any) -> bool | None:
    """Answer of a comparison for finite numbers, if it asks for NaN or infinity; None for any other operation."""
    if func in (aten.isnan.default, aten.isinf.default):
        return False
    if func in (aten.ne.Tensor, aten.eq.Tensor) and args[0] is args[1]:
        return bool(func is aten.eq.Tensor)
    if func in (aten.ne.Scalar, aten.eq.Scalar) and isinstance(args[1], float) and math.isinf(args[1]):
        return bool(func is aten.ne.Scalar)
    return None


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Arguments that an operation writes into."""
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
