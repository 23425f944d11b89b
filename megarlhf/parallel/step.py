"""Forward, backward and the optimizer step, through Megatron-Core's schedules, DDP and distributed optimizer.

One rule makes every layout compute the same: a micro-batch's loss is already divided by a denominator of the whole
mini-batch (all micro-batches, all data-parallel ranks). So gradients are plain sums, and nothing divides again.

Legend: B rows of a micro-batch, S columns.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from megarlhf.config import OffloadConfig, OptimConfig
from megarlhf.parallel.batching import padded_length
from megarlhf.parallel.chunks import Model, chunks_of
from megarlhf.parallel.context import ContextShare, context_share
from megarlhf.parallel.device_memory import DeviceMemory, RoleParts, Tensors
from megarlhf.parallel.loss import Accumulated, Loss
from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.parallel.mesh import Mesh
from megarlhf.parallel.micro_batch import MicroBatch, MicroBatchLayout
from megarlhf.parallel.optimizer_pieces import PIECE_BYTES, optimizers_in, pieces_of, step_in_pieces
from megarlhf.parallel.optimizer_settings import lr_scheduler, optimizer_config
from megarlhf.parallel.packing.rows import PackedRow
from megarlhf.parallel.pipeline import KnownShapes
from megarlhf.parallel.router_balance import ROUTER_AUX_LOSS, RouterBalance


def forward_only(
    module: Model, mesh: Mesh, batches: Sequence[MicroBatch], score: Callable[[Tensor, MicroBatch], Tensor]
) -> list[Tensor]:
    """Run the model without gradients and apply `score` to each micro-batch's output.

    Returns: one tensor per micro-batch on the last pipeline stage, an empty list on the others.
    """
    module.eval()

    def collect(output: Tensor, batch: MicroBatch, non_loss_data: bool) -> Tensor:
        return score(output, batch)

    with torch.no_grad():
        outputs = _run(chunks_of(module), mesh, batches, collect, forward_only=True)
    return outputs if mesh.is_last_stage else []


def _run(
    chunks: Sequence[GPTModel | DistributedDataParallel],
    mesh: Mesh,
    batches: Sequence[MicroBatch],
    on_output: Callable[..., Any],
    *,
    forward_only: bool,
    balance: RouterBalance | None = None,
) -> list[Any]:
    """Run Megatron's schedule over `batches`. `balance`: the load-balancing loss of routers.

    Returns: on the last stage the results of `on_output` for each micro-batch, in order.
    """
    assert batches, "a schedule needs at least one micro-batch on every rank"
    config, vpp = chunks[0].config, len(chunks)
    rows, length = batches[0].tokens_BS.shape
    one_shape = all(batch.tokens_BS.shape == (rows, length) for batch in batches)
    assert one_shape or mesh.layout.pp == 1 or config.variable_seq_lengths, "micro-batches differ in shape"
    filler = _filler(batches[0], mesh)
    # The interleaved schedule takes micro-batches in rounds of pp. Fillers come first, so that the last micro-batch,
    # behind which a schedule may act, is one that reaches every parameter.
    fillers = [filler] * (-len(batches) % mesh.layout.pp if vpp > 1 else 0)
    all_batches = [*fillers, *batches]

    def step(batches_left: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches_left)
        if batch is filler:
            return _forward(model, batch, mesh, None)[0], _no_loss
        output, batch = _forward(model, batch, mesh, balance)
        return output, partial(on_output, batch=batch)

    pipelined: dict[str, Any] = {}
    with megatron_device(mesh.runtime.device):
        if mesh.layout.pp > 1:
            # A message has this rank's share of the positions, under sequence parallelism a part of the share.
            divisor = mesh.layout.cp * (mesh.layout.tp if config.sequence_parallel else 1)
            shapes = [[b.tokens_BS.size(1) // divisor, b.tokens_BS.size(0), config.hidden_size] for b in all_batches]
            pipelined["p2p_communicator"] = KnownShapes(mesh.groups.pp, config, shapes)
        iterators = [iter(all_batches) for _ in chunks]
        outputs = get_forward_backward_func(pp_size=mesh.layout.pp, vp_size=vpp if vpp > 1 else None)(
            forward_step_func=step,
            data_iterator=iterators if vpp > 1 else iterators[0],
            model=list(chunks) if vpp > 1 else chunks[0],
            num_microbatches=len(all_batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=mesh.groups,
            **pipelined,
        )
    assert all(next(left, None) is None for left in iterators), "the schedule has left out a micro-batch"
    return list(outputs[len(fillers) :])


def _forward(
    model: torch.nn.Module, batch: MicroBatch, mesh: Mesh, balance: RouterBalance | None
) -> tuple[Tensor, MicroBatch]:
    """Run one stage on a micro-batch. Returns its output, and the micro-batch with this rank's context share."""
    tokens_BS, cp_group = batch.tokens_BS, mesh.groups.cp if mesh.layout.cp > 1 else None
    row = None if batch.layout is None else batch.layout.packed_row(tokens_BS.device, cp_group)
    positions_S, share = _positions_and_share(tokens_BS, row, cp_group)
    if share is not None:
        tokens_BS, batch = share.cut(tokens_BS), replace(batch, share=share)
    sequences = None if balance is None else balance.sequences(batch.layout, share, tokens_BS.device)
    # `sequences` takes the place of the attention mask: see `models.experts.ExpertsLayer`.
    output = model(tokens_BS, positions_S.expand(tokens_BS.shape), sequences, packed_seq_params=row)
    if share is not None and output.size(-1) == 1 and mesh.is_last_stage:
        # Gather the scores of a scalar head. Hidden states are not gathered: each rank makes log-probs from its own.
        output = share.whole(output.squeeze(-1)).unsqueeze(-1)
    return output, batch


