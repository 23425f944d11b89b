"""A smoke test of `make bench-prompts`: a tiny model, one round, without TRL and vLLM; its figures, goals and page.

Not covered: TRL's side, whose child is that of `make bench-packing`; generation.
"""

import json
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import kept
from benchmarks import prompts as bench
from benchmarks import prompts_figures as figures
from benchmarks.packing_workload import REHEARSAL, Workload
from benchmarks.prompts_work import Work, by_formula
from megarlhf.parallel.packing.partition import ForwardCost


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "prompts.json"
    arguments = ["--rehearse", "--rounds", "1", "--threads", "1", "--no-vllm", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prompts", *arguments, "--only", "long_tail_4_1"])
        bench.main()
    return json.loads(out.read_text())


def test_both_sides_train_on_the_same_and_compute_what_the_formula_says(result):
    comparison = result["comparisons"]["long_tail_4_1"]
    shared, unshared = (comparison["ways"][comparison["fastest"][side]] for side in ("shared", "unshared"))
    assert comparison["grad_norms_differ_by"] < 1e-4
    for side, way in (("shared", shared), ("unshared", unshared)):
        formula = comparison["formula"][side]
        assert way["flops"] == {"matmul": formula["layers"] + formula["head"], "attention": formula["attention"]}
        assert way["part_seconds"].keys() >= {"old_logprobs", "reference_logprobs", "actor_forward_backward"}
        assert way["peak_bytes"] > 0
    ratio = sum(unshared["flops"].values()) / sum(shared["flops"].values())
    assert result["flop_ratio_long_tail_4_1"] == ratio > 2
    measured = unshared["seconds"]["median"] / shared["seconds"]["median"]
    assert result["unshared_over_shared_long_tail_4_1"] == measured
    assert result["share_of_flop_ratio_long_tail_4_1"] == measured / ratio
    assert result["left_out"]["trl"] == "--rehearse"
    assert result["trl_over_ours_long_tail_4_1"] is None


def test_goals_are_met_or_missed_or_not_measured(result):
    ratios = {"trl_over_ours_equal_1_1": 1.6, "pair_rm_1_1": 1.1, "shared_memory_over_unshared_equal_4_1": 1.01}
    met = {goal["name"]: goal["met"] for goal in figures.goals(ratios)}
    assert met["trl_over_ours_equal_1_1"] is True
    assert met["pair_rm_1_1"] is met["shared_memory_over_unshared_equal_4_1"] is False
    assert met["trl_over_ours_equal_4_1"] is None
    assert {goal["name"] for goal in result["goals"]} == met.keys()


def test_of_training_phase_and_whole_step_the_lesser_is_compared_with_trl():
    def of(trl, ours):
        ways = {"trl 4": {"seconds": {"median": trl}}, "shared 9": {"seconds": {"median": ours}}}
        return {"ways": ways, "fastest": {"trl": "trl 4", "shared": "shared 9", "unshared": None}}

    found = figures.ratios({"equal_1_1": of(6.0, 2.0), "step_1_1": of(8.0, 4.0), "equal_4_1": of(9.0, 3.0)})
    assert found["trl_over_ours_equal_1_1"] == found["trl_over_ours_equal_1_1_step"] == 2.0
    assert found["trl_over_ours_equal_1_1_phase"] == 3.0
    assert found["trl_over_ours_equal_4_1"] is None, "of a part alone nothing is claimed"


def test_the_page_takes_what_was_found(result):
    page = figures.PAGE.read_text(encoding="utf-8")
    filled = figures.filled(page, result)
    assert f"{result['flop_ratio_long_tail_4_1']:.2f}" in filled
    assert figures.filled(filled, figures.load()) == page, "python -m benchmarks.prompts_figures --page writes it"


def test_work_of_two_responses_by_hand():
    """Cost 10 a token and 1 a pair: a prompt of 2 with responses of 1 and 3. Apart 3 + 5 tokens and 6 + 15 pairs;
    shared 6 tokens, and of pairs 3 + 3 + 12. Four log-probs, each for 100, five times with two forwards before."""
    workload = Workload([[1, 2]], [[1], [1, 2, 3]])
    apart, shared = (
        by_formula(ForwardCost(10.0, 1.0), workload, shared=each, forwards=2, head=100) for each in (False, True)
    )
    assert apart == {"layers": 5 * 80, "attention": 5.5 * 21, "head": 2000}
    assert shared == {"layers": 5 * 60, "attention": 5.5 * 18, "head": 2000}


def test_counted_work_of_attention():
    """2 heads of 8 channels over 3 tokens, causal: 6 pairs; forward 4, backward 10 for each channel and pair."""
    query, key, value = (torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(3))
    with Work() as work:
        scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
        torch.randn(2, 3) @ torch.randn(3, 5)
    assert work.flops == {"attention": 14 * 2 * 8 * 6, "matmul": 2 * 2 * 3 * 5}


def test_a_run_goes_on_with_what_its_commit_has_found(tmp_path, monkeypatch):
    """Not of another commit, of other settings, or of changed files."""
    monkeypatch.setattr(bench, "KEPT", tmp_path)
    setting = bench.Setting(model=tmp_path, sizes=REHEARSAL, threads=1, rounds=1, trl=None)
    monkeypatch.setattr(kept, "commit_of_sources", lambda: "abc")
    bench.kept_of({"commit": "abc"}, setting).keep("equal_1_1", {"ways": 3})
    assert bench.kept_of({"commit": "abc"}, setting).found("equal_1_1") == {"ways": 3}
    assert bench.kept_of({"commit": "abd"}, setting).found("equal_1_1") is None
    assert bench.kept_of({"commit": "abc"}, setting).found("equal_4_1") is None
    other = bench.Setting(model=tmp_path, sizes=REHEARSAL, threads=1, rounds=2, trl=None)
    assert bench.kept_of({"commit": "abc"}, other).found("equal_1_1") is None
    bench.kept_of({"commit": "abd"}, setting).keep("equal_1_1", {})
    assert bench.kept_of({"commit": "abd"}, setting).found("equal_1_1") is None, "changed while it ran"
    monkeypatch.setattr(kept, "commit_of_sources", lambda: "abc-dirty")
    bench.kept_of({"commit": "abc-dirty"}, setting).keep("equal_1_1", {})
    assert bench.kept_of({"commit": "abc-dirty"}, setting).found("equal_1_1") is None
    assert kept.commit_at_end("abc") == "abc, changed while it ran"
