"""A config that ties the head, and files that hold a head as well: what transformers, vLLM and we make of it. Not
covered: Megatron checkpoints (test_convert), engines (tests/distributed/test_vllm.py)."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.architectures.placements import vllm_placements
from megarlhf.runtime import free_port
from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, convert
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.transport.storages import load_from_files
from tests.refuses import refuses
from tests.weights.cases import empty
from tests.weights.models import write_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_a_head(directory, change=0.0):
    """A tied model whose files hold a head too: the embedding, `change` added to it. Returns its tensors."""
    (path,) = write_model("qwen2_tied", directory).glob("*.safetensors")
    state = load_file(path)
    assert HEAD not in state
    state[HEAD] = state[EMBEDDING] + change
    save_file(state, path, metadata={"format": "pt"})
    return state


def transformers_head(directory):
    """(whether transformers ties it, the head's values)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return head is embedding, head.detach()


def test_an_equal_head_is_the_embedding_everywhere(tmp_path):
    """transformers ties it; what we load into vLLM's storages has no head, and what we export neither."""
    state = with_a_head(tmp_path / "model")
    tied, head = transformers_head(tmp_path / "model")
    assert tied
    assert torch.equal(head, state[EMBEDDING])
    stored = open_checkpoint(tmp_path / "model")
    part = vllm_placements(stored.arch, tp=1, tp_rank=0, rank=0)
    live = empty([part], torch.float32)[0]
    load_from_files(part, stored.weights, live)
    assert HEAD not in live
    assert torch.equal(live[EMBEDDING][: len(head)], head)
    convert(stored, tmp_path / "out", HuggingFaceTarget())
    (path,) = (tmp_path / "out").glob("*.safetensors")
    exported = load_file(path)
    assert exported.keys() == state.keys() - {HEAD}
    assert torch.equal(exported[EMBEDDING], state[EMBEDDING])


def test_another_head_is_refused(tmp_path, caplog):
    """transformers does not tie it, against its config: whoever ties it trains and samples from another model."""
    state = with_a_head(tmp_path / "model", change=0.5)
    with caplog.at_level(logging.WARNING):
        tied, head = transformers_head(tmp_path / "model")
    assert not tied
    assert torch.equal(head, state[HEAD])
    assert not torch.equal(head, state[EMBEDDING])
    with refuses("other values", "not tied", "config.json"):
        open_checkpoint(tmp_path / "model")


@pytest.mark.slow
def test_vllm_s_own_loader_does_not_tie_another_head_either(tmp_path):
    """It sees the files; an engine of ours sees config.json only (its weights start as dummies) and would tie."""
    state = with_a_head(tmp_path / "model", change=0.5)
    command = [sys.executable, "-m", "tests.weights.vllm_loader", "1", "0", str(free_port()), str(tmp_path / "model")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=env, timeout=280)
    parameters = torch.load(tmp_path / "model" / "vllm-1-0.pt")
    for name in (EMBEDDING, HEAD):
        assert torch.equal(parameters[name][: len(state[name])], state[name])
