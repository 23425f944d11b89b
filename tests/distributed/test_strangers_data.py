"""Strangers' data through `sft`, `rm` and `rl` to the end on two ranks, by configuration alone: sets with weights and
a validation share, a saved dictionary, and a compressed file, in one cache.

Not covered: which samples they are (tests/data/test_strangers.py).
"""

from pathlib import Path
from typing import Any

import pytest

from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.data.strangers import written
from tests.ranks import RankPool

SMALL = {"num_steps": 2, "mini_batch_samples": 8, "micro_batch_samples": 2}


def run(ranks: RankPool, command: str, folder: Path, tree: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Rows of metrics, and what rank 0 said."""
    tree["run"] = {"dir": str(folder / command)}
    tree["data"] |= {"max_prompt_tokens": 16, "cache": str(folder / "cache")}
    status, said = ranks.run(2, "command_status", *argv_of(command, tree, folder / f"{command}.yaml"))[0]
    assert status == 0, said
    return read_metrics(folder / command), said


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


def test_sft_rm_and_rl_by_configuration_alone(ranks, one_layer, folder) -> None:
    actor = {"model": {"path": str(one_layer["plain"])}}
    first, second = (written(name, folder / name) for name in ("table", "parquet_zst"))
    mixed = [{**first, "weight": 3}, {**second, "weight": 1}]
    rows, _ = run(
        ranks, "sft", folder, {"actor": actor, "data": {"train": mixed, "validation_share": 0.2}, "train": SMALL}
    )
    assert {"eval_loss"} <= rows[0].keys()
    assert rows[-1]["step"] == 2

    saved = written("saved_dict", folder / "saved")
    scorer = {"model": {"path": str(one_layer["plain"])}}
    phases = {"train": saved, "phases": "0,1,1"}
    rows, _ = run(ranks, "rm", folder, {"reward_model": scorer, "data": phases, "train": SMALL})
    assert rows[-1]["step"] == 2
    assert rows[-1]["pair_accuracy"] is not None

    tree = {
        "actor": actor,
        "data": {"train": written("gz", folder / "gz"), "phases": "0,1,1"},
        "rewards": [{"kind": "rule", "rule": "exact_match"}],
        "algo": {"advantage": "group_relative"},
        "rollout": {"engine": "megatron", "num_samples_per_prompt": 2, "max_response_tokens": 4},
        "train": {**SMALL, "prompts_per_step": 4},
    }
    rows, _ = run(ranks, "rl", folder, tree)
    assert rows[-1]["step"] == 2
    entries = list((folder / "cache").glob("*/MANIFEST.json"))
    assert len(entries) == 4, "one for each set and command, whatever the ranks"
