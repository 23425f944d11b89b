"""Runs of `megarlhf dpo` from a configuration file to the exported model, on two tensor-parallel ranks.

Every chosen response has two digits and every rejected one three, so that there is something to learn in a few steps.
Not covered: killed and resumed runs (test_resume.py), skipped steps (test_replay.py).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from tests.command import argv_of
from tests.refuses import command_refuses

STEPS = 8
SUFFICIENT = {"dpo": 0.55, "simpo": 0.5, "orpo": 2.4, "ipo": 15.0, "kto": 0.47}
"""Held-out losses that a run has to get below; it begins at ln 2, about 1.1, 2.8, 25 and 1/2."""


def write_pairs(path: Path, numbers: range) -> str:
    lines = [
        {"prompt": f"{7 * n % 90 + 3}+{n % 95}=", "chosen": str(n % 50 + 10), "rejected": str(n % 50 + 130)}
        for n in numbers
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def tree(two_layers, tmp_path) -> dict[str, Any]:
    return {
        "run": {"dir": str(tmp_path / "run")},
        "actor": {"model": {"path": str(two_layers["plain"])}, "parallel": {"tp": 2}, "optim": {"lr": 2e-3}},
        "data": {
            "train": write_pairs(tmp_path / "pairs.jsonl", range(64)),
            "validation": write_pairs(tmp_path / "validation.jsonl", range(64, 96)),
        },
        "train": {"num_steps": STEPS, "mini_batch_samples": 16, "max_tokens_per_micro_batch": 128},
    }


def command(tree: dict[str, Any], *overrides: str) -> list[str]:
    file = Path(tree["run"]["dir"]).with_suffix(".yaml")
    return [*argv_of("dpo", tree, file), *overrides]


@pytest.mark.parametrize("loss", SUFFICIENT)
def test_a_run_on_two_ranks_learns_to_prefer(loss, tree, ranks) -> None:
    """Loss falls and held-out accuracy rises; the exported model prefers the chosen responses under Hugging Face."""
    ranks.run(2, "command", *command(tree, f"loss={loss}"))
    run = Path(tree["run"]["dir"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[0], rows[-1]
    assert last["step"] == STEPS
    assert last["eval_loss"] < SUFFICIENT[loss] < first["eval_loss"]
    assert last["loss"] < rows[1]["loss"]
    assert last["eval_pair_accuracy"] >= 0.9 > 0.8 > first["eval_pair_accuracy"] or loss == "orpo"
    assert last["eval_reward_margin"] > max(first["eval_reward_margin"], 0.0)
    assert {"pair_accuracy", "reward_margin", "chosen_logprob", "grad_norm", "learning_rate"} <= last.keys()
    assert ("sft_loss" in last) == (loss == "orpo")
    assert ("kl_point" in last) == (loss == "kto")
    exported = run / "checkpoints" / "latest" / "actor"
    origin = json.loads((exported / "megarlhf.json").read_text())
    assert origin["command"] == "dpo"
    assert origin["writing"] == {"texts": {"end": load_tokenizer(exported).eos_id}}
    assert (origin["reference"] is None) == (loss in ("simpo", "orpo"))
    validation = Path(tree["data"]["validation"]).read_text().splitlines()
    chosen = _mean_logprob(exported, [json.loads(line) for line in validation], "chosen")
    assert chosen == pytest.approx(last["eval_chosen_logprob"], rel=1e-5)


def _mean_logprob(model: Path, records: list[dict[str, str]], side: str) -> float:
    from transformers import AutoModelForCausalLM

    tokenizer, policy = load_tokenizer(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = 0.0
    for record in records:
        prompt = [tokenizer.bos_id, *tokenizer.encode(record["prompt"])]
        response = [*tokenizer.encode(record[side], continuation=True), tokenizer.eos_id]
        with torch.no_grad():
            logits_TV = policy(torch.tensor([prompt + response])).logits[0].double()
        logprobs_TV = torch.log_softmax(logits_TV[len(prompt) - 1 : -1], -1)
        total += logprobs_TV.gather(1, torch.tensor(response)[:, None]).sum().item()
    return total / len(records)


@pytest.mark.parametrize(
    "override, names",
    [
        ("train.max_tokens_per_micro_batch=19", ["train.max_tokens_per_micro_batch = 19", "longest prompt"]),
        ("data.validation={one}", ["data.validation", "one usable pair", "loss = 'kto'"]),
    ],
)
def test_what_kto_cannot_measure_is_refused(override, names, tree, ranks, tmp_path) -> None:
    """Pairs of 18 and 16 tokens fit, a longer prompt with its responses does not."""
    lines = [{"prompt": "12+34=", "chosen": "4", "rejected": "5"}, {"prompt": "1+1=", "chosen": "222", "rejected": "3"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one = write_pairs(tmp_path / "one.jsonl", range(1))
    tree["data"].pop("validation")
    tree["train"]["mini_batch_samples"] = 2
    command_refuses(ranks, command(tree, "loss=kto", "actor.parallel.tp=1", override.format(one=one)), *names)
    assert not (Path(tree["run"]["dir"]) / "metrics.jsonl").exists()
