"""What a user asks of a rehearsal."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from megarlhf.rehearsal.hardware import Hardware
from megarlhf.rehearsal.lengths import Lengths
from megarlhf.rehearsal.margin import MarginConfig
from megarlhf.rehearsal.routing import Routing
from megarlhf.rehearsal.transformer_engine import Layers

DEFAULT_STEPS = 2
"""What is made lazily, such as the optimizer's state, is there from the second step on."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One rehearsal."""

    command: str
    cfg: Any
    """As it was loaded."""
    world_size: int
    hardware: Hardware
    ranks_per_node: int = 8
    steps: int = DEFAULT_STEPS
    device_bytes: int
    """Of one device; the hardware file's, or what the user says."""
    margin: MarginConfig = field(default_factory=MarginConfig)
    layers: Layers = "te"
    routing: Routing = field(default_factory=Routing)
    ranks: tuple[int, ...] | None = None
    """Those to rehearse; None: one of each kind. All: every number."""
    prompt_lengths: Lengths | None = None
    response_lengths: Lengths | None = None
    rollout_tokens_per_second: float | None = None
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    reshard_plan: bool = True
    """Whether the bytes of every rank from trainer to engines are planned."""
