"""Exchanges between pipeline stages whose micro-batches differ in length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

Shape = list[int]
"""[S, B, H] of what travels between two stages; S is a stretch of it under sequence parallelism."""


class KnownShapes(P2PCommunicator):
    """Every stage has the same micro-batches in the same order, so each knows what it will receive.

    Megatron-Core's stages tell each other the shape before each exchange: a message more, and a wait for the device to
    read it on the host. Schedules without virtual stages run forwards and backwards each in the order of micro-batches.
    """

    def __init__(self, pp_group: dist.ProcessGroup, config: ModelParallelConfig, shapes: Sequence[Shape]) -> None:
        super().__init__(pp_group=pp_group, config=config)
        assert config.virtual_pipeline_model_parallel_size is None, "virtual stages run micro-batches in another order"
        self._shapes = list(shapes)
        self._received_forward, self._received_backward = iter(self._shapes), iter(self._shapes)
        self._sent_forward, self._sent_backward = iter(self._shapes), iter(self._shapes)

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


def _check(to: str, sent: Tensor | None, shapes: Iterator[Shape]) -> None:
    """The other stage receives into memory of the shape that it knows."""
    if sent is not None:
        expected = next(shapes)
        assert list(sent.shape) == expected, f"{list(sent.shape)} is sent to the {to} stage, which expects {expected}"
