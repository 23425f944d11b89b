"""A run that is cut off anywhere and started again by the same command gives the run that was never cut off.

Runs are cut off by an exception at a chosen call, on ranks that are there already; by SIGKILL, in processes of their
own, in tests/test_resume_killed.py and `make test-faults`. Equal means: every metric but what a step took, bit for
bit, and every byte of the exported weights. Not covered: GPUs, whose kernels need `run.deterministic`.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megarlhf.observe.records.cost_metrics import reproducible
from megarlhf.provenance import Provenance, Weights
from megarlhf.resume.points.point import find_points, read_manifest
from tests.command import argv_of
from tests.distributed.interrupted_jobs import command_on_a_tight_disk, command_until, command_with_signal
from tests.distributed.test_rl_layouts import config as rl_config
from tests.ranks import RankPool
from tests.refuses import lines_naming

STEPS = 5
TRAIN = "megarlhf.parallel.step:Trainer"
BOUNDARY = "megarlhf.resume.points.checkpointer:Checkpointer"
ENGINE = "megarlhf.rollout.megatron_engine:MegatronEngine"
EXPORTS = "megarlhf.trainers.run.exports:Exports"
BANK = "megarlhf.rollout.bank:StepBank"

ROLES = ("actor", "reference", "critic", "reward_model")

Cut = tuple[str, str, int]
"""Class, method, and the number of the call that does not happen."""
CUTS: dict[str, list[list[Cut]]] = {
    "sft": [
        [(BOUNDARY, "boundary_reached", 1)],
        [(TRAIN, "step", 3)],
        [(BOUNDARY, "boundary_reached", 5)],
        [(EXPORTS, "maybe_write", 5)],
    ],
    "rm": [[(TRAIN, "accumulate", 4)], [(EXPORTS, "maybe_write", 5)]],
    "dpo": [[(TRAIN, "accumulate", 4)], [(BOUNDARY, "boundary_reached", 5)]],
    "ppo": [
        [(ENGINE, "generate", 3), (TRAIN, "accumulate", 8)],
        [("megarlhf.trainers.rl.update", "add_advantages", 2), (TRAIN, "step", 5), (BOUNDARY, "boundary_reached", 4)],
    ],
    "grpo": [[(TRAIN, "step", 6), (ENGINE, "generate", 2)]],
}
"""The runs of a command, each cut off once or several times: calls are counted from each of its starts. A start gets at
least two boundaries further than the one before, so that it goes on from a point which that one has written."""


@dataclass
class Case:
    """A command, its configuration, and what it gives when nothing happens."""

    command: str
    config: dict[str, Any]
    reference: Path


def tree(name: str, models: dict[str, Path], data: dict[str, Path]) -> dict[str, Any]:
    if name in ("sft", "rm", "dpo"):
        role, model = ("reward_model", "plain") if name == "rm" else ("actor", "plain")
        optim = {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2}
        further: dict[str, Any] = {}
        if name == "dpo":  # whose loss needs most: a reference, and a point measured before each step
            further = {"loss": "kto", "reference": {"model": {"path": str(models["other"])}, "parallel": {"tp": 2}}}
        return {
            **further,
            role: {"model": {"path": str(models[model])}, "optim": optim},
            # 64 records are not a multiple of the batch: the second epoch begins inside a batch.
            "data": {"train": str(data["sft" if name == "sft" else "pairs"])},
            "train": {"num_steps": STEPS, "mini_batch_samples": 24, "micro_batch_samples": 4},
            "checkpoint": {"every": 2, "every_minutes": 0, "export_every": 2},
        }
    kl = {"coef": 0.1, "controller": "adaptive", "target": 1e-3, "horizon": 100}  # whose coefficient is a metric
    algo = {} if name == "ppo" else {"advantage": "group_relative", "kl": kl}
    made = rl_config({**models, "other": models["scorer"]}, data["prompts"], {}, **algo)
    stop = {"validation_reward_patience": 50, "max_kl": 100.0}
    made["train"] |= {"num_steps": 3, "micro_batch_samples": 4, "stop": stop}
    if name == "grpo":
        made["rewards"][0]["normalise"] = "running"  # over all steps so far: `reward_mean` shows it
    made["data"]["validation"], made["eval"] = str(data["prompts"]), {"every": 1, "max_samples": 6}
    # A role that rank 1 has nothing of.
    made["reference" if name == "grpo" else "reward_model"]["parallel"] = {"ranks": 1}
    made["checkpoint"] = {"every_updates": 1, "every_minutes": 0, "keep": 3, "export_every": 1}
    return made


def command_line(case: Case, run: Path, *overrides: str) -> list[str]:
    return [*argv_of(case.command, {**case.config, "run": {"dir": str(run)}}, run.with_suffix(".yaml")), *overrides]


def files(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file by its path: what is in it, and when it was written."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def assert_refused(ranks: RankPool, run: Path, argv: list[str], *names: str) -> str:
    """The command ends with status 2 and changes nothing in the run's directory; what it wrote has a line with all of
    the names."""
    before = files(run)
    status, said = ranks.run(1, "command_status", *argv)[0]
    assert (status, bool(lines_naming(said, *names))) == (2, True), said
    assert files(run) == before
    return said


def rows(run: Path) -> list[dict[str, Any]]:
    """Metrics without those that say what a step took."""
    return [reproducible(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, bytes]:
    """Every exported file of weights, by step and role."""
    files = sorted((run / "checkpoints").glob("step_*/*/*.safetensors"))
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


@pytest.fixture(scope="module", params=CUTS)
def case(request, ranks, two_layers, data, tmp_path_factory) -> Case:
    name = request.param
    made = Case("rl" if name in ("ppo", "grpo") else name, tree(name, two_layers, data), Path())
    made.reference = tmp_path_factory.mktemp(name) / "whole"
    ranks.run(2, "command", *command_line(made, made.reference))
    return made


def test_a_run_that_is_cut_off_goes_on_exactly(case, ranks, tmp_path, request) -> None:
    name = request.node.callspec.params["case"]
    for number, cuts in enumerate(CUTS[name]):
        run = tmp_path / f"run{number}"
        argv, newest = command_line(case, run), ""
        for start, (owner, method, calls) in enumerate(cuts):
            outcome, said = ranks.run(2, command_until, calls, owner, method, *argv)[0]
            assert outcome == "killed", f"{owner}.{method} was called less than {calls} times"
            if start:
                assert f"from resume/{newest}" in said
            before = newest
            newest = max((point.position.name for point in find_points(run)), default="")
            assert newest > before or not start, f"{cuts[start]} came before a point of this start"
        said = ranks.run(2, "command", *argv)[0]
        assert (f"from resume/{newest}" if newest else "the run begins anew") in said
        assert rows(run) == rows(case.reference), cuts
        assert weights(run) == weights(case.reference)
        assert json.loads((run / "FINISHED").read_text())["reason"] == "num_steps"
        assert not [path for path in (run / "resume").iterdir() if path.name.startswith(".")]


def as_an_earlier_version_wrote_it(run: Path) -> None:
    """In which `train.shuffle` was true: in the run's configuration and in its resume points."""
    file = run / "config.yaml"
    text = file.read_text()
    assert "shuffle: samples" in text
    file.write_text(text.replace("shuffle: samples", "shuffle: true"))
    for each in find_points(run):
        stated = read_manifest(each)
        assert stated["config"]["train"]["shuffle"] == "samples"
        stated["config"]["train"]["shuffle"] = True
        digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
        (each.path / "MANIFEST.json").write_text(json.dumps({"manifest": stated, "sha256": digest}))


