"""Losses on preference pairs, from the log-probs of their responses.

Legend: P pairs. `chosen_P` and `rejected_P` are log-probs of whole responses, in nats: sums over the response's tokens,
its end-of-sequence included, or means where a function says so. Every loss is one number a pair, [P]; the caller adds
them up and divides by the pairs of the mini-batch.

`margin_P` is the policy's log-ratio to the reference on the chosen response, minus that on the rejected one:
(log pi(y_w) - log pi_ref(y_w)) - (log pi(y_l) - log pi_ref(y_l)).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(margin_P: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Bradley-Terry on the implicit rewards beta log(pi / pi_ref); with smoothing the labels are wrong that often.

    Shapes:  [P] -> [P]
    Maths:   -(1 - eps) log sigmoid(beta margin) - eps log sigmoid(-beta margin)
    Source:  Rafailov et al. 2023, eq. 7; smoothing: Mitchell 2023, "A note on DPO with noisy preferences" (cDPO)
    Others:  OpenRLHF's is the same. TRL's `sigmoid` is that without smoothing; its `robust` (Chowdhury et al. 2024)
             subtracts the second term and divides by 1 - 2 eps, which is not here.
    """
    rewards_P = beta * margin_P
    return -(1.0 - label_smoothing) * logsigmoid(rewards_P) - label_smoothing * logsigmoid(-rewards_P)


def ipo(margin_P: Tensor, *, beta: float) -> Tensor:
    """A squared distance to a margin of 1 / (2 beta), which stays finite where all labels agree.

    Shapes:  [P] -> [P]
    Maths:   (margin - 1 / (2 beta))^2; beta is the paper's tau
    Source:  Azar et al. 2023, eq. 17
    Others:  the paper's log-probs are of whole responses, and OpenRLHF's are. TRL divides each response's log-ratio by
             its tokens first: hand in margins of such means for that.
    """
    return (margin_P - 1.0 / (2.0 * beta)).square()


def simpo(
    chosen_mean_P: Tensor, rejected_mean_P: Tensor, *, beta: float, margin: float, label_smoothing: float = 0.0
) -> Tensor:
    """Bradley-Terry on mean log-probs, without a reference; the chosen one has to win by `margin`.

    Shapes:  log-probs, mean over each response's tokens: [P] each -> [P]
    Maths:   -log sigmoid(beta (log p_w / |y_w| - log p_l / |y_l|) - margin), smoothed as `dpo`
    Source:  Meng et al. 2024, eq. 6 (margin: gamma)
    Others:  the authors' code is given gamma / beta, TRL gamma; the loss is the same. TRL's CPOTrainer adds the
             likelihood of chosen responses unless `cpo_alpha` is 0.
    """
    rewards_P = beta * (chosen_mean_P - rejected_mean_P) - margin
    return -(1.0 - label_smoothing) * logsigmoid(rewards_P) - label_smoothing * logsigmoid(-rewards_P)


def orpo(chosen_mean_P: Tensor, rejected_mean_P: Tensor) -> Tensor:
    """The odds of the chosen response should exceed those of the rejected one. Without a reference.

    Shapes:  log-probs, mean over each response's tokens: [P] each -> [P]
    Maths:   -log sigmoid(log odds(y_w) - log odds(y_l)); odds = p / (1 - p), log p the mean log-prob
    Source:  Hong et al. 2024, eq. 4 and 7; the whole loss (eq. 6) adds the likelihood of the chosen response, which
             the caller does
    Others:  TRL is the same, but for a response whose mean log-prob is 0 to all digits, where it gives infinity: here
             1 - p is held at 1e-12, and such a response gets no gradient.
    """
    return -logsigmoid(_log_odds(chosen_mean_P) - _log_odds(rejected_mean_P))


def _log_odds(logprob_P: Tensor) -> Tensor:
    """log(p / (1 - p))."""
    held_P = logprob_P.clamp(max=-1e-12) if logprob_P.dtype == torch.float64 else logprob_P.clamp(max=-1e-7)
    return held_P - torch.log(-torch.expm1(held_P))


def kto(
    chosen_ratio_P: Tensor,
    rejected_ratio_P: Tensor,
    *,
    beta: float,
    point: float | Tensor,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Prospect theory's value of a gain and a loss against a reference point: each response is judged for itself.

    Shapes:  log pi / pi_ref of chosen and rejected [P] -> [P]: the mean of a pair's two losses
    Maths:   1/2 [w_d (1 - sigmoid(beta (r_w - z))) + w_u (1 - sigmoid(beta (z - r_l)))], z from `kl_point`
    Source:  Ethayarajh et al. 2024, eq. 8 (there: lambda_y - v, which is the same)
    Others:  TRL's KTOTrainer means over single examples; on pairs, of which every response is one, that is the same.
    """
    desirable_P = desirable_weight * torch.sigmoid(-beta * (chosen_ratio_P - point))
    undesirable_P = undesirable_weight * torch.sigmoid(-beta * (point - rejected_ratio_P))
    return 0.5 * (desirable_P + undesirable_P)


def kl_point(mismatched_ratio_M: Tensor) -> Tensor:
    """KTO's reference point z: how far the policy is from the reference, from responses to other prompts.

    Shapes:  log pi(y' | x) / pi_ref(y' | x) of M prompts, each with a response to another prompt -> 0-d, no gradient
    Maths:   max(0, mean)
    Source:  Ethayarajh et al. 2024, section 4.1: the mean is over the (micro-)batch
    Others:  TRL means over the forwards of all ranks together, so its point follows the micro-batch. The caller hands
             in the whole mini-batch.
    """
    return mismatched_ratio_M.detach().mean().clamp(min=0.0)
