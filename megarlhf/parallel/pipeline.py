"""Exchanges between pipeline stages whose micro-batches differ in length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from torch import Tensor

Shape = list[int]
"""[S, B, H] of what travels between two stages; S is a stretch of it under sequence parallelism."""


class KnownShapes(P2PCommunicator):
    """Every rank has the same micro-batches and computes them in the same order, so each knows what it will receive.

    Megatron-Core's stages tell each other the shape before each exchange: a message more, and a wait for the device to
    read it on the host. Without virtual stages, forwards and backwards each run in the order of micro-batches. With
    them a micro-batch comes once for each chunk, in the order of Megatron-Core's table; backwards visit the chunks from
    the last to the first and the micro-batches in the table's order too. Between the last rank and the first travels
    what goes from one chunk to the next: nothing behind the last chunk.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig, shapes: Sequence[Shape]) -> None:
        super().__init__(pp_group=pp_group, config=config)
        vpp = config.virtual_pipeline_model_parallel_size or 1
        table = get_schedule_table(len(shapes), vpp, config.microbatch_group_size_per_vp_stage)
        along = [shapes[number] for number, _ in table]
        around = [shapes[number] for number, chunk in table if chunk < vpp - 1]
        before = around if pp_group.rank() == 0 else along
        behind = around if pp_group.rank() == pp_group.size() - 1 else along
        self._received_forward, self._received_backward = iter(before), iter(behind)
        self._sent_forward, self._sent_backward = iter(behind), iter(before)

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        """Upstream's, without messages; upstream calls it before each exchange."""
        _check("next", tensor_send_next, self._sent_forward)
        _check("previous", tensor_send_prev, self._sent_backward)
        return (
            next(self._received_forward) if recv_prev else [0, 0, 0],
            next(self._received_backward) if recv_next else [0, 0, 0],
        )

    def _communicate(
        self, *, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Upstream's, of other tensors over the same memory. With virtual stages upstream does not wait until an output
        is sent before it empties the tensor (`deallocate_output_tensor`), and what is being sent must live on."""
        return super()._communicate(
            tensor_send_next=None if tensor_send_next is None else tensor_send_next.detach(),
            tensor_send_prev=None if tensor_send_prev is None else tensor_send_prev.detach(),
            **options,
        )


def _check(to: str, sent: Tensor | None, shapes: Iterator[Shape]) -> None:
    """The other stage receives into memory of the shape that it knows."""
    if sent is not None:
        expected = next(shapes)
        assert list(sent.shape) == expected, f"{list(sent.shape)} is sent to the {to} stage, which expects {expected}"
