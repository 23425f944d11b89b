"""Megatron-LM's `mp_rank` trees: read as it leaves them, written so that it reads them. Not covered: files written by
Megatron-LM itself (none are at hand; the trees here are made by hand from its names)."""

from __future__ import annotations

import random
import shutil
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.megatron_layout import MegatronLayout, ModelRank
from megarlhf.weights.checkpoint.formats.megatron.args import MegatronWeights, args_of
from megarlhf.weights.checkpoint.formats.mp_rank.read import read_mp_rank
from megarlhf.weights.checkpoint.formats.mp_rank.write import preallocate_mp_rank
from megarlhf.weights.checkpoint.formats.torch_file.archive import check_crc, seal
from megarlhf.weights.transport.extent import MappedFiles
from megarlhf.weights.transport.storages import view
from tests.refuses import refuses
from tests.weights.cases import fill_from_logical, random_logical
from tests.weights.families import CONFIGS, architecture

Storages = dict[ModelRank, dict[str, torch.Tensor]]
LAYOUTS = {
    "tp1": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp2 pp2 te": {"tp": 2, "pp": 2, "spec": "te"},
    "uneven pp3": {"pp": 3, "layers_per_stage": (1, 2, 1)}, "vpp2": {"tp": 2, "pp": 2, "vpp": 2, "spec": "te"},
}  # fmt: skip
EXPERT_LAYOUTS = {
    "ep2": {"ep": 2},
    "tp2 ep2 grouped te": {"tp": 2, "ep": 2, "experts": "grouped", "spec": "te"},
    "tp2 pp2 ep2 grouped": {"tp": 2, "pp": 2, "ep": 2, "experts": "grouped"},
}


def layout_of(arch: Architecture, **settings: Any) -> MegatronLayout:
    return MegatronLayout(padded_vocab=128 * settings.get("tp", 1), **settings)


def state_dicts(arch: Architecture, layout: MegatronLayout, head: str = "lm") -> Storages:
    logical, storages_by_rank = random_logical(arch, head), {}
    for at, part in zip(layout.ranks(), layout.parts(arch, head), strict=True):
        live = {name: torch.full(shape, -1.0, dtype=torch.float64) for name, shape in part.storages.items()}
        fill_from_logical(part, live, logical)
        storages_by_rank[at] = live
    return storages_by_rank


def junk(arch: Architecture, layout: MegatronLayout) -> dict[str, Any]:
    more = {"rank": 3, "save": "/somewhere", "lr": 1e-4, "data_path": ["1.0", "text"], "timeout": None}
    args = Namespace(**args_of(arch, layout, torch.bfloat16), **more, activation=torch.nn.functional.gelu)
    steps = {"step": torch.tensor(3.0), "exp_avg": torch.randn(7), "exp_avg_sq": torch.randn(7)}
    moments = dict.fromkeys(range(3), steps)
    rng = {
        "random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }  # fmt: skip
    return {
        "args": args, "iteration": 123,
        "optimizer": {"optimizer": {"state": moments, "param_groups": [{"params": [0, 1, 2], "lr": 1e-4}]}},
        "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": np.int64(1968)},
        "rng_state": [rng], "num_floating_point_operations_so_far": 1.5e18,
    }  # fmt: skip


