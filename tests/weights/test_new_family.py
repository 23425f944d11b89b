"""A family that nobody knows, all its names its own: one `Family` is enough for both heads, there and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.architectures import families
from megarlhf.architectures.families.llama import FAMILY as LLAMA
from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import logical_tensors
from megarlhf.architectures.table import Entry, Family
from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, MegatronTarget, convert
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from tests.weights.cases import TINY, random_logical

RENAMED = {"lm_head.weight": "unembed.weight", "score.weight": "value.weight", "model.norm.weight": "trunk.last.weight"}


def renamed(entry: Entry) -> Entry:
    return replace(entry, tensors=tuple((RENAMED.get(name, f"z.{name}"), shape) for name, shape in entry.tensors))


@pytest.fixture
def zebra(monkeypatch) -> Family:
    table = replace(
        LLAMA.table, embedding=tuple(map(renamed, LLAMA.table.embedding)), final=tuple(map(renamed, LLAMA.table.final)),
        lm_head=renamed(LLAMA.table.lm_head), scalar_head=renamed(LLAMA.table.scalar_head), hf_layer="stripes.{layer}.",
    )  # fmt: skip
    family = replace(LLAMA, model_type="zebra", table=table)
    monkeypatch.setitem(families.FAMILIES, "zebra", family)
    return family


@pytest.mark.parametrize(("head", "tied"), [("lm", False), ("lm", True), ("scalar", False)])
def test_both_heads_there_and_back(zebra, tmp_path, head, tied):
    """A tied model's files may repeat the embedding under the head's name, whatever that is."""
    config = {**TINY, "model_type": "zebra", "tie_word_embeddings": tied}
    arch = architecture_from_hf(config)
    logical = {name: value.float() for name, value in random_logical(arch, head).items()}
    assert ("value.weight" in logical) == (head == "scalar")
    stored = dict(logical)
    if tied:
        stored["unembed.weight"] = logical["z.model.embed_tokens.weight"].clone()
    (tmp_path / "hf").mkdir()
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    source = open_checkpoint(tmp_path / "hf")
    assert source.head == head
    for number, form in enumerate(("torch_dist", "mp_rank")):
        convert(source, tmp_path / f"m{number}", MegatronTarget(tp=2, pp=3, format=form))
        convert(open_checkpoint(tmp_path / f"m{number}"), tmp_path / f"b{number}", HuggingFaceTarget())
        back = load_file(tmp_path / f"b{number}" / "model.safetensors")
        assert back.keys() == logical_tensors(arch, head).keys()
        assert all(torch.equal(back[name], value) for name, value in logical.items())
