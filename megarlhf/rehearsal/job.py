"""What a rank is to rehearse, and what it has seen: plain data, between processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megarlhf.config import FrozenModel, RLConfig, roles_of
from megarlhf.layout import MeshLayout
from megarlhf.rehearsal.cost_model.engine_time import RolloutEstimate
from megarlhf.rehearsal.cost_model.margin import MarginConfig
from megarlhf.rehearsal.fake_device import torch_patches
from megarlhf.rehearsal.fake_device.assumptions import Assumption
from megarlhf.rehearsal.fake_device.ledger import PhaseMemory
from megarlhf.rehearsal.fake_device.routing import Routing
from megarlhf.rehearsal.fake_device.torch_patches import Kind
from megarlhf.rehearsal.fakes.batches import RankLoad
from megarlhf.rehearsal.fakes.lengths import Lengths
from megarlhf.rehearsal.fakes.resume_point import PointSizes
from megarlhf.rehearsal.timeline.messages import Line, Reached
from megarlhf.rehearsal.timeline.trace import Event, Work
from megarlhf.rehearsal.transformer_engine.replace import Layers
from megarlhf.rollout.factory import mesh_orders
from megarlhf.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank is to rehearse."""

    command: str
    cfg: FrozenModel
    """With whatever stands in for what is missing: `fakes/inputs.py`."""
    rank: int
    world_size: int
    ranks_per_node: int
    kind: Kind
    layers: Layers = "te"
    """Of a GPU; on a CPU they are local ones."""
    num_steps: int
    response_lengths: Lengths
    device_bytes: int = 0
    """Of a device's memory; 0: not bounded."""
    margin: MarginConfig = field(default_factory=MarginConfig)
    """What cannot be seen of it."""
    rollout_tokens_per_second: float | None = None
    """Of responses, of one engine; None: by the roofline of decoding."""
    bare_engine: bool = False
    """Responses come from nowhere: no engine's weights, cache and updates."""
    reuse: bool = True
    """Rehearse what is equal once: layers, experts, digests of weights."""
    routing: Routing = field(default_factory=Routing)
    """Of models with experts."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What a rehearsed rank has seen."""

    rank: int
    memory: list[PhaseMemory]
    messages: list[tuple[Line, int, int]]
    """(row, count, bytes)."""
    events: list[Event]
    flops: dict[tuple[int, str, Work], int]
    """By step, phase and work; without what is computed again in a backward."""
    work_seconds: dict[tuple[int, str, Work], float]
    again_seconds: dict[tuple[int, str], float]
    """Of what is computed again, in `work_seconds` too."""
    operations: dict[tuple[int, str], int]
    assumptions: list[tuple[Assumption, int]]
    reached: Reached
    groups_created: int
    memberships: int
    shares: dict[str, list[RankLoad]]
    """By phase, the work of each data-parallel rank of its role."""
    tokens: dict[tuple[int, str], int]
    """Packed in a step and phase, on all ranks of its role."""
    rollouts: list[RolloutEstimate]
    """Of each step."""
    problems: list[str]
    """Why the run would not start, in sentences."""
    cache_bytes: int
    """Of the rollout engine on this rank."""
    held: dict[str, int]
    """Bytes by kind at the end of the last step, on the device or in host memory for a while."""
    offloaded: int
    """Bytes of host memory for what is not on the device meanwhile."""
    resume_point: PointSizes | None
    """What it writes of one."""
    tool_seconds: float
    tool_gib: float


def layouts_of(cfg: Any, runtime: Runtime) -> dict[str, MeshLayout]:
    """Of each role, with the order of ranks that the run chooses."""
    roles = roles_of(cfg)
    orders = mesh_orders(cfg.rollout, roles, runtime) if isinstance(cfg, RLConfig) else {}
    return {
        name: replace(section.parallel.layout(runtime.world_size, name), order=orders.get(name))
        for name, section in roles.items()
    }


def runtime_of(rank: int, world_size: int, ranks_per_node: int, device: torch.device) -> Runtime:
    """Of a rank that is not there."""
    return Runtime(
        rank=rank,
        local_rank=rank % ranks_per_node,
        world_size=world_size,
        local_world_size=min(ranks_per_node, world_size),
        ranks_per_block=min(ranks_per_node, world_size),  # nodes have equally many: request.require_sense
        device=device,
        backend=torch_patches.BACKENDS["cpu" if device.type == "cpu" else "gpu"],
    )
