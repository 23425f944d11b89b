"""What the packed functions refuse, in words.

Not covered: the device assertion that stands for the look at cu_seqlens on a GPU (interpreted_packed.py has the
kernels').
"""

import logging

import pytest
import torch

from megarlhf.kernels import backends, packed_gae, packed_moments, packed_sums
from megarlhf.kernels import packed_whiten as whiten

X_T = torch.arange(5.0)
SCORES_N = torch.ones(2)
CU = torch.tensor([0, 2, 5])


def gae(cu_seqlens=CU, *, logprobs_T=X_T, ref_T=X_T, values_T=X_T, scores_N=SCORES_N, **options):
    options = {"gamma": 1.0, "lam": 1.0, "kl_coef": 0.1} | options
    return packed_gae(logprobs_T, ref_T, values_T, scores_N, cu_seqlens, **options)


BORDERS = [
    ([1, 2, 5], r"cu_seqlens begins with 1; give int32 or int64 \[N \+ 1\]: 0 first"),
    ([0, 4, 2, 5], r"cu_seqlens falls from 4 to 2 at sequence 1;"),
    ([0, 6, 5], r"cu_seqlens falls from 6 to 5 at sequence 1;"),
    ([0, 2, 4], r"cu_seqlens ends with 4, but there are 5 tokens; .* where each sequence ends, 5 last"),
    ([0, 2, 6], r"cu_seqlens ends with 6, but there are 5 tokens"),
    ([0], r"cu_seqlens ends with 0, but there are 5 tokens"),
    ([[0, 5]], r"cu_seqlens is torch.int64 \[1, 2\]; give int32 or int64"),
    ([0.0, 5.0], r"cu_seqlens is torch.float32 \[2\]; give int32 or int64"),
]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("cu_seqlens, message", BORDERS)
def test_borders(cu_seqlens, message, backend):
    cu_seqlens = torch.tensor(cu_seqlens)
    calls = [
        lambda: gae(cu_seqlens, backend=backend),
        lambda: packed_sums(X_T, cu_seqlens, backend=backend),
        lambda: packed_moments(X_T, cu_seqlens, backend=backend),
        lambda: whiten(X_T, cu_seqlens=cu_seqlens, backend=backend),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_no_borders_at_all():
    with pytest.raises(ValueError, match=r"cu_seqlens is empty; .* \(for no sequence \[0\]\)"):
        gae(torch.empty(0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"cu_seqlens ends with 5, but there are 0 tokens"):
        packed_sums(X_T[:0], CU)


def test_borders_on_another_device():
    """The CPU's are taken anywhere; those of a device that is not the tokens' are not."""
    with pytest.raises(ValueError, match=r"cu_seqlens is on meta, the tokens on cpu; move it there; or give it on the"):
        gae(CU.to("meta"))


@pytest.mark.parametrize("scores_N", [torch.ones(3), torch.ones(2, 1), torch.ones(2).long()])
def test_scores(scores_N):
    with pytest.raises(ValueError, match=r"scores_N is .* for 2 sequences \(cu_seqlens has 3 entries\); give floats"):
        gae(scores_N=scores_N)


@pytest.mark.parametrize("name", ["logprobs_T", "ref_T", "values_T"])
@pytest.mark.parametrize("column_T", [X_T.long(), X_T[:, None], X_T[:4], X_T.to("meta")])
def test_columns(name, column_T):
    with pytest.raises(
        ValueError, match=r"of one dimension: the tokens|one number a token in each|on (meta|cpu), the tokens on"
    ):
        gae(**{name: column_T})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ref_T": None}, "kl_coef = 0.1 needs the reference's log-probs, got None"),
        ({"kl_coef": -0.1}, r"kl_coef = -0.1; give a number of 0 or more"),
        ({"kl_coef": float("nan")}, r"kl_coef = nan"),
        ({"kl_kind": "k4"}, "unknown KL estimator 'k4'; the known ones are k1, k2, k3"),
        ({"token_rewards_T": torch.zeros(6)}, r"kl_coef = 0.1 beside token_rewards_T; add the KL to these"),
        ({"gamma": 1.5}, "gamma = 1.5; give a number from 0 to 1"),
        ({"lam": -0.1}, "lam = -0.1"),
        ({"lam": float("nan")}, "lam = nan"),
        ({"backend": "chunked"}, "backend 'chunked' is not known; use auto, triton, torch or reference"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        gae(**options)
    gae()


@pytest.mark.parametrize("mask_T", [torch.ones(4).bool(), torch.ones(5), torch.ones(5, 1).bool()])
def test_masks(mask_T):
    for call in (lambda: packed_sums(X_T, CU, mask_T), lambda: whiten(X_T, mask_T)):
        with pytest.raises(ValueError, match=r"mask_T is .* for 5 tokens; give bool \[5\]"):
            call()


@pytest.mark.parametrize("groups_N", [torch.ones(2), torch.ones(3).long(), torch.ones(2).bool()])
def test_groups(groups_N):
    with pytest.raises(ValueError, match=r"groups_N is .* for 2 sequences .* give integers \[2\]"):
        packed_sums(X_T, CU, groups_N=groups_N)
    with pytest.raises(ValueError, match="groups_N are groups of sequences, got no cu_seqlens"):
        whiten(X_T, groups_N=torch.ones(2).long())


def test_moments_of_something_else():
    with pytest.raises(ValueError, match="moments are of 2 sequences, x_T has 1"):
        whiten(X_T, moments=packed_moments(X_T, CU))


def test_gradients_are_not_lost_silently():
    leaf_T = X_T.clone().requires_grad_()
    for call in (lambda: packed_sums(leaf_T, CU), lambda: packed_moments(leaf_T, CU), lambda: whiten(leaf_T)):
        with pytest.raises(ValueError, match=r"x_T wants a gradient, .* give none; detach\(\) it"):
            call()


def test_triton_on_a_cpu_and_in_fp64(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="packed kernels needs a GPU, this is a CPU; use auto or torch, or set"):
        gae(backend="triton")
    with pytest.raises(ValueError, match="the triton backend computes in fp32, got fp64; use auto, torch or reference"):
        gae(values_T=X_T.double(), backend="triton")


def test_the_choice_is_logged_once(caplog):
    backends.log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="megarlhf.kernels.backends"):
        for _ in range(2):
            gae()
            packed_sums(X_T.double(), CU)
    messages = [record.message for record in caplog.records]
    assert messages == [
        "packed kernels on cpu: torch (the fastest here)",
        "packed kernels on cpu, fp64: torch (the fastest here)",
    ]