def test_another_layout_goes_on_with_the_same_state(ranks, two_layers, data, tmp_path) -> None:
    """PPO cut off inside a step at tp 1, gone on with at tp 2 x pp 2 and at cp 2 x dp 2 on the same responses: the
    updates that are left agree up to the rounding of their sums, as tests/distributed/test_rl_layouts.py allows. The
    first of them goes on from what an earlier version has written."""
    ppo = Case("rl", tree("ppo", two_layers, data), Path())
    ppo.config["checkpoint"]["background"] = False
    finals, overrides = [], ("train.num_steps=1", "train.micro_batch_samples=2")
    cut = command_line(ppo, tmp_path / "cut", *overrides)
    assert ranks.run(1, command_until, 5, TRAIN, "step", *cut)[0][0] == "killed"
    for name, world_size, parallel in (("same", 1, {}), ("tp2pp2", 4, {"tp": 2, "pp": 2}), ("cp2dp2", 4, {"cp": 2})):
        run = tmp_path / name
        shutil.copytree(tmp_path / "cut", run)
        if name == "same":
            as_an_earlier_version_wrote_it(run)
        argv = command_line(ppo, run, *overrides)
        layout = [f"{role}.parallel={json.dumps(parallel)}" for role in ROLES]
        said = ranks.run(world_size, "command", *argv, *layout)[0]
        assert "from resume/step_000000_update_0002" in said
        if name != "same":
            cp = " x cp 2" if "cp" in parallel else ""
            assert f"tp {parallel.get('tp', 1)}{cp} x pp" in said
        finals.append(rows(run)[-1])
    for final in finals[1:]:
        assert final["response_length_mean"] == finals[0]["response_length_mean"]
        for metric in ("value_loss", "entropy", "actor_grad_norm", "critic_grad_norm", "kl"):
            assert final[metric] == pytest.approx(finals[0][metric], rel=1e-4, abs=1e-6), metric


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


