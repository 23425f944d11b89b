"""The GPU benchmark of the log-prob kernels, rehearsed on a CPU: the result's form, the gate, the floors, the table.

Not covered: CUDA events, memory, the Triton kernels, and the peers that need a GPU; what the figures are.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks import gpu_logprob
from benchmarks.gpu_shape import DeviceLostError, best_peers
from benchmarks.gpu_table import goals
from benchmarks.gpu_timing import Ceilings, linear_floor_ms, logits_floor_ms
from benchmarks.gpu_truth import GRADIENT_TOLERANCE, Shape, judge_gradients, judge_values, make_inputs, make_truth
from benchmarks.machine import ROOT

TINY = ["--rehearse", "--tokens", "24", "--hidden", "32", "--vocab", "1096", "--rounds", "2"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """The result and the page of one rehearsal with two wrong candidates among the right ones, in a process of its own,
    without the peers that take seconds to import or to compile."""
    folder = tmp_path_factory.mktemp("rehearsal")
    out, page = folder / "result.json", folder / "page.md"
    command = [sys.executable, "-m", "benchmarks.gpu_logprob", *TINY, "--exclude", "torch.compile"]
    command += ["--exclude", "megatron-core", "--plant", "--out", str(out), "--markdown", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), page.read_text()


def test_a_rehearsal_measures_every_shape_and_says_what_it_is(rehearsal):
    result, page = rehearsal
    assert "A rehearsal on a CPU with tiny shapes: no figure here says anything about a GPU." in page
    assert result["rehearsal"]
    assert result["finished"]
    assert result["goals"] == []
    assert {"commit", "torch", "device", "command"} <= result["machine"].keys()
    assert "--rehearse" in result["machine"]["command"]
    assert result["packages"]["torch"] == torch.__version__
    assert min(result["ceilings"].values()) > 0
    assert result["missing"]["megatron-core"] == "excluded by --exclude"
    names = [(shape["kind"], shape["name"]) for shape in result["shapes"]]
    expected = [("logits", "V=1096"), ("logits", "V=1096/8"), ("linear", "H=32 V=1096"), ("linear", "H=32 V=1096/8")]
    assert names == expected
    assert all(shape["collective"] == "left out" for shape in result["shapes"])


def test_ours_pass_the_gate_and_are_timed_against_a_floor(rehearsal):
    result, _ = rehearsal
    for shape in result["shapes"]:
        for mode, rows in shape["modes"].items():
            ours = {name: row for name, row in rows.items() if name.startswith("megarlhf")}
            both_kept = shape["kind"] == "linear" and mode == "forward+backward"
            assert len(ours) == (4 if both_kept else 2)
            for row in ours.values():
                assert row["status"] == "timed", row
                assert row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["max"]
                assert len(row["rounds"]) == 2
                assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["ms"]["median"])
                # fp32 arithmetic on bf16 inputs, and a gradient rounded to bf16.
                assert 0 <= row["errors"]["value"] < 1e-4
                gradients = [error for name, error in row["errors"].items() if "gradient" in name]
                assert len(gradients) == (mode == "forward+backward") * (1 + (shape["kind"] == "linear"))
                assert all(error < 0.005 for error in gradients)
            assert any(row["status"] == "timed" for name, row in rows.items() if "torch" in name)
            assert ours.keys() <= shape["best_peer"][mode].keys()


def test_wrong_candidates_are_refused_and_not_timed(rehearsal):
    result, page = rehearsal
    tables = [rows for shape in result["shapes"] for rows in shape["modes"].values()]
    planted = [row for rows in tables for name, row in rows.items() if name.startswith("planted")]
    assert len(planted) == 12
    for row in planted:
        assert row["status"] == "refused"
        assert "off by" in row["reason"]
        assert "ms" not in row
    assert "| planted" not in page


H200 = Ceilings(copy_bytes_per_s=4.3e12, matmul_flops_per_s=790e12)


@pytest.mark.parametrize("vocab, parts, forward, both", [(128256, 1, 0.489, 1.466), (151936, 8, 0.072, 0.217)])
def test_floors_of_the_logits_kernel(vocab, parts, forward, both):
    """8192 tokens in bf16 at 4.3 TB/s: 8192 x 128256 x 2 bytes / 4.3e12 = 0.489 ms."""
    columns = Shape("logits", 8192, vocab, parts).columns
    assert logits_floor_ms(8192, columns, "forward", H200) == pytest.approx(forward, abs=6e-4)
    assert logits_floor_ms(8192, columns, "forward+backward", H200) == pytest.approx(both, abs=6e-4)


@pytest.mark.parametrize(
    "vocab, hidden, whole, shard",
    [(128256, 4096, (10.9, 32.7, 43.6), (1.36, 4.09, 5.45)), (151936, 8192, (25.8, 77.4, 103.0), (3.23, 9.68, 12.9))],
)
def test_floors_of_the_linear_kernel(vocab, hidden, whole, shard):
    """8192 tokens at 790 TFLOP/s, to three digits: one product, three, four."""
    for parts, expected in ((1, whole), (8, shard)):
        columns = Shape("linear", 8192, vocab, parts, hidden).columns
        floors = [linear_floor_ms(8192, hidden, columns, products, H200) for products in (1, 3, 4)]
        assert floors == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("shape", [Shape("logits", 20, 300, 1), Shape("linear", 20, 2400, 8, 16)])
@pytest.mark.parametrize("gives, sign", [("logprob+entropy", 1), ("logprob", -1), ("mean loss", -1)])
def test_the_gate_takes_autograd_in_fp64_and_refuses_a_slip(shape, gives, sign):
    """Truth is made by hand in `gpu_truth`; autograd on fp64 logits has to agree with it to rounding."""
    inputs = make_inputs(shape, CPU)
    truth = make_truth(inputs)
    leaves = [tensor.double().requires_grad_() for tensor in inputs.tensors]
    log_TV = (leaves[0] if shape.kind == "logits" else leaves[0] @ leaves[1].t()).log_softmax(1)
    logprobs_T = log_TV.gather(1, inputs.labels_T[:, None])[:, 0]
    outputs = [sign * (logprobs_T.mean() if gives == "mean loss" else logprobs_T)]
    if gives == "logprob+entropy":
        outputs.append(-(log_TV.exp() * log_TV).sum(1))
    upstream = [up.double() for up in inputs.upstream(gives, sign)]
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    outputs = [output.detach() for output in outputs]
    values = judge_values(truth, gives, sign, tuple(outputs))
    slopes = judge_gradients(truth, gives, gradients)
    assert values.reason is None
    assert slopes.reason is None
    assert max(*values.errors.values(), *slopes.errors.values()) < 1e-12
    assert len(slopes.errors) == len(leaves)
    slip = 1 + 2 * GRADIENT_TOLERANCE
    assert "gradient off by 0.04" in judge_gradients(truth, gives, tuple(slip * x for x in gradients)).reason
    assert judge_values(truth, gives, -sign, tuple(outputs)).reason is not None
    assert judge_values(truth, gives, sign, tuple(output * torch.nan for output in outputs)).reason is not None


def timed_row(gives, ms, **more):
    return {"status": "timed", "gives": gives, "ms": {"median": ms}, **more}


def test_a_peer_counts_where_it_gives_as_much():
    """2 ms with the entropy, 1 ms without: the loss alone is no peer of the first."""
    rows = {
        "megarlhf": timed_row("logprob+entropy", 2.0), "megarlhf, log-prob only": timed_row("logprob", 1.0),
        "with": timed_row("logprob+entropy", 3.0), "without": timed_row("logprob", 1.5),
        "refused": {"status": "refused", "gives": "logprob"},
    }  # fmt: skip
    assert best_peers(rows) == {
        "megarlhf": {"peer": "with", "peer_over_ours": 1.5},
        "megarlhf, log-prob only": {"peer": "without", "peer_over_ours": 1.5},
    }


def test_goals_by_hand():
    """A shard's logits at 80% of the floor with 99 MB, and the best peer at 0.9 of our time: two of three met."""
    ours = timed_row("logprob", 1.0, share_of_floor=0.8, peak_extra_bytes=99e6)
    rows = {"megarlhf": ours, "torch": timed_row("logprob", 0.9)}
    shape = {"kind": "logits", "name": "V=8/8", "parts": 8, "tokens": 4, "columns": 1, "modes": {"forward": rows}}
    assert [(goal["goal"], goal["wanted"], goal["met"]) for goal in goals([shape])] == [
        ("share of the floor", 0.75, True), ("extra MB, at most", 100.0, True), ("torch over ours", 1.0, False),
    ]  # fmt: skip


