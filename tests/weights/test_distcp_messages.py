"""What is said of directories with .distcp files that are no model of Megatron's, or lack something; and the tokenizer
that is taken out of a checkpoint. Files of the formats that are read: tests/distributed/test_distcp_formats.py."""

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, MegatronTarget, convert
from megarlhf.weights.checkpoint.formats.megatron.tokenizers import stored_tokenizer
from megarlhf.weights.checkpoint.formats.torch_dist.saved import read_saved
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from tests.refuses import missing_names, refuses
from tests.weights.models import write_model

EMBEDDING = "embedding.word_embeddings.weight"


def save(folder: Path, state: dict) -> Path:
    """torch/distributed/checkpoint/state_dict_saver.py, save."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    return folder


@pytest.mark.parametrize("state, names", [
    ({"model.layers.0.mlp.up_proj.weight": 2}, "torch.distributed.checkpoint|model.layers.0.mlp.up_proj.weight"),
    ({"net": {"a": 2, "b": 2, "c": 2, "d": 2}}, "no model of Megatron's|4 tensors|net.a, net.b, net.c|Hugging Face"),
    ({EMBEDDING: 2}, "metadata.json|writes last|not finished"),
    ({"model0": {EMBEDDING: 2}, "model1": {EMBEDDING: 2}}, "torch_dcp|model0, model1|--ckpt-format torch_dist"),
    ({"model": {"module.vision." + EMBEDDING: 2}}, f"fsdp_dtensor|no {EMBEDDING}|model.module.vision.{EMBEDDING}"),
    ({"model": {EMBEDDING: 2, "module." + EMBEDDING: 2}}, "several|'model.'|'model.module.'"),
])  # fmt: skip
def test_what_it_is_instead(tmp_path, state, names) -> None:
    def filled(part):
        return {k: filled(v) if isinstance(v, dict) else torch.ones(v, 3) for k, v in part.items()}

    directory = save(tmp_path / "saved", filled(state))
    expected = names.split("|")
    with refuses(str(directory), *expected):
        read_saved(directory)


def test_other_backends_and_shards_of_verl(tmp_path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with refuses("backend 'zarr'", "--ckpt-format torch_dist"):
        read_saved(tmp_path)
    (tmp_path / "metadata.json").unlink()
    actor = tmp_path / "actor"
    actor.mkdir()
    (actor / "model_world_size_2_rank_0.pt").write_bytes(b"")
    with refuses("verl's FSDP", "actor/model_world_size_2_rank_0.pt", "verl.model_merger"):
        open_checkpoint(tmp_path)


def test_the_tokenizer_of_an_iteration_goes_along(tmp_path, caplog) -> None:
    """Where Megatron-LM puts it: megatron/training/checkpointing.py, save_tokenizer_assets (--save-tokenizer-assets).
    A tokenizer that is named as reference wins; tiktoken's file has tokenizer.json's name and another form."""
    hf = write_model("llama", tmp_path / "hf")
    with caplog.at_level(logging.WARNING):
        convert(open_checkpoint(hf), tmp_path / "megatron", MegatronTarget())
    assert not missing_names(caplog.text, str(hf), "no tokenizer", "config.json")
    caplog.clear()
    tokenizer = tmp_path / "megatron" / "release" / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"of": "the run"}')
    convert(open_checkpoint(tmp_path / "megatron"), tmp_path / "out", HuggingFaceTarget())
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == {"of": "the run"}
    assert not caplog.records
    (hf / "tokenizer.json").write_text('{"of": "the reference"}')
    convert(open_checkpoint(tmp_path / "megatron", hf=hf), tmp_path / "out2", HuggingFaceTarget())
    assert json.loads((tmp_path / "out2" / "tokenizer.json").read_text()) == {"of": "the reference"}
    release = tokenizer.parent
    assert stored_tokenizer(release, {"tokenizer_type": "HuggingFaceTokenizer"}) == tokenizer
    assert stored_tokenizer(release, {"tokenizer_type": "TikTokenizer"}) is None
