"""Megatron-Core's own `dist_checkpointing` loads what we write, and what it saves is what we read.

Real `GPTModel`s with Megatron's local layer spec, over gloo on CPU, through `parallel_state`. The expected
parameters come from `megatron_placements` by plain slicing, which tests/weights hold against Megatron's shapes.
Not covered: transformer-engine's layers (a GPU), saving by Megatron-LM's own scripts, optimizer state beyond being
passed over.
"""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import logical_tensors
from megarlhf.runtime import Runtime
from megarlhf.weights.checkpoint.checksums import check_checksums
from megarlhf.weights.checkpoint.formats.torch_dist.keys import key_form
from megarlhf.weights.checkpoint.formats.torch_dist.metadata import read_tensors
from megarlhf.weights.checkpoint.formats.torch_dist.read import read_torch_dist
from tests.refuses import refuses
from tests.weights import megatron_shapes
from tests.weights.cases import fill_from_logical
from tests.weights.families import architecture
from tests.weights.torch_dist import assert_same, read, write

PER_LAYER = {"non_homogeneous_layers": True}
SINGLE = {"singleton_local_shards": True}


def values(family: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The logical tensors of a model, the same in every process."""
    generator = torch.Generator().manual_seed(5)
    shapes = logical_tensors(architecture(family))
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@contextlib.contextmanager
def megatron_models(
    joined: Runtime, family: str, layout: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[list[Any], list[dict[str, Tensor]]]]:
    """This rank's model chunks, and the parameters that each should have."""
    from megatron.core import parallel_state

    from megarlhf.parallel.megatron_cpu import megatron_device

    with megatron_device(joined.device):
        vpp = layout.get("vpp", 1)
        parallel_state.destroy_model_parallel()  # what our own meshes have left in this process
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.get("tp", 1),
            pipeline_model_parallel_size=layout.get("pp", 1),
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            expert_model_parallel_size=layout.get("ep", 1),
            expert_tensor_parallel_size=layout.get("tp", 1),
        )
        try:
            arch, ours = architecture(family), MegatronLayout(**{**layout, "spec": "local"})
            stage = parallel_state.get_pipeline_model_parallel_rank()
            expert, tensor = (getattr(parallel_state, f"get_{x}_model_parallel_rank")() for x in ("expert", "tensor"))
            at = (stage, expert, tensor)
            number = next(n for n, a in enumerate(ours.ranks()) if (a.pp, a.ep, a.tp) == at)
            part = ours.parts(arch)[number]
            wanted = {name: torch.zeros(shape, dtype=dtype) for name, shape in part.storages.items()}
            fill_from_logical(part, wanted, values(family, dtype))
            models, expected = [], []
            for chunk in range(vpp):
                first, last = stage == 0 and chunk == 0, stage == ours.pp - 1 and chunk == vpp - 1
                model = megatron_shapes._model(arch, layout, first, last, chunk if vpp > 1 else None)
                models.append(model.to(dtype))
                prefix = f"model{chunk}." if vpp > 1 else ""
                expected.append(
                    {name.removeprefix(prefix): value for name, value in wanted.items() if name.startswith(prefix)}
                )
            yield models, expected
        finally:
            parallel_state.destroy_model_parallel()


