"""The pretraining mix of rl: its gradient is the coefficient x that of the texts alone, at every layout; and a run.

Not covered: pieces and order of texts (tests/trainers/test_pretraining_mix.py).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarlhf.data.samples.texts import pieces
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.distributed.compare import assert_gradients_equal
from tests.distributed.interrupted_jobs import command_until
from tests.distributed.test_rl_layouts import config

COEF = 3.0
TEXTS = ["1+2=3", "a longer text of several words", "7", "2+2=4 and 3+3=6"]


def configured(
    models: dict[str, Path], data: dict[str, Path], folder: Path, parallel: dict[str, Any]
) -> dict[str, Any]:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    cfg = config(models, data["prompts"], parallel, advantage="group_relative")
    del cfg["critic"]
    del cfg["train"]["micro_batch_samples"]
    cfg["train"] |= {"epochs_per_step": 1, "mini_batch_samples": 16, "max_tokens_per_micro_batch": 48}
    cfg["ptx"] = {"data": str(folder / "texts.jsonl"), "coef": COEF, "mini_batch_samples": 4, "max_tokens": 12}
    return cfg


def texts_alone(model_path: Path) -> tuple[float, dict[str, np.ndarray]]:
    """The mean next-token loss of all pieces and its gradient, by Hugging Face, one piece at a time."""
    from transformers import LlamaForCausalLM

    tokenizer = load_tokenizer(model_path)
    parts = [torch.tensor(part) for text in TEXTS for part in pieces(text, tokenizer, 12)]
    assert len(parts) > len(TEXTS), "one is cut"
    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    count = sum(len(part) - 1 for part in parts)
    losses = [
        torch.nn.functional.cross_entropy(model(part[None]).logits[0, :-1], part[1:], reduction="sum") / count
        for part in parts
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    return float(loss), {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("world", "parallel"), [(1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {})])
def test_the_gradient_is_that_of_both_losses(world, parallel, ranks, two_layers, data, tmp_path) -> None:
    """All pieces are in the one update, so that no order plays a part."""
    cfg = configured(two_layers, data, tmp_path, parallel)
    loss, expected = texts_alone(two_layers["plain"])
    cfg["ptx"]["mini_batch_samples"] = sum(len(pieces(text, load_tokenizer(two_layers["plain"]), 12)) for text in TEXTS)
    both = ranks.run(world, "rl_step", cfg)[0]
    alone = ranks.run(world, "rl_step", cfg | {"ptx": None})[0]
    assert both["responses"] == alone["responses"]
    assert both["metrics"]["ptx_loss"] == pytest.approx(loss, rel=1e-5)
    assert both["metrics"]["policy_loss"] == pytest.approx(alone["metrics"]["policy_loss"], abs=1e-6)
    assert both["metrics"]["first_ratio_deviation"] == 0.0
    (with_texts,), (without,) = (step["gradients"]["actor"] for step in (both, alone))
    added = {name: with_texts[name] - without[name] for name in with_texts}
    assert_gradients_equal(added, {name: COEF * expected[name] for name in added}, relative=1e-4)


def test_a_run_with_texts_to_the_end_at_tp2_goes_on_exactly_where_it_was(ranks, two_layers, data, tmp_path) -> None:
    """Three steps of two updates in one go, and killed at the second update of the third: the same metrics."""
    cfg = configured({**two_layers, "other": two_layers["scorer"]}, data, tmp_path, {"tp": 2})
    cfg["train"] |= {"num_steps": 3, "mini_batch_samples": 8}
    cfg["checkpoint"] = {"every_updates": 1, "background": False}
    argv = argv_of("rl", cfg, tmp_path / "cfg.yaml")
    ranks.run(2, "command", *argv, f"run.dir={tmp_path / 'whole'}")
    step, parts = ("megarlhf.parallel.step:Trainer", "step"), f"run.dir={tmp_path / 'parts'}"
    killed = ranks.run(2, command_until, 6, *step, *argv, parts)
    assert [outcome for outcome, _ in killed] == ["killed"] * 2
    assert "from resume/step_000002_update_0001" in ranks.run(2, "command", *argv, parts)[0]
    whole, parts = (read_metrics(tmp_path / name) for name in ("whole", "parts"))
    assert [row["step"] for row in parts] == [0, 1, 2, 3]
    for row, again in zip(whole[1:], parts[1:], strict=True):
        assert row["ptx_loss"] == again["ptx_loss"] > 0
        assert row["loss"] == again["loss"]
    assert whole[3]["ptx_loss"] < whole[1]["ptx_loss"], "the texts are learnt"
