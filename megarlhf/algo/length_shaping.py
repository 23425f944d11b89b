"""Rewards for the length of a response, whatever its content.

Legend: N samples.
"""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(lengths_N: Tensor, *, longest: int, buffer: int, penalty: float) -> Tensor:
    """Penalty, 0 or less, that is added to the reward of a response near the greatest length.

    Shapes:  lengths_N [N] integers, in tokens -> [N] fp32
    Maths:   0 up to longest - buffer tokens; from there it falls in a straight line to -penalty at `longest`
    Source:  soft overlong punishment of DAPO, Yu et al. 2025, eq. 13, there with penalty 1
    Others:  the same as verl's overlong_buffer (len, penalty_factor) and OpenRLHF's overlong_buffer_len
    """
    if not 0 < buffer <= longest:
        raise ValueError(f"buffer = {buffer} tokens of at most {longest}; give 1 to {longest}")
    beyond_N = (lengths_N.double() - (longest - buffer)).clamp(min=0)
    return (-penalty * beyond_N / buffer).clamp(min=-penalty).float()


def missing_end_penalty(finished_N: Tensor, *, penalty: float) -> Tensor:
    """Penalty that is added to the reward of a response: -penalty where it was cut before an end token, else 0.

    Shapes:  finished_N [N] bool -> [N] fp32
    Source:  TRL's missing_eos_penalty
    """
    return torch.where(finished_N, 0.0, -penalty)
