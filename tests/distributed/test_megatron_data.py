"""Fine-tuning goes on with Megatron's indexed data, and `rl` has it as its pretraining mix.

Not covered: which samples they are (tests/data/test_megatron_indexed.py).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarlhf.config import RMConfig, SFTConfig
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.planning.preflight import preflight
from tests.command import argv_of
from tests.data.in_memory import open_indexed
from tests.data.test_megatron_indexed import documents, write
from tests.distributed.test_rl_layouts import config
from tests.refuses import missing_names, refuses


@pytest.fixture(scope="module")
def indexed(tmp_path_factory) -> Path:
    """Two sets, in the 16 tokens of the tiny models, whose end of sequence is 2."""
    folder = tmp_path_factory.mktemp("indexed")
    write(folder / "a_text", documents(60, seed=1, vocab=16), np.uint16)
    write(folder / "b_text", documents(40, seed=2, vocab=16))
    return folder


def sft(model: Path, folder: Path, **data: Any) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder / "run"), "seed": 3},
        "actor": {"model": {"path": str(model)}, "optim": {"lr": 1e-3}},
        "data": {"sequence_length": 15} | data,
        "train": {"num_steps": 2, "mini_batch_samples": 8, "max_tokens_per_micro_batch": 64},
        "checkpoint": {"every_minutes": 0},
    }


def test_sft_on_a_blend_with_megatron_s_split(ranks, one_layer, indexed, tmp_path) -> None:
    """Two ranks; the held-out loss is the model's own mean over all tokens but the first of each sample."""
    from transformers import AutoModelForCausalLM

    blend = {"path": f"30 {indexed}/a_text 70 {indexed}/b_text", "kind": "megatron", "split": "8,2"}
    held = {"path": f"{indexed}/a_text", "kind": "megatron", "split": "8,2"}
    tree = sft(one_layer["plain"], tmp_path, train=blend, validation=held)
    ranks.run(2, "command", *argv_of("sft", tree, tmp_path / "sft.yaml"))
    rows = read_metrics(tmp_path / "run")
    assert [row["tokens"] for row in rows[1:]] == [8 * 16] * 2
    samples = open_indexed(indexed / "a_text", "8,2", 15, seed=3, part="validation")
    tokens = torch.tensor([samples[n].tokens for n in range(len(samples))])
    model = AutoModelForCausalLM.from_pretrained(one_layer["plain"], dtype=torch.float32)
    with torch.no_grad():
        expected = float(model(tokens, labels=tokens).loss)
    assert rows[0]["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_rl_with_a_pretraining_mix_of_indexed_data(ranks, one_layer, data, indexed, tmp_path) -> None:
    tree = config(one_layer, data["prompts"], {}, advantage="leave_one_out")
    tree["rewards"] = [{"kind": "rule", "rule": "exact_match"}]
    del tree["critic"], tree["reward_model"]
    tree["run"] = {"dir": str(tmp_path / "run")}
    tree["train"] |= {"micro_batch_samples": None, "max_tokens_per_micro_batch": 48, "epochs_per_step": 1}
    mix = {"path": f"{indexed}/a_text", "kind": "megatron"}
    tree["ptx"] = {"data": mix, "mini_batch_samples": 4, "max_tokens": 16}
    tree["checkpoint"] = {"every_minutes": 0}
    ranks.run(1, "command", *argv_of("rl", tree, tmp_path / "rl.yaml"))
    row = read_metrics(tmp_path / "run")[-1]
    assert row["ptx_loss"] > 1.0


def test_what_does_not_fit_is_found_before_a_run(one_layer, indexed, tmp_path) -> None:
    """Other tokens than the model's, other ends than the tokenizer's, another command, a length of nothing."""

    def look(folder: Path, length: int = 15, **source: Any) -> str:
        given = {"kind": "megatron", **source}
        cfg = SFTConfig.model_validate(sft(one_layer["plain"], folder, train=given, sequence_length=length))
        return "\n".join(preflight("sft", cfg, 1, device_type="cpu").notes)

    assert "end of sequence" not in look(tmp_path, path=f"{indexed}/a_text")
    large = write(tmp_path / "large", [[5, 40, 2]] * 80)
    with refuses("token 40", "vocab_size = 16"):
        look(tmp_path, path=str(large))
    endless = write(tmp_path / "endless", [[5, 6, 7]] * 2000)
    assert not missing_names(look(tmp_path, path=str(endless)), "end with token 7", "end of sequence is 2")
    with refuses("data.train", str(tmp_path / "nowhere"), "nowhere.bin", "nowhere.idx"):
        look(tmp_path, path=str(tmp_path / "nowhere"))
    with refuses("513 tokens", "512", "lower data.sequence_length by 1"):
        look(tmp_path, path=str(endless), length=512)
    with refuses("101 tokens", "train.max_tokens_per_micro_batch = 64"):
        look(tmp_path, path=str(endless), length=100)
    with refuses("subset", "columns", "adapter", "leave out"):
        look(tmp_path, path=str(large), columns={"a": "b"})
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"prompt": "1", "response": "2"}))
    with refuses("sequence_length = 15", "kind = megatron"):
        SFTConfig.model_validate(sft(one_layer["plain"], tmp_path, train=str(records)))
    rm = sft(one_layer["plain"], tmp_path, train={"path": str(large), "kind": "megatron"})
    rm["reward_model"] = rm.pop("actor")
    del rm["data"]["sequence_length"]
    with refuses("kind = megatron", "token ids", "prompts", "responses"):
        RMConfig.model_validate(rm)
