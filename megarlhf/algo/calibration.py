"""Calibration of a reward model: how far its scores can be trusted, from pairs of which people preferred the first.

The model says that the chosen response of a pair is better with probability sigmoid(chosen - rejected).

Legend: P pairs, K = 2 P responses.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Z_95 = 1.959963984540054


def wilson_interval(successes: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share. Source: Wilson 1927."""
    if not count:
        return 0.0, 1.0
    share, z2 = successes / count, Z_95**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def reliability(chosen_P: Tensor, rejected_P: Tensor, *, bins: int = 5) -> list[dict[str, float]]:
    """Bin pairs by the model's probability for the response with the higher score, from 0.5 to 1 in equal bins. For
    each
    bin: the mean probability (`said`) and how often the model is right.

    Bins without a pair are left out. A pair of equal scores is half right.
    """
    difference_P = (chosen_P - rejected_P).double()
    sure_P = difference_P.abs().sigmoid()
    right_P = torch.where(difference_P == 0, 0.5, (difference_P > 0).double())
    index_P = ((sure_P - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    rows = []
    for n in range(bins):
        inside_P = index_P == n
        if bool(inside_P.any()):
            rows.append(
                {
                    "from": 0.5 + n / (2 * bins),
                    "to": 0.5 + (n + 1) / (2 * bins),
                    "pairs": int(inside_P.sum()),
                    "said": float(sure_P[inside_P].mean()),
                    "right": float(right_P[inside_P].mean()),
                }
            )
    return rows


def calibration_error(table: list[dict[str, float]]) -> float:
    """The mean over pairs of |said - right| of their bin (expected calibration error, Guo et al. 2017)."""
    pairs = sum(row["pairs"] for row in table)
    return sum(row["pairs"] * abs(row["said"] - row["right"]) for row in table) / pairs if pairs else 0.0


def correlation(x_K: Tensor, y_K: Tensor) -> float | None:
    """Pearson's; None where either does not vary."""
    x_K, y_K = x_K.double() - x_K.double().mean(), y_K.double() - y_K.double().mean()
    size = float((x_K.square().sum() * y_K.square().sum()).sqrt())
    return float((x_K * y_K).sum()) / size if size > 0 else None


def pair_report(scores_P2: Tensor, lengths_P2: Tensor) -> dict[str, Any]:
    """Report on a reward model's held-out scores.

    Shapes:  scores_P2, lengths_P2 [P, 2]: score, and tokens, of the chosen and the rejected response
    """
    chosen_P, rejected_P = scores_P2.double().unbind(1)
    right_P, count = chosen_P > rejected_P, len(scores_P2)
    low, high = wilson_interval(int(right_P.sum()), count)
    table = reliability(chosen_P, rejected_P)
    longer_P, shorter_P = lengths_P2[:, 0] > lengths_P2[:, 1], lengths_P2[:, 0] < lengths_P2[:, 1]

    def accuracy(mask_P: Tensor) -> dict[str, float | None]:
        chosen_right = right_P[mask_P].double()
        return {"pairs": len(chosen_right), "accuracy": float(chosen_right.mean()) if len(chosen_right) else None}

    return {
        "pairs": count,
        "accuracy": int(right_P.sum()) / count,
        "accuracy_interval": [low, high],
        "calibration_error": calibration_error(table),
        "reliability": table,
        "score_mean": float(scores_P2.double().mean()),
        "score_deviation": float(scores_P2.double().std(correction=0)),
        "score_length_correlation": correlation(scores_P2.flatten(), lengths_P2.flatten()),
        "chosen_longer": accuracy(longer_P),
        "chosen_shorter": accuracy(shorter_P),
        "equal_length": accuracy(~longer_P & ~shorter_P),
    }
