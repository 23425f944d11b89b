"""Orders to a rehearsed rank and its record: plain data, passed between processes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megarlhf.config import FrozenModel, RLConfig
from megarlhf.layout import MeshLayout
from megarlhf.rehearsal.cost_model.margin import MarginConfig
from megarlhf.rehearsal.fake_device import torch_patches
from megarlhf.rehearsal.fake_device.assumptions import Assumption
from megarlhf.rehearsal.fake_device.ledger import PhaseMemory
from megarlhf.rehearsal.fake_device.routing import Routing
from megarlhf.rehearsal.fake_device.torch_patches import Kind
from megarlhf.rehearsal.fakes.batches import RankLoad
from megarlhf.rehearsal.fakes.drawn_samples import ConversationLengths
from megarlhf.rehearsal.fakes.lengths import Lengths
from megarlhf.rehearsal.fakes.resume_point import PointSizes
from megarlhf.rehearsal.result import RolloutRow
from megarlhf.rehearsal.timeline.messages import Line, Reached
from megarlhf.rehearsal.timeline.trace import Event, Work
from megarlhf.rehearsal.transformer_engine.replace import Layers
from megarlhf.rollout.factory import mesh_orders
from megarlhf.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Job:
    """Order to rehearse one rank."""

    command: str
    cfg: FrozenModel
    """Configuration in which stand-ins replace missing files (`fakes/inputs.py`)."""
    rank: int
    world_size: int
    ranks_per_node: int
    kind: Kind
    layers: Layers = "te"
    """Layers of a GPU. A CPU always has local ones."""
    num_steps: int
    response_lengths: Lengths
    """Sampled tokens of samples."""
    conversations: ConversationLengths | None = None
    """Lengths of conversations, if there is an environment."""
    device_bytes: int = 0
    """Memory of a device; 0 means unbounded."""
    margin: MarginConfig = field(default_factory=MarginConfig)
    """Numbers for device memory that no tensor shows."""
    rollout_tokens_per_second: float | None = None
    """Response tokens per second of one engine; None estimates them by the roofline of decoding."""
    bare_engine: bool = False
    """Whether responses are made without an engine: without its weights, cache and updates."""
    reuse: bool = True
    """Whether equal layers, experts and digests of weights are rehearsed once."""
    routing: Routing = field(default_factory=Routing)
    """Assignment of tokens to experts, in models that have experts."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Everything that was counted on a rehearsed rank."""

    rank: int
    memory: list[PhaseMemory]
    messages: list[tuple[Line, int, int]]
    """(row, count, bytes)"""
    events: list[Event]
    flops: dict[tuple[int, str, Work], int]
    """FLOPs by step, phase and work, without recomputation in a backward."""
    work_seconds: dict[tuple[int, str, Work], float]
    recomputed_seconds: dict[tuple[int, str], float]
    """Seconds of recomputation, which `work_seconds` includes."""
    operations: dict[tuple[int, str], int]
    assumptions: list[tuple[Assumption, int]]
    reached: Reached
    groups_created: int
    memberships: int
    loads: dict[str, list[RankLoad]]
    """Work of each data-parallel rank of a phase's role, by phase."""
    tokens: dict[tuple[int, str], int]
    """Tokens packed in a step and phase on all ranks of the role."""
    rollouts: list[RolloutRow]
    """One estimate for each step."""
    refusals: list[str]
    """Reasons why the run would not start, as sentences."""
    cache_bytes: int
    """Cache of the rollout engine on this rank."""
    held: dict[str, int]
    """Bytes by kind at the end of the last step, on the device or offloaded to host memory."""
    offloaded: int
    """Host memory for what is offloaded."""
    resume_point: PointSizes | None
    """Bytes of this rank's part of a resume point; None if none was written."""
    tool_seconds: float
    tool_gib: float


def layouts_of(cfg: Any, runtime: Runtime) -> dict[str, MeshLayout]:
    """Layout of each role, with the order of ranks that the run chooses."""
    roles = cfg.roles()
    orders = mesh_orders(cfg.rollout, roles, runtime) if isinstance(cfg, RLConfig) else {}
    return {
        name: replace(section.parallel.layout(runtime.world_size, name), order=orders.get(name))
        for name, section in roles.items()
    }


def runtime_of(rank: int, world_size: int, ranks_per_node: int, device: torch.device) -> Runtime:
    """Runtime of a rank without a process of its own."""
    return Runtime(
        rank=rank,
        local_rank=rank % ranks_per_node,
        world_size=world_size,
        local_world_size=min(ranks_per_node, world_size),
        ranks_per_block=min(ranks_per_node, world_size),  # nodes have equally many: request.check_request
        device=device,
        backend=torch_patches.BACKENDS["cpu" if device.type == "cpu" else "gpu"],
    )
