"""A smoke test of `make bench-convert`: a small model, one round, no peers; every figure of the result is there."""

import json
import sys

import pytest

from benchmarks import convert as bench
from benchmarks import random_llama

SMALL = {
    **random_llama.CONFIG, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 512,
}  # fmt: skip


def test_the_benchmark_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "write_random_llama", lambda path: random_llama.write_random_llama(path, config=SMALL))
    out = tmp_path / "convert.json"
    arguments = ["convert", "--work", str(tmp_path / "work"), "--rounds", "1", "--no-peers", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    bench.main()
    result = json.loads(out.read_text())
    for name in ("hf_to_megatron_over_cp", "megatron_to_hf_over_cp"):
        assert result[name] == pytest.approx(
            result["seconds"][name.replace("_over_cp", "_torch_dist")]["median"] / result["seconds"]["cp"]["median"]
        )
    assert 0 < result["peak_anonymous_bytes"] < 200e6
    assert not (tmp_path / "work").exists()
