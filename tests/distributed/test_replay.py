"""`megarlhf replay` repeats a skipped step from what is kept of it: bit for bit where it was, and elsewhere up to the
rounding of sums; a fault that lies in weights or batch shows again, and its first tensor is named.

Not covered: NCCL, and faults of a device, which no repeat shows again.
"""

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megarlhf.resume.points import point
from megarlhf.runtime import Runtime
from tests.apart import run_module
from tests.distributed import jobs
from tests.distributed.test_bad_steps import config as sft_config
from tests.distributed.test_rl_layouts import config as rl_config
from tests.refuses import command_refuses, lines_naming

NORM = "decoder.layers.1.input_layernorm"


def skipping(tree: dict[str, Any], run: Path, most: int) -> str:
    """A configuration file of a run in `run` that ends when `most` steps were skipped."""
    tree["run"] = {**tree["run"], "dir": str(run)}
    tree["train"] |= {"max_skipped_in_a_row": most}
    file = run.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(tree))
    return str(file)


def files_of(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}


def numbers(said: str, what: str) -> tuple[float, float]:
    """Then and now."""
    (found,) = re.findall(rf"^{what}: (\S+) then, (\S+) now", said, re.MULTILINE)
    return float(found[0]), float(found[1])


def largest_gradients(said: str) -> dict[str, float]:
    """By parameter."""
    return {name: float(norm) for norm, name in re.findall(r"^  (\S+)  (\S+weight)$", said, re.MULTILINE)}


def command_on_a_full_disk(runtime: Runtime, full: str, *argv: str) -> tuple[int, str]:
    """A command that finds no room for a point below the folder named `full`."""
    room = point.make_room

    def make_room(directory: Path, size: int, spare: Sequence[point.Point] = ()) -> str | None:
        return "no room" if full in directory.parts else room(directory, size, spare)

    with mock.patch.object(point, "make_room", make_room):
        return jobs.command_status(runtime, *argv)


def overflowing(model: Path, directory: Path) -> Path:
    """A model with finite weights whose second layer's norm overflows in one element."""
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"][3] = 3e38
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_the_tensor_that_overflows_is_named_on_any_layout(ranks, two_layers, data, tmp_path) -> None:
    """Two steps are skipped at tp 1. The real command repeats the second, on one rank; at pp 2 the layer is the second
    stage's first."""
    models = {"plain": overflowing(two_layers["plain"], tmp_path / "model")}
    run = tmp_path / "run"
    file = skipping(sft_config(models, data, {}), run, 2)
    ((status, said),) = ranks.run(1, "command_status", "sft", "-c", file)
    assert status == 4, said
    kept = run / "failures/step_000002_actor"
    assert f"`megarlhf replay {kept}`" in said
    before = files_of(run)

    done = run_module("megarlhf", "replay", str(kept))
    assert done.returncode == 0, done.stderr
    assert lines_naming(done.stdout, "step 2 of actor", "skipped", "loss is nan")
    assert lines_naming(
        done.stdout, "first", f"output of {NORM}", "0 NaN", "rank 0 (tp 0, cp 0, pp 0, dp 0)", "forward"
    )
    assert "loss: nan then, nan now" in done.stdout
    assert lines_naming(done.stdout, "the kept micro-batches", "tp 1 x pp 1 x dp 1")

    for parallel, first in (({"tp": 2, "sequence_parallel": True}, 0), ({"pp": 2}, 1)):
        layout = f"actor.parallel={json.dumps(parallel)}"
        said = ranks.run(2, "command", "replay", str(kept), layout)[0]
        assert lines_naming(said, "first", f"output of {NORM}", "0 NaN", f"rank {first}")
        assert lines_naming(said, "kept mini-batch", "other micro-batches", f"tp {parallel.get('tp', 1)}")
    assert files_of(run) == before


