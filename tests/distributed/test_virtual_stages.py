"""Virtual pipeline stages compute what one process does: training, resume points, exports and weights for vLLM.

Which chunk has which layers is in tests/test_layout.py, states of resume points at other layouts in
test_resume_state.py, memory, messages and time of a rehearsal in tests/rehearsal. Not covered: NCCL, where what is sent
must outlive its tensor too.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megarlhf.architectures.placements import vllm_placements
from megarlhf.config import SFTConfig
from megarlhf.models.build import placements_on
from megarlhf.models.role import build_role
from megarlhf.parallel import step
from megarlhf.parallel.chunks import split_name
from megarlhf.parallel.mesh import GroupCache
from megarlhf.resume.claim.identity import digest_of_weights
from megarlhf.runtime import Runtime
from megarlhf.trainers import replay
from megarlhf.trainers.supervised.sft import SupervisedFineTuning
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.reshard import Resharder
from tests.distributed import jobs
from tests.distributed.test_bad_steps import find_first
from tests.distributed.test_packed_layouts import PACKED, PADDED, assert_same_training, rl, supervised, write_ragged
from tests.distributed.tiny import write_family, write_tiny_llama

STEPS, MINI_BATCH = 3, 8
PP2, PP2_VPP2 = {"pp": 2}, {"pp": 2, "vpp": 2}
TP2_PP2_VPP2 = {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True}
THREES, RAGGED = {"micro_batch_samples": 3}, {"max_tokens_per_micro_batch": 95}


@pytest.fixture(scope="module")
def ragged(tmp_path_factory) -> dict[str, Path]:
    return write_ragged(tmp_path_factory.mktemp("ragged"), seed=7)


def shaped_steps(runtime: Runtime, config: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """`sft_steps`, and of each call of a schedule the rows and columns of the micro-batches that it was given, and how
    many chunks."""
    given: list[tuple[int, list[tuple[int, ...]]]] = []
    run = step._run

    def noted(chunks: Any, mesh: Any, batches: Any, *args: Any, **kwargs: Any) -> Any:
        given.append((len(chunks), [tuple(batch.tokens_BS.shape) for batch in batches]))
        return run(chunks, mesh, batches, *args, **kwargs)

    with mock.patch.object(step, "_run", noted):
        return jobs.sft_steps(runtime, config, num_steps) | {"given": given}


def sft(path: Path, data: dict[str, Path], parallel: dict[str, Any], micro: dict[str, int], **role: Any) -> Any:
    cfg = supervised("actor", path, data["sft"], parallel, micro)
    cfg["actor"] |= role
    cfg["train"] |= {"num_steps": STEPS, "mini_batch_samples": MINI_BATCH}
    return cfg


@pytest.fixture(scope="module")
def single(ranks, models, ragged) -> Any:
    """Three steps of one process, on padded micro-batches; each model once."""
    made: dict[str, Any] = {}

    def call(model: str) -> Any:
        if model not in made:
            made[model] = ranks.run(1, "sft_steps", sft(models[model], ragged, {}, PADDED), STEPS)[0]
        return made[model]

    return call


CASES: dict[str, tuple[int, dict[str, Any], str, dict[str, int], list[int]]] = {
    "packed, an odd number": (2, PP2_VPP2, "plain", RAGGED, [2, 3, 3]),
    "padded, an odd number, tied": (2, PP2_VPP2, "tied", THREES, [3, 3, 3]),
    "packed, TP2, tied": (4, TP2_PP2_VPP2, "tied", RAGGED, [2, 3, 3]),
    "padded, TP2": (4, TP2_PP2_VPP2, "plain", PADDED, [4, 4, 4]),
    "packed, DP2, tied": (4, PP2_VPP2, "tied", RAGGED, [1, 2, 2]),
    "packed, CP2, tied": (4, PP2_VPP2 | {"cp": 2}, "tied", RAGGED, [2, 3, 3]),
    "packed, one micro-batch": (2, PP2_VPP2, "plain", {"max_tokens_per_micro_batch": 2000}, [1, 1, 1]),
}
"""Ranks, layout, model, micro-batches, and how many of them each step has."""


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow) if name == "padded, TP2" else name for name in CASES]
)
def test_sft_equals_one_process(case, ranks, models, ragged, single) -> None:
    """Losses and gradient norms 1e-5, each gradient of the first step, weights after three steps; any number of
    micro-batches, of any lengths."""
    world_size, parallel, model, micro, counts = CASES[case]
    everyone = ranks.run(world_size, shaped_steps, sft(models[model], ragged, parallel, micro), STEPS)
    actual, expected = everyone[0], single(model)
    assert_same_training(actual, expected)
    assert len(actual["loss"]) == STEPS
    assert all(rank["loss"] == actual["loss"] and rank["grad_norm"] == actual["grad_norm"] for rank in everyone)
    chunks, shapes = zip(*actual["given"], strict=True)
    assert chunks == (2,) * STEPS
    assert [len(of_step) for of_step in shapes] == counts
    if micro is RAGGED:
        assert any(len(set(of_step)) > 1 for of_step in shapes), "the micro-batches are of one length"


def test_stages_of_several_sizes(ranks, ragged, tmp_path) -> None:
    """Six layers as 1, 2, 2, 1: the first rank has layers 0, 3 and 4, in chunks of one and of two."""
    model = write_tiny_llama(tmp_path / "six", num_layers=6)
    expected = ranks.run(1, "sft_steps", sft(model, ragged, {}, PACKED), 1)[0]
    parallel = PP2_VPP2 | {"layers_per_stage": [1, 2, 2, 1]}
    assert_same_training(ranks.run(2, "sft_steps", sft(model, ragged, parallel, PACKED), 1)[0], expected)


@pytest.mark.parametrize(
    ("family", "world_size", "parallel"),
    [("qwen3_moe", 4, PP2_VPP2 | {"ep": 2}), pytest.param("gpt2", 2, PP2_VPP2, marks=pytest.mark.slow)],
)
def test_experts_and_learned_positions(family, world_size, parallel, ranks, ragged, tmp_path) -> None:
    """Experts are on pairs of ranks, in both chunks; learned positions are in the first chunk alone."""
    layers = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    model = write_family(tmp_path / family, family, max_position_embeddings=128, **layers)
    one, two = (
        ranks.run(world, "sft_steps", sft(model, ragged, layout, RAGGED), 1)[0]
        for world, layout in ((1, {}), (world_size, parallel))
    )
    for part in (one["gradients"][0], two["gradients"][0], one["weights"], two["weights"]):
        for name in [name for name in part if "c_attn.bias" in name]:  # a key's bias has nearly no gradient
            del part[name]
    idle = [name for name, gradient in one["gradients"][0].items() if not gradient.any()]
    assert len(idle) < 10, "experts that get no token are few"
    for name in idle:
        del one["gradients"][0][name]
        assert not two["gradients"][0].pop(name).any(), name
    assert_same_training(two, one)


@pytest.mark.parametrize(
    ("world_size", "parallel"), [(2, PP2_VPP2), pytest.param(4, TP2_PP2_VPP2, marks=pytest.mark.slow)]
)
def test_ppo_equals_one_process(world_size, parallel, ranks, models, ragged) -> None:
    """Actor, critic and reward model; the actor samples by itself."""
    expected = ranks.run(1, "rl_step", rl(models, ragged["prompts"], {}, PADDED))[0]
    actual = ranks.run(world_size, "rl_step", rl(models, ragged["prompts"], parallel, PACKED))[0]
    assert set(actual["gradients"]) == {"actor", "critic"}
    assert_same_training(actual, expected)


@pytest.mark.parametrize("recompute", ["full", "layers"])
def test_memory_by_phase_and_recomputation_change_no_bit(recompute, ranks, models, ragged) -> None:
    """In bf16, two steps: everything comes and goes, the optimizer in pieces, layers are computed again. And gradients
    of the first step are those of ordinary stages, bit for bit."""
    away = {"parameters": True, "gradients": True, "optimizer": "stream"}
    again = {"recompute": recompute} | ({"recompute_layers": 1} if recompute == "layers" else {})
    model = {"model": {"path": str(models["tied"]), "dtype": "bf16"}}
    variants = {
        "ordinary": (PP2, model),
        "virtual": (PP2_VPP2, model),
        "changed": (PP2_VPP2, model | again | {"offload": away}),
    }
    if recompute == "layers":
        del variants["ordinary"]
    runs = {
        name: ranks.run(2, "sft_steps", sft(models["tied"], ragged, parallel, PACKED, **role), 2)[0]
        for name, (parallel, role) in variants.items()
    }
    for name, gradient in runs["virtual"]["gradients"][0].items():
        assert gradient.any(), name
        if "ordinary" in runs:
            np.testing.assert_array_equal(runs["ordinary"]["gradients"][0][name], gradient, err_msg=name)
    assert runs["changed"]["grad_norm"] == runs["virtual"]["grad_norm"]
    for name, weight in runs["virtual"]["weights"].items():
        np.testing.assert_array_equal(runs["changed"]["weights"][name], weight, err_msg=name)


def exported_and_resharded(runtime: Runtime, config: dict[str, Any], directory: str) -> dict[str, Any]:
    """A role as it was loaded: its export, and what the ranks of an engine of vLLM's, as many as there are, get."""
    cfg = SFTConfig.model_validate(config)
    role = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0)
    role.export(Path(directory))
    shard, world = role.shard, range(runtime.world_size)
    sources = [placements_on(shard, rank) for rank in world]
    engine = [vllm_placements(shard.arch, tp=len(world), tp_rank=rank, rank=rank) for rank in world]
    mine = engine[runtime.rank]
    storages = {name: torch.full(shape, torch.nan) for name, shape in mine.storages.items()}
    plan = make_plan(sources, engine)
    Resharder(plan, rank=runtime.rank, dtype=torch.float32, device=runtime.device).run(shard.parameters(), storages)
    dist.barrier()
    whole = {name: tensor.numpy() for name, tensor in _logical(mine, storages).items()}
    names = list(shard.parameters())
    return {"names": names, "chunks": len(shard.chunks), "engine": whole, "digest": digest_of_weights(role)}


