"""`make equality` finds what differs between two runs, and takes times for no difference.

Not covered: the runs themselves, and how a version's files are put into a directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.equality.compare import Numbers, differences, emptiness, is_compared, read_numbers, with_new_names
from tools.equality.execute import ComparedVersion, Outcome
from tools.equality.runs import ComparedRun, all_runs, merged
from tools.equality.trees import CodeTree, in_keys_of

ROWS: list[dict[str, Any]] = [
    {"step": 0, "eval_loss": 3.5},
    {"step": 1, "loss": 0.1, "grad_norm": 2.5, "kl": None, "tokens": 80, "entropy": 1.5, "seconds_train": 0.25},
    {"step": 2, "loss": 0.2, "grad_norm": 2.25, "kl": None, "tokens": 81, "entropy": 1.25, "seconds_train": 0.5},
]
WEIGHTS = "checkpoints/step_000002/actor/model.safetensors"


def write_run(run: Path, rows: list[dict[str, Any]] = ROWS, weights: bytes = b"weights") -> Numbers:
    """A run directory with these metrics and one file of weights, and what is read from it."""
    (run / WEIGHTS).parent.mkdir(parents=True)
    (run / WEIGHTS).write_bytes(weights)
    (run / "checkpoints/latest").symlink_to("step_000002")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "lengths.jsonl").write_text('{"step": 1, "prompts": [6], "responses": [3]}\n')
    return read_numbers(run)


def changed(step: int, **values: Any) -> list[dict[str, Any]]:
    """The rows with other values in one of them; `...` removes a metric."""
    row = {name: value for name, value in (ROWS[step] | values).items() if value is not ...}
    return [row if number == step else other for number, other in enumerate(ROWS)]


def test_equal_runs_have_no_difference_and_times_are_none(tmp_path: Path) -> None:
    old = write_run(tmp_path / "old")
    new = write_run(tmp_path / "new", changed(1, seconds_train=7.5, wall_clock=1.5, peak_memory_gib=2.5))
    assert list(differences(old, new)) == []
    assert new.left_out == ["peak_memory_gib", "seconds_train", "wall_clock"]
    assert old.rows["1"] == {
        "step": "1", "loss": "0.1", "grad_norm": "2.5", "kl": "null", "tokens": "80", "entropy": "1.5"
    }  # fmt: skip
    assert sorted(old.digests) == ["checkpoints/latest", WEIGHTS, "lengths.jsonl"]
    assert old.digests["checkpoints/latest"] == "step_000002"


@pytest.mark.parametrize(
    ("rows", "difference"),
    [
        (changed(1, loss=0.1 + 2**-56), "step 1: loss: OLD 0.1, NEW 0.10000000000000002"),
        (changed(2, loss=...), "step 2: loss: OLD 0.2, NEW missing"),
        (changed(2, reward=1.0), "step 2: reward: OLD missing, NEW 1.0"),
        (changed(1, tokens=80.0), "step 1: tokens: OLD 80, NEW 80.0"),
        (changed(1, kl=0.0), "step 1: kl: OLD null, NEW 0.0"),
        (ROWS[:2], "step 2: missing in NEW"),
        ([*ROWS, {"step": 3}], "step 3: only in NEW"),
    ],
)
def test_a_difference_of_metrics_is_said(rows: list[dict[str, Any]], difference: str, tmp_path: Path) -> None:
    old, new = write_run(tmp_path / "old"), write_run(tmp_path / "new", rows)
    assert list(differences(old, new)) == [difference]


def test_other_weights_and_lengths_are_said(tmp_path: Path) -> None:
    old, new = write_run(tmp_path / "old"), write_run(tmp_path / "new", weights=b"Weights")
    (said,) = differences(old, new)
    assert said.startswith(f"{WEIGHTS}: OLD ")
    (tmp_path / "new/lengths.jsonl").write_text("")
    assert len(list(differences(old, read_numbers(tmp_path / "new")))) == 2
    (tmp_path / "new" / WEIGHTS).unlink()
    assert any(said.endswith("NEW missing") for said in differences(old, read_numbers(tmp_path / "new")))


def test_a_renamed_metric_is_compared_with_its_old_name(tmp_path: Path) -> None:
    renamed = {"policy_entropy": "entropy"}
    old = write_run(tmp_path / "old")
    new = write_run(tmp_path / "new", changed(1, entropy=..., policy_entropy=1.5))
    assert len(list(differences(old, new))) == 2
    (old, new) = (with_new_names(numbers, renamed) for numbers in (old, new))
    assert [row.get("policy_entropy") for row in old.rows.values()] == [None, "1.5", "1.25"]
    assert list(differences(old, new)) == []


def test_a_step_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step 1 twice"):
        write_run(tmp_path / "old", [*ROWS, ROWS[1]])


def test_numbers_that_prove_little_are_said(tmp_path: Path) -> None:
    numbers = write_run(tmp_path / "run")
    assert list(emptiness(numbers, last_step=2, shows={"loss": 0.15})) == []
    assert list(emptiness(numbers, last_step=3, shows={"loss": 0.2, "kl": 0.0, "clip_fraction": 0.0})) == [
        "the last row is of step 2, expected 3",
        "loss is nowhere above 0.2: 0.1, 0.2",
        "kl is nowhere above 0: null, null",
        "clip_fraction is nowhere above 0: it is missing",
    ]
    (tmp_path / "run" / WEIGHTS).unlink()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 2, "loss": 0.5, "tokens": 80}\n')
    assert list(emptiness(read_numbers(tmp_path / "run"), last_step=2, shows={})) == [
        "only 1 different numbers with a fractional part are compared",
        "fewer than 6 metrics are compared in steps 2",
        "no weights were exported",
    ]


def test_names_decide_what_is_left_out() -> None:
    """Words between underscores and slashes, not letters: `seconds` within a longer word is another word."""
    times = ("seconds", "seconds_train", "tokens_per_second", "rollout_idle_fraction", "columns_received_mib")
    assert not any(map(is_compared, (*times, "peak_memory_gib", "wall_clock", "engine_rebuilds")))
    assert all(map(is_compared, ("step", "loss", "tokens", "reward/blockidle_mean", "eval_loss", "test_loss")))


def test_a_version_that_does_not_know_a_key_gets_its_old_one() -> None:
    renamed = {
        "rollout.vllm.share": "rollout.gpu_memory_utilization",
        "ROLE.optimizer": "ROLE.optim",
        "rewards[].offset": "rewards[].shift",
    }
    config = {
        "actor": {"optimizer": {"lr": 1e-3}, "parallel": {"tp": 2}},
        "rollout": {"engine": "vllm", "vllm": {"share": 0.3}},
        "rewards": [{"kind": "model", "offset": 0.5}, {"kind": "rule"}],
    }
    old = {
        "actor": {"optim": {"lr": 1e-3}, "parallel": {"tp": 2}},
        "rollout": {"engine": "vllm", "gpu_memory_utilization": 0.3},
        "rewards": [{"kind": "model", "shift": 0.5}, {"kind": "rule"}],
    }
    assert in_keys_of("| `rollout.gpu_memory_utilization` | number |", config, renamed) == old
    known = "| `rollout.vllm.share` | number |\n| `ROLE.optimizer.lr` | number |\n| `rewards[].offset` | number |"
    assert in_keys_of(known, config, renamed) == config


class WrittenRuns(ComparedVersion):
    """A version whose runs are written by hand."""

    def _make(self, run: ComparedRun) -> Iterator[str]:
        shutil.rmtree(self.directory(run), ignore_errors=True)
        write_run(self.directory(run))
        return iter(())


def test_numbers_are_kept_until_something_decides_otherwise(tmp_path: Path) -> None:
    """Not for NEW, nor for another configuration or other libraries; what a run has to show is looked at each time."""
    run = ComparedRun(name="sft", command="sft", config={"train": {"num_steps": 2}}, last_step=2)
    tree = CodeTree(tmp_path / "tree", tmp_path / "inputs")

    def outcome(run: ComparedRun, *, reuse: bool = True, surroundings: str = "libraries") -> Outcome:
        return WrittenRuns("OLD", tmp_path / "old", tree, surroundings, reuse=reuse).outcome(run)

    first, second = outcome(run), outcome(run)
    assert first.seconds > 0 == second.seconds
    assert first.numbers == second.numbers
    assert outcome(replace(run, shows={"loss": 1.0})).problems == ["loss is nowhere above 1: 0.1, 0.2"]
    others = (outcome(run, reuse=False), outcome(run, surroundings="others"), outcome(replace(run, config={})))
    assert all(other.seconds > 0 for other in others)


def test_every_run_has_a_name_of_its_own_and_one_to_agree_with() -> None:
    runs = all_runs(Path("inputs"))
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    for command in ("sft", "rm", "dpo", "ppo", "grpo"):
        assert {command + end for end in ("", "-tp2", "-pp2", "-tp2pp2")} <= set(names)
    (killed,) = [run for run in runs if run.kill_at is not None]
    whole = next(run for run in runs if run.name == killed.same_as)
    assert names.index(whole.name) < names.index(killed.name)
    assert whole.config == killed.config
    assert whole.kill_at is None
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": None, "d": 3}, "e": 4}) == {"a": {"c": 2, "d": 3}, "e": 4}
