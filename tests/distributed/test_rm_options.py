"""The reward model's options in whole runs, at TP2 or with stages: margins, scores, exports of unit variance."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarlhf.commands import cli
from megarlhf.observe.records.cost_metrics import reproducible
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.rollout.rewards.classifier import Classifier
from tests.classifiers import write_tokenizer
from tests.command import argv_of
from tests.data.in_memory import load_records
from tests.distributed.samples import pair_samples
from tests.refuses import refuses


@pytest.fixture
def run(ranks, two_layers, data, tmp_path) -> Any:
    """`megarlhf rm` of three steps with an export after each, with margins of 0, 1 and 2 in the data."""
    records = load_records(data["pairs"], fields=("prompt", "chosen", "rejected"))
    lines = [json.dumps({**dict(record), "margin": n % 3}) + "\n" for n, record in enumerate(records)]
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    cfg = {
        "reward_model": {"model": {"path": str(two_layers["plain"])}, "optim": {"lr": 1e-2}},
        "data": {"train": str(tmp_path / "pairs.jsonl"), "validation": str(tmp_path / "pairs.jsonl")},
        "eval": {"max_samples": 12},
        "train": {"num_steps": 3, "mini_batch_samples": 8, "max_tokens_per_micro_batch": 128},
        "checkpoint": {"export_every": 1},
    }

    def made(name: str, world: int, parallel: dict[str, Any], **keys: Any) -> list[dict[str, Any]]:
        model = {**keys.pop("reward_model", cfg["reward_model"]), "parallel": parallel}
        tree = cfg | {"run": {"dir": str(tmp_path / name)}, "reward_model": model} | keys
        ranks.run(world, "command", *argv_of("rm", tree, tmp_path / f"{name}.yaml"))
        return read_metrics(tmp_path / name)

    return made


def scores(directory: Path, pairs: Path) -> torch.Tensor:
    """[P, 2] by Hugging Face, each response alone."""
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    model.config.pad_token_id = 999
    found = pair_samples(pairs, directory, 1024)[:12]
    rows = [[pair.prompt_tokens + part for part in (pair.chosen_tokens, pair.rejected_tokens)] for pair in found]
    with torch.no_grad():
        return torch.tensor([[float(model(torch.tensor([row])).logits) for row in pair] for pair in rows])


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2, "vpp": 2}], ids=["tp2", "pp2 vpp2"])
def test_every_export_has_unit_variance_and_training_goes_on_as_without(parallel, run, models, tmp_path) -> None:
    """The exports after steps 1, 2 and 3, scored by Hugging Face; losses are those of a run that divides nothing."""
    of_four_layers = {"model": {"path": str(models["plain"])}, "optim": {"lr": 1e-2}}
    scaled = run("scaled", 2, parallel, unit_variance=True, reward_model=of_four_layers)
    plain = run("plain", 2, parallel, reward_model=of_four_layers)
    for step in (1, 2, 3):
        export = tmp_path / f"scaled/checkpoints/step_{step:06d}/reward_model"
        assert float(scores(export, tmp_path / "pairs.jsonl").std(correction=0)) == pytest.approx(1.0, abs=1e-3)
    assert [row.get("loss") for row in scaled] == [row.get("loss") for row in plain]
    unscaled = scores(tmp_path / "plain/checkpoints/step_000002/reward_model", tmp_path / "pairs.jsonl")
    assert abs(float(unscaled.std(correction=0)) - 1) > 0.05


def test_what_is_said_of_the_scores_is_that_of_the_export(run, tmp_path) -> None:
    """At PP2 the same report as on one rank, and its figures by Hugging Face's scores."""
    rows = run("single", 1, {})
    run("pp2", 2, {"pp": 2})
    single, pp2 = (json.loads((tmp_path / name / "calibration.json").read_text()) for name in ("single", "pp2"))
    for key in ("accuracy", "score_mean", "score_deviation", "calibration_error", "score_length_correlation"):
        assert pp2[key] == pytest.approx(single[key], abs=1e-4), key
    found = scores(tmp_path / "single/checkpoints/latest/reward_model", tmp_path / "pairs.jsonl")
    assert single["pairs"] == 12
    assert single["accuracy"] == rows[-1]["eval_pair_accuracy"] == float((found[:, 0] > found[:, 1]).double().mean())
    assert single["score_mean"] == pytest.approx(float(found.mean()), abs=1e-4)
    assert rows[-1]["eval_calibration_error"] == single["calibration_error"]
    assert "eval_calibration_error" not in rows[0]


def test_the_export_scores_alike_in_transformers_whatever_its_padding(padded_with_its_end, tmp_path) -> None:
    """With the export's own tokenizer, as its users call it."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    export, expected = padded_with_its_end
    model = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    records = load_records(tmp_path / "pairs.jsonl", fields=("prompt", "chosen", "rejected"))[:12]
    texts = [row["prompt"] + row[key] + tokenizer.eos_token for row in records for key in ("chosen", "rejected")]
    for batch, tokenizer.padding_side in ((1, "right"), (8, "right"), (8, "left")):
        found: list[float] = []
        for start in range(0, len(texts), batch):
            inputs = tokenizer(texts[start : start + batch], return_tensors="pt", padding=True)
            with torch.no_grad():
                found += model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0].tolist()
        torch.testing.assert_close(torch.tensor(found).view(-1, 2), expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def padded_with_its_end(run, tmp_path) -> tuple[Path, torch.Tensor]:
    """The export of a run whose base pads with its end of sequence, and its scores of each pair alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(tmp_path / "base", pad_token="</s>")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes, **ids)).save_pretrained(
        tmp_path / "base"
    )
    run("padded", 1, {}, reward_model={"model": {"path": str(tmp_path / "base")}, "optim": {"lr": 1e-2}})
    export = tmp_path / "padded/checkpoints/latest/reward_model"
    return export, scores(export, tmp_path / "pairs.jsonl")


