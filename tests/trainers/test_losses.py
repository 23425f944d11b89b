"""SFT's and the policy's loss on hidden states, against autograd through all logits, in fp64.

Not covered: tensor and pipeline parallelism (tests/distributed/test_vocabulary.py), algo's formulas (tests/algo).
"""

import pytest
import torch

from megarlhf.config import AlgoConfig
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.parallel.vocab import Vocabulary
from megarlhf.trainers.rl.losses import PolicyLoss
from megarlhf.trainers.supervised.sft import NextTokenLoss

B, S, H, PADDED, TRUE, TEMPERATURE = 3, 5, 6, 2304, 2200, 0.8
BACKENDS = ["chunked", "reference"]
IN_LOSS = {"coef": 0.2, "placement": "loss", "estimator": "k3"}


class Case:
    """Hidden states, a matrix of several slices, a batch with two rows of responses and one without."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.hidden_SBH = torch.randn(S, B, H, dtype=torch.float64, generator=generator).requires_grad_()
        self.weight_VH = (0.8 * torch.randn(PADDED, H, dtype=torch.float64, generator=generator)).requires_grad_()
        mask_BS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
        old_BS = -7.0 + torch.randn(B, S, dtype=torch.float64, generator=generator)
        columns = {
            "response_mask": mask_BS,
            "sample_numbers": torch.arange(B)[:, None].expand(B, S),
            "loss_weights": torch.full((B, S), 1 / 8, dtype=torch.float64),
            "old_logprobs": old_BS,
            "ref_logprobs": old_BS + 0.1,
            "advantages": torch.randn(B, S, dtype=torch.float64, generator=generator),
        }
        self.batch = MicroBatch(torch.randint(TRUE, (B, S), generator=generator), columns)

    def vocabulary(self, backend, save_bytes=2**28):
        return Vocabulary(self.weight_VH, TRUE, None, backend=backend, save_bytes=save_bytes)

    def policy_loss(self, backend, save_bytes=2**28, *, corrects_all=False, **algo):
        """Of 8 response tokens, some in other micro-batches."""
        vocabulary = self.vocabulary(backend, save_bytes)
        cfg = AlgoConfig.model_validate(algo)
        loss = PolicyLoss(
            algo=cfg,
            temperature=TEMPERATURE,
            response_tokens=8,
            vocabulary=vocabulary,
            kl_coef=cfg.kl.coef,
            entropy_coef=cfg.entropy_coef,
            corrects_all=corrects_all,
        )
        return loss(self.hidden_SBH, self.batch)

    def gradients(self, loss):
        return torch.autograd.grad(loss, (self.hidden_SBH, self.weight_VH))

    def all_logprobs(self, temperature):
        """[B, S, V] of the true vocabulary, at each token that they are the distribution of: of the first there is
        none."""
        logits_SBV = self.hidden_SBH.roll(1, dims=0) @ self.weight_VH[:TRUE].t() / temperature
        return logits_SBV.log_softmax(-1).transpose(0, 1)

    def of_tokens(self, temperature):
        return self.all_logprobs(temperature).gather(2, self.batch.tokens_BS[..., None])[..., 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sft_loss_and_gradients(backend):
    """Minus the mean over the mini-batch's 20 response tokens, at temperature 1."""
    case = Case()
    mask_BS = case.batch.columns["response_mask"]
    loss, *_ = NextTokenLoss(denominator=20, vocabulary=case.vocabulary(backend))(case.hidden_SBH, case.batch)
    expected = -case.of_tokens(1.0)[mask_BS].sum() / 20
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(case.gradients(loss), case.gradients(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("save_bytes", [0, 5 * 1024 * 8, 2**28])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_entropy_bonus_has_the_gradient_of_the_entropy_through_all_logits(backend, save_bytes):
    """What entropy_coef = .3 adds to the policy's gradient is that of -.3 x mean entropy of the tempered softmax; with
    logits made again, one slice kept, all kept."""
    case = Case()
    with_bonus, sums, _ = case.policy_loss(backend, save_bytes, entropy_coef=0.3)
    without, *_ = case.policy_loss(backend, save_bytes, entropy_coef=0.0)
    logprobs_BSV = case.all_logprobs(TEMPERATURE)
    mask_BS = case.batch.columns["response_mask"]
    entropy_sum = -(logprobs_BSV.exp() * logprobs_BSV).sum(-1)[mask_BS].sum()
    torch.testing.assert_close(sums[2], entropy_sum.detach(), rtol=1e-10, atol=0)
    expected = case.gradients(-0.3 * entropy_sum / 8)
    assert all(float(gradient.norm()) > 1e-3 for gradient in expected), "the entropy has no gradient here"
    pairs = zip(case.gradients(with_bonus), case.gradients(without), strict=True)
    torch.testing.assert_close(tuple(a - b for a, b in pairs), expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kl", [{}, IN_LOSS, IN_LOSS | {"ratio_weighted": True}])
def test_the_policy_s_gradient_through_all_logits(backend, kl):
    """Clipped surrogate and KL written out; entropy is reported and, without a coefficient, has no gradient."""
    case = Case()
    loss, sums, _ = case.policy_loss(backend, kl=kl)
    columns, mask_BS = case.batch.columns, case.batch.columns["response_mask"]
    logprobs_T = case.of_tokens(TEMPERATURE)[mask_BS]
    ratio_T = (logprobs_T - columns["old_logprobs"][mask_BS]).exp()
    advantage_T = columns["advantages"][mask_BS]
    expected = -torch.minimum(ratio_T * advantage_T, ratio_T.clamp(0.8, 1.2) * advantage_T).sum() / 8
    if kl:
        gap_T = columns["ref_logprobs"][mask_BS] - logprobs_T
        weight_T = ratio_T if "ratio_weighted" in kl else 1.0
        expected = expected + 0.2 * (weight_T * (gap_T.exp() - 1 - gap_T)).sum() / 8
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(case.gradients(loss), case.gradients(expected), rtol=1e-8, atol=1e-11)
    assert float(sums[2]) > 5.0


@pytest.mark.parametrize("corrects_all", [False, True])
def test_weights_of_the_correction_are_those_of_kl_and_entropy_too_where_samples_are_stale(corrects_all):
    """A weight w of every token multiplies the surrogate, and the whole loss if older weights drew samples."""
    plain, corrected = Case(), Case()
    corrected.batch.columns["rollout_weights"] = torch.full((B, S), 0.25, dtype=torch.float64)
    for algo in ({"kl": IN_LOSS}, {"entropy_coef": 0.3}):
        whole, sums, _ = plain.policy_loss("reference", **algo)
        loss, *_ = corrected.policy_loss("reference", corrects_all=corrects_all, **algo)
        surrogate = float(sums[0])
        others = float(whole) - surrogate
        assert abs(others) > 1e-3
        assert float(loss) == pytest.approx(0.25 * surrogate + (0.25 if corrects_all else 1.0) * others, rel=1e-9)


def test_megatron_s_gradient_buffer_gets_the_matrix_s_gradient_and_autograd_none():
    """Added to what an earlier micro-batch left; a frozen matrix has no buffer and needs none."""
    case = Case()
    loss, *_ = case.policy_loss("chunked", entropy_coef=0.3)
    expected = case.gradients(loss)[1]
    case.weight_VH.main_grad = torch.ones_like(case.weight_VH)
    case.policy_loss("chunked", entropy_coef=0.3)[0].backward()
    assert case.weight_VH.grad is None
    assert float(expected.norm()) > 0
    torch.testing.assert_close(case.weight_VH.main_grad, 1.0 + expected)
    frozen = Case()
    frozen.weight_VH.requires_grad_(False)
    frozen.policy_loss("chunked", entropy_coef=0.3)[0].backward()
    torch.testing.assert_close(frozen.hidden_SBH.grad, case.hidden_SBH.grad)