def _logical(part: Any, storages: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each box that a rank holds, by tensor and where it begins."""
    return {
        f"{placed.tensor} {placed.box.start} {placed.box.stop}": torch.as_strided(
            storages[placed.storage], placed.box.shape, placed.strides, placed.offset
        ).clone()
        for placed in part.placements
    }


@pytest.mark.parametrize(("world_size", "parallel", "model"), [(2, PP2_VPP2, "tied"), (4, TP2_PP2_VPP2, "plain")])
def test_exports_and_an_engine_s_weights_are_those_that_were_loaded(
    world_size, parallel, model, ranks, models, ragged, tmp_path
) -> None:
    """Bit for bit; and their digest, as certificates have it, is that of one process."""
    cfg = sft(models[model], ragged, parallel, PADDED)
    parts = ranks.run(world_size, exported_and_resharded, cfg, str(tmp_path / "exported"))
    original, exported = (load_file(d / "model.safetensors") for d in (models[model], tmp_path / "exported"))
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
    assert all(part["chunks"] == 2 and {split_name(name)[0] for name in part["names"]} == {0, 1} for part in parts)
    alone = ranks.run(1, exported_and_resharded, sft(models[model], ragged, {}, PADDED), str(tmp_path / "alone"))
    assert {part["digest"] for part in parts} == {alone[0]["digest"]}
    compared = 0
    for part in parts:
        for where, values in part["engine"].items():
            name, start, stop = where.split(" ", 1)[0], *_ends(where)
            box = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            np.testing.assert_array_equal(values, original[name].numpy()[box], err_msg=where)
            compared += values.size
    assert compared >= sum(tensor.numel() for tensor in original.values())


def _ends(where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    start, stop = where.split(" ", 1)[1].split(") (")
    return tuple(int(n) for n in start.strip("(,)").split(",") if n.strip()), tuple(
        int(n) for n in stop.strip("(,)").split(",") if n.strip()
    )


def repeated(runtime: Runtime, config: dict[str, Any], spoiled: str) -> tuple[dict[str, float], str]:
    """What a replay says of a step: the norm of each gradient by the parameter's name in the whole model, and the first
    tensor that is not finite where the weight `spoiled` of the last rank is NaN."""
    cfg = SFTConfig.model_validate(config)
    objective, samples = SupervisedFineTuning(cfg), jobs._sft_samples(cfg)[:MINI_BATCH]
    role = build_role("actor", cfg.actor, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=1)
    loss, batches = objective.training_loss(role, samples), objective.micro_batches(role, samples)
    norms = replay.repeat(role, batches, loss).gradient_norms
    if runtime.rank == runtime.world_size - 1:
        role.shard.parameters()[spoiled].data.view(-1)[0] = torch.nan
    (_, first), *_ = replay.repeat(role, batches, loss).first
    return norms, str(first)


def test_a_replay_names_parameters_and_tensors_as_in_the_whole_model(ranks, models, ragged) -> None:
    """Layer 3 is the only one in the last rank's second chunk. Of ranks whose first tensors are not finite the one that
    came first is told: the last rank's, not what the first rank gets back from it."""
    name = "decoder.layers.{}.mlp.linear_fc1.weight"
    one, *_ = ranks.run(1, repeated, sft(models["tied"], ragged, {}, RAGGED), name.format(3))
    two, *_ = ranks.run(2, repeated, sft(models["tied"], ragged, PP2_VPP2, RAGGED), "model1." + name.format(0))
    assert two[0].keys() == one[0].keys()
    assert name.format(3) in two[0]
    for parameter, norm in one[0].items():
        assert two[0][parameter] == pytest.approx(norm, rel=1e-5), parameter
    assert two[1] == one[1]
    assert two[1].startswith("weight weight of decoder.layers.3.mlp.linear_fc1: 1 NaN and 0 infinite of ")


def test_a_tensor_that_is_not_finite_is_named_in_its_chunk(ranks, models, data) -> None:
    """Of each rank the second chunk is spoiled; the last rank's comes behind the first's, and gets NaN from it."""
    cfg = sft(models["plain"], data, PP2_VPP2, PADDED)
    where = "model1.decoder.layers.0.mlp.linear_fc1"
    found = ranks.run(2, find_first, cfg, "weight", where)
    assert [found[0][: len(where) + 24], found[1][:36]] == [
        f"weight weight of {where}: 1 NaN",
        "input 0 of model1.decoder.layers.0: ",
    ]
    assert ranks.run(2, find_first, cfg, "", "") == [None, None]
