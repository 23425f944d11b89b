"""The whole pipeline through the command line, as `make demo` runs it, on two ranks with real vLLM.

SFT is started as a user starts it, in processes of its own; the other commands by their arguments on ranks that are
there already, as under a launcher. `rl` in a process of its own: tests/test_resume_killed.py.
Tiny models and a few steps: what is asserted is that the stages fit together, what they leave behind, and the watch
on the log-probs. Not covered: that anything is learned (`make demo-seeds`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megarlhf.commands.cli import main
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.observe.records.metrics import read_metrics
from tests.command import succeed
from tests.data.in_memory import build_pairs, load_records
from tests.ranks import RankPool
from tools.demo.make_data import Recipe, write_all

RECIPE = Recipe(validation=20, test=8, sft_train=200, pairs_train=200, prompts_train=60)
FEW = ["train.num_steps=3", "train.mini_batch_samples=16", "train.max_tokens_per_micro_batch=64", "eval.max_samples=15"]
RL_METRICS = {
    "step",
    "reward_mean",
    "kl",
    "policy_loss",
    "actor_grad_norm",
    "clip_fraction",
    "entropy",
    "response_length_mean",
    "rollout_logprob_gap_mean",
    "rollout_logprob_gap_p999",
    "rollout_logprob_gap_max",
    "seconds_rollout",
    "seconds_experience",
    "seconds_train",
    "seconds_reshard",
    "seconds_certificate",
    "tokens_per_second",
    "rollout_tokens_per_second",
    "peak_memory_gib",
    "wall_clock",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, vllm_ranks: RankPool) -> Path:
    """Data, SFT at TP2, reward model at PP2, PPO at DP2."""
    root = tmp_path_factory.mktemp("runs")
    write_all(root / "data", RECIPE, seed=0)
    data, actor, scorer = root / "data", root / "sft/checkpoints/latest/actor", root / "rm/checkpoints/latest"
    succeed(
        *("sft", "-c", "configs/demo/sft.yaml", f"run.dir={root / 'sft'}", f"actor.model.path={data / 'base'}"),
        *(f"data.train={data / 'sft_train.jsonl'}", f"data.validation={data / 'sft_validation.jsonl'}"),
        *(
            "actor.parallel.tp=2",
            "checkpoint.export_every=2",
            "checkpoint.export_keep=1",
            "actor.optim.warmup_steps=1",
            *FEW,
        ),
    )
    rm = ["rm", "-c", "configs/demo/rm.yaml", f"run.dir={root / 'rm'}", f"reward_model.model.path={actor}"]
    rm += [f"data.train={data / 'pairs_train.jsonl'}", f"data.validation={data / 'pairs_validation.jsonl'}"]
    rm += ["reward_model.parallel={pp: 2, layers_per_stage: [2, 1]}", "reward_model.optim.warmup_steps=1", *FEW]
    vllm_ranks.run(2, "command", *rm)
    vllm_ranks.run(2, "command", "rl", "-c", "configs/demo/ppo.yaml", f"run.dir={root / 'ppo'}", *rl_overrides(root))
    assert (scorer / "reward_model/config.json").is_file()
    return root


def rl_overrides(root: Path) -> list[str]:
    actor, scorer = root / "sft/checkpoints/latest/actor", root / "rm/checkpoints/latest/reward_model"
    data = root / "data"
    paths = [f"actor.model.path={actor}", f"critic.model.path={scorer}", f"reward_model.model.path={scorer}"]
    paths += [f"data.train={data / 'prompts_train.jsonl'}", f"data.validation={data / 'prompts_validation.jsonl'}"]
    paths += ["actor.optim.warmup_steps=4"]
    return [*paths, "train.prompts_per_step=8", "eval.every=2", "rollout.verify_weights_every=1", *FEW]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    return rows


def test_supervised_stages_leave_what_the_next_one_needs(runs: Path) -> None:
    """Resolved configuration, metrics, TensorBoard events, and checkpoints that Hugging Face loads."""
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    for name, metrics in (
        ("sft", {"loss", "grad_norm", "tokens", "seconds", "eval_perplexity"}),
        ("rm", {"loss", "grad_norm", "tokens", "seconds", "pair_accuracy", "eval_pair_accuracy"}),
    ):
        rows = rows_of(runs / name)
        assert metrics | {"tokens_per_second", "peak_memory_gib", "wall_clock"} <= rows[-1].keys()
        assert rows[-1]["tokens_per_second"] * rows[-1]["seconds"] == pytest.approx(rows[-1]["tokens"])
        assert all(value is not None for row in rows for value in row.values())
        assert any((runs / name / "tensorboard").iterdir())
        assert yaml.safe_load((runs / name / "config.yaml").read_text())["train"]["mini_batch_samples"] == 16
    saved = sorted(path.name for path in (runs / "sft/checkpoints").iterdir())
    assert saved == ["latest", "step_000003"], "keep = 1 leaves the newest"
    actor = LlamaForCausalLM.from_pretrained(runs / "sft/checkpoints/latest/actor")
    assert actor.config.num_hidden_layers == 3
    scorer, info = LlamaForSequenceClassification.from_pretrained(
        runs / "rm/checkpoints/latest/reward_model", output_loading_info=True
    )
    assert tuple(scorer.score.weight.shape) == (1, 128)
    assert not info["missing_keys"]
    _assert_last_row_is_of_the_saved_model(runs, scorer)


def _assert_last_row_is_of_the_saved_model(runs: Path, scorer: Any) -> None:
    """`unit_variance` divides the head before the last evaluation: scores by Hugging Face have its mean, variance 1."""
    path = runs / "data/pairs_validation.jsonl"
    pairs, _ = build_pairs(
        load_records(path, fields=("prompt", "chosen", "rejected")),
        load_tokenizer(runs / "rm/checkpoints/latest/reward_model"),
        max_prompt_tokens=64,
        max_response_tokens=64,
    )
    sequences = [p.prompt_tokens + side for p in pairs[:15] for side in (p.chosen_tokens, p.rejected_tokens)]
    with torch.no_grad():
        hidden = [scorer.model(torch.tensor([tokens])).last_hidden_state[0, -1] for tokens in sequences]
        scores_K = torch.stack([scorer.score(last)[0].double() for last in hidden])
    assert float(scores_K.var(unbiased=False)) == pytest.approx(1.0, rel=1e-3)
    last = rows_of(runs / "rm")[-1]
    assert last["eval_chosen_score"] == pytest.approx(float(scores_K[0::2].mean()), rel=1e-3, abs=1e-4)
    assert last["eval_rejected_score"] == pytest.approx(float(scores_K[1::2].mean()), rel=1e-3, abs=1e-4)


def test_ppo_logs_every_metric_and_the_gap_is_within_rounding(runs: Path) -> None:
    """fp32 on a CPU: vLLM and the trainer agree on every sampled token to 1e-4 nats at every step."""
    rows = rows_of(runs / "ppo")
    for row in rows[1:]:
        assert row.keys() >= RL_METRICS | {"value_loss", "critic_grad_norm"}
        assert 0 < row["rollout_logprob_gap_max"] < 1e-4
        assert row["first_ratio_deviation"] == 0.0
    # The reference has all samples of a prompt in one row, the actor those of a mini-batch: the same up to rounding.
    assert abs(rows[1]["kl"]) < 1e-7
    assert abs(rows[-1]["kl"]) > 1e-6, "the actor never moved"
    assert {"eval_reward_mean", "eval_accuracy"} <= rows[0].keys() & rows[2].keys()
    assert sorted(p.name for p in (runs / "ppo/checkpoints/latest/").iterdir()) == ["actor", "critic"]


def test_grpo_is_the_same_command_without_a_critic_at_tp2(runs: Path, tmp_path: Path, vllm_ranks: RankPool) -> None:
    """TP2 for trainer and vLLM; afterwards `eval` and `generate` on what it saved, and one report of all runs."""
    layout = ["actor.parallel.tp=2"]
    grpo = ["rl", "-c", "configs/demo/grpo.yaml", f"run.dir={tmp_path / 'grpo'}", *rl_overrides(runs), *layout]
    vllm_ranks.run(2, "command", *grpo)
    rows = rows_of(tmp_path / "grpo")
    for row in rows[1:]:
        assert row.keys() >= RL_METRICS
        assert "value_loss" not in row
        assert row["rollout_logprob_gap_max"] < 1e-4
    config = tmp_path / "generate.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "run": {"dir": str(tmp_path / "generate"), "nproc": 2},
                "actor": {"model": {"path": str(tmp_path / "grpo/checkpoints/latest/actor")}},
                "data": {"train": str(runs / "data/prompts_validation.jsonl"), "max_prompt_tokens": 16},
                "rollout": {"max_response_tokens": 6},
                "rewards": [{"kind": "rule", "rule": "exact_match"}],
            }
        )
    )
    vllm_ranks.run(2, "command", "generate", "-c", str(config), "max_samples=7")
    lines = [json.loads(line) for line in (tmp_path / "generate/responses.jsonl").read_text().splitlines()]
    assert len(lines) == 7
    for line in lines:
        assert line.keys() == {"prompt", "answer", "response", "finished", "rewards"}
        assert line["rewards"] == {"exact_match": float(line["response"] == line["answer"])}
    run_dirs = [str(runs / name) for name in ("sft", "rm", "ppo")] + [str(tmp_path / "grpo")]
    assert main(["report", *run_dirs, "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "http" not in page.split("<script", 1)[0]
    assert "eval_accuracy" in page


def test_a_gap_above_the_limit_for_two_steps_ends_the_run_after_its_checkpoint(
    runs: Path, tmp_path: Path, fresh_ranks: RankPool
) -> None:
    """A limit below rounding stands for a real disagreement. Three steps were asked for."""
    grpo = ["rl", "-c", "configs/demo/grpo.yaml", f"run.dir={tmp_path / 'gap'}", *rl_overrides(runs)]
    ((status, written),) = fresh_ranks.run(
        1, "command_status", *grpo, "run.nproc=1", "rollout.logprob_gap={mean: 1.0e-12, steps: 2}"
    )
    assert status == 4, written[-3000:]
    for cause in ("weights", "temperature", "truncation", "rollout.logprob_gap.mean"):
        assert cause in written
    assert [row["step"] for row in read_metrics(tmp_path / "gap")] == [0, 1, 2]
    assert (tmp_path / "gap/checkpoints/latest").resolve().name == "step_000002"