def sharded(models: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """As Megatron-LM puts it together: `model`, or `model0`, `model1`."""
    from megatron.core import parallel_state

    metadata = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    names = ["model"] if len(models) == 1 else [f"model{n}" for n in range(len(models))]
    return {name: model.sharded_state_dict(metadata=metadata) for name, model in zip(names, models, strict=True)}


def save(joined: Runtime, family: str, layout: dict[str, Any], path: str, metadata: dict[str, Any]) -> None:
    """Megatron-Core saves a model; with some optimizer state and Megatron-LM's kinds of arguments beside it."""
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.enums import AttnBackend

    dtype = torch.bfloat16
    with megatron_models(joined, family, layout, dtype) as (models, expected):
        for model, wanted in zip(models, expected, strict=True):
            parameters = dict(model.named_parameters())
            assert parameters.keys() == wanted.keys()
            for name, parameter in parameters.items():
                parameter.data.copy_(wanted[name])
        state = sharded(models, metadata)
        replica = (0, 0, joined.rank)
        state["optimizer"] = {
            key: dist_checkpointing.ShardedTensor.from_rank_offsets(key, torch.ones(3), replica_id=replica)
            for key in ("optimizer.state.exp_avg.decoder.final_layernorm.weight", "chained_1.optimizer.state.x")
        }
        state["rng_state"] = dist_checkpointing.ShardedObject("rng_state", [b"x"], (joined.world_size,), (joined.rank,))
        state |= {
            "args": argparse.Namespace(
                tensor_model_parallel_size=layout.get("tp", 1), attention_backend=AttnBackend.auto, params_dtype=dtype
            ),
            "iteration": 7,
            "checkpoint_version": 3.0,
        }
        dist_checkpointing.save(state, path, content_metadata=metadata)


def load(joined: Runtime, family: str, layout: dict[str, Any], path: str, dtype: torch.dtype) -> dict[str, Any]:
    """Megatron-Core loads a checkpoint of ours into a model full of NaN; what differs from the expected values."""
    from megatron.core import dist_checkpointing
    from megatron.core.safe_globals import register_safe_globals
    from torch.distributed.checkpoint.api import CheckpointException

    register_safe_globals()
    with megatron_models(joined, family, layout, dtype) as (models, expected):
        for model in models:
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)
        metadata = dist_checkpointing.load_content_metadata(path) or {}
        try:
            state = dist_checkpointing.load(sharded(models, metadata), path)
        except CheckpointException as error:
            return {"refused": str(error)}
        names = ["model"] if len(models) == 1 else [f"model{n}" for n in range(len(models))]
        wrong, compared = [], 0
        for name, model, wanted in zip(names, models, expected, strict=True):
            model.load_state_dict(state[name], strict=True)
            parameters = dict(model.named_parameters())
            assert parameters.keys() == wanted.keys()
            wrong += [key for key, value in wanted.items() if not torch.equal(parameters[key].detach(), value)]
            compared += len(wanted)
        dist.barrier()
        return {"wrong": wrong, "compared": compared, "iteration": state["iteration"], "args": vars(state["args"])}


def world(layout: dict[str, Any]) -> int:
    return int(layout.get("tp", 1) * layout.get("pp", 1) * layout.get("ep", 1))


