"""What ranks hold of a role, gathered as logical tensors on rank 0."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.architectures.placements import hf_placements
from megarlhf.models.build import ModelShard, placements_on
from megarlhf.models.role import Role
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.reshard import Resharder
from tests.distributed.logical import Arrays


def weights_of(role: Role) -> Arrays:
    """Logical tensors of a role's weights, on rank 0; empty elsewhere."""
    role.parts.to_compute()
    return gather(role.shard, role.shard.parameters())


def gather(part: ModelShard, storages: Mapping[str, Tensor]) -> Arrays:
    """Logical tensors out of every rank's storages, on rank 0; empty elsewhere."""
    wanted = hf_placements(part.arch, part.head, rank=0)
    plan = make_plan([placements_on(part, rank) for rank in range(dist.get_world_size())], [wanted])
    whole = {name: torch.zeros(shape) for name, shape in wanted.storages.items()} if dist.get_rank() == 0 else {}
    live = {name: tensor.detach().contiguous() for name, tensor in storages.items()}
    Resharder(plan, rank=dist.get_rank(), dtype=torch.float32, device=torch.device("cpu")).run(live, whole)
    return {name: tensor.numpy() for name, tensor in whole.items()}


def gather_gradients(role: Role) -> Arrays:
    """Logical gradients, after the reductions and before the optimizer. Each rank with the same weights has a shard."""
    trainer = role.trainer
    assert trainer is not None
    groups = role.mesh.groups
    of_buffers = [(buffer, groups.dp_cp) for chunk in trainer.chunks for buffer in chunk.buffers]
    of_buffers += [(buffer, groups.expt_dp) for chunk in trainer.chunks for buffer in chunk.expert_parallel_buffers]
    for buffer, group in of_buffers:
        for bucket in buffer.buckets:
            shards = list(bucket.grad_data.chunk(group.size()))
            whole = [torch.empty_like(shard) for shard in shards]
            dist.all_gather(whole, shards[group.rank()].clone(), group=group)
            bucket.grad_data.copy_(torch.cat(whole))
    live = role.shard.module.named_parameters()
    return gather(role.shard, {name: p.main_grad if p.requires_grad else torch.zeros_like(p) for name, p in live})


def record_gradients(role: Role, into: list[Arrays]) -> None:
    """From now on keep the gradients of every step of `role`."""
    assert role.trainer is not None
    original = role.trainer.gradient_norm

    def gradient_norm() -> float:
        into.append(gather_gradients(role))
        return original()

    role.trainer.gradient_norm = gradient_norm  # type: ignore[method-assign]
