"""What the packed functions refuse, in words.

Not covered: the device assertion that stands for the look at cu_seqlens on a GPU (interpreted_packed.py has the
kernels').
"""

import logging

import pytest
import torch

from megarlhf.kernels import backends, packed_gae, packed_moments, packed_sums
from megarlhf.kernels import packed_whiten as whiten
from tests.refuses import refuses

X_T = torch.arange(5.0)
SCORES_N = torch.ones(2)
CU = torch.tensor([0, 2, 5])


def gae(cu_seqlens=CU, *, logprobs_T=X_T, ref_T=X_T, values_T=X_T, scores_N=SCORES_N, **options):
    options = {"gamma": 1.0, "lam": 1.0, "kl_coef": 0.1} | options
    return packed_gae(logprobs_T, ref_T, values_T, scores_N, cu_seqlens, **options)


LAYOUT = "int32 or int64 [N + 1]"
BORDERS = [
    ([1, 2, 5], ("begins with 1", LAYOUT)), ([0, 4, 2, 5], ("from 4 to 2", "sequence 1")),
    ([0, 6, 5], ("from 6 to 5", "sequence 1")), ([0, 2, 4], ("ends with 4", "5 tokens", "5 last")),
    ([0, 2, 6], ("ends with 6", "5 tokens")), ([0], ("ends with 0", "5 tokens")),
    ([[0, 5]], ("torch.int64 [1, 2]", LAYOUT)), ([0.0, 5.0], ("torch.float32 [2]", LAYOUT)),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("cu_seqlens, names", BORDERS)
def test_borders(cu_seqlens, names, backend):
    cu_seqlens = torch.tensor(cu_seqlens)
    calls = [
        lambda: gae(cu_seqlens, backend=backend),
        lambda: packed_sums(X_T, cu_seqlens, backend=backend),
        lambda: packed_moments(X_T, cu_seqlens, backend=backend),
        lambda: whiten(X_T, cu_seqlens=cu_seqlens, backend=backend),
    ]
    for call in calls:
        with refuses("cu_seqlens", *names):
            call()


LEAF_T = X_T.clone().requires_grad_()
REFUSED = {
    "no borders": (lambda: gae(torch.empty(0, dtype=torch.int64)), ("cu_seqlens", "empty", "[0]")),
    "no tokens": (lambda: packed_sums(X_T[:0], CU), ("cu_seqlens", "ends with 5", "0 tokens")),
    # The CPU's are taken anywhere; those of a device that is not the tokens' are not.
    "borders elsewhere": (lambda: gae(CU.to("meta")), ("cu_seqlens", "meta", "cpu", "move it", "on the CPU")),
    "groups without borders": (lambda: whiten(X_T, groups_N=torch.ones(2).long()), ("groups_N", "cu_seqlens")),
    "moments of others": (lambda: whiten(X_T, moments=packed_moments(X_T, CU)), ("moments", "2 sequences", "1")),
    "gradients of sums": (lambda: packed_sums(LEAF_T, CU), ("x_T", "gradient", "detach()")),
    "gradients of moments": (lambda: packed_moments(LEAF_T, CU), ("x_T", "gradient", "detach()")),
    "gradients of whitening": (lambda: whiten(LEAF_T), ("x_T", "gradient", "detach()")),
    "fp64 by Triton": (lambda: gae(values_T=X_T.double(), backend="triton"), ("triton", "fp64", "torch", "reference")),
}


@pytest.mark.parametrize("call, names", REFUSED.values(), ids=REFUSED)
def test_refused(call, names):
    with refuses(*names):
        call()


@pytest.mark.parametrize("scores_N", [torch.ones(3), torch.ones(2, 1), torch.ones(2).long()])
def test_scores(scores_N):
    with refuses("scores_N", "2 sequences", "3 entries", "floats [2]"):
        gae(scores_N=scores_N)


@pytest.mark.parametrize("name", ["logprobs_T", "ref_T", "values_T"])
@pytest.mark.parametrize(
    "column_T, wrong", [(X_T.long(), "int64"), (X_T[:, None], "[5, 1]"), (X_T[:4], "4"), (X_T.to("meta"), "meta")]
)
def test_columns(name, column_T, wrong):
    with refuses(wrong):
        gae(**{name: column_T})


@pytest.mark.parametrize(
    "options, names",
    [
        ({"ref_T": None}, ("kl_coef = 0.1", "ref_logprobs_T", "None", "kl_coef = 0")),
        ({"kl_coef": -0.1}, ("kl_coef = -0.1", "0 or more")),
        ({"kl_coef": float("nan")}, ("kl_coef = nan",)),
        ({"kl_kind": "k4"}, ("'k4'", "k1, k2, k3")),
        ({"token_rewards_T": torch.zeros(6)}, ("kl_coef = 0.1", "token_rewards_T", "kl_coef = 0")),
        ({"gamma": 1.5}, ("gamma = 1.5", "0 to 1")),
        ({"lam": -0.1}, ("lam = -0.1",)),
        ({"lam": float("nan")}, ("lam = nan",)),
        ({"backend": "chunked"}, ("'chunked'", "auto, triton, torch or reference")),
    ],
)
def test_options(options, names):
    with refuses(*names):
        gae(**options)
    gae()


@pytest.mark.parametrize("mask_T", [torch.ones(4).bool(), torch.ones(5), torch.ones(5, 1).bool()])
def test_masks(mask_T):
    for call in (lambda: packed_sums(X_T, CU, mask_T), lambda: whiten(X_T, mask_T)):
        with refuses("mask_T", "5 tokens", "bool [5]"):
            call()


@pytest.mark.parametrize("groups_N", [torch.ones(2), torch.ones(3).long(), torch.ones(2).bool()])
def test_groups(groups_N):
    with refuses("groups_N", "2 sequences", "integers [2]"):
        packed_sums(X_T, CU, groups_N=groups_N)


def test_triton_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with refuses("packed kernels", "GPU", "CPU", "auto or torch", "TRITON_INTERPRET=1"):
        gae(backend="triton")


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
