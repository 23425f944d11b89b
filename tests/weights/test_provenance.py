"""What is stated of a model's origin goes with its weights through conversions, and never with another model's."""

from pathlib import Path

import pytest
import torch

from megarlhf.provenance import FILE, Provenance, Weights, read_provenance
from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, MegatronTarget, convert
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from tests.weights.models import write_model

BASE = Weights(path="/base", digest="1", dtype="bfloat16")
STATED = Provenance(
    command="rl", role="actor", run="/run", step=3, base=BASE, reference=BASE, writing={"texts": {"end": 2}}
)
OTHER = Provenance(command="sft", role="actor", run="/other", step=1, base=BASE)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model("llama", tmp_path / "model", dtype=torch.bfloat16)
    return tmp_path / "model"


def test_a_conversion_carries_it_along(model: Path, tmp_path: Path) -> None:
    (model / FILE).write_text(STATED.to_json())
    chain = (("a", MegatronTarget()), ("b", MegatronTarget(tp=2, format="mp_rank")), ("c", HuggingFaceTarget()))
    source = model
    for name, target in chain:
        convert(open_checkpoint(source), tmp_path / name, target)
        source = tmp_path / name
        assert read_provenance(source) == STATED


def test_the_directory_that_describes_a_model_says_nothing_of_its_weights(model: Path, tmp_path: Path) -> None:
    """As for a resume point, which has a statement of its own and no config.json."""
    convert(open_checkpoint(model), tmp_path / "megatron", MegatronTarget())
    (model / FILE).write_text(OTHER.to_json())
    (tmp_path / "megatron" / "hf").rename(tmp_path / "moved")
    source = open_checkpoint(tmp_path / "megatron", hf=model)
    convert(source, tmp_path / "plain", HuggingFaceTarget())
    assert (tmp_path / "plain" / "config.json").exists()
    assert read_provenance(tmp_path / "plain") is None
    (tmp_path / "megatron" / FILE).write_text(STATED.to_json())
    for name, target in (("own", HuggingFaceTarget()), ("relaid", MegatronTarget(pp=2))):
        convert(source, tmp_path / name, target)
        assert read_provenance(tmp_path / name) == STATED
