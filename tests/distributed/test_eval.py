"""`megarlhf eval` in whole runs: its figures by Hugging Face and by hand, the same at every layout.

Not covered: intervals (tests/algo/test_intervals.py), what is refused (tests/config/test_eval_config.py).
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarlhf.algo.intervals import pass_at_k
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.data.in_memory import load_records
from tests.distributed.samples import pair_samples
from tests.ranks import RankPool

LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}}
Run = Callable[..., dict[str, Any]]


def runner(ranks: RankPool, folder: Path) -> Run:
    """`megarlhf eval` of a configuration on so many ranks: its `eval.json`, whose figures are those of the metrics."""

    def run(name: str, world: int, **tree: Any) -> dict[str, Any]:
        path, run_dir = folder / f"{name}.yaml", folder / name
        run_section = {"dir": str(run_dir), "seed": 3} | tree.pop("run", {})
        (written, *_) = ranks.run(world, "command", *argv_of("eval", {"run": run_section, **tree}, path))
        report: dict[str, Any] = json.loads((run_dir / "eval.json").read_text())
        (row,) = read_metrics(run_dir)
        for figure, each in report["figures"].items():
            assert row[figure] == each["value"]
            assert figure in written
        return report

    return run


@pytest.fixture
def run(ranks, tmp_path) -> Run:
    return runner(ranks, tmp_path)


def model(path: Path, **parallel: int) -> dict[str, Any]:
    return {"model": {"path": str(path)}, "parallel": parallel}


def value(report: dict[str, Any], name: str) -> Any:
    return report["figures"][name]["value"]


def nll_by_hugging_face(path: Path, rows: list[tuple[list[int], int]]) -> list[tuple[float, int]]:
    """Sum of nats, and tokens, of what follows the first `start` tokens of each row."""
    from transformers import LlamaForCausalLM

    hf, found = LlamaForCausalLM.from_pretrained(path, dtype=torch.float64).eval(), []
    for tokens, start in rows:
        labels = torch.tensor([[-100] * start + tokens[start:]])
        with torch.no_grad():
            mean = float(hf(torch.tensor([tokens]), labels=labels).loss)
        found.append((mean * (len(tokens) - start), len(tokens) - start))
    return found


def test_perplexity_is_hugging_faces_at_every_layout(run, two_layers, data) -> None:
    """Weighted by tokens: responses have one to four, and the mean of their means is another number."""
    directory, tokenizer, rows = two_layers["plain"], load_tokenizer(two_layers["plain"]), []
    for record in load_records(data["sft"], fields=("prompt", "response")):
        prompt = [tokenizer.bos_id, *tokenizer.encode(record["prompt"])]
        rows.append(
            ([*prompt, *tokenizer.encode(record["response"], continuation=True), tokenizer.eos_id], len(prompt))
        )
    by_text = nll_by_hugging_face(directory, rows)
    total, count = map(sum, zip(*by_text, strict=True))
    tree = {"data": {"train": str(data["sft"])}}
    single = run("single", 1, actor=model(directory), **tree)
    assert single["tasks"] == ["perplexity"]
    assert value(single, "num_tokens") == count
    assert value(single, "eval_loss") == pytest.approx(total / count, abs=2e-6)
    assert value(single, "eval_perplexity") == pytest.approx(math.exp(total / count), rel=5e-6)
    assert abs(sum(nats / tokens for nats, tokens in by_text) / len(by_text) - total / count) > 1e-3
    packed = {"forward": {"max_tokens_per_micro_batch": 64}}
    for name, parallel in LAYOUTS.items():
        other = run(name, 2, actor=model(directory, **parallel), **tree, **packed)
        for figure, each in single["figures"].items():
            expected = {key: pytest.approx(x, rel=2e-5) if isinstance(x, float) else x for key, x in each.items()}
            assert other["figures"][figure] == expected, figure
        assert other["models"] == single["models"]
        assert other["data"] == single["data"]


def test_perplexity_of_plain_text_in_pieces(run, two_layers, tmp_path) -> None:
    texts = ["1+2=3", "37+48=85 " * 4]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    directory = two_layers["plain"]
    tokenizer, rows = load_tokenizer(directory), []
    for text in texts:
        tokens = tokenizer.encode(text)
        rows += [([tokenizer.bos_id, *tokens[start : start + 15]], 1) for start in range(0, len(tokens), 15)]
    total, count = map(sum, zip(*nll_by_hugging_face(directory, rows), strict=True))
    limits = {"max_prompt_tokens": 8, "max_response_tokens": 8}
    texts_only = {"data": {"train": str(tmp_path / "texts.jsonl"), **limits}, "eval": {"perplexity_of": "text"}}
    report = run("text", 1, actor=model(directory), **texts_only)
    assert len(rows) > len(texts)
    assert (value(report, "num_tokens"), report["figures"]["eval_loss"]["over"]) == (count, f"{len(rows)} pieces")
    assert value(report, "eval_loss") == pytest.approx(total / count, abs=2e-6)


def test_a_reward_model_on_pairs_is_that_of_hugging_face_at_every_layout(run, two_layers, data) -> None:
    from transformers import LlamaForSequenceClassification

    reward_model = two_layers["scorer"]
    hf = LlamaForSequenceClassification.from_pretrained(reward_model, dtype=torch.float64).eval()
    pairs = pair_samples(data["pairs"], reward_model)
    with torch.no_grad():
        rows = [[p.prompt_tokens + side for side in (p.chosen_tokens, p.rejected_tokens)] for p in pairs]
        hf.config.pad_token_id = 999
        scores = torch.tensor([[float(hf(torch.tensor([row])).logits) for row in pair] for pair in rows]).double()
    difference = scores[:, 0] - scores[:, 1]
    tree = {"data": {"train": str(data["pairs"])}}
    single = run("single", 1, reward_model=model(reward_model), **tree)
    assert single["tasks"] == ["pairs"]
    assert value(single, "eval_pair_accuracy") == float((difference > 0).double().mean())
    assert value(single, "eval_loss") == pytest.approx(
        float(-torch.nn.functional.logsigmoid(difference).mean()), abs=1e-5
    )
    assert value(single, "eval_chosen_score") == pytest.approx(float(scores[:, 0].mean()), abs=1e-5)
    calibration = single["calibration"]
    assert sum(row["pairs"] for row in calibration["reliability"]) == calibration["pairs"] == len(pairs)
    assert calibration["calibration_error"] == value(single, "eval_calibration_error")
    for name, parallel in LAYOUTS.items():
        other = run(name, 2, reward_model=model(reward_model, **parallel), **tree)
        for figure in single["figures"]:
            assert value(other, figure) == pytest.approx(value(single, figure), abs=2e-5), figure


def generation(data: dict[str, Path]) -> dict[str, Any]:
    return {
        "data": {"train": str(data["prompts"]), "max_prompt_tokens": 16},
        "rollout": {"engine": "megatron", "max_response_tokens": 5, "num_samples_per_prompt": 4},
        "greedy": False,
        "max_samples": 12,
    }


BRIEF = {"kind": "rule", "rule": "tests.distributed.user_rewards:brief", "name": "brief", "workers": 0}


def test_pass_at_k_by_hand_of_what_generate_wrote(run, ranks, two_layers, data, tmp_path) -> None:
    """The same seeds draw the same samples."""
    tree = {"actor": model(two_layers["plain"]), "rewards": [BRIEF], **generation(data)}
    tree["rollout"] |= {"top_p": 0.95, "stop": ["=9"]}
    report = run("eval", 1, **tree, eval={"accuracy": "brief", "pass_at": [1, 2, 4]})
    assert report["sampling"] == {
        "greedy": False, "temperature": 1.0, "top_p": 0.95, "top_k": 0, "min_p": 0.0, "num_samples_per_prompt": 4,
        "max_response_tokens": 5, "stop": ["=9"], "stop_token_ids": [], "engine": "megatron", "dtype": None,
    }  # fmt: skip
    ranks.run(
        1,
        "command",
        *argv_of("generate", {"run": {"dir": str(tmp_path / "g"), "seed": 3}, **tree}, tmp_path / "g.yaml"),
    )
    lines = [json.loads(line) for line in (tmp_path / "g" / "responses.jsonl").read_text().splitlines()]
    kept = (tmp_path / "eval" / "responses.jsonl").read_text()
    assert [json.loads(line) for line in kept.splitlines()] == lines
    right = [int(line["rewards"]["brief"]) for line in lines]
    correct = [sum(right[start : start + 4]) for start in range(0, len(right), 4)]
    assert len(correct) == 12
    assert len(set(correct)) > 2, "some prompts are answered rightly sometimes"
    for k in (1, 2, 4):
        expected = sum(pass_at_k(4, c, k) for c in correct) / len(correct)
        figure = report["figures"][f"eval_pass_at_{k}"]
        assert figure["value"] == pytest.approx(expected)
        assert figure["low"] < figure["value"] <= figure["high"]
        assert figure["over"] == "12 prompts"
    assert value(report, "eval_average_at_4") == value(report, "eval_pass_at_1") == sum(right) / len(right)


def test_a_model_against_itself_wins_half_and_another_layout_says_the_same(run, two_layers, data, tmp_path) -> None:
    """Scored by our reward model. Sampled: the two draw other samples, and one half is within the interval, as 95 of
    100 seeds have it. Greedy: all are ties."""
    tree: dict[str, Any] = generation(data) | {"rewards": [{"kind": "model"}], "max_samples": 24}
    plain, sampled = model(two_layers["plain"]), {}
    ours = {"actor": plain, "against": plain, "reward_model": model(two_layers["scorer"])}
    for name, world, parallel in (("one", 1, {}), ("tp2", 2, {"tp": 2}), ("pp2", 2, {"pp": 2})):
        plain = model(two_layers["plain"], **parallel)
        roles = {"actor": plain, "against": plain, "reward_model": model(two_layers["scorer"], **parallel)}
        sampled[name] = run(name, world, **roles, **tree)
    one = sampled["one"]["figures"]
    assert 0.05 < one["eval_win_rate"]["high"] - one["eval_win_rate"]["low"] < 0.4
    assert one["eval_tie_rate"]["value"] < 0.5
    assert one["eval_model"]["value"] != one["against_model"]["value"]
    again = [run(f"seed{n}", 1, **ours, **tree, run={"seed": n})["figures"]["eval_win_rate"] for n in (0, 1, 2, 4)]
    rates = [one["eval_win_rate"], *again]
    assert len({each["value"] for each in rates}) == 5
    assert sum(each["low"] < 0.5 < each["high"] for each in rates) >= 4
    assert sum(each["value"] for each in rates) / 5 == pytest.approx(0.5, abs=0.04)
    for name in ("tp2", "pp2"):
        for figure in ("eval_win_rate", "eval_model", "against_model", "eval_reward_difference"):
            assert value(sampled[name], figure) == pytest.approx(one[figure]["value"], abs=1e-4), (name, figure)
    rollout = {**tree["rollout"], "num_samples_per_prompt": 1}
    greedy = run("greedy", 1, **ours, **{**tree, "greedy": True, "rollout": rollout})["figures"]
    assert (greedy["eval_win_rate"]["value"], greedy["eval_tie_rate"]["value"]) == (0.5, 1.0)
    assert greedy["eval_reward_difference"] == {"value": 0.0, "low": 0.0, "high": 0.0, "over": "24 prompts"}
    for name, same in (("greedy", True), ("one", False)):
        files = [tmp_path / name / file for file in ("responses.jsonl", "responses_of_against.jsonl")]
        said = [[json.loads(line)["response"] for line in file.read_text().splitlines()] for file in files]
        assert len(said[0]) == len(said[1]) == 24 * (1 if same else 4)
        assert (said[0] == said[1]) is same


def test_two_models_by_vllm_one_after_the_other(vllm_ranks, one_layer, data, tmp_path) -> None:
    """Of other weights and layouts, at greedy the same responses as by the actor's own forward."""
    run = runner(vllm_ranks, tmp_path)
    tree = generation(data) | {"greedy": True, "rewards": [BRIEF]}
    tree |= {"actor": model(one_layer["plain"], tp=2), "against": model(one_layer["tied"])}
    found = {}
    for engine in ("megatron", "vllm"):
        tree["rollout"] = {"engine": engine, "max_response_tokens": 5}
        found[engine] = run(engine, 2, **tree)
    assert found["vllm"]["figures"] == found["megatron"]["figures"]
    assert value(found["vllm"], "response_length_mean") != value(found["vllm"], "against_response_length_mean")
