"""A smoke test of `make bench-reshard`: a small model, one round; every figure of the result is there."""

import functools
import json
import sys
from types import SimpleNamespace

import pytest
from torch import multiprocessing

from benchmarks import reshard as bench
from tests.test_bench_convert import SMALL


def test_the_benchmark_runs(tmp_path, monkeypatch):
    """The two ways agree (the benchmark itself looks), and no rank receives more than it must.

    Its ranks are forked from the server of `RankPool`, which has imported torch.
    """
    forked = functools.partial(multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(bench, "mp", SimpleNamespace(spawn=forked))
    out = tmp_path / "reshard.json"
    monkeypatch.setattr(bench, "CONFIG", SMALL)
    monkeypatch.setattr(sys, "argv", ["reshard", "--rounds", "1", "--out", str(out)])
    bench.main()
    result = json.loads(out.read_text())
    assert result["received_over_minimum"] == 1.0
    assert result["peak_extra_bytes"] < 64e6
    assert result["layouts"].keys() == bench.LAYOUTS.keys()
    for layout in result["layouts"].values():
        seconds = {way: layout["seconds"][way]["median"] for way in bench.WAYS}
        assert layout["allgather_over_ours"] == pytest.approx(seconds["allgather"] / seconds["ours"])
        assert layout["ours_over_floor"] == pytest.approx(seconds["ours"] / seconds["floor"])
        assert min(layout["received_bytes"]) > 0
        assert layout["seconds_certificate"] > 0
