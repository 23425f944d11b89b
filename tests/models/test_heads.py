"""The scalar head. Not covered: sequence parallelism (tests/distributed)."""

from types import SimpleNamespace

import torch

from megarlhf.models.build import fuse_weight_gradients
from megarlhf.models.heads import ScalarHead
from tests.refuses import refuses


def head(dtype, weight):
    config = SimpleNamespace(sequence_parallel=False, hidden_size=len(weight), params_dtype=dtype)
    made = ScalarHead(config, SimpleNamespace(tp=None))
    with torch.no_grad():
        made.weight.copy_(torch.tensor([weight]))
    return made


def test_scores_closer_than_a_step_of_bf16_are_told_apart():
    """Between 16 and 32 numbers of bf16 are 1/8 apart. Four siblings score 20, 20 + 1/64, 20 + 2/64 and 20 + 3/64."""
    scalar = head(torch.bfloat16, [1.0, 1.0])
    hidden_SBH = torch.tensor([[[20.0, n / 64]] for n in range(4)], dtype=torch.bfloat16, requires_grad=True)
    scores_SB1, bias = scalar(hidden_SBH)
    assert bias is None
    assert scores_SB1.dtype == torch.float32
    assert scores_SB1.flatten().tolist() == [20.0, 20.015625, 20.03125, 20.046875]
    in_bf16 = torch.nn.functional.linear(hidden_SBH, scalar.weight)
    assert in_bf16.unique().tolist() == [20.0], "the product in bf16 does not tell them apart"

    (scores_SB1.flatten() * torch.tensor([1.0, -1.0, 2.0, 1 / 256])).sum().backward()
    assert scalar.weight.dtype == scalar.weight.grad.dtype == torch.bfloat16
    # Of the first input: 20 x (1 - 1 + 2 + 1/256), rounded once; of the second: 1/64 x (-1 + 4 + 3/256).
    expected = torch.tensor([20 * (2 + 1 / 256), (3 + 3 / 256) / 64]).bfloat16()
    assert torch.equal(scalar.weight.grad[0], expected)
    assert hidden_SBH.grad[:, 0, 0].tolist() == [1.0, -1.0, 2.0, 1 / 256]


def test_in_fp32_the_head_is_the_plain_product():
    scalar = head(torch.float32, [0.3, -0.7, 0.1])
    hidden_SBH = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(scalar(hidden_SBH)[0], torch.nn.functional.linear(hidden_SBH, scalar.weight))


class FusedLayer(torch.nn.Linear):
    """As TransformerEngine's: the attribute is read in every forward."""

    fuse_wgrad_accumulation = False


def test_weight_gradients_are_fused_where_a_layer_can():
    plain, fused = torch.nn.Linear(2, 2), FusedLayer(2, 2)
    fuse_weight_gradients(torch.nn.Sequential(plain, torch.nn.Sequential(fused)))
    assert fused.fuse_wgrad_accumulation is True
    assert not hasattr(plain, "fuse_wgrad_accumulation")
    with refuses("transformer-engine", "requirements/transformer-engine.txt", error=RuntimeError):
        fuse_weight_gradients(plain)
