"""The user's request for a rehearsal."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.config import RLConfig
from megarlhf.rehearsal.cost_model.hardware import Hardware
from megarlhf.rehearsal.cost_model.margin import MarginConfig
from megarlhf.rehearsal.fake_device.routing import Routing
from megarlhf.rehearsal.fakes.lengths import Lengths
from megarlhf.rehearsal.transformer_engine.replace import Layers
from megarlhf.rollout.engines import engine_of

DEFAULT_STEPS = 2
"""Number of steps: what is made lazily, such as the optimizer's state, exists from the second step on."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One rehearsal, as requested."""

    command: str
    cfg: Any
    """Configuration as it was loaded."""
    world_size: int
    hardware: Hardware
    ranks_per_node: int = 8
    steps: int = DEFAULT_STEPS
    device_bytes: int
    """Memory of one device, from the hardware file or the user."""
    margin: MarginConfig = field(default_factory=MarginConfig)
    layers: Layers = "te"
    routing: Routing = field(default_factory=Routing)
    ranks: tuple[int, ...] | None = None
    """Ranks to rehearse; None means one of each kind."""
    prompt_lengths: Lengths | None = None
    response_lengths: Lengths | None = None
    """Sampled tokens of a sample; of a conversation those of all turns."""
    observed_lengths: Lengths | None = None
    """Observed tokens of a conversation with an environment."""
    turns: Lengths | None = None
    """Turns of a conversation with an environment."""
    rollout_tokens_per_second: float | None = None
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    resume_point: bool = True
    """Whether a resume point is written, if the job writes any."""
    reshard_plan: bool = True
    """Whether the bytes of every rank from trainer to engines are planned."""


def check_request(request: Request) -> None:
    """Refuse options without effect, and numbers that do not fit the job.

    Raises: ValueError that names the option.
    """
    cfg, world, per_node = request.cfg, request.world_size, request.ranks_per_node
    if request.ranks is not None and max(request.ranks) >= world:
        raise ValueError(f"--ranks {max(request.ranks)}: the job has ranks 0 to {world - 1} only")
    if world > per_node and world % per_node:
        raise ValueError(
            f"--ranks-per-node {per_node} does not divide the {world} ranks of the job; all nodes have equally many, "
            f"so give a number that divides {world}"
        )
    if request.steps > cfg.train.num_steps:
        raise ValueError(f"--steps {request.steps}: the job has only {cfg.train.num_steps} steps (train.num_steps)")
    has_engine = isinstance(cfg, RLConfig) and engine_of(cfg.rollout).has_own_weights
    if request.rollout_tokens_per_second is not None and not has_engine:
        why = f"rollout.engine = {cfg.rollout.engine}" if isinstance(cfg, RLConfig) else f"{request.command} has none"
        raise ValueError(f"--rollout-tokens-per-second is for engines of vLLM, but {why}; leave it out")
    _check_conversations(request)
    if request.routing.skew != 1.0 and not _experts_of(cfg):
        raise ValueError(f"--routing-skew {request.routing.skew:g}: no model of the job has experts; leave it out")
    if most := [number for number in _experts_of(cfg) if request.routing.skew > number]:
        raise ValueError(
            f"--routing-skew {request.routing.skew:g}: an expert that gets every token has {min(most):g} times the "
            "mean; give at most that"
        )


def _check_conversations(request: Request) -> None:
    """Raises: ValueError for lengths of conversations that the job does not have."""
    environment = getattr(request.cfg, "environment", None)
    given = {"--turns": request.turns, "--observed-lengths": request.observed_lengths}
    for option in (option for option, lengths in given.items() if lengths is not None):
        if environment is None:
            why = f"{request.command} has none" if request.command != "rl" else "there is no section environment"
            raise ValueError(f"{option} is for conversations with an environment, but {why}; leave it out")
        if environment.max_turns == 1 and option == "--observed-lengths":
            raise ValueError(
                f"{option}: with environment.max_turns = 1 the model reads no answer of the environment; leave it out"
            )


def _experts_of(cfg: Any) -> list[float]:
    """For each model with experts, the largest load of one expert as a multiple of the mean."""
    archs = [architecture_from_hf(section.model.hf_directory()) for section in cfg.roles().values()]
    return [arch.num_experts / arch.experts_per_token for arch in archs if arch.num_experts]