def test_damaged_points_are_passed_over_before_anything_is_touched(ranks, one_layer, data, tmp_path) -> None:
    """The newest point has a flipped byte, the next one is cut short: the third is used, and the end is the same. When
    all are damaged the start is refused, and nothing has changed in the directory."""
    sft = Case("sft", tree("sft", one_layer, data), Path())
    sft.config["checkpoint"] = {"every": 1, "every_minutes": 0, "keep": 4}
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks.run(1, "command", *command_line(sft, whole))
    argv = command_line(sft, run)
    ranks.run(1, command_until, 11, BOUNDARY, "boundary_reached", *argv)  # two a step, one before
    points = find_points(run)
    assert len(points) >= 3
    flip_a_byte(next((points[-1].path / "actor").glob("*.distcp")))
    (points[-2].path / "state/random.pt").write_bytes((points[-2].path / "state/random.pt").read_bytes()[:-1])
    said = ranks.run(1, command_on_a_tight_disk, run, *argv)[0]
    assert "WARNING: no resume point" not in said, "what was passed over gives way"
    assert f"from resume/{points[-3].position.name}" in said
    assert lines_naming(said, points[-1].position.name, "passed over", "actor")
    assert lines_naming(said, points[-2].position.name, "passed over", "state/random.pt")
    assert rows(run) == rows(whole)
    assert [point.position.step for point in find_points(run)] == [2, 3, 4, 5], "what was passed over is gone"
    assert not list((run / "resume").glob("*.passed_over"))

    other = tmp_path / "other"
    argv = command_line(sft, other)
    ranks.run(1, command_until, 9, BOUNDARY, "boundary_reached", *argv)
    for point in find_points(other):
        flip_a_byte(point.path / "MANIFEST.json")
    said = assert_refused(ranks, other, argv, f"{other}/resume")
    for point in find_points(other):
        assert lines_naming(said, point.path.name, "damaged")


def test_other_data_and_other_frozen_models_are_refused(ranks, one_layer, data, tmp_path) -> None:
    """Under the same names: files whose content has changed since. `run.allow_changes` lets the run go on, and it is
    said. So is another source of a rule, which refuses nothing: it may have been corrected."""
    made = tree("grpo", one_layer, data)
    prompts, validation = tmp_path / "prompts.jsonl", tmp_path / "validation.jsonl"
    for name, role in (("plain", "reference"), ("scorer", "reward_model"), ("plain", "actor")):
        shutil.copytree(one_layer[name], tmp_path / role)
        made[role]["model"]["path"] = str(tmp_path / role)
    for name, file in (("train", prompts), ("validation", validation)):
        shutil.copy(data["prompts"], file)
        made["data"][name] = str(file)
    grpo = Case("rl", made, Path())
    run = tmp_path / "run"
    argv = command_line(grpo, run)
    ranks.run(1, command_until, 6, TRAIN, "step", *argv)
    divided = ("norm_eps 1e-06 -> 0.01", "config.json")
    changes: list[tuple[Path, Callable[[Path], None], tuple[str, ...]]] = [
        (prompts, swap_two_lines, ("data.train", "other samples")),
        (tmp_path / "reference/model.safetensors", nudge_a_weight, ("reference", "other weights", "KL")),
        (tmp_path / "reference/config.json", divide_otherwise, ("reference.model.path", *divided)),
        (tmp_path / "actor/config.json", divide_otherwise, ("actor.model.path", *divided)),
        (tmp_path / "actor/generation_config.json", end_earlier, ("tokens that end a response", "changed since")),
        (validation, swap_two_lines, ("data.validation", "changed since")),
        (tmp_path / "reward_model/model.safetensors", nudge_a_weight, ("reward model", "weights", "changed since")),
    ]
    for file, change, names in changes:
        kept = file.read_bytes() if file.exists() else b"{}"
        change(file)
        assert_refused(ranks, run, argv, *names)
        if file != changes[-1][0]:
            file.write_bytes(kept)
    in_bf16 = [*argv, "actor.model.dtype=bf16", "run.allow_changes=true"]
    said = assert_refused(ranks, run, in_bf16, "actor", "float32", "bfloat16", "actor.model.dtype=fp32")
    assert "or go on with it by run.allow_changes" not in said
    # Another place is none of what is computed. What the actor began with stays said, whatever lies at its path now.
    (tmp_path / "actor").rename(tmp_path / "moved")
    nudge_a_weight(tmp_path / "moved/model.safetensors")
    shutil.move(prompts, tmp_path / "staged.jsonl")
    moved = [f"actor.model.path={tmp_path}/moved", f"data.train={tmp_path}/staged.jsonl"]
    said = ranks.run(1, "command", *argv, *moved, "run.allow_changes=true")[0]
    assert lines_naming(said, *names)
    assert "other samples" not in said
    assert lines_naming(said, "data.train", f"{prompts} -> {tmp_path}/staged.jsonl")
    assert lines_naming(said, "actor.model.path", f"{tmp_path}/moved", f"{tmp_path}/actor", "other weights")
    (point,) = find_points(run)[-1:]
    stated = read_manifest(point)["base"]["actor"]
    assert stated["path"] == str(tmp_path / "actor")
    assert Provenance.from_json((point.path / "actor/megarlhf.json").read_text()).base == Weights(**stated)