def test_a_lost_device_starts_the_run_again_without_its_candidate(tmp_path, monkeypatch):
    """What was measured stays in the file; the shape at which it happened is done again."""
    out = tmp_path / "result.json"
    argv = [*TINY, "--out", str(out)]
    calls, started = [], []

    class Started(Exception):
        """execv does not return."""

    def fake_shape(run, shape):
        calls.append(shape)
        if len(calls) == 2:
            raise DeviceLostError("a peer")
        return {"kind": shape.kind, "name": shape.name, "tokens": 24, "modes": {}, "best_peer": {}}

    def fake_execv(program, command):
        started.append(command)
        raise Started

    monkeypatch.setattr(gpu_logprob, "run_shape", fake_shape)
    monkeypatch.setattr(os, "execv", fake_execv)
    with pytest.raises(Started):
        gpu_logprob.main(argv)
    assert started[0][-5:-1] == ["--resume", "--exclude", "=a peer", "--limit"]
    written = json.loads(out.read_text())
    assert [shape["name"] for shape in written["shapes"]] == ["V=1096"]
    assert written["lost"] == [{"candidate": "a peer", "shape": "V=1096/8", "kind": "logits"}]
    assert not written["finished"]
    # Started again: the first shape is not measured a second time.
    gpu_logprob.main(started[0][3:])
    assert [shape.name for shape in calls[2:]] == ["V=1096/8", "H=32 V=1096", "H=32 V=1096/8"]
    assert json.loads(out.read_text())["finished"]
