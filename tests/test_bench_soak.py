"""What grows in a long run: the line through its measurements, and the measurements of a short run.

Not covered: 2,000 steps (`make test-soak`).
"""

import json
import random

from benchmarks.faults.runs import Case
from benchmarks.soak import RECORDS, growths, last_step, soak
from tests.chat_model import write_chat_model


def measured(memory, files=lambda step: 40):
    chance = random.Random(0)
    return [
        {"step": step, "seconds": step / 8, "memory_mb": memory(step, chance), "open_files": files(step)}
        for step in range(4, 2000, 8)
    ]


def test_noise_and_a_first_climb_are_no_growth_and_a_slow_leak_is():
    noise = growths(measured(lambda step, chance: 1800 + min(step, 150) + 3 * chance.random()), first=200, block=100)
    assert not noise["memory_mb"].grows
    assert not noise["open_files"].grows
    leak = growths(
        measured(lambda step, chance: 1800 + 0.008 * step + 3 * chance.random(), lambda step: 40 + step // 500),
        first=200,
        block=100,
    )
    assert leak["memory_mb"].grows
    assert 7 < leak["memory_mb"].per_1000_steps < 9
    assert leak["open_files"].grows


def test_a_short_run_is_measured_until_its_end(tmp_path):
    model = write_chat_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(40 * (json.dumps({"prompt": "a b", "response": "c"}) + "\n"))
    tree = {
        "actor": {"model": {"path": str(model)}, "optim": {"lr": 1e-3}},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "train": {"num_steps": 200, "mini_batch_samples": 4, "max_tokens_per_micro_batch": 64},
    }
    rows = soak(Case("sft", "sft", 1, tree), tmp_path, 0.25)
    assert last_step(tmp_path / "sft/metrics.jsonl") == 200
    assert rows[-1]["step"] <= 200
    assert rows[-1]["run_files"] > 3
    assert rows[-1]["records_mb"] > 0
    assert (tmp_path / "sft" / RECORDS[0]).stat().st_size > 0
    assert last_step(tmp_path / "none") == 0
