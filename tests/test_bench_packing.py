"""A smoke test of `make bench-packing`: a tiny model, one round, without TRL and vLLM; and its workload and peer."""

import contextlib
import json
import statistics
import subprocess
import sys
import time

import psutil

from benchmarks import packing as bench
from benchmarks.packing_workload import REHEARSAL, Sizes, make_workload, reward, text_of, write_model
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from tests.refuses import refuses


def test_the_benchmark_runs(tmp_path, monkeypatch):
    """Packed and padded train on the same gradients (the benchmark looks), and the ratio is that of their medians."""
    out = tmp_path / "packing.json"
    arguments = ["--rehearse", "--rounds", "1", "--threads", "1", "--no-trl", "--no-vllm", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["packing", *arguments, "--only", "ppo_long_tailed"])
    bench.main()
    result = json.loads(out.read_text())
    comparison = result["comparisons"]["ppo_long_tailed"]
    packed, padded = (comparison["ways"][name] for name in ("packed 64", "padded 4"))
    assert result["padded_over_packed"] == padded["seconds"]["median"] / packed["seconds"]["median"]
    assert comparison["grad_norms_differ_by"] < 1e-4
    assert packed["part_seconds"].keys() == padded["part_seconds"].keys() >= {"old_logprobs", "values"}
    assert 0.9 < sum(packed["share"].values()) < 1.1
    assert 0 < packed["floor"]["forward_backward"] < packed["seconds"]["median"]
    assert result["trl_over_ours_long_tailed"] is None
    assert result["left_out"]["trl"] == "--no-trl"


def test_a_side_that_computes_something_else_is_found():
    """Only the gate: no child is started."""
    setting = bench.Setting(None, REHEARSAL, bench.SMALL, 1, 1, None)
    rounds = {"packed 64": [{"metrics": {"actor_grad_norm": 1.0}}], "trl 4": [{"grad_norms": [1.01]}]}
    with refuses("not the same computation", error=AssertionError):
        bench.check(bench.COMPARISONS["one_update_equal"], rounds, 0, setting)
    # In mini-batches of another order it cannot agree, and is not asked to.
    assert bench.check(bench.COMPARISONS["grpo_equal"], rounds, 0, setting) is None
    with refuses("ended early", error=AssertionError):
        bench.check(bench.COMPARISONS["grpo_equal_step"], {"trl 4": [{"generated_tokens": 9}]}, 10, setting)


def test_the_workload_is_long_tailed():
    """Lognormal with mean 64 (a little is lost to the limit), up to 512; equal lengths have the same mean."""
    sizes = Sizes()
    lengths = sorted(map(len, make_workload("long_tailed", sizes).responses))
    assert len(lengths) == sizes.samples
    assert lengths[-1] == 512
    assert 60 < statistics.mean(lengths) < 66
    # The median of a lognormal distribution is its mean / exp(sigma^2 / 2).
    assert abs(statistics.median(lengths) - 64 / 1.6487) < 1.5
    equal = make_workload("equal", sizes)
    assert {len(row) for row in equal.responses} == {64}
    assert len({len(ids) for ids in equal.prompts}) == 1


def test_both_sides_read_the_same_ids_and_rewards(tmp_path):
    """Text that TRL tokenizes gives the ids that ours is handed, and the reward does not see how a side decodes."""
    from transformers import AutoTokenizer

    model = write_model(tmp_path / "model", REHEARSAL)
    theirs, ours = AutoTokenizer.from_pretrained(str(model)), load_tokenizer(model)
    workload = make_workload("long_tailed", REHEARSAL)
    for ids in (*workload.prompts, *workload.responses):
        assert theirs(text_of(ids))["input_ids"] == ours.encode(text_of(ids)) == ids
    texts = [theirs.batch_decode([ids], skip_special_tokens=True)[0] for ids in workload.responses]
    rewards = [reward("", text, {}) for text in texts]
    assert rewards == [reward("", ours.decode(ids, continuation=True), {}) for ids in workload.responses]
    assert len(set(rewards)) == len(rewards)


def test_the_model_does_not_end(tmp_path):
    """End-of-sequence has a log-prob far below any that sampling would meet."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(write_model(tmp_path / "model", REHEARSAL)))
    prompts = torch.tensor([ids[:3] for ids in make_workload("equal", REHEARSAL).prompts])
    with torch.no_grad():
        logprobs = model(prompts).logits.log_softmax(-1)
    assert float(logprobs[..., model.config.eos_token_id].max()) < -15
    assert float(logprobs[..., 4:].max()) < 0
    assert float(logprobs[..., 4:].min()) > -15


def test_a_child_ends_with_a_benchmark_that_is_killed(tmp_path):
    """In the middle of a command; otherwise it goes on computing beside what is measured next."""
    (tmp_path / "sleeper.py").write_text(
        "import os, time\nfrom benchmarks.packing_children import Parent\n"
        "parent = Parent()\nparent.say({'pid': os.getpid()})\nparent.serve({'sleep': lambda: time.sleep(300)})\n"
    )
    starter = (
        "import sys\nfrom benchmarks.packing_children import Child, environment\n"
        "child = Child('sleeper', {}, environment(1, [sys.argv[1]]))\n"
        "print(child.facts['pid'], flush=True)\nchild.ask('sleep')\n"
    )
    command = [sys.executable, "-c", starter, str(tmp_path)]
    with subprocess.Popen(command, cwd=bench.ROOT, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        child = psutil.Process(int(started.stdout.readline()))
        time.sleep(0.2)
        assert child.is_running()
        started.kill()
    ended = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < ended, "it sleeps on"
            time.sleep(0.1)
