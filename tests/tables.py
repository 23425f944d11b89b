"""Short tables of numbers, written as they stand."""

import torch

from megarlhf.experience import Ragged


def ragged(*rows, dtype=torch.float32):
    return Ragged.from_rows([torch.tensor(row) for row in rows], dtype)