def _filler(batch: MicroBatch, mesh: Mesh) -> MicroBatch:
    """The smallest micro-batch of the same kind, which contributes neither gradient nor output."""
    columns = padded_length(1, mesh)
    layout = batch.layout
    if layout is not None:
        layout = MicroBatchLayout((), (), (), rows=1, columns=columns, packed=layout.packed)
    return MicroBatch(batch.tokens_BS.new_zeros(1, columns), {}, layout)


def _no_loss(output: Tensor, non_loss_data: bool = False) -> tuple[Tensor, Tensor, None] | None:
    """Loss of a filler, whose gradients are zeros."""
    if non_loss_data:
        return None
    return output.sum() * 0.0, torch.zeros((), dtype=torch.int, device=output.device), None


def _positions_and_share(
    tokens_BS: Tensor, row: PackedRow | None, cp_group: dist.ProcessGroup | None
) -> tuple[Tensor, ContextShare | None]:
    """Positions of the columns that this rank computes, and its share of the columns (None: all)."""
    if row is not None:
        assert row.positions_T is not None
        return row.positions_T, row.share
    length, device = tokens_BS.size(1), tokens_BS.device
    share = None if cp_group is None else context_share([length], cp_group, device)
    return (torch.arange(length, device=device) if share is None else share.own_S), share


