"""Responses that stand end to end: sums and means of each, and back to its tokens.

Legend: T tokens of all responses end to end, N responses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Borders of responses: the first `lengths_N[0]` tokens belong to the first one, and so on."""

    lengths_N: Tensor
    """int64, on the tokens' device; 0 is allowed."""
    num_tokens: int
    """Sum of the lengths, known without asking the device."""

    @staticmethod
    def of(lengths_N: Tensor) -> Segments:
        """Make segments from lengths. Waits for the device where the lengths are on one."""
        return Segments(lengths_N, int(lengths_N.sum()))

    def sums(self, x_T: Tensor) -> Tensor:
        """[T] -> [N]: each response's sum, in the order of its tokens; 0 for an empty one. Gradients flow.

        Not index_add: on a GPU its order changes from run to run.
        """
        if not self.num_tokens:
            return x_T.new_zeros(self.lengths_N.shape)
        # `unsafe` leaves out a check of lengths that waits for the device.
        return torch.segment_reduce(x_T, "sum", lengths=self.lengths_N, axis=0, unsafe=True)

    def means(self, x_T: Tensor) -> Tensor:
        """[T] -> [N]: each response's mean; 0 for an empty one. Gradients flow."""
        return self.sums(x_T) / self.lengths_N.clamp(min=1)

    def repeat(self, x_N: Tensor) -> Tensor:
        """[N] -> [T]: a response's number at each of its tokens. Gradients flow."""
        return x_N.repeat_interleave(self.lengths_N, output_size=self.num_tokens)
