"""What only Triton's packed kernels do. test_packed_triton.py runs this with their interpreter.

Not covered here: that a GPU's code compiles and scans as the interpreter does, several streams or devices.
"""

import dataclasses

import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from megarlhf.kernels import (
    packed,
    packed_gae,
    packed_reference,
    packed_sums,
    packed_torch,
    packed_triton,
    packed_whiten,
)
from megarlhf.kernels.packed_inputs import CuSeqlens, GAEInputs
from megarlhf.kernels.packed_triton import LaunchConfig
from tests.kernels.packed_cases import assert_no_worse, columns, cu_seqlens_of

HOW = {"gamma": 0.99, "lam": 0.95, "kl_coef": 0.1, "kl_kind": "k3"}
LENGTHS = [700, 0, 128, 1, 129]
SMALL = LaunchConfig(tokens=128, warps=1, programs=64, blocks=1)
"""Blocks of 128 tokens, eight parts a sequence, most of them empty."""


def made(lengths=LENGTHS):
    cu_seqlens = cu_seqlens_of(lengths)
    return CuSeqlens(cu_seqlens, sum(lengths), max(lengths)), columns(lengths)


def launches(monkeypatch, kernel):
    """(grid, what is constant) of each launch."""
    noted, run = [], kernel.run

    def noting(*args, **kwargs):
        noted.append((kwargs["grid"], kwargs.get("REDUCE")))
        return run(*args, **kwargs)

    monkeypatch.setattr(kernel, "run", noting, raising=False)
    return noted


def test_cut_sequences_are_as_exact_as_whole_ones(monkeypatch):
    """Two launches where sequences are few, one where they are many; parts without a token change nothing."""
    noted = launches(monkeypatch, packed_triton._scan_kernel)
    where, inputs = made()
    truth = packed_reference.gae(GAEInputs(*(column.double() for column in inputs), **HOW), where)
    loop = packed_reference.gae(GAEInputs(*inputs, **HOW), where)
    assert SMALL.parts(len(LENGTHS), sum(LENGTHS)) == 8
    for launch, grids in ((SMALL, [((5, 8), True), ((5, 8), False)]), (LaunchConfig(tokens=128), [((5, 1), False)])):
        noted.clear()
        assert_no_worse(packed_triton.gae(GAEInputs(*inputs, **HOW), where, launch), loop, truth)
        assert noted == grids


@pytest.mark.parametrize("masked", [False, True])
def test_moments_and_whitening_of_cut_sequences(masked):
    where, (_, _, x_T, _) = made()
    mask_T = x_T > 0 if masked else None
    moments_N3 = packed_triton.moments(x_T, mask_T, where, SMALL)
    torch.testing.assert_close(moments_N3, packed_torch.moments(x_T, mask_T, where), rtol=1e-13, atol=1e-13)
    numbers = (where, moments_N3[:, 0], moments_N3[:, 1], False)
    expected_T = packed_torch.whiten(x_T, mask_T, *numbers)
    assert torch.equal(packed_triton.whiten(x_T, mask_T, *numbers, SMALL), expected_T)
    assert torch.count_nonzero(expected_T) > 300


def test_when_sequences_are_cut():
    """1024 of 8192 tokens: no. 16 of them: into 64 parts, of which 16 have a block. Short ones: no."""
    launch = LaunchConfig()
    assert launch.parts(1024, 1024 * 8192) == launch.parts(256, 256 * 8192) == 1
    assert launch.parts(16, 16 * 8192) == 64
    assert launch.parts(1, 8192) == 16
    assert launch.parts(16, 16 * 2048) == launch.parts(1, 0) == launch.parts(1, 1) == 1


def test_blocks_fit_short_sequences():
    """As long as the longest sequence, 128 at least; four tokens a thread or more."""
    blocks = [LaunchConfig().fitted(CuSeqlens(cu_seqlens_of([size]), size, size)) for size in (0, 129, 300, 9999)]
    assert blocks == [(128, 1), (256, 2), (512, 4), (512, 4)]


@pytest.mark.parametrize(
    "cu_seqlens, message",
    [
        ([1, 2, 5], "does not begin with 0"),
        ([0, 4, 2, 5], "cu_seqlens falls"),
        ([0, 2, 4], "does not end with the last token"),
        ([0, 6, 5], "past the last token"),
    ],
)
def test_bad_borders_trip_the_kernels_assertions(monkeypatch, cu_seqlens, message):
    """The interpreter leaves out device assertions unless told otherwise; with them it also checks for overflow."""
    options = dataclasses.replace(interpreter.interpreter_builder.options, debug=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    monkeypatch.setattr(packed, "require_cu_seqlens", lambda cu, x_T, asserted: len(x_T))
    x_T = torch.arange(8.0)[:5]
    scores_N = torch.ones(len(cu_seqlens) - 1)

    def calls(cu_seqlens):
        some = {"cu_seqlens": cu_seqlens, "backend": "triton"}
        return [
            lambda: packed_gae(x_T, x_T, x_T, scores_N, gamma=1.0, lam=1.0, kl_coef=0.1, **some),
            lambda: packed_sums(x_T, **some),
            lambda: packed_whiten(x_T, moments=packed.Moments(*torch.ones(3, len(scores_N))), **some),
        ]

    for call in calls(torch.tensor([0, *range(1, len(scores_N)), 5])):
        call()
    for call in calls(torch.tensor(cu_seqlens)):
        with pytest.raises(InterpreterError, match=rf"AssertionError.*{message}"):
            call()


@pytest.mark.parametrize("tokens, warps", [(128, 1), (1024, 2)])
def test_other_blocks_give_the_same_values(tokens, warps):
    where, inputs = made()
    usual = packed_triton.gae(GAEInputs(*inputs, **HOW), where)
    other = packed_triton.gae(GAEInputs(*inputs, **HOW), where, LaunchConfig(tokens=tokens, warps=warps))
    for output, expected in zip(usual, other, strict=True):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