def save_tree(
    root: Path, arch: Architecture, layout: MegatronLayout, ranks: Storages,
    **changes: Any
) -> Path:  # fmt: skip
    """Writes the files with torch.save; returns iteration 123's directory."""
    folder = root / "iter_0000123"
    for at, storages in ranks.items():
        name = f"mp_rank_{at.tp:02d}" + (f"_{at.pp:03d}" if layout.pp > 1 else "")
        name += f"_{at.ep:03d}" if layout.ep > 1 else ""
        (folder / name).mkdir(parents=True)
        content = {**junk(arch, layout), "checkpoint_version": 3.0, **changes}
        for v in range(layout.vpp):
            prefix = f"model{v}." if layout.vpp > 1 else ""
            chunk = {n.removeprefix(prefix): t for n, t in storages.items() if n.startswith(prefix)}
            extra = {"decoder.layers.0.self_attention.linear_qkv._extra_state": None}
            content[prefix.rstrip(".") or "model"] = OrderedDict(chunk | extra)
        torch.save(content, folder / name / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("123")
    return folder


def saved(root: Path, family: str = "llama", changes: Any = None, **settings: Any) -> tuple[Any, Any, Any, Path]:
    """Architecture, layout, storages by rank, and the directory of their iteration."""
    arch = architecture(family)
    layout = layout_of(arch, **settings)
    ranks = state_dicts(arch, layout)
    return arch, layout, ranks, save_tree(root, arch, layout, ranks, **(changes or {}))


def same_tensors(read: MegatronWeights, ranks: Storages) -> int:
    maps, compared = MappedFiles(), 0
    for at, part, extents in zip(read.layout.ranks(), read.parts, read.extents, strict=True):
        assert list(extents) == list(part.storages)
        for name, extent in extents.items():
            assert torch.equal(maps.tensor(extent), ranks[at][name].to(extent.dtype)), (at, name)
            compared += 1
    return compared


def cases() -> list[Any]:
    plain = [(family, layout) for family in CONFIGS for layout in LAYOUTS]
    moe = [(family, layout) for family in ("mixtral", "qwen3_moe") for layout in EXPERT_LAYOUTS]
    return plain + moe


@pytest.mark.parametrize("family, name", cases())
def test_every_family_and_layout_is_read_by_value_and_written_for_torch(family, name, tmp_path):
    """torch.save -> read_mp_rank; preallocate_mp_rank -> bytes through the extents -> torch.load, read_mp_rank."""
    arch = architecture(family)
    layout = layout_of(arch, **(LAYOUTS | EXPERT_LAYOUTS)[name])
    ranks = state_dicts(arch, layout)
    save_tree(tmp_path / "saved", arch, layout, ranks)
    read = read_mp_rank(tmp_path / "saved")
    assert (read.arch, read.layout, read.head) == (arch, layout, "lm")
    assert read.args["lr"] == 1e-4
    assert list(read.parts) == layout.parts(arch)
    assert same_tensors(read, ranks) == sum(len(part.storages) for part in read.parts) > 10

    args = args_of(arch, layout, torch.float64)
    parts, extents = preallocate_mp_rank(tmp_path / "out", arch, layout, "lm", torch.float64, args, 123)
    assert parts == list(read.parts)
    for at, storages in zip(layout.ranks(), extents, strict=True):
        for storage, extent in storages.items():
            raw = ranks[at][storage].contiguous().view(-1).numpy()
            np.memmap(extent.path, np.float64, "r+", extent.offset, raw.shape)[:] = raw
    again = read_mp_rank(tmp_path / "out" / "iter_0000123")
    assert again.layout == layout
    assert list(again.extents) == extents
    for at, before, after in zip(layout.ranks(), read.extents, again.extents, strict=True):
        (saved,), (path,) = ({extent.path for extent in extents.values()} for extents in (before, after))
        assert path.relative_to(tmp_path / "out") == saved.relative_to(tmp_path / "saved")
        seal(path)
        assert check_crc(path) == []
        with torch.serialization.safe_globals([Namespace]):
            loaded = torch.load(path, weights_only=True, mmap=True)
        assert (loaded["checkpoint_version"], loaded["iteration"]) == (3.0, 123)
        assert loaded["args"].padded_vocab_size == layout.padded_vocab
        prefixes = [f"model{v}." for v in range(layout.vpp)] if layout.vpp > 1 else [""]
        flat = {p + n: t for p in prefixes for n, t in loaded[p.rstrip(".") or "model"].items()}
        assert flat.keys() == ranks[at].keys()
        assert all(torch.equal(flat[n], t) for n, t in ranks[at].items())


def test_directory_forms(tmp_path):
    _, _, ranks, folder = saved(tmp_path, tp=2, pp=2)
    assert read_mp_rank(tmp_path).directory == read_mp_rank(folder).directory == folder
    shutil.copytree(folder, tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert read_mp_rank(tmp_path).directory == tmp_path / "release"
    for path in sorted(folder.glob("*/model_optim_rng.pt")):
        path.rename(path.with_name("model_rng.pt"))
        (folder / (path.parent.name + "_000")).mkdir()
        (folder / (path.parent.name + "_000") / "optim.pt").write_bytes(b"")
    assert same_tensors(read_mp_rank(folder), ranks) == sum(map(len, ranks.values()))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("77")
    with refuses("iter_0000077", "does not exist"):
        read_mp_rank(tmp_path)
    (tmp_path / "nothing").mkdir()
    with refuses(str(tmp_path / "nothing"), "mp_rank_"):
        read_mp_rank(tmp_path / "nothing")


@pytest.mark.parametrize("layers, settings, head", [
    (6, {"pp": 2, "vpp": 2, "layers_per_stage": (1, 2, 2, 1)}, "lm"), (4, {"tp": 2, "pp": 2}, "scalar"),
])  # fmt: skip
def test_chunks_of_different_lengths_and_a_scalar_head(layers, settings, head, tmp_path):
    arch = architecture("llama", num_hidden_layers=layers)
    layout = layout_of(arch, **settings)
    ranks = state_dicts(arch, layout, head)
    save_tree(tmp_path, arch, layout, ranks)
    read = read_mp_rank(tmp_path)
    assert (read.arch, read.layout, read.head) == (arch, layout, head)
    assert list(read.parts) == layout.parts(arch, head)
    assert same_tensors(read, ranks) == sum(map(len, ranks.values())) > 10


def test_release_is_written(tmp_path):
    arch = architecture("llama")
    layout = layout_of(arch)
    preallocate_mp_rank(tmp_path, arch, layout, "lm", torch.bfloat16, args_of(arch, layout, torch.bfloat16), "release")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (tmp_path / "release" / "mp_rank_00" / "model_optim_rng.pt").is_file()
    assert read_mp_rank(tmp_path).directory == tmp_path / "release"


def test_two_numbers_are_resolved_by_contents_without_args(tmp_path):
    """mp_rank_TT_XXX: expert ranks all hold the embedding, stages do not."""
    for settings in ({"ep": 2}, {"pp": 2}):
        root = tmp_path / str(settings)
        arch, layout, ranks, folder = saved(root, "mixtral", {"args": None}, **settings)
        assert sorted(p.name for p in folder.iterdir()) == ["mp_rank_00_000", "mp_rank_00_001"]
        read = read_mp_rank(root, arch)
        assert read.layout == layout
        assert same_tensors(read, ranks) > 10


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("legacy", [False, True])
def test_older_orders_and_names(family, version, legacy, tmp_path):
    """Rows permuted by Megatron-LM's own formulas, reversed; older names nested as they were."""
    arch = architecture(family, **({"num_key_value_heads": 4} if family == "llama" else {}))
    layout = layout_of(arch, tp=2)
    ranks = state_dicts(arch, layout)
    stored = {at: {n: old_order(n, t, 2, version) for n, t in storages.items()} for at, storages in ranks.items()}
    save_tree(tmp_path, arch, layout, stored, checkpoint_version=version)
    if legacy:
        for path in tmp_path.glob("*/*/*.pt"):
            content = torch.load(path, weights_only=False)
            torch.save({**content, "model": old_names(content["model"])}, path)
    read = read_mp_rank(tmp_path)
    assert (list(read.parts) == layout.parts(arch)) == (version >= 2)
    logical, maps, covered = random_logical(arch), MappedFiles(), 0
    for part, extents in zip(read.parts, read.extents, strict=True):
        live = {name: maps.tensor(extent) for name, extent in extents.items()}
        assert part.padding().keys() <= {"embedding.word_embeddings.weight", "output_layer.weight"}
        for placement in part.placements:
            index = tuple(slice(a, b) for a, b in zip(placement.box.start, placement.box.stop, strict=True))
            assert torch.equal(view(placement, live), logical[placement.tensor][index]), placement
            covered += placement.box.numel
    assert covered >= sum(t.numel() for t in logical.values())


def old_order(name: str, tensor: torch.Tensor, heads: int, version: float) -> torch.Tensor:
    if ".linear_qkv." not in name or version >= 2:
        return tensor
    by_head = tensor.view(heads, 3, -1, *tensor.shape[1:])
    moved = by_head.transpose(0, 1) if version == 0 else by_head.transpose(1, 2)
    return moved.reshape(tensor.shape).contiguous()


def old_names(model: dict[str, Any]) -> dict[str, Any]:
    """As `TransformerLanguageModel.state_dict_for_save_checkpoint` nests and names them."""
    words = {
        "linear_qkv": "query_key_value", "linear_proj": "dense", "linear_fc1": "dense_h_to_4h",
        "linear_fc2": "dense_4h_to_h", "pre_mlp_layernorm": "post_attention_layernorm",
    }  # fmt: skip
    embedding: dict[str, Any] = {}
    encoder, rest = {}, {}
    for name, tensor in model.items():
        for new, old in words.items():
            name = name.replace(new, old)
        if name.startswith("embedding."):
            embedding.setdefault(name.split(".")[1], {})["weight"] = tensor
        elif name.startswith("decoder."):
            encoder[name.removeprefix("decoder.")] = tensor
        else:
            rest["output_layer"] = {"weight": tensor}
    return {"language_model": {"embedding": embedding, "encoder": encoder, **rest}}


def test_missing_versions(tmp_path):
    """0 as in Megatron-LM for older names, today's for Megatron-Core's; grouped queries have no older order."""
    arch, layout, _, folder = saved(tmp_path, "gpt2")
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    del content["checkpoint_version"]
    torch.save(content, path)
    assert list(read_mp_rank(tmp_path).parts) == layout.parts(arch)
    torch.save({**content, "model": old_names(content["model"])}, path)
    oldest = read_mp_rank(tmp_path).parts
    assert list(oldest) != layout.parts(arch)
    torch.save({**content, "model": old_names(content["model"]), "checkpoint_version": 0}, path)
    assert read_mp_rank(tmp_path).parts == oldest
    torch.save({**content, "checkpoint_version": 4.0}, path)
    with refuses("checkpoint_version 4.0", "0, 1.0, 2.0 or 3.0"):
        read_mp_rank(tmp_path)
    saved(tmp_path / "g", changes={"checkpoint_version": 1.0})
    with refuses("checkpoint_version 1.0", "2 for 4"):
        read_mp_rank(tmp_path / "g")


def test_every_wrong_tensor_is_listed(tmp_path):
    arch = architecture("llama")
    layout = layout_of(arch, pp=2)
    ranks = state_dicts(arch, layout)
    first, second = ranks.values()
    del first["decoder.layers.1.mlp.linear_fc2.weight"]
    second["decoder.layers.0.surprise"] = torch.ones(1)
    second["decoder.layers.0.mlp.router.expert_bias"] = torch.ones(4)
    second["rotary_pos_emb.inv_freq"] = torch.ones(4)
    second["decoder.final_layernorm.weight"] = torch.ones(65)
    second["output_layer.weight"] = second["output_layer.weight"].t().contiguous().t()
    save_tree(tmp_path, arch, layout, ranks)
    with refuses(
        "4 tensors", "mp_rank_00_000: decoder.layers.1.mlp.linear_fc2.weight is missing",
        "mp_rank_00_001: decoder.layers.0.surprise", "mp_rank_00_001: decoder.final_layernorm.weight", "(65,)", "(64,)",
        "mp_rank_00_001: output_layer.weight", "strides (1, 128)",
    ):  # fmt: skip
        read_mp_rank(tmp_path)


def test_missing_files_and_mixed_runs(tmp_path):
    *_, folder = saved(tmp_path, tp=2, pp=2)
    shutil.move(folder / "mp_rank_01_001", tmp_path / "kept")
    with refuses("1 of 4 files", "mp_rank_01_001", "copy"):
        read_mp_rank(tmp_path)
    (folder / "mp_rank_01_001").mkdir()
    with refuses("no model_optim_rng.pt", "mp_rank_01_001"):
        read_mp_rank(tmp_path)
    (folder / "mp_rank_01_001").rmdir()
    shutil.copytree(tmp_path / "kept", folder / "mp_rank_01")
    with refuses("mixes", "mp_rank_TT"):
        read_mp_rank(tmp_path)
    shutil.rmtree(folder / "mp_rank_01")
    shutil.move(tmp_path / "kept", folder / "mp_rank_01_001")
    shutil.copytree(folder / "mp_rank_00_001", folder / "mp_rank_00_002")
    shutil.copytree(folder / "mp_rank_01_001", folder / "mp_rank_01_002")
    with refuses("pipeline size 3", "args say 2"):
        read_mp_rank(tmp_path)


@pytest.mark.parametrize("changes, names", [
    ({"padded_vocab_size": 384}, "256|2 tensor ranks|padded_vocab_size = 384"),
    ({"virtual_pipeline_model_parallel_size": 2}, "1 model chunks"), ({"num_layers": 5}, "4 layers|expected 5"),
])  # fmt: skip
def test_args_that_contradict_the_files(changes, names, tmp_path):
    arch = architecture("llama")
    layout = layout_of(arch, tp=2)
    args = junk(arch, layout)["args"]
    del args.megarlhf_architecture
    save_tree(tmp_path, arch, layout, state_dicts(arch, layout), args=Namespace(**{**vars(args), **changes}))
    with refuses(*names.split("|")):
        read_mp_rank(tmp_path)


def test_other_files_of_torch_are_refused(tmp_path):
    path = saved(tmp_path)[-1] / "mp_rank_00" / "model_optim_rng.pt"
    for content, names in (
        ([1], "a list|Megatron's dict"), ({"state_dict": {}}, "'model'|'model0'|state_dict"),
        ({"model": {"w": torch.ones(1)}}, "no embedding.word_embeddings.weight"),
    ):  # fmt: skip
        torch.save(content, path)
        with refuses(*names.split("|")):
            read_mp_rank(tmp_path)
