"""Does this architecture fit this layout? Decided from config.json alone."""

from __future__ import annotations

import math

from megarlhf.config import RoleConfig
from megarlhf.layout import Layout, split_layers
from megarlhf.weights.architecture import Architecture


def check_role(role: str, section: RoleConfig, world_size: int) -> tuple[Architecture, Layout]:
    """The role's architecture and layout.

    Raises: ValueError naming the numbers when tp does not divide heads, KV heads or the MLP, when the layers do
    not divide by pp, or when the world does not divide by tp x pp.
    """
    arch = Architecture.from_hf(section.model.path)
    layout = section.parallel.layout(world_size, role)
    tp = section.parallel.tp
    parts = {
        "attention heads": arch.num_heads,
        "KV heads": arch.num_kv_heads,
        "MLP width": arch.ffn_size,
    }
    for what, count in parts.items():
        if count % tp:
            common = math.gcd(*parts.values())
            divisors = [n for n in range(1, common + 1) if common % n == 0 and n <= 64]
            raise ValueError(
                f"{role}.parallel.tp = {tp} does not divide the {count} {what} of {section.model.path}; "
                f"choose one of {', '.join(map(str, divisors))}"
            )
    try:
        split_layers(arch.num_layers, section.parallel.pp, section.parallel.layers_per_stage)
    except ValueError as error:
        raise ValueError(f"{role}.parallel: {error}") from None
    return arch, layout
