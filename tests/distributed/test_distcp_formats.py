"""Megatron checkpoints of today's formats, saved by Megatron-Core and torch.distributed.checkpoint (`distcp_jobs.py`
names the writers' lines): read to the last bit, as a conversion and as a run reads them. Not covered: files of the
programs themselves on GPUs; a released Megatron-Core 0.19 (its common_state is saved by the installed one)."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarlhf.config import ModelConfig
from megarlhf.model_directory import find_hf_directory
from megarlhf.planning.models import _require_tokenizer
from megarlhf.provenance import FILE as PROVENANCE
from megarlhf.provenance import find_provenance_file
from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, convert
from megarlhf.weights.checkpoint.describe import describe
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.checkpoint.replaceable import require_replaceable
from megarlhf.weights.checkpoint.verify import differences, digests
from tests.distributed.distcp_jobs import save_as
from tests.distributed.test_sft_layouts import config
from tests.refuses import missing_names, refuses
from tests.weights.models import write_model

FORMATS = {"torch_dcp": "torch_dcp", "fsdp_dtensor": "fsdp_dtensor"}
WITH_ARGS = ("common_state", "foreign", "torch_dcp", "fsdp_dtensor")
WITHOUT_ARGS = ("nemo", "verl")


def same_model(a: Path, b: Path, hf: Path | None) -> str:
    """What `verify` says; empty when the two are the same."""
    first, second = open_checkpoint(a, hf=hf), open_checkpoint(b)
    return differences(first, second, digests(first), digests(second), None)


@pytest.mark.parametrize("kind", [*WITH_ARGS, *WITHOUT_ARGS])
def test_first_loss_and_bits(ranks, models, data, tmp_path, kind) -> None:
    """A run starts from each kind and has the first loss of the Hugging Face directory."""
    hf, stored = models["plain"], tmp_path / "stored"
    ranks.run(2, save_as, kind, str(hf), str(stored))
    opened = open_checkpoint(stored, hf=hf)
    assert opened.format == FORMATS.get(kind, "torch_dist")
    assert same_model(stored, hf, hf) == ""
    if kind in WITH_ARGS:
        assert same_model(stored, hf, None) == "", "from the arguments alone"
        assert opened.iteration == 10
    else:
        with refuses("args lack", "num_layers", "config.json"):
            open_checkpoint(stored)
    section = config(stored, data["sft"], {})
    section["actor"]["model"]["hf"] = str(hf)
    loss = ranks.run(1, "sft_steps", section, 1)[0]["loss"][0]
    assert loss == ranks.run(1, "sft_steps", config(hf, data["sft"], {}), 1)[0]["loss"][0] > 1.0


@pytest.mark.parametrize("experts", ["each", "grouped"])
@pytest.mark.parametrize("kind", FORMATS)
def test_experts_in_a_state_dict(ranks, tmp_path, kind, experts) -> None:
    hf = write_model("mixtral", tmp_path / "hf", dtype=torch.bfloat16)
    ranks.run(3 if experts == "each" else 2, save_as, kind, str(hf), str(tmp_path / "stored"), experts)
    assert same_model(tmp_path / "stored", hf, hf) == ""


def test_foreign_objects_are_named(ranks, models, tmp_path, caplog) -> None:
    """Control: the file cannot be loaded without the class, for which nobody looks here."""
    stored = tmp_path / "stored"
    ranks.run(1, save_as, "foreign", str(models["plain"]), str(stored))
    with pytest.raises(ModuleNotFoundError, match="mytrainer"):
        torch.load(stored / "iter_0000010" / "common.pt", weights_only=False)
    opened = open_checkpoint(stored)
    assert opened.foreign == {"bridge": "mytrainer.bridge.Bridge"}
    assert describe(opened)["arguments not read"] == "bridge (mytrainer.bridge.Bridge)"
    convert(opened, tmp_path / "out", HuggingFaceTarget())
    assert not missing_names(caplog.text, "bridge (mytrainer.bridge.Bridge)", "not read")
    assert "mytrainer" not in sys.modules


def test_rotary_scaling_of_ms_swift(ranks, models, data, tmp_path) -> None:
    """A Llama 3.1 whose scaling stands in `args.rope_scaling` alone: into config.json, and no contradiction."""
    hf, stored = models["rope"], tmp_path / "stored"
    ranks.run(1, save_as, "swift_rope", str(hf), str(stored))
    assert open_checkpoint(stored).arch.rope_scaling == open_checkpoint(hf).arch.rope_scaling is not None
    convert(open_checkpoint(stored), tmp_path / "out", HuggingFaceTarget())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]["rope_type"] == "llama3"
    assert same_model(stored, hf, hf) == ""
    shutil.copytree(hf, tmp_path / "plain")
    changed = json.loads((hf / "config.json").read_text())
    changed["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(changed))
    with refuses("1 points", "rope_scaling: config.json says None", "'rope_type': 'llama3'"):
        open_checkpoint(stored, hf=tmp_path / "plain")


def test_parts_of_trees_and_their_tokenizers(ranks, models, tmp_path, caplog) -> None:
    """NeMo 2 and verl, from each folder of the tree; the tokenizer goes along, or it is said that there is none."""
    hf, nemo, verl = models["plain"], tmp_path / "nemo", tmp_path / "verl"
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(hf / "config.json", bare / "config.json")
    ranks.run(1, save_as, "nemo", str(hf), str(nemo))
    convert(open_checkpoint(nemo, hf=bare), tmp_path / "out", HuggingFaceTarget())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"of": "NeMo"}'
    assert "no tokenizer" not in caplog.text
    with refuses("actor: no tokenizer", f"actor.model.tokenizer to {nemo / 'context' / 'nemo_tokenizer'}"):
        _require_tokenizer("actor", ModelConfig(path=nemo, hf=bare))
    ranks.run(1, save_as, "verl", str(hf), str(verl))
    step = verl / "global_step_10"
    shutil.copytree(bare, step / "actor" / "model" / "huggingface")
    for place in (verl, step, step / "actor", step / "actor" / "model", step / "actor" / "model" / "dist_ckpt"):
        assert open_checkpoint(place).iteration == 10
        assert find_hf_directory(place) == step / "actor" / "model" / "huggingface"
    assert same_model(verl, hf, None) == ""
    (step / "actor" / "model" / "dist_ckpt" / PROVENANCE).touch()
    assert find_provenance_file(verl) == step / "actor" / "model" / "dist_ckpt" / PROVENANCE
    with refuses("--force", "the tree", str(step)):
        require_replaceable(step, hf)
    convert(open_checkpoint(verl), tmp_path / "out2", HuggingFaceTarget())
    assert not missing_names(caplog.text, "has no tokenizer", "dist_ckpt")
    shutil.copytree(step / "actor", step / "critic")
    with refuses("several models", "actor/model/dist_ckpt", "critic/model/dist_ckpt"):
        open_checkpoint(verl)
    (verl / "latest_checkpointed_iteration.txt").unlink()
    with refuses("global_step_10", "latest_checkpointed_iteration.txt"):
        open_checkpoint(verl)


def _lose(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def _empty(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-50])


DAMAGED: list[tuple[str, Any, str]] = [
    ("common_state", _lose(".metadata"), ".metadata|not finished"),
    ("common_state", _lose("metadata.json"), "metadata.json|writes last|not finished"),
    ("common_state", _empty, "truncated"),
    ("torch_dcp", _lose("__1_0.distcp"), "lacks 1 of 2 files|__1_0.distcp"),
    ("torch_dcp", _lose(".metadata"), ".metadata|not finished"),
    ("fsdp_dtensor", _empty, "truncated"),
]


@pytest.mark.parametrize("kind, damage, names", DAMAGED)
def test_damaged_ones_are_refused(ranks, models, tmp_path, kind, damage, names) -> None:
    stored = tmp_path / "stored"
    ranks.run(2, save_as, kind, str(models["plain"]), str(stored))
    damage(stored / "iter_0000010")
    with refuses(*names.split("|")):
        open_checkpoint(stored, hf=models["plain"])
