"""Messages between pipeline stages whose micro-batches differ in length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor

Shape = list[int]
"""[S, B, H] of a message between two stages. Under sequence parallelism S is this rank's part of the positions."""


class KnownShapes(P2PCommunicator):
    """Communicator that knows the shapes of all messages in advance.

    All ranks compute the same micro-batches in the same order, so each knows what it will receive. Megatron-Core's
    stages instead send the shape before each message, and wait for the device to read it on the host.

    Without virtual stages, forwards and backwards each run in the order of micro-batches. With virtual stages a
    micro-batch comes once for each chunk, in the order of Megatron-Core's table. Backwards visit the chunks from last
    to first, and the micro-batches in the table's order. Messages from the last rank to the first go from one chunk to
    the next, so there are none behind the last chunk.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig, shapes: Sequence[Shape]) -> None:
        super().__init__(pp_group=pp_group, config=config)
        vpp = config.virtual_pipeline_model_parallel_size or 1
        table = get_schedule_table(len(shapes), vpp, config.microbatch_group_size_per_vp_stage)
        within = [shapes[n] for n, _ in table]
        wrapped = [shapes[n] for n, chunk in table if chunk < vpp - 1]
        from_previous = wrapped if pp_group.rank() == 0 else within
        to_next = wrapped if pp_group.rank() == pp_group.size() - 1 else within
        self._received_forward, self._received_backward = iter(from_previous), iter(to_next)
        self._sent_forward, self._sent_backward = iter(to_next), iter(from_previous)

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        """Shapes of the next messages. Upstream calls this before each exchange."""
        _check("next", tensor_send_next, self._sent_forward)
        _check("previous", tensor_send_prev, self._sent_backward)
        return (
            next(self._received_forward) if recv_prev else [0, 0, 0],
            next(self._received_backward) if recv_next else [0, 0, 0],
        )

    def _communicate(
        self, *, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Exchange detached views of the tensors. With virtual stages upstream empties an output tensor
        (`deallocate_output_tensor`) without waiting until it is sent; the view keeps the memory alive."""
        return super()._communicate(
            tensor_send_next=None if tensor_send_next is None else tensor_send_next.detach(),
            tensor_send_prev=None if tensor_send_prev is None else tensor_send_prev.detach(),
            **options,
        )


def _check(to: str, sent: Tensor | None, shapes: Iterator[Shape]) -> None:
    if sent is not None:
        expected = next(shapes)
        assert list(sent.shape) == expected, f"{list(sent.shape)} is sent to the {to} stage, which expects {expected}"
