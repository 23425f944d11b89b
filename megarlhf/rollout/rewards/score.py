"""Rule rewards over a batch of responses, shared out over the ranks of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.layout import split_evenly


def rule_rewards(
    rule: Callable[[str, str, Mapping[str, Any]], float],
    prompts: Sequence[str],
    responses: Sequence[str],
    fields: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> Tensor:
    """The rule's value for each response, [N] fp32, the same on every rank. Each rank computes its share.

    Raises: on every rank, whatever the rule raised on one.
    """
    share = split_evenly(len(responses), dist.get_world_size())[dist.get_rank()]
    found: list[float] = []
    error = ""
    try:
        found = [float(rule(prompts[n], responses[n], fields[n])) for n in share]
    except Exception as failure:  # noqa: BLE001 -- the user's code may raise anything; every rank has to hear of it
        error = f"reward rule failed on one of samples {share.start}..{share.stop - 1}: {failure!r}"
    parts: list[tuple[list[float], str]] = [([], "")] * dist.get_world_size()
    dist.all_gather_object(parts, (found, error))
    if errors := [message for _, message in parts if message]:
        raise RuntimeError(errors[0])
    return torch.tensor([value for values, _ in parts for value in values], dtype=torch.float32, device=device)
