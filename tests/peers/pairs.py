"""Losses on preference pairs, on both sides: the first half of the responses is chosen, the second half rejected.

The mismatched log-ratios of KTO's reference point come from the old and the engine's log-probs.
"""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from megarlhf.algo import losses, preference
from tests.peers.inputs import Inputs, N, T

BETA = 0.3
LossOf = Callable[[Tensor], Tensor]


def with_gradient(inputs: Inputs, loss_of: LossOf, *, old: bool = False) -> list[float]:
    """The loss and its gradient at each response token. `old`: at log-probs of which none is above 0, as odds need."""
    logprobs_NT = (inputs.old_logprobs_NT if old else inputs.logprobs_NT).clone().requires_grad_()
    loss = loss_of(logprobs_NT)
    (gradient_NT,) = torch.autograd.grad(loss, logprobs_NT)
    return [float(loss), *inputs.tokens(gradient_NT).tolist()]


# --- ours -----------------------------------------------------------------------------------------


def ours(inputs: Inputs, *, loss: str, means: bool = False, sft: bool = False, **options: Any) -> list[float]:
    """The function of this name, from sums or means over tokens; the mean over pairs. `sft`: with the likelihood of
    the chosen tokens, averaged over all of them."""

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        lengths_N = inputs.lengths_N if means else torch.ones(N)
        if loss in ("simpo", "orpo"):
            numbers_N = logprobs_NT.sum(1) / lengths_N
        else:
            numbers_N = (logprobs_NT - inputs.ref_logprobs_NT).sum(1) / lengths_N
        chosen_P, rejected_P = numbers_N.chunk(2)
        if loss in ("dpo", "ipo"):
            loss_P = getattr(preference, loss)(chosen_P - rejected_P, beta=BETA, **options)
        elif loss == "kto":
            ratio_N = (inputs.old_logprobs_NT - inputs.rollout_logprobs_NT).sum(1)
            point = preference.kl_point(ratio_N)
            loss_P = preference.kto(chosen_P, rejected_P, beta=BETA, point=point, **options)
        elif loss == "simpo":
            loss_P = preference.simpo(chosen_P, rejected_P, beta=BETA, **options)
        else:
            loss_P = BETA * preference.orpo(chosen_P, rejected_P)
        nll = -logprobs_NT[: N // 2].sum() / inputs.lengths_N[: N // 2].sum()
        return loss_P.mean() + (0.5 * nll if sft else 0.0)

    return with_gradient(inputs, loss_of, old=loss == "orpo")


def _score_gradient(inputs: Inputs, loss_of: LossOf) -> list[float]:
    """The loss of a reward model whose scores are the rewards, and its gradient at each."""
    scores_N = inputs.greedy_N.clone().requires_grad_()
    loss = loss_of(scores_N)
    return [float(loss), *torch.autograd.grad(loss, scores_N)[0].tolist()]


def our_scores(inputs: Inputs, *, margin: bool = False, center: float = 0.0) -> list[float]:
    """The ranking loss on one score a response; the margins are those of `_margins_P`."""

    def loss_of(scores_N: Tensor) -> Tensor:
        chosen_P, rejected_P = scores_N.chunk(2)
        margin_P = _margins_P(inputs) if margin else None
        loss = losses.pairwise_ranking(chosen_P, rejected_P, denominator=N // 2, margin_N=margin_P)
        return loss + center * losses.centering(chosen_P, rejected_P, denominator=N // 2)

    return _score_gradient(inputs, loss_of)


def _margins_P(inputs: Inputs) -> Tensor:
    return inputs.advantages_N[: N // 2].abs()


# --- theirs ---------------------------------------------------------------------------------------


def trl_reward(
    inputs: Inputs, *, importable: Callable[[str], Any], margin: bool = False, center: float | None = None
) -> list[float]:
    """`RewardTrainer.compute_loss`."""
    trainer = importable("trl.trainer.reward_trainer").RewardTrainer

    def loss_of(scores_N: Tensor) -> Tensor:
        fake = _stand_in()
        fake.args.configure_mock(center_rewards_coefficient=center)
        batch = {"attention_mask": torch.ones(N, 1)} | ({"margin": _margins_P(inputs)} if margin else {})
        return trainer.compute_loss(fake, lambda **_: SimpleNamespace(logits=scores_N[:, None]), batch)

    return _score_gradient(inputs, loss_of)


def openrlhf_reward(inputs: Inputs, *, importable: Callable[[str], Any], margin: bool = False) -> list[float]:
    """`PairWiseLoss`."""
    loss = importable("openrlhf.models.loss").PairWiseLoss()
    margins = [_margins_P(inputs)] if margin else []
    return _score_gradient(inputs, lambda scores_N: loss(*scores_N.chunk(2), *margins))


def _fake_model(by_marker: dict[int, Tensor], mask_NT: Tensor) -> Any:
    """What TRL's patched models return, by the first token of `input_ids`."""

    def model(*, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        some_NT = torch.zeros(N, T)
        return SimpleNamespace(
            log_probs=by_marker[int(input_ids[0, 0])] * mask_NT, entropy=some_NT, mean_logits=some_NT,
            is_top1=some_NT.bool(),
        )  # fmt: skip

    return model


def _stand_in(**settings: Any) -> MagicMock:
    fake = MagicMock()
    fake.configure_mock(
        aux_loss_enabled=False, precompute_ref_logps=False, beta=BETA, _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0, _tp_size=1, **settings,
    )  # fmt: skip
    fake.accelerator.configure_mock(device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x)
    fake.args.configure_mock(gradient_checkpointing=False, gradient_checkpointing_kwargs=None)
    fake.model.training = True
    return fake


def _tokens(inputs: Inputs, marker: int) -> dict[str, Tensor]:
    """A prompt of one token, which says which of the model's answers is meant, before each response."""
    mask_NT = torch.cat([torch.zeros(N, 1), inputs.mask_NT], 1).long()
    return {"input_ids": torch.full((N, 1 + T), marker), "attention_mask": mask_NT, "completion_mask": mask_NT}


def trl_dpo(inputs: Inputs, *, importable: Callable[[str], Any], kinds: dict[str, float]) -> list[float]:
    """`DPOTrainer._compute_loss` with these loss types and weights."""
    module = importable("trl.trainer.dpo_trainer")

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        fake = _stand_in(
            ld_alpha=None,
            f_divergence_type="reverse_kl",
            loss_types=list(kinds),
            loss_weights=list(kinds.values()),
            label_smoothing=0.0,
            use_weighting=False,
            ref_model=_fake_model({1: inputs.ref_logprobs_NT}, inputs.mask_NT),
        )
        model = _fake_model({1: logprobs_NT}, inputs.mask_NT)
        return module.DPOTrainer._compute_loss(fake, model, _tokens(inputs, 1), False)

    return with_gradient(inputs, loss_of)


def trl_kto(inputs: Inputs, *, importable: Callable[[str], Any], **weights: float) -> list[float]:
    """`KTOTrainer._compute_loss`, with `_compute_kl_logps` for the mismatched ones."""
    module = importable("trl.trainer.kto_trainer")

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        reference = {1: inputs.ref_logprobs_NT, 2: inputs.rollout_logprobs_NT}
        fake = _stand_in(
            calculate_KL=True, loss_type="kto", ref_model=_fake_model(reference, inputs.mask_NT), **weights
        )
        fake._compute_kl_logps = lambda model, batch: module.KTOTrainer._compute_kl_logps(fake, model, batch)
        model = _fake_model({1: logprobs_NT, 2: inputs.old_logprobs_NT}, inputs.mask_NT)
        other = {f"KL_{name}": value for name, value in _tokens(inputs, 2).items()}
        batch = {**_tokens(inputs, 1), **other, "label": torch.arange(N) < N // 2}
        return module.KTOTrainer._compute_loss(fake, model, batch, False)

    return with_gradient(inputs, loss_of)


def trl_simpo(inputs: Inputs, *, importable: Callable[[str], Any], margin: float, smoothing: float) -> list[float]:
    """`CPOTrainer.cpo_loss`, as it is with SimPO's mean log-probs."""
    trainer = importable("trl.experimental.cpo.cpo_trainer").CPOTrainer
    fake = _stand_in(alpha=0.0, loss_type="simpo", simpo_gamma=margin, label_smoothing=smoothing)

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        chosen_P, rejected_P = (logprobs_NT.sum(1) / inputs.lengths_N).chunk(2)
        return trainer.cpo_loss(fake, chosen_P, rejected_P)[0].mean()

    return with_gradient(inputs, loss_of)


def trl_orpo(inputs: Inputs, *, importable: Callable[[str], Any]) -> list[float]:
    """`ORPOTrainer.odds_ratio_loss`, which is subtracted; it computes in fp32."""
    trainer = importable("trl.experimental.orpo.orpo_trainer").ORPOTrainer

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        chosen_P, rejected_P = (logprobs_NT.sum(1) / inputs.lengths_N).chunk(2)
        return -trainer.odds_ratio_loss(_stand_in(), chosen_P, rejected_P)[0].mean()

    return with_gradient(inputs, loss_of, old=True)


def openrlhf_dpo(inputs: Inputs, *, importable: Callable[[str], Any], **options: Any) -> list[float]:
    """`DPOLoss`."""
    loss = importable("openrlhf.models.loss").DPOLoss(BETA, **options)

    def loss_of(logprobs_NT: Tensor) -> Tensor:
        reference = inputs.ref_logprobs_NT.sum(1).chunk(2)
        return loss(*logprobs_NT.sum(1).chunk(2), *reference)[0]

    return with_gradient(inputs, loss_of)