GROUPED = {"padded_vocab": 104, "experts": "grouped"}
WRITTEN: dict[str, tuple[str, MegatronLayout, list[dict[str, Any]]]] = {
    # Another tp pads the vocabulary to other rows.
    "llama": (
        "llama_biases",
        MegatronLayout(tp=2, pp=2, padded_vocab=104),
        [{"padded_vocab": 128}, {"tp": 2, "padded_vocab": 256}, {"pp": 2, "vpp": 2, "padded_vocab": 100}],
    ),
    "qwen3 tied": (
        "qwen3_tied",
        MegatronLayout(pp=3, layers_per_stage=(1, 2, 1), padded_vocab=128),
        [{"tp": 2, "padded_vocab": 104}, {"pp": 2, "padded_vocab": 128}],
    ),
    # Four ranks share two KV groups, so QKV is cut inside of groups.
    "llama tp4": (
        "llama",
        MegatronLayout(tp=4, padded_vocab=512),
        [{"tp": 2, "padded_vocab": 128}, {"tp": 4, "padded_vocab": 512}],
    ),
    "gpt2": (
        "gpt2",
        MegatronLayout(tp=2, pp=2, vpp=2, padded_vocab=104),
        [{"padded_vocab": 128}, {"tp": 2, "pp": 2, "padded_vocab": 104}],
    ),
    "mixtral": (
        "mixtral",
        MegatronLayout(tp=2, ep=2, padded_vocab=104, spec="local"),
        [{"padded_vocab": 104}, {"ep": 2, "pp": 2, "padded_vocab": 104}, {"ep": 4, **GROUPED}],
    ),
    "qwen3_moe": (
        "qwen3_moe",
        MegatronLayout(ep=4, padded_vocab=104, spec="local"),
        [{"tp": 2, "ep": 2, "padded_vocab": 104}, {"ep": 2, **GROUPED}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRITTEN)
def test_megatron_loads_what_we_write(ranks, tmp_path, case) -> None:
    """Every parameter of every rank, padding included, from a checkpoint written at another layout."""
    family, layout, targets = WRITTEN[case]
    dtype = torch.float32 if case == "llama" else torch.bfloat16
    arch = architecture(family)
    directory = write(tmp_path / "run", arch, layout, values(family, dtype), dtype=dtype)
    for target in targets:
        results = ranks.run(world(target), load, family, target, str(directory), dtype)
        for result in results:
            assert result["wrong"] == [], target
            assert (result["iteration"], result["args"]) == (12, {"lr": 0.5})
        assert sum(result["compared"] for result in results) >= 6 * arch.num_layers + 2


def test_megatron_misses_a_key(ranks, tmp_path) -> None:
    """The loads above are strict: a model with a bias more than the checkpoint does not load."""
    arch = architecture("llama")
    directory = write(tmp_path / "run", arch, MegatronLayout(padded_vocab=104), values("llama", torch.float32))
    (result,) = ranks.run(1, load, "qwen2", {"padded_vocab": 104}, str(directory), torch.float32)
    assert "linear_qkv.bias" in result["refused"]


SAVED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"padded_vocab": 128}, {}),
    ("llama_biases", {"tp": 2, "padded_vocab": 256}, PER_LAYER),
    ("qwen3_tied", {"pp": 3, "layers_per_stage": (1, 2, 1), "padded_vocab": 104}, {}),
    ("qwen2", {"tp": 2, "pp": 2, "padded_vocab": 104}, SINGLE),
    ("llama", {"tp": 4, "padded_vocab": 104}, {}),
    ("opt", {"pp": 2, "vpp": 2, "padded_vocab": 104}, PER_LAYER),
    ("gpt2", {"tp": 2, "padded_vocab": 104}, {}),
    ("mixtral", {"tp": 2, "ep": 2, "padded_vocab": 104}, {}),
    ("mixtral", {"ep": 2, "padded_vocab": 104, "experts": "grouped"}, PER_LAYER),
    ("mixtral", {"pp": 2, "ep": 2, "padded_vocab": 104, "experts": "grouped"}, {}),
    ("qwen3_moe", {"tp": 2, "padded_vocab": 104}, SINGLE),
    ("qwen3_moe", {"ep": 2, "padded_vocab": 104, "experts": "grouped"}, SINGLE),
]


@pytest.mark.parametrize(("family", "layout", "metadata"), SAVED)
def test_what_megatron_saves_is_read_bit_for_bit(ranks, tmp_path, family, layout, metadata) -> None:
    """All layouts, key forms and kinds of experts; optimizer state and random states are passed over."""
    ranks.run(world(layout), save, family, layout, str(tmp_path), metadata)
    arch = architecture(family)
    checkpoint = read_torch_dist(tmp_path, arch)
    tensors = read_tensors(tmp_path)
    assert key_form(tensors) == (
        "single" if metadata is SINGLE else "per_layer" if metadata is PER_LAYER else "stacked"
    )
    assert (checkpoint.layout.padded_vocab, checkpoint.head) == (layout["padded_vocab"], "lm")
    assert checkpoint.args["tensor_model_parallel_size"] == layout.get("tp", 1)
    assert checkpoint.args["params_dtype"] == torch.bfloat16
    assert "chained_1.optimizer.state.x" in tensors
    got = read(tmp_path, arch)
    assert_same(got, {name: value.double() for name, value in values(family, torch.bfloat16).items()})


def test_a_flipped_byte_and_a_cut_are_found(ranks, tmp_path) -> None:
    """In files of Megatron's: the CRC of a tensor's bytes, when asked for; a cut already by opening."""
    layout = {"padded_vocab": 104}
    ranks.run(1, save, "llama", layout, str(tmp_path), {})
    arch = architecture("llama")
    extent = read_torch_dist(tmp_path, arch).extents[0]["decoder.final_layernorm.weight[0]"]
    count, silent = check_checksums(tmp_path)
    assert (count > 30, silent) == (True, 0)
    raw = bytearray(extent.path.read_bytes())
    raw[extent.offset + 5] ^= 4
    extent.path.write_bytes(raw)
    with refuses("1 damaged records", "archive/data/0"):
        check_checksums(tmp_path)
    extent.path.write_bytes(raw[:-1])
    with refuses(extent.path.name, "truncated"):
        read_torch_dist(tmp_path, arch)
