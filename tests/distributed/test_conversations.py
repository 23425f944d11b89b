"""Conversations from fine-tuning to reinforcement learning: a turn ends with one token, and it is not end of sequence.

Not covered: vLLM, which is asked to end at the same tokens (tests/rollout/test_end_tokens.py).
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from megarlhf.config import SFTConfig
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.model_directory import end_tokens
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.planning.preflight import preflight
from tests.command import argv_of
from tests.data.chat_styles import CHATML, said, write_chat_tokenizer
from tests.distributed.tiny import write_tiny_llama
from tests.ranks import RankPool
from tests.refuses import missing_names, refuses


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model whose tokenizer has the marks of ChatML and no template, and ends with `</s>`."""
    from transformers import LlamaForCausalLM

    directory = write_tiny_llama(tmp_path_factory.mktemp("base"), num_layers=1)
    (directory / "tokenizer.model").unlink()
    write_chat_tokenizer(directory, None)
    model = LlamaForCausalLM.from_pretrained(directory)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(load_tokenizer(directory).tokens()))
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def talks(tmp_path_factory) -> dict[str, Path]:
    """Whatever is asked, the answer is "yes"."""
    root, draw = tmp_path_factory.mktemp("talks"), random.Random(0)
    files: dict[str, list[dict[str, Any]]] = {"sft": [], "pairs": [], "prompts": []}
    for _ in range(64):
        first, second = draw.sample("abcd", 2)
        asked = [said("user", first), said("assistant", "yes"), said("user", second)]
        sharegpt = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in asked]
        files["sft"].append({"conversations": [*sharegpt, {"from": "gpt", "value": "yes"}]})
        sides = {name: [*asked, said("assistant", text)] for name, text in (("chosen", "yes"), ("rejected", "no"))}
        files["pairs"].append(sides)
        files["prompts"].append({"messages": asked, "answer": "yes"})
    for name, rows in files.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: root / f"{name}.jsonl" for name in files}


def run(ranks: RankPool, command: str, folder: Path, tree: dict[str, Any]) -> Path:
    """In `folder/command`."""
    tree["run"] = {"dir": str(folder / command), "seed": 3}
    ranks.run(1, "command", *argv_of(command, tree, folder / f"{command}.yaml"))
    return folder / command


@pytest.fixture(scope="module")
def taught(ranks, base, talks, tmp_path_factory) -> Path:
    """The export of `sft` on all answers, with a template from the configuration."""
    root = tmp_path_factory.mktemp("runs")
    (root / "chatml.jinja").write_text(CHATML)
    optim = {"lr": 5e-3, "schedule": "constant"}
    tree = {
        "actor": {"model": {"path": str(base)}, "optim": optim},
        "data": {"train": str(talks["sft"]), "loss_on": "all", "chat_template": str(root / "chatml.jinja")},
        "train": {"num_steps": 60, "mini_batch_samples": 16, "max_tokens_per_micro_batch": 1024},
        "checkpoint": {"every_minutes": 0},
    }
    return run(ranks, "sft", root, tree) / "checkpoints" / "latest" / "actor"


def test_what_sft_teaches_as_an_end_is_where_generate_ends(ranks, base, taught, talks, tmp_path) -> None:
    """The export names template and end, so that the next stage needs neither; its other files are the base's."""
    tokenizer = load_tokenizer(taught)
    end = tokenizer.tokens().index("<|im_end|>")
    assert end_tokens(base, 2) == (2,) != (2, end) == end_tokens(taught, 2)
    assert (taught / "chat_template.jinja").read_text() == CHATML
    assert (taught / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert read_metrics(taught.parents[2])[-1]["loss"] < 0.1
    tree = {
        "actor": {"model": {"path": str(taught)}},
        "data": {"train": str(talks["prompts"]), "max_prompt_tokens": 128},
        "rollout": {"engine": "megatron", "max_response_tokens": 6},
        "rewards": [{"kind": "rule", "rule": "exact_match"}],
        "max_samples": 16,
    }
    folder = run(ranks, "generate", tmp_path, tree)
    lines = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    assert [line["response"] for line in lines] == [line["answer"] for line in lines]
    assert all(line["finished"] for line in lines)
    metrics = read_metrics(folder)[-1]
    assert metrics["response_length_mean"] == 4.0, "three letters and the end"


def test_pairs_and_prompts_of_conversations_through_rm_and_rl(ranks, taught, talks, tmp_path) -> None:
    """The reward model reads its score at the token that ends the answer, in `rm` as in `rl`."""
    model = {"model": {"path": str(taught)}, "optim": {"lr": 3e-3, "schedule": "constant"}}
    tree: dict[str, Any] = {
        "reward_model": model,
        "data": {"train": str(talks["pairs"])},
        "train": {"num_steps": 12, "mini_batch_samples": 16, "max_tokens_per_micro_batch": 2048},
        "checkpoint": {"every_minutes": 0},
    }
    scorer = run(ranks, "rm", tmp_path, tree) / "checkpoints" / "latest" / "reward_model"
    tree = {
        "actor": model,
        "reward_model": {"model": {"path": str(scorer)}},
        "rewards": [{"kind": "model"}, {"kind": "rule", "rule": "exact_match"}],
        "data": {"train": str(talks["prompts"]), "max_prompt_tokens": 128},
        "train": {
            "num_steps": 1, "prompts_per_step": 4, "mini_batch_samples": 8, "max_tokens_per_micro_batch": 1024,
        },
        "rollout": {"engine": "megatron", "num_samples_per_prompt": 2, "max_response_tokens": 6},
        "algo": {"advantage": "leave_one_out", "kl": {"coef": 0.0}},
        "checkpoint": {"every_minutes": 0},
    }  # fmt: skip
    folder = run(ranks, "rl", tmp_path, tree)
    row = read_metrics(folder)[-1]
    assert row["reward/exact_match_mean"] > 0.9
    assert row["finished_fraction"] == 1.0


def test_a_bad_conversation_is_found_before_ranks_start(base, tmp_path) -> None:
    """With file and line, and the start says how records are read and where answers end."""
    talks = tmp_path / "talks.jsonl"
    tree = {
        "run": {"dir": str(tmp_path / "run")},
        "actor": {"model": {"path": str(base)}},
        "data": {"train": str(talks), "chat_template": CHATML},
        "train": {"num_steps": 1, "mini_batch_samples": 1, "max_tokens_per_micro_batch": 64},
    }
    talks.write_text(json.dumps({"messages": [said("user", "hi"), said("assistant", "ho")]}) + "\n")
    notes = "\n".join(preflight("sft", SFTConfig.model_validate(tree), 1, device_type="cpu").notes)
    assert not missing_names(notes, "talks.jsonl", "chat template of data.chat_template", "learnt: the last")
    assert not missing_names(notes, "ends an answer with token", "(<|im_end|>)", "2 (</s>)")
    with talks.open("a") as out:
        out.write(json.dumps({"messages": [said("user", "hi"), said("asistant", "ho")]}) + "\n")
    with refuses("talks.jsonl, line 2", "messages"):
        preflight("sft", SFTConfig.model_validate(tree), 1, device_type="cpu")
    missing = {**tree, "data": {"train": str(talks), "chat_template": str(tmp_path / "none.jinja")}}
    with refuses("data.chat_template", str(tmp_path / "none.jinja")):
        preflight("sft", SFTConfig.model_validate(missing), 1, device_type="cpu")
    unread = {**tree, "data": {"train": str(talks), "chat_template": CHATML, "template": "plain"}}
    with refuses("chat_template", "template = plain"):
        SFTConfig.model_validate(unread)
