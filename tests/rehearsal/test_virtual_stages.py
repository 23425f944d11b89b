"""The time that a rehearsal tells of the interleaved schedule, from the events that it has recorded.

Not covered: messages that take long, memory (test_truth.py), layers that are played (test_reuse.py).
"""

import pytest

from tests.rehearsal.jobs import DENSE, job_tree, run_command, write_job, write_model

PP, VPP, MICRO_BATCHES = 2, 2, 4


def test_the_bubble_is_a_vpp_th(tmp_path) -> None:
    """Equal micro-batches on stages that are nearly equal, of layers beside which vocabulary and messages are small:
    (p - 1) / v of a micro-batch's time (Narayanan et al. 2021, section 2.2). Every message has its receiver."""
    tree = job_tree("sft", tmp_path, pp=PP, vpp=VPP)
    wide = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 4}
    write_model(tmp_path / "dense", {**DENSE, **wide, "max_position_embeddings": 8192})
    tree["data"] |= {"max_prompt_tokens": 1024, "max_response_tokens": 3072}
    tree["train"] = {"num_steps": 2, "mini_batch_samples": MICRO_BATCHES, "micro_batch_samples": 1}
    lengths = ["--prompt-lengths", "constant:1024", "--response-lengths", "constant:3072"]
    file = write_job("sft", tmp_path, tree)
    done = run_command("sft", file, tmp_path / "out", "--world-size", str(PP), "--workers", "2", *lengths)
    said = done.json()
    assert (done.status, said["faults"], said["refusals"]) == (0, [], [])
    assert said["layouts"] == {"actor": "tp 1 x pp 2 x dp 1, vpp 2"}
    bubble, plain = ((PP - 1) / v / (MICRO_BATCHES + (PP - 1) / v) for v in (VPP, 1))
    assert said["times"][-1]["bubble"] == pytest.approx(bubble, rel=0.06)
    assert said["times"][-1]["bubble"] < 0.6 * plain
    messages = [line for line in said["ranks"][0]["messages"] if (line["step"], line["phase"]) == (2, "train/actor")]
    counts = {line["operation"]: line["count"] for line in messages if line["operation"] in ("send", "receive")}
    assert sum(counts.values()) == MICRO_BATCHES * (4 * VPP - 2)
