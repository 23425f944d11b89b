"""Megatron-Core's messages beside forwards and backwards, for layers that run and for layers that are played.

Megatron-Core begins the sum of a bucket's gradients when all are there, and waits for a bucket's weights when the first
is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from megarlhf.rehearsal.cost_model.meter import Meter
from megarlhf.rehearsal.fake_device.ledger import Ledger
from megarlhf.rehearsal.timeline.messages import Wire


class Buckets:
    """Buckets of Megatron-Core. Played layers report to them, and their messages are kept out of tapes: the layer in
    which a bucket happens to end is no property of the layer."""

    def __init__(self, ledger: Ledger, meter: Meter, wire: Wire) -> None:
        self._parts: tuple[Any, ...] = (ledger, meter, wire)
        self._bucket_groups: dict[int, Any] = {}
        """Megatron-Core's bucket groups by identity of their parameters, which they hold."""

    def register(self, bucket_group: Any) -> None:
        """Register a bucket group. The optimizer makes the same groups once more for itself, later."""
        for parameter in bucket_group.params:
            self._bucket_groups.setdefault(id(parameter), bucket_group)

    def await_weights(self, parameters: Iterable[Tensor]) -> None:
        """Wait for weights before the forward of a played layer."""
        for parameter in parameters:
            bucket_group = self._bucket_groups.get(id(parameter))
            if bucket_group is not None and bucket_group.param_gather_handle is not None:
                bucket_group.finish_param_sync()

    def mark_ready(self, parameters: Iterable[Tensor]) -> None:
        """Report gradients after the backward of a played layer, in its order."""
        for parameter in parameters:
            bucket_group = self._bucket_groups.get(id(parameter))
            if bucket_group is not None and bucket_group.ddp_config.overlap_grad_reduce:
                bucket_group.register_grad_ready(parameter)

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Scope in which no tape records."""
        listeners = [part.listener for part in self._parts]
        for part in self._parts:
            part.listener = None
        try:
            yield
        finally:
            for part, listener in zip(self._parts, listeners, strict=True):
                part.listener = listener