def swap_two_lines(file: Path) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[1], lines[0], *lines[2:]]))


def divide_otherwise(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 0.01}))


def end_earlier(file: Path) -> None:
    file.write_text(json.dumps({"eos_token_id": [2, 5]}))


def nudge_a_weight(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensors["model.norm.weight"][3] += torch.finfo(torch.float32).eps
    save_file(tensors, file, metadata={"format": "pt"})


def test_what_the_bank_holds_is_not_generated_again(ranks, one_layer, data, tmp_path) -> None:
    """Cut off while the second step's responses are drawn, and resumed from before the first: both steps' responses
    come out of the bank, where they are there, and the run is the same. A changed file of the bank is not used."""
    grpo = Case("rl", tree("grpo", one_layer, data), Path())
    grpo.config["checkpoint"] = {"every_minutes": 1000}
    whole = tmp_path / "whole"
    ranks.run(1, "command", *command_line(grpo, whole))
    argv = command_line(grpo, tmp_path / "cut")
    assert ranks.run(1, command_until, 16 + 6, BANK, "add", *argv)[0][0] == "killed"
    assert not find_points(tmp_path / "cut")
    for name, spoilt in (("kept", False), ("spoilt", True)):
        run = tmp_path / name
        shutil.copytree(tmp_path / "cut", run)
        argv = command_line(grpo, run)
        if spoilt:
            for file in sorted(run.glob("bank/step_*/*.jsonl")):
                flip_a_byte(file)
        said = ranks.run(1, "command", *argv)[0]
        for step, kept in ((1, 16), (2, 5)):
            assert bool(lines_naming(said, f"step {step}", f"{kept} of 16 responses", "bank")) is not spoilt
        assert rows(run) == rows(whole)
        assert not list((run / "bank").glob("step_*")), "all steps are covered by the last resume point"


def uncalled_before_the_start(config: dict[str, Any]) -> None:
    """No rule of the configuration is called before the run, so that its calls can be counted."""
    for reward in config["rewards"]:
        if reward["kind"] == "rule":
            reward["check"] = "none"


@pytest.mark.parametrize(
    ("name", "owner", "method", "calls", "position"),
    [
        ("sft", TRAIN, "step", 3, "step_000002_update_0001"),
        ("sft", "megarlhf.models.role:Role", "forward", 3, "step_000001_update_0001"),
        ("grpo", BANK, "add", 17, "step_000001"),
        # Two an evaluation.
        ("grpo", "megarlhf.trainers.rl.evaluation", "make_experience", 3, "step_000000_update_0004"),
        ("grpo", "megarlhf.rollout.rewards.score", "call_in_rank", 33, "step_000001"),
    ],
)
def test_a_signal_saves_and_ends_the_run(
    name, owner, method, calls, position, ranks, one_layer, data, tmp_path
) -> None:
    """SIGTERM in the middle of an optimizer update, an evaluation, a rollout or a reward: status 75, a
    resume point of the last boundary, and the same run in the end."""
    made = Case("sft" if name == "sft" else "rl", tree(name, one_layer, data), Path())
    made.config["checkpoint"] = {"every_minutes": 1000}
    if name == "sft":  # an evaluation is six micro-batches, in two parts
        made.config["data"]["validation"], made.config["eval"] = str(data["sft"]), {"every": 2, "max_samples": 24}
    else:
        uncalled_before_the_start(made.config)
    whole, run = tmp_path / "whole", tmp_path / "run"
    ranks.run(1, "command", *command_line(made, whole))
    argv = command_line(made, run)
    status, said = ranks.run(1, command_with_signal, calls, owner, method, *argv)[0]
    assert status == 75, said
    point = find_points(run)[-1].position.name
    assert f"stopped (SIGTERM): saved {run}/resume/{point}" in said
    assert point == position
    said = ranks.run(1, "command", *argv)[0]
    assert f"from resume/{point}" in said
    assert rows(run) == rows(whole)
