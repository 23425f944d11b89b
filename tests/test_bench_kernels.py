"""A smoke test of `make bench-kernels`: small shapes, one round; every figure of the result is there."""

import contextlib
import io
import json
import sys

import pytest

from benchmarks import kernels as bench
from tests.ranks import RankPool


def _printed_peak(runtime, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.print_peak(*arguments)
    return int(printed.getvalue())


def peak_in_a_fork(*arguments):
    """The largest of two: peaks are sampled, by a thread that a busy machine may let wait."""
    peaks = []
    for _ in range(2):
        pool = RankPool(1)
        peaks += pool.run(1, _printed_peak, *arguments)
        pool.close()
    return max(peaks)


def test_the_benchmark_runs(tmp_path, monkeypatch):
    """All ways agree with fp64 (the benchmark itself looks), and ours holds less than naive torch does.

    Each way's memory is measured in a process of its own: here in a fork, which imports nothing; one as by `make`.
    """
    as_by_make = bench.peak_of(600, 20000, 32, "forward", "ours")
    monkeypatch.setattr(bench, "peak_of", peak_in_a_fork)
    out = tmp_path / "kernels.json"
    monkeypatch.setattr(bench, "HIDDEN", 32)
    monkeypatch.setattr(bench, "SHAPES", ((600, 20000),))
    monkeypatch.setattr(sys, "argv", ["kernels", "--rounds", "1", "--out", str(out)])
    bench.main()
    result = json.loads(out.read_text())
    (shape,) = result["shapes"].values()
    forward = {name: values["median"] for name, values in shape["seconds"]["forward"].items()}
    assert result["linear_forward_over_matmul"] == pytest.approx(forward["ours"] / forward["matmul"])
    assert result["naive_over_ours"] == pytest.approx(forward["naive"] / forward["ours"])
    assert shape["seconds"]["forward_backward"].keys() == bench.WAYS.keys()
    peaks = shape["peak_bytes"]
    assert 0 < as_by_make < 600 * 20000 * 4
    assert result["naive_memory_over_ours"] == peaks["forward"]["naive"] / peaks["forward"]["ours"] > 1
    # All logits, 48 MB, are what naive torch makes at least.
    assert peaks["forward_backward"]["naive"] > 600 * 20000 * 4 > peaks["forward_backward"]["ours"]


def test_a_wrong_way_is_found_before_it_is_timed(monkeypatch):
    def wrong(hidden_TH, weight_VH, labels_T):
        logprobs_T, entropy_T = bench.naive(hidden_TH, weight_VH, labels_T)
        return logprobs_T * 1.01, entropy_T

    monkeypatch.setattr(bench, "WAYS", {**bench.WAYS, "wrong": wrong})
    with pytest.raises(AssertionError, match="wrong"):
        bench.Task(20, 300, 16).check()
