"""What several ranks of a checkpoint hold: compared wherever a whole model is read. Loading reads only its boxes."""

import pytest
import torch

from megarlhf.commands.convert import main
from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, MegatronTarget, convert
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.checks import replicas as copies
from megarlhf.weights.checks.replicas import require_equal_replicas
from tests.refuses import refuses
from tests.weights.models import write_model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("replicas")
    targets = {"llama": MegatronTarget(tp=2, format="mp_rank"), "mixtral": MegatronTarget(ep=2, format="mp_rank")}
    for family, target in targets.items():
        source = open_checkpoint(write_model(family, root / f"{family}.hf", dtype=torch.bfloat16))
        convert(source, root / family, target)
    return root


def flip(extent, element):
    with extent.path.open("r+b") as file:
        file.seek(extent.offset + element * extent.dtype.itemsize)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_one_bit_of_one_replica(checkpoints, tmp_path, family):
    """Of every tensor that both ranks hold, in either rank: found, named with both files. What one rank alone holds
    cannot be known."""
    stored = open_checkpoint(checkpoints / family).weights
    require_equal_replicas(stored)
    first, second = ({(p.tensor, p.box) for p in part.placements} for part in stored.parts)
    both = first & second
    norms = {f"model.layers.{n}.{norm}_layernorm.weight" for n in range(4) for norm in ("input", "post_attention")}
    norms.add("model.norm.weight")
    if family == "llama":
        assert {tensor for tensor, _ in both} == norms
    else:
        dense = {tensor for tensor, _ in first if ".experts." not in tensor}
        assert {tensor for tensor, _ in both} == dense > norms
    for rank, part in enumerate(stored.parts):
        for placement in part.placements:
            extent, last = stored.extents[rank][placement.storage], placement.part(placement.box).offset
            flip(extent, last)
            if (placement.tensor, placement.box) in both:
                with refuses(placement.tensor, "one place") as error:
                    require_equal_replicas(stored)
                assert "rank_00" in str(error.value)
            else:
                require_equal_replicas(stored)
            flip(extent, last)
    require_equal_replicas(stored)


def test_on_threads(checkpoints, monkeypatch):
    monkeypatch.setattr(copies, "_WORTH_THREADS", 0)
    stored = open_checkpoint(checkpoints / "mixtral").weights
    require_equal_replicas(stored)
    extent = stored.extents[1]["decoder.final_layernorm.weight"]
    flip(extent, 3)
    with refuses("model.norm.weight", "one place"):
        require_equal_replicas(stored)
    flip(extent, 3)


def test_every_command_that_reads_a_whole_model_refuses(checkpoints, tmp_path, capsys):
    source = checkpoints / "mixtral"
    stored = open_checkpoint(source).weights
    flip(stored.extents[1]["embedding.word_embeddings.weight"], 7)
    out = tmp_path / "out"
    try:
        for arguments in (
            ["megatron-to-hf", "--megatron", source, "--out", out],
            ["relayout", "--megatron", source, "--out", out, "--tp", "2"],
            ["verify", source, checkpoints / "mixtral.hf"],
            ["inspect", source, "--check"],
        ):
            assert main(list(map(str, arguments))) == 2, arguments
            assert "embed_tokens.weight is " in capsys.readouterr().err
    finally:
        flip(stored.extents[1]["embedding.word_embeddings.weight"], 7)
    assert not list(tmp_path.iterdir())
    convert(open_checkpoint(source), out, HuggingFaceTarget())


def test_ranks_saved_in_two_dtypes_are_compared_in_the_narrower(tmp_path):
    """Not covered: what a run that keeps its norms in fp32 on one rank only would mean by that."""
    from megarlhf.architectures.placements import identity_placements
    from megarlhf.weights.transport.extent import CheckpointWeights, Extent

    values = torch.tensor([1.0, 1.0 + 2**-12, -0.0])
    (tmp_path / "a").write_bytes(values.numpy().tobytes())
    (tmp_path / "b").write_bytes(values.bfloat16().view(torch.int16).numpy().tobytes())
    parts = tuple(identity_placements({"w": (3,)}, rank) for rank in (0, 1))
    kinds = {"a": torch.float32, "b": torch.bfloat16}
    extents = tuple({"w": Extent(tmp_path / name, 0, (3,), dtype)} for name, dtype in kinds.items())
    require_equal_replicas(CheckpointWeights(tmp_path, parts, extents))
    (tmp_path / "b").write_bytes(torch.tensor([1.0, 1.0, 0.0]).bfloat16().view(torch.int16).numpy().tobytes())
    with refuses("w", "-0.0 in a", "0.0 in b"):
        require_equal_replicas(CheckpointWeights(tmp_path, parts, extents))