@pytest.mark.parametrize("command", ["sft", "rm", "dpo"])
def test_a_spike_is_repeated_bit_for_bit_and_elsewhere_up_to_rounding(
    command, ranks, two_layers, data, tmp_path
) -> None:
    """Two ranks make one step and skip the next, which is repeated there and on another layout. rm in bf16, on packed
    rows; dpo with kto's reference point, which is kept too."""
    run, tree = tmp_path / "run", sft_config(two_layers, data, {})
    if command == "rm":
        tree["reward_model"] = tree.pop("actor")
        tree["reward_model"]["model"]["dtype"] = "bf16"
        tree["data"]["train"] = str(data["pairs"])
        tree["train"] = {"num_steps": 9, "mini_batch_samples": 8, "max_tokens_per_micro_batch": 96}
    if command == "dpo":
        tree |= {"loss": "kto", "reference": {"model": {"path": str(two_layers["other"])}}}
        tree["data"]["train"] = str(data["pairs"])
    role = "reward_model" if command == "rm" else "actor"
    file = skipping(tree, run, 1)
    ranks.run(2, "command", command, "-c", file, "train.num_steps=1", "checkpoint.every=1")
    overrides = ("train.skip_grad_norm_above=1e-9", "run.allow_changes=true", "checkpoint.every=0")
    results = ranks.run(2, "command_status", command, "-c", file, *overrides)
    assert [status for status, _ in results] == [4, 4], results
    kept = run / f"failures/step_000002_{role}"

    said = ranks.run(2, "command", "replay", str(kept))[0]
    assert "train.skip_grad_norm_above" in said
    loss, norm = numbers(said, "loss"), numbers(said, "gradient norm")
    assert "(the same, bit for bit)" in said
    assert loss[0] == loss[1] > 0
    assert norm[0] == norm[1] > 0
    assert "all finite" in said
    largest = largest_gradients(said)
    assert len(largest) == 5
    assert list(largest.values()) == sorted(largest.values(), reverse=True)
    assert 0.4 * norm[0] < sum(value**2 for value in largest.values()) ** 0.5 <= norm[0] * (1 + 1e-5)

    world_size, parallel = (1, {}) if command == "rm" else (4, {"tp": 2, "pp": 2})
    layout = f"{role}.parallel={json.dumps(parallel)}"
    said = ranks.run(world_size, "command", "replay", str(kept), layout)[0]
    assert lines_naming(said, "other micro-batches", "kept on tp 1 x pp 1 x dp 2")
    tolerance = 2e-2 if command == "rm" else 1e-5
    for what in ("loss", "gradient norm"):
        then, now = numbers(said, what)
        assert now == pytest.approx(then, rel=tolerance), what
    assert largest_gradients(said) == pytest.approx(largest, rel=tolerance)


def test_actor_and_critic_are_repeated(ranks, two_layers, data, tmp_path) -> None:
    """The last of four updates of a step of rl, all of them skipped. Then the critic's batch gets NaN in its returns,
    of which weights and outputs show nothing."""
    tree = rl_config(two_layers, data["prompts"], {})
    tree["run"]["dir"] = str(tmp_path)
    tree["train"] |= {"max_skipped_in_a_row": 9, "skip_grad_norm_above": 1e-9}
    metrics = ranks.run(1, "rl_step", tree)[0]["metrics"]
    assert metrics["skipped_steps"] == 8
    for role in ("actor", "critic"):
        kept = tmp_path / f"failures/step_000001_update_0003_{role}"
        said = ranks.run(1, "command", "replay", str(kept))[0]
        assert lines_naming(said, f"step 1, update 4 of {role}", "skipped", "gradient norm")
        assert "(the same, bit for bit)" in said
        assert "all finite" in said

    batches = torch.load(kept / "rank_00000.pt", weights_only=True)
    mask_BS = batches[1]["columns"]["response_mask"]
    batches[1]["columns"]["returns"][tuple(mask_BS.nonzero()[0])] = torch.nan
    torch.save(batches, kept / "rank_00000.pt")
    said = ranks.run(1, "command", "replay", str(kept))[0]
    assert lines_naming(said, "first", "column returns of micro-batch 1", "1 NaN", "0 infinite")
    assert math.isnan(numbers(said, "loss")[1])


def test_weights_that_are_not_there_are_taken_from_a_resume_point_of_that_very_moment(
    ranks, two_layers, data, tmp_path
) -> None:
    """The disk is full at the first of two skipped steps; of the second a file is damaged. A point after another number
    of optimizer steps does not serve."""
    run, tree = tmp_path / "run", sft_config(two_layers, data, {})
    tree["train"]["skip_grad_norm_above"] = 1e-9
    tree["checkpoint"] = {"every": 1, "every_minutes": 0, "keep": 9, "background": False}
    argv = ("step_000001_actor", "sft", "-c", skipping(tree, run, 2))
    ((status, said),) = ranks.run(1, command_on_a_full_disk, *argv)
    assert status == 4, said
    first, kept = run / "failures/step_000001_actor", run / "failures/step_000002_actor"
    assert lines_naming(said, "weights", f"{first}/point", "no room")
    assert not (first / "point").exists()
    shard = next((kept / "point/actor").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.unlink()  # not the other failure's link of it
    shard.write_bytes(bytes(content))
    (saved,) = point.find_points(run)
    assert saved.position.step == 1
    for directory in (first, kept):
        said = ranks.run(1, "command", "replay", str(directory))[0]
        assert lines_naming(said, "weights", str(saved.path), "0 optimizer steps")
        assert "(the same, bit for bit)" in said

    failure = json.loads((kept / "failure.json").read_text())
    failure["counters"] = dict.fromkeys(failure["counters"], 1)
    (kept / "failure.json").write_text(json.dumps(failure))
    said = command_refuses(ranks, ["replay", str(kept)], "weights of actor", "start the run again", "same command")
    for point_path in (f"{kept}/point", str(saved.path)):
        assert lines_naming(said, point_path, "actor", "0 optimizer step", "not 1")