def test_margins_reach_the_loss_at_every_layout(run, tmp_path) -> None:
    """The first held-out loss, before training: -log sigmoid(chosen - rejected - margin), by hand of the scores."""
    rows = run("margin", 1, {}, margin=True)
    tp2 = run("margin_tp2", 2, {"tp": 2}, margin=True)
    plain = run("no_margin", 1, {})
    assert rows[1]["loss"] > plain[1]["loss"]
    for row, other in zip(rows, tp2, strict=True):
        for name in reproducible(row):
            assert other[name] == pytest.approx(row[name], abs=2e-4), name
    found = scores(tmp_path / "margin/checkpoints/latest/reward_model", tmp_path / "pairs.jsonl")
    difference = found[:, 0] - found[:, 1] - torch.tensor([n % 3 for n in range(12)])
    expected = float(-torch.nn.functional.logsigmoid(difference).mean())
    assert rows[-1]["eval_loss"] == pytest.approx(expected, abs=1e-4)


def mean_scores(directory: Path, pairs: Path) -> torch.Tensor:
    """[P, 2]: the mean over each response's tokens of Hugging Face's hidden states times the head."""
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    found = pair_samples(pairs, directory, 1024)

    def mean(prompt: list[int], response: list[int]) -> float:
        hidden_1TH = model.model(torch.tensor([prompt + response])).last_hidden_state
        return float(model.score(hidden_1TH)[0, len(prompt) :, 0].mean())

    with torch.no_grad():
        return torch.tensor(
            [[mean(pair.prompt_tokens, side) for side in (pair.chosen_tokens, pair.rejected_tokens)] for pair in found]
        )[:12]


def test_the_mean_over_the_response_at_every_layout(run, tmp_path) -> None:
    """Loss, report and scale are of means by Hugging Face; packed, padded, TP2 with sequence parallelism and PP2."""
    keys: dict[str, Any] = {"loss": "response_mean", "margin": True}
    rows = run("mean", 1, {}, **keys)
    padded = {"num_steps": 3, "mini_batch_samples": 8, "micro_batch_samples": 2}
    for name, parallel, more in (("tp2", {"tp": 2, "sequence_parallel": True}, {}), ("pp2", {"pp": 2}, padded)):
        others = run(name, 2, parallel, **keys, **({"train": more} if more else {}))
        for row, other in zip(rows, others, strict=True):
            for key in ("loss", "grad_norm", "pair_accuracy", "eval_loss", "eval_chosen_score", "eval_rejected_score"):
                if key in row:
                    assert other[key] == pytest.approx(row[key], abs=2e-4), (name, key)
    export, pairs = tmp_path / "mean/checkpoints/latest/reward_model", tmp_path / "pairs.jsonl"
    found = mean_scores(export, pairs)
    assert abs(float(scores(export, pairs).mean() - found.mean())) > 1e-3, "the last token's score is another one"
    difference = found[:, 0] - found[:, 1] - torch.tensor([n % 3 for n in range(12)])
    expected = float(-torch.nn.functional.logsigmoid(difference).mean())
    assert rows[-1]["eval_loss"] == pytest.approx(expected, abs=1e-4)
    assert rows[-1]["eval_chosen_score"] == pytest.approx(float(found[:, 0].mean()), abs=1e-4)
    report = json.loads((tmp_path / "mean/calibration.json").read_text())
    assert report["score_mean"] == pytest.approx(float(found.mean()), abs=1e-4)
    run("scaled", 1, {}, **keys, unit_variance=True)
    scaled = mean_scores(tmp_path / "scaled/checkpoints/latest/reward_model", pairs)
    assert float(scaled.std(correction=0)) == pytest.approx(1.0, abs=1e-3)


def test_an_export_says_how_it_scores(run, tmp_path) -> None:
    """Also one that is trained further with another loss, and in a Megatron checkpoint converted from it."""
    run("mean", 1, {}, loss="response_mean")
    export = tmp_path / "mean/checkpoints/latest/reward_model"
    assert json.loads((export / "config.json").read_text())["megarlhf_score_of"] == "response_mean"
    assert cli.main(["convert", "hf-to-megatron", f"--hf={export}", f"--out={tmp_path / 'megatron'}", "--tp=2"]) == 0
    stated = json.loads(next((tmp_path / "megatron").rglob("config.json")).read_text())
    assert stated["megarlhf_score_of"] == "response_mean"
    with refuses(str(export), "mean over the response"):
        Classifier(export, torch.device("cpu"))
    run("again", 1, {}, reward_model={"model": {"path": str(export)}, "optim": {"lr": 1e-2}})
    again = tmp_path / "again/checkpoints/latest/reward_model"
    assert "megarlhf_score_of" not in json.loads((again / "config.json").read_text())
