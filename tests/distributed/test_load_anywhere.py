"""A role starts from a Hugging Face directory, torch_dist or mp_rank of any layout: the first loss is the same."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from megarlhf.weights.checkpoint.conversion import MegatronTarget, convert
from megarlhf.weights.checkpoint.open_checkpoint import detect_format, open_checkpoint
from tests.distributed.test_sft_layouts import config
from tests.refuses import refuses

LIVE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2pp2": (4, {"tp": 2, "pp": 2, "sequence_parallel": False}),
}


@pytest.fixture(scope="module")
def stored(models, tmp_path_factory) -> dict[str, Path]:
    """The same model in all three formats, at layouts that no test runs."""
    root = tmp_path_factory.mktemp("stored")
    source = open_checkpoint(models["plain"])
    convert(source, root / "torch_dist", MegatronTarget(tp=2, pp=3, layers_per_stage=(2, 1, 1)))
    convert(source, root / "mp_rank", MegatronTarget(tp=4, pp=2, vpp=2, format="mp_rank", spec="local"))
    return {"huggingface": models["plain"], "torch_dist": root / "torch_dist", "mp_rank": root / "mp_rank"}


@pytest.mark.parametrize("live", LIVE)
def test_the_first_loss_is_the_same(ranks, stored, data, live) -> None:
    """To the last bit at one live layout, within 1e-6 of the loss of TP1 at the other. tp = 4 > 2 KV heads on disk."""
    world_size, parallel = LIVE[live]
    losses = {}
    for kind, path in stored.items():
        assert detect_format(path) == kind
        losses[kind] = ranks.run(world_size, "sft_steps", config(path, data["sft"], parallel), 1)[-1]["loss"][0]
    assert losses["torch_dist"] == losses["huggingface"]
    assert losses["mp_rank"] == losses["huggingface"]
    reference = ranks.run(1, "sft_steps", config(stored["huggingface"], data["sft"], {}), 1)[0]["loss"][0]
    assert reference > 1.0
    assert losses["mp_rank"] == pytest.approx(reference, rel=1e-6)


def test_a_checkpoint_without_config_or_tokenizer_takes_them_from_model_hf(
    ranks, stored, models, data, tmp_path
) -> None:
    """As pre-training leaves it; without `model.hf` the error says what to set."""
    bare = tmp_path / "bare"
    shutil.copytree(stored["mp_rank"], bare)
    shutil.rmtree(bare / "hf")
    section = config(bare, data["sft"], {})
    with refuses(str(bare), "config.json", "set model.hf", error=AssertionError):
        ranks.run(1, "sft_steps", section, 1)
    section["actor"]["model"]["hf"] = str(models["plain"])
    loss = ranks.run(1, "sft_steps", section, 1)[0]["loss"][0]
    assert loss == ranks.run(1, "sft_steps", config(models["plain"], data["sft"], {}), 1)[0]["loss"][0]
