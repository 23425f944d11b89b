"""A role's state in a resume point: the same logical tensors at every layout, and an ordinary Megatron checkpoint.

Not covered here: transformer-engine's layers and fused optimizers (a GPU).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarlhf.resume.points.point import damaged_files, find_points, read_manifest
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from tests.distributed.resume_jobs import (
    load_with_megatron,
    save_and_export,
    save_and_load,
    save_and_load_streamed,
    save_without_model,
)
from tests.distributed.tiny import write_family
from tests.refuses import missing_names

Chain = tuple[tuple[str, int, dict[str, Any]], ...]
"""Directory, ranks, and the layout; with `distributed` that of the optimizer."""
CHAIN: Chain = (
    ("dp2", 2, {}), ("cp2", 2, {"cp": 2}), ("tp2_pp2_vpp2", 4, {"tp": 2, "pp": 2, "vpp": 2}),
    ("tp2_cp2", 4, {"tp": 2, "cp": 2}), ("tp1", 1, {}), ("dp2_not_distributed", 2, {"distributed": False}),
    ("dp4", 4, {}), ("pp2_uneven", 2, {"pp": 2, "layers_per_stage": [3, 1]}),
)  # fmt: skip
EXPERT_CHAIN: Chain = (
    ("ep2_of_dp4", 4, {"ep": 2}),
    ("tp2_ep2", 4, {"tp": 2, "ep": 2}),
    ("tp1", 1, {}),
    ("ep2_not_distributed", 4, {"ep": 2, "distributed": False}),
    ("pp2_ep2", 4, {"pp": 2, "ep": 2}),
)


def whole(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, read by torch."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(directory), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}


STATES = [
    ("fp32", "lm", "plain", CHAIN), ("bf16", "lm", "tied", CHAIN),
    ("fp32", "scalar", "plain", CHAIN), ("bf16", "lm", "experts", EXPERT_CHAIN),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "head", "model", "chain"), STATES)
def test_state_is_bit_equal_at_every_layout(ranks, models, tmp_path, dtype, head, model, chain) -> None:
    """Trained at the first layout and carried on through the others: every tensor, moments and fp32 copies included."""
    path = write_family(tmp_path / "experts", "qwen3_moe") if model == "experts" else models[model]
    source, states = None, []
    for name, world_size, parallel in chain:
        target = tmp_path / name
        reports = ranks.run(world_size, save_and_load, str(path), parallel, dtype, head, source, str(target))
        assert all(report["optimizer_steps"] == 3 == report["scheduler_steps"] for report in reports)
        assert len({report["rate"] for report in reports}) == 1
        states.append(whole(target / "actor"))
        source = str(target)
    first = states[0]
    kinds = {key.split(".")[2] for key in first if key.startswith("optimizer.state.")}
    assert kinds == {"exp_avg", "exp_avg_sq"} | ({"fp32_param"} if dtype == "bf16" else set())
    assert all(bool(first[key].any()) for key in first if ".exp_avg." in key)
    vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
    for state in states[1:]:
        assert state.keys() == first.keys()
        for key, tensor in state.items():
            rows = slice(vocabulary) if "embeddings" in key or "output_layer" in key else slice(None)
            assert torch.equal(tensor[rows], first[key][rows]), key
    described = open_checkpoint(tmp_path / chain[-1][0] / "actor", head="scalar")  # type: ignore[arg-type]
    assert described.companion == tmp_path / chain[-1][0] / "actor/hf"
    family = "Qwen3Moe" if model == "experts" else "Llama"
    kind = f"{family}ForSequenceClassification" if head == "scalar" else f"{family}ForCausalLM"
    assert (described.head, described.config["architectures"]) == (head, [kind])
    assert described.config.get("num_labels") == (1 if head == "scalar" else None)


def test_streamed_state_is_never_on_the_device_as_a_whole(ranks, models, tmp_path) -> None:
    """It is written where it lies, and a fresh role is filled there: its moments are made one piece at a time."""
    (found,) = ranks.run(1, save_and_load_streamed, str(models["plain"]), str(tmp_path / "point"))
    assert found["pieces"] > 5
    assert (found["written"], found["filled"]) == (0, 1)
    assert found["tensors"] > 4 * 10
    assert found["equal"]


def test_a_role_of_a_point_is_an_ordinary_checkpoint(ranks, models, tmp_path) -> None:
    """Megatron-Core's own description of the model finds every tensor that it asks for; our reader, and with it
    `convert` and `model.path`, takes the same weights out of it as the role exports."""
    point, exported = tmp_path / "point", tmp_path / "exported"
    parallel = {"tp": 2, "pp": 2, "vpp": 2}
    ranks.run(4, save_and_export, str(models["plain"]), parallel, str(point), str(exported))
    found = ranks.run(1, load_with_megatron, str(point / "actor"), str(exported))[0]
    assert found["wrong"] == []
    assert found["compared"] == found["parameters"] > 10
    assert found["iteration"] == 3
    assert open_checkpoint(point / "actor").head == "lm"
    from megarlhf.commands.convert import main as convert

    converted = tmp_path / "converted"
    source = ["--megatron", str(point / "actor"), "--out", str(converted)]
    assert convert(["megatron-to-hf", *source], prog="megarlhf convert") == 0
    files = {path.name: path.read_bytes() for path in exported.iterdir() if path.suffix != ".safetensors"}
    assert {"config.json", "tokenizer.model"} <= files.keys()
    assert files == {path.name: path.read_bytes() for path in converted.iterdir() if path.name in files}
    from safetensors.torch import load_file

    ours, role = (load_file(folder / "model.safetensors") for folder in (converted, exported))
    assert ours.keys() == role.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in role.items())


def test_the_model_directory_may_go_during_the_run(ranks, two_layers, tmp_path) -> None:
    """What cannot be read at the start is refused there, on every rank; later nothing is read any more."""
    model = Path(shutil.copytree(two_layers["plain"], tmp_path / "model"))
    for refused in ranks.run(2, save_without_model, str(model), str(tmp_path / "run")):
        assert not missing_names(refused, "resume point", "rank 0", str(model / "merges.txt"), "link to gone")
    assert not model.exists()
    (point,) = find_points(tmp_path / "run")
    manifest = read_manifest(point)
    assert damaged_files(point, manifest) == []
    small = {name.removeprefix("actor/hf/") for name in manifest["files"] if name.startswith("actor/hf/")}
    assert small == {path.name for path in two_layers["plain"].iterdir()} - {"model.safetensors"}
    tokenizer = point.path / "actor/hf/tokenizer.model"
    assert tokenizer.read_bytes() == (two_layers["plain"] / "tokenizer.model").read_bytes()
