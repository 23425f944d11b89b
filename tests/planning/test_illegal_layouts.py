"""Every illegal layout, role on ranks and policy of memory: refused before a process group exists, each as a start
under a launcher meets it on a rank. What is only without effect is said, and refuses nothing. Not covered: what a
machine with a GPU refuses by its own kernels."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from megarlhf.commands import cli
from megarlhf.config import load_config
from megarlhf.planning.preflight import preflight
from tests.planning.configs import MODEL, ROWS
from tests.planning.illegal import CASES, MIB, VLLM, Case, actor, case, of_experts, read_only
from tests.refuses import missing_names
from tools.demo.make_data import train_tokenizer


class Joined(Exception):
    """A process group would be made."""


def trees(root: Path) -> dict[str, dict[str, Any]]:
    made = {"model": {"path": "MODEL:model", "random_init": True}}
    tree = {
        "run": {"dir": str(root / "run")}, "actor": made,
        "data": {"train": str(root / "train.jsonl"), "max_prompt_tokens": 40},
        "train": {"num_steps": 10, "mini_batch_samples": 24, "micro_batch_samples": 1},
    }  # fmt: skip
    rl = {
        **tree, "critic": made, "rewards": [{"kind": "rule", "rule": "exact_match"}],
        "train": {**tree["train"], "prompts_per_step": 6},
        "rollout": {"num_samples_per_prompt": 4, "max_response_tokens": 24, "engine": "megatron"},
        "algo": {"kl": {"coef": 0.1}},
    }  # fmt: skip
    rm = {"reward_model" if key == "actor" else key: value for key, value in tree.items()}
    generate = {key: value for key, value in tree.items() if key != "train"}
    generate["rollout"] = {"engine": "megatron", "max_response_tokens": 24}
    return {"sft": tree, "dpo": tree, "rm": rm, "rl": rl, "generate": generate}


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(tree.get(key), dict)
        tree[key] = merged(tree[key], value) if both else value
    return tree


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Case], Path]:
    def models_in(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: models_in(each) for key, each in value.items()}
        return str(tmp_path / value[6:]) if isinstance(value, str) and value.startswith("MODEL:") else value

    def make(case: Case) -> Path:
        for name, changes in {"model": {}, **case.models}.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps({**MODEL, **changes}))
            (tmp_path / name / "tokenizer.model").write_bytes(train_tokenizer())
        (tmp_path / "train.jsonl").write_text(ROWS)
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(models_in(merged(trees(tmp_path)[case.command], case.changes))))
        return file

    return make


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, write: Callable[[Case], Path]) -> Callable[[Case, int], int]:
    def no_group(*args: Any, **kwargs: Any) -> None:
        raise Joined

    def call(case: Case, rank: int = 0) -> int:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.world_size, "LOCAL_WORLD_SIZE": case.world_size}
        for name, number in numbers.items():
            monkeypatch.setenv(name, str(number))
        for name in ("init_process_group", "new_group"):
            monkeypatch.setattr(dist, name, no_group)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "1")  # nobody is asked there
        facts = SimpleNamespace(device_type=case.device)
        monkeypatch.setattr("megarlhf.planning.preflight.capabilities", lambda: facts)
        monkeypatch.setattr("megarlhf.planning.preflight.available_bytes", lambda: case.available)
        monkeypatch.setattr("megarlhf.commands.launch.SILENCE_SECONDS", 0.0)
        return cli.main([case.command, "-c", str(write(case))])

    return call


@pytest.mark.parametrize("name", CASES)
def test_refused_before_a_process_group_exists(name, start, capsys, tmp_path) -> None:
    """By the last rank as by the first, with what is wrong, what was given, and what to do; nothing is written."""
    case = CASES[name]
    assert start(case, case.world_size - 1) == 2
    assert not missing_names(capsys.readouterr().err, *case.names.split("|"))
    assert not (tmp_path / "run").exists()


LEGAL = {
    "sft": case(actor(tp=2, pp=2, cp=2, vpp=3), 8),
    # Neither the width of the residual stream nor the vocabulary has to divide: one is whole on every rank, the other
    # is padded.
    "width and vocabulary": case(
        {"actor": {"model": {"path": "MODEL:other"}, "parallel": {"tp": 4}}},
        4,
        models={"other": {"hidden_size": 90, "vocab_size": 101}},
    ),
    "experts": of_experts(8, ep=4, cp=2, tp=2),
    "rl": case(read_only("reference", ranks=[1, 3], tp=2), 4, command="rl", available=64 * MIB),
    "dpo": case(read_only("reference", ranks=1), 2, command="dpo"),
    "generate": case(actor(tp=2, cp=2), 4, command="generate"),
}


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_start_comes_as_far_as_the_process_group(name: str, start: Callable[[Case, int], int]) -> None:
    """The table above is refused by what its cases say, and not by how they are started."""
    with pytest.raises(Joined):
        start(LEGAL[name], 0)


UNREAD = {
    "offload of a role that is not trained": ("rl",
     merged(read_only("reference"), {"reference": {"offload": {"optimizer": "stream", "gradients": False}}}),
     {"reference.offload.optimizer", "reference.offload.gradients"}),
    "recompute of a role that is not trained": ("dpo",
     merged(read_only("reference"), {"reference": {"recompute": "full", "kernels": {"save_mib": 1}}}),
     {"reference.recompute", "reference.kernels.save_mib"}),
    "weights that nobody makes room for": ("sft", {"actor": {"offload": {"parameters": True, "optimizer": True}}},
     {"actor.offload.parameters"}),
    "overlap without anything to sum": ("rm",
     {"reward_model": {"optim": {"overlap_grad_reduce": False, "overlap_param_gather": False}}},
     {"reward_model.optim.overlap_grad_reduce", "reward_model.optim.overlap_param_gather"}),
    "memory of another engine": ("rl",
     {"rollout": {"vllm": {"gpu_memory_utilization": 0.6}, "max_engine_rebuilds": 1}},
     {"rollout.vllm", "rollout.max_engine_rebuilds"}),
    "memory of another device": (
     "rl", {"rollout": {**VLLM, "vllm": {"cpu_cache_gib": 2, "gpu_memory_utilization": 0.6}}},
     {"rollout.vllm.cpu_cache_gib"}),
    "logits that are kept anyway": ("sft", {"actor": {"kernels": {"logprobs": "reference", "save_mib": 1}}},
     {"actor.kernels.save_mib"}),
    "a head beside random weights": ("rl", {"critic": {"model": {"fresh_head": True}}}, {"critic.model.fresh_head"}),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_only_without_effect_is_said(name: str, write: Callable[[Case], Path]) -> None:
    """A line that several roles or files share: the run goes on."""
    command, changes, keys = UNREAD[name]
    cfg = load_config(cli.COMMANDS[command].config, write(Case(command, changes, 1)))
    start = "set, but without effect here: "
    notes = [note for note in preflight(command, cfg, 1, device_type="cuda").notes if note.startswith(start)]
    assert {note.removeprefix(start).split(" (")[0] for note in notes} == keys