class Trainer:
    """A rank's model with gradient buffers and an optimizer. The optimizer is sharded over data- and context-parallel
    ranks, which hold the same weights.

    Load the weights first: the optimizer copies them.
    """

    def __init__(
        self,
        module: Model,
        mesh: Mesh,
        optim: OptimConfig,
        num_steps: int,
        offload: OffloadConfig,
        device_memory: DeviceMemory,
        balance: RouterBalance | None = None,
    ) -> None:
        self.mesh = mesh
        self.module = module
        self.balance = balance
        """Load-balancing loss of the experts' routers."""
        self.updates = 0
        """Number of updates that this process has begun."""
        self.before_update: Callable[[], None] = lambda: None
        """Called on every rank before the weights are changed."""
        # A single rank has nothing to shard, and its collectives would be copies.
        several = mesh.layout.dp * mesh.layout.cp > 1
        shard = several if optim.distributed == "auto" else optim.distributed
        with megatron_device(mesh.runtime.device):
            self.chunks = tuple(
                DistributedDataParallel(
                    config=module.config,
                    ddp_config=DistributedDataParallelConfig(
                        grad_reduce_in_fp32=True,
                        use_distributed_optimizer=shard,
                        overlap_grad_reduce=several and optim.overlap_grad_reduce,
                        overlap_param_gather=several and shard and optim.overlap_param_gather,
                    ),
                    module=chunk,
                    pg_collection=mesh.groups,
                )
                for chunk in chunks_of(module)
            )
            """Virtual stages with gradient buffers."""
            self.optimizer: MegatronOptimizer = get_megatron_optimizer(
                optimizer_config(optim, module.config.bf16, shard),
                list(self.chunks),
                use_gloo_process_groups=False,
                pg_collection=mesh.groups,
            )
        self.scheduler = lr_scheduler(self.optimizer, optim, num_steps)
        self._make_parts(offload, device_memory)
        # An optimizer step starts all gathers; a forward waits for those of its own buckets.
        for chunk in self.chunks:
            chunk.overlap_param_gather_with_optimizer_step = True
        self._weights_are_whole()
        module.config.finalize_model_grads_func = _finalize_grads
        module.config.grad_scale_func = self.optimizer.scale_loss
        if balance is not None:
            balance.scale = self.optimizer.scale_loss
        no_sync = [chunk.no_sync for chunk in self.chunks]
        module.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    @property
    def buffers(self) -> list[Any]:
        """Megatron's gradient buffers of all chunks."""
        return [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _make_parts(self, offload: OffloadConfig, device_memory: DeviceMemory) -> None:
        """Register the memory that may be offloaded."""
        streams = offload.optimizer == "stream" or (offload.optimizer == "auto" and device_memory.auto)
        self._pieces = pieces_of(self.optimizer, PIECE_BYTES if streams else sys.maxsize)
        buffers = self.buffers

        def own() -> list[Tensor]:
            return [*self.module.parameters(), *(b.param_data for b in buffers if b.param_data is not None)]

        self.parts = RoleParts(
            device_memory,
            parameters=Tensors(own, device_memory.host, synchronize=self._finish_gathers),
            gradients=Tensors(lambda: [buffer.grad_data for buffer in buffers], device_memory.host, copied=False),
            optimizer=tuple(Tensors(piece.state, device_memory.host, without=own) for piece in self._pieces),
            streams=streams,
        )
        device_memory.share(self.parts, offload)

    def _weights_are_whole(self) -> None:
        """Tell Megatron that no forward has to gather parameters."""
        for group in self._bucket_groups:
            group.param_gather_dispatched = True

    def _finish_gathers(self) -> None:
        """Wait for the gathers of the last step."""
        for group in self._bucket_groups:
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None

    @property
    def _bucket_groups(self) -> list[Any]:
        return [
            group for chunk in self.chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
        ]

    @property
    def learning_rate(self) -> float:
        return float(self.scheduler.get_lr(self.optimizer.param_groups[0]))

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> Accumulated:
        """Forward and backward over this rank's micro-batches. Gradients are summed over data- and context-parallel
        ranks."""
        self.parts.to_learn(synchronize=False)
        self.module.train()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def on_output(output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor | None]]:
            value, sums, captured = loss(output, batch)
            # Megatron would divide by the token count, here 0: our loss is divided already.
            report = torch.cat([value.detach().reshape(1).double(), sums.detach().double()])
            return value, torch.zeros((), dtype=torch.int, device=value.device), (report, captured)

        if self.balance is not None:
            self.balance.begin([batch.layout for batch in batches])
        reports = _run(self.chunks, self.mesh, batches, on_output, forward_only=False, balance=self.balance)
        self._weights_are_whole()
        names = ("loss", *loss.names)
        total = torch.zeros(len(names), dtype=torch.float64, device=self.mesh.runtime.device)
        if self.mesh.owns_outputs:
            total += torch.stack([sums for sums, _ in reports]).sum(0)
        if self.balance is not None:  # each rank has the part of its own routers
            names, total = (*names, ROUTER_AUX_LOSS), torch.cat([total, self.balance.total.reshape(1)])
        dist.all_reduce(total)
        captured = [captured for _, captured in reports if captured is not None]
        return Accumulated(dict(zip(names, total.tolist(), strict=True)), captured)

    def gradient_norm(self) -> float:
        """Global norm of the accumulated gradients before clipping, equal on every rank. Infinite when any element on
        any rank is NaN or infinite.

        Megatron's norm counts each gradient on one replica only, and would miss a NaN on another. Therefore every rank
        checks all of its buffers.
        """
        with megatron_device(self.mesh.runtime.device):
            overflow = self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
        largest = [torch.linalg.vector_norm(buffer.grad_data, ord=math.inf) for buffer in self.buffers]
        finite = not overflow and math.isfinite(norm) and all(math.isfinite(float(value)) for value in largest)
        # Infinity, not NaN, which a maximum may lose.
        agreed = torch.tensor(norm if finite else math.inf, dtype=torch.float64, device=self.mesh.runtime.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return float(agreed)

    def own_gradients(self) -> dict[str, Tensor]:
        """Parameter -> the flat part of its summed gradient that this rank owns. Each part has one owner among the
        ranks with the same weights."""
        gradients = {}
        parameters: list[tuple[str, Any]] = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        for optimizer in optimizers_in(self.optimizer):
            for name, parameter in parameters:
                gradient = parameter.main_grad.view(-1)
                if isinstance(optimizer, DistributedOptimizer):
                    with contextlib.suppress(KeyError):  # other ranks own it
                        owned = optimizer._get_model_param_range_map(parameter)["param"]
                        gradients[name] = gradient[owned.start : owned.end]
                elif self._is_first_copy(parameter):
                    gradients[name] = gradient
        return gradients

    def _is_first_copy(self, parameter: Tensor) -> bool:
        """Whether this rank is the first of the data-parallel ranks that hold this parameter."""
        is_expert = not getattr(parameter, "allreduce", True)  # Megatron-Core's mark
        own = self.mesh.coordinates
        return self.mesh.experts.dp == 0 if is_expert else (own.dp, own.cp) == (0, 0)

    def make_optimizer_state(self) -> None:
        """Make the state that the optimizer's first step would make, as zeros, with one piece on the device at a
        time."""
        for piece, part in zip(self._pieces, self.parts.optimizer, strict=True):
            if piece.is_new:
                self.parts.device_memory.keep_only(part)
                with megatron_device(self.mesh.runtime.device):
                    piece.make_state()

    def step(self, norm: float) -> None:
        """Clip and apply the accumulated gradients. `norm`: the result of `gradient_norm`, which must have been
        called."""
        optimizer = self.optimizer
        self.before_update()
        with megatron_device(self.mesh.runtime.device):
            # The rest of optimizer.step(); `gradient_norm` has done its first part.
            for single in optimizers_in(optimizer):
                if optimizer.config.clip_grad > 0.0:
                    clip_grad_by_total_norm_fp32(single.get_parameters(), optimizer.config.clip_grad, norm)
            self.updates += 1
            if not self.parts.streams:
                self.parts.to_update()
            step_in_pieces(optimizer, self._pieces, self.parts.to_update_piece if self.parts.streams else None)
        self.scheduler.step(increment=1)


def _finalize_grads(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's gradient reductions, without its division by a token count."""
    finalize_model_grads(model, None, **kwargs)
