"""Files to files: the items, the threads, the cast; against the same plan carried in memory."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import hf_placements, identity_placements
from megarlhf.weights.checkpoint.formats.huggingface.read import HFFiles
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport import file_copy as module
from megarlhf.weights.transport.extent import Extent, MappedFiles
from megarlhf.weights.transport.file_copy import transfer
from tests.refuses import refuses
from tests.weights.cases import LLAMA_70B, copy_in_memory, empty, random_logical, tiny
from tests.weights.families import CONFIGS, architecture


def raw_files(parts, directory, dtype):
    """A file per part: its storages one after the other, 3 bytes off any alignment."""
    extents_by_rank = []
    for part in parts:
        path, at, extents = directory / f"part{part.rank}", 3, {}
        for name, shape in part.storages.items():
            extents[name] = Extent(path, at, shape, dtype)
            at = extents[name].end
        path.write_bytes(b"\xff" * at)
        extents_by_rank.append(extents)
    return extents_by_rank


def fp32_files(directory, arch):
    """Tensors with a number of its own for each element, and the file of Hugging Face that has them."""
    logical = {name: value.to(torch.float32).contiguous() for name, value in random_logical(arch).items()}
    save_file(logical, directory / "model.safetensors")
    return logical, HFFiles(directory).weights(arch, "lm")


def carry(directory, arch, layout, progress=lambda num_bytes: None):
    """fp32 files into raw files of a layout, equal to the plan in memory, padding zero. Returns both sides and the
    number of bytes compared."""
    logical, hf = fp32_files(directory, arch)
    parts = [part.on_rank(1 + part.rank) for part in layout.parts(arch)]
    extents = raw_files(parts, directory, torch.float32)
    plan = make_plan(hf.parts, parts)
    transfer(plan, hf.extents, extents, first_destination=1, workers=2, progress=progress)
    expected, maps, compared = empty(parts, torch.float32, 0.0), MappedFiles(), 0
    copy_in_memory(plan, {0: logical}, expected)
    for part, by_name in zip(parts, extents, strict=True):
        for name, extent in by_name.items():
            assert torch.equal(maps.tensor(extent), expected[part.rank][name]), name
            compared += extent.num_bytes
    return logical, hf, parts, extents, compared


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("item_bytes", [200, 1 << 20])
def test_every_family_there_and_back(tmp_path, monkeypatch, family, item_bytes):
    """fp32 files -> uneven PP2 x TP2 in raw files -> back."""
    monkeypatch.setattr(module, "ITEM_BYTES", item_bytes)
    arch = architecture(family)
    layout = MegatronLayout(tp=2, pp=2, layers_per_stage=(1, arch.num_layers - 1), padded_vocab=256)
    reported_bytes = []
    logical, hf, parts, extents, compared = carry(tmp_path, arch, layout, reported_bytes.append)
    assert sum(reported_bytes) == compared > 4 * arch.num_layers * arch.hidden_size**2
    assert (len(reported_bytes) > 500) == (item_bytes == 200)
    back = [part.on_rank(5) for part in hf.parts]
    returned = raw_files(back, tmp_path, torch.float32)
    sources = [part.on_rank(part.rank - 1) for part in parts]
    transfer(make_plan(sources, [back[0].on_rank(4)]), extents, returned, first_destination=4)
    for name, extent in returned[0].items():
        assert torch.equal(MappedFiles().tensor(extent), logical[name]), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("spec", ["local", "te"])
@pytest.mark.parametrize("item_bytes", [300, 1500, 20_000])
def test_grouped_experts_in_small_pieces(tmp_path, monkeypatch, family, spec, item_bytes):
    """Experts of a legacy grouped storage lie behind one another, whatever its shape says."""
    monkeypatch.setattr(module, "ITEM_BYTES", item_bytes)
    arch = architecture(family)
    layout = MegatronLayout(tp=2, ep=2, padded_vocab=128, spec=spec, experts="grouped")
    _, _, parts, _, _ = carry(tmp_path, arch, layout)
    assert any(name.endswith("experts.weight1") for name in parts[0].storages) == (spec == "local")


def test_the_cast_is_the_destination_s(tmp_path):
    arch = tiny()
    logical = {name: torch.randn(value.shape) for name, value in random_logical(arch).items()}
    save_file(logical, tmp_path / "model.safetensors")
    hf = HFFiles(tmp_path).weights(arch, "lm")
    parts = [part.on_rank(1) for part in hf.parts]
    extents = raw_files(parts, tmp_path, torch.bfloat16)
    transfer(make_plan(hf.parts, parts), hf.extents, extents, first_destination=1)
    maps = MappedFiles()
    for name, extent in extents[0].items():
        assert torch.equal(maps.tensor(extent), logical[name].to(torch.bfloat16))


def test_numbers_beyond_float16_are_refused(tmp_path):
    """They would become infinite; an infinity of the source stays one."""
    for largest, refused in ((65504.0, False), (float("inf"), False), (7e4, True)):
        value = torch.full((8,), -1.0)
        value[5] = largest
        save_file({"a": value}, tmp_path / "model.safetensors")
        source = HFFiles(tmp_path).tensors["a"]
        part = identity_placements({"a": (8,)})
        (out,) = raw_files([part], tmp_path, torch.float16)
        plan = make_plan([part], [part.on_rank(1)])
        if refused:
            with refuses("a", "65504", "float16", "bf16", "fp32"):
                transfer(plan, [{"a": source}], [out], first_destination=1)
        else:
            transfer(plan, [{"a": source}], [out], first_destination=1)
            assert torch.equal(MappedFiles().tensor(out["a"]), value.half())


def test_memory_does_not_grow_with_the_model(monkeypatch):
    """The items of a 70B layout: none above the limit or one row; together, every byte."""
    arch = tiny(**{key: value for key, value in LLAMA_70B.items() if key != "model_type"})
    layout = MegatronLayout(tp=8, pp=4, padded_vocab=129024)
    (part,) = [part for part in layout.parts(arch) if part.rank == 0]
    extents = {name: Extent(Path("part0"), 0, shape, torch.bfloat16) for name, shape in part.storages.items()}
    plan = make_plan([hf_placements(arch)], [part.on_rank(1)])
    items = list(module._write_items(module._by_destination(plan, [extents], 1), module.ITEM_BYTES))
    assert max(item.num_bytes for item in items) <= module.ITEM_BYTES
    assert sum(item.num_bytes for item in items) == sum(extent.num_bytes for extent in extents.values())
    copied = sum(copy.numel for item in items for copy in item.copies)
    assert copied == sum(copy.numel for copy in plan.copies)


def test_an_error_in_a_thread_stops_the_transfer(tmp_path):
    arch = tiny()
    _, hf = fp32_files(tmp_path, arch)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])
    parts = [part.on_rank(1) for part in hf.parts]
    extents = raw_files(parts, tmp_path, torch.float32)
    before = threading.active_count()
    with refuses("model.safetensors", "truncated", "copy it again"):
        transfer(make_plan(hf.parts, parts), hf.extents, extents, first_destination=1)
    assert threading.active_count() == before
