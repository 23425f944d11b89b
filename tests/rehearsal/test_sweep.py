"""Sweeps: what is left out and counted, the order, the file of the best, and the bytes below which nothing can fit.

Not covered: that the best of a sweep is the best on a cluster.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarlhf.commands.rehearse import main
from megarlhf.config import RLConfig, SFTConfig, load_config
from megarlhf.rehearsal.fakes.lengths import Constant
from megarlhf.rehearsal.processes import RankFailed
from megarlhf.rehearsal.request import Request
from megarlhf.rehearsal.result import Result
from megarlhf.rehearsal.steady_round import round_seconds
from megarlhf.rehearsal.sweep import Axis, Variant, best_first, least_bytes, parse_axes
from tests.refuses import missing_names, refuses
from tests.rehearsal.jobs import DENSE, MODELS, job_tree, records_of, request_of, run_command, write_job, write_model
from tests.rehearsal.results import a_result, too_small

Overrides = list[str]


def test_a_sweep(tmp_path, capsys) -> None:
    """Of four combinations two do not divide (two ranks, three stages); the others are rehearsed and ordered."""
    file = write_job("sft", tmp_path, job_tree("sft", tmp_path))
    axes = ("--sweep", "actor.parallel.pp=1,3", "train.mini_batch_samples=4,8")
    done = run_command("sft", file, tmp_path / "out", "--world-size", "2", "--steps", "1", *axes)
    assert done.status == 0
    said = json.loads((done.out / "sweep.json").read_text())
    illegal = {tuple(each["overrides"]): each["why"] for each in said["illegal"]}
    assert set(illegal) == {("actor.parallel.pp=3", f"train.mini_batch_samples={size}") for size in (4, 8)}
    assert "world size 2" in illegal["actor.parallel.pp=3", "train.mini_batch_samples=8"]
    assert (said["too_large"], said["failed"]) == ([], [])
    trained = [each["tokens/s"] for each in said["done"]]
    assert trained == sorted(trained, reverse=True)
    assert trained[1] > 0
    best = [*said["done"][0]["overrides"], "run.world_size=2"]
    assert load_config(SFTConfig, done.out / "best.yaml") == load_config(SFTConfig, file, best)
    assert sorted(path.name for path in done.out.iterdir()) == ["best.yaml", "sweep.json"]
    written = capsys.readouterr().out
    assert not missing_names(written, "2 cannot run", "actor.parallel.pp=3")
    assert written.index("2 cannot run") < written.index("1 of "), "before minutes are spent"


Answer = Callable[[Request], Result]


def swept(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer, *options: str) -> tuple[int, list[Request]]:
    """(exit status, what was rehearsed) of a sweep over two batch sizes and two layouts, without rehearsing."""
    asked: list[Request] = []

    def rehearse(request: Request, told: Any) -> Result:
        asked.append(request)
        return answer(request)

    monkeypatch.setattr("megarlhf.rehearsal.run_sweep.rehearse", rehearse)
    file = write_job("sft", folder, job_tree("sft", folder))
    axes = ("--sweep", "actor.parallel.pp=1,2", "train.mini_batch_samples=4,8")
    return main(["sft", "-c", str(file), "-o", str(folder / "out"), "--world-size", "2", *options, *axes]), asked


def test_too_large_by_parameters_alone(tmp_path, monkeypatch) -> None:
    """By hand: 2 layers of 4 x 64 x 64 + 3 x 64 x 96 + 2 x 64 elements and a norm, in bf16, with a gradient in fp32,
    and a main parameter and two moments on two data-parallel ranks. On a device of less only both halves fit."""
    elements = 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    whole, half = int(elements * (2 + 4 + 12 / 2)), int(elements / 2 * (2 + 4 + 12))
    assert half < whole
    size = ("--gpu-memory-gib", str((whole + half) / 2 / 2**30))
    status, asked = swept(tmp_path, monkeypatch, lambda request: a_result(1), *size)
    assert status == 0
    assert [request.cfg.actor.parallel.pp for request in asked] == [2, 2]
    said = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [(each["overrides"][0], each["bytes"]) for each in said["too_large"]] == [("actor.parallel.pp=1", whole)] * 2


def test_nothing_fits(tmp_path, monkeypatch) -> None:
    """There is no best, nor that of an earlier sweep."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "best.yaml").write_text("{}")
    (tmp_path / "out" / "sweep.json").write_text('{"too_large": []}')
    status, asked = swept(tmp_path, monkeypatch, lambda request: too_small(a_result(1), 10))
    assert (status, len(asked)) == (1, 4)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sweep.json"]


def test_a_variant_that_fails_or_is_refused_ends_no_sweep(tmp_path, monkeypatch) -> None:
    def answer(request: Request) -> Result:
        if request.cfg.train.mini_batch_samples == 8:
            raise RankFailed("planted") if request.cfg.actor.parallel.pp == 1 else ValueError("refused")
        return a_result(1)

    status, _ = swept(tmp_path, monkeypatch, answer)
    said = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert status == 0
    assert [each["why"] for each in said["failed"]] == ["planted"]
    assert [each["why"] for each in said["illegal"]] == ["refused"]
    assert len(said["done"]) == 2


def swept_engines(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer) -> tuple[list[Any], dict[str, Any]]:
    """(number of slices, share and stages of each rehearsed variant, what is written) of a sweep over engines."""
    asked: list[Any] = []

    def rehearse(request: Request, told: Any) -> Result:
        rollout = request.cfg.rollout
        asked.append((rollout.slices, rollout.vllm.gpu_memory_utilization, request.cfg.actor.parallel.pp))
        return answer(request)

    monkeypatch.setattr("megarlhf.rehearsal.run_sweep.rehearse", rehearse)
    tree = job_tree("rl", folder) | {"rollout": {"num_samples_per_prompt": 2, "max_response_tokens": 64}}
    axes = ("rollout.slices=1,2,4", "rollout.vllm.gpu_memory_utilization=0.1,0.2,0.001", "actor.parallel.pp=1,2")
    lengths = ("--response-lengths", "constant:60", "--gpu-memory-gib", "20")
    file = write_job("rl", folder, tree)
    assert (
        main(["rl", "-c", str(file), "-o", str(folder / "out"), "--world-size", "4", *lengths, "--sweep", *axes]) == 0
    )
    return asked, json.loads((folder / "out" / "sweep.json").read_text())


def test_of_engines_the_fastest_is_rehearsed(tmp_path, monkeypatch, capsys) -> None:
    """Four slices wait least, with either of the shares that hold all responses; the third has no room. The others take
    clearly longer."""
    asked, said = swept_engines(tmp_path, monkeypatch, lambda request: a_result(1))
    assert sorted(asked) == [(4, share, stages) for share in (0.1, 0.2) for stages in (1, 2)]
    assert len(said["slower"]) == 2 * 4
    assert {each["overrides"][1] for each in said["illegal"]} == {"rollout.vllm.gpu_memory_utilization=0.001"}
    seconds = {each["overrides"][0]: each["rollout s"] for each in said["slower"]}
    assert seconds["rollout.slices=2"] < seconds["rollout.slices=1"]
    assert "8 left out, which differ in the engine alone" in capsys.readouterr().out


def test_the_next_engine_is_rehearsed_where_the_fastest_does_not_fit(tmp_path, monkeypatch) -> None:
    def answer(request: Request) -> Result:
        fits = request.cfg.rollout.slices == 2
        return a_result(1) if fits else too_small(a_result(1), 10)

    asked, said = swept_engines(tmp_path, monkeypatch, answer)
    assert [slices for slices, _, stages in asked if stages == 1] == [4, 4, 2, 2]
    assert len(said["slower"]) == 2 * 2


@pytest.mark.parametrize("slices, engines, most_off", [(1, 1, 1e-9), (3, 1, 1e-9), (3, 2, 0.05)])
def test_a_round_without_a_rehearsal_takes_as_long(slices, engines, most_off, tmp_path) -> None:
    """The same samples of 60 prompts of one length, at the same version of the weights. Several engines may get others,
    since they have seen other lengths before."""
    tree = job_tree("rl", tmp_path)
    tree["train"] |= {"prompts_per_step": 60, "mini_batch_samples": 120}
    tree["rollout"] |= {"slices": slices, "vllm": {"gpu_memory_utilization": 0.02}}
    del tree["reward_model"]["parallel"]
    tree["train"]["num_steps"] = 9
    request = request_of("rl", tree, tmp_path, world_size=engines, steps=slices, prompt_lengths=Constant(20))
    (record,) = records_of(request, tmp_path / "standing_in", 0)
    assert round_seconds(request, rounds=1) == pytest.approx(record.rollouts[-1].slowest, rel=most_off)


def test_the_order() -> None:
    """What runs by the tokens that it trains a second; then what has no time; then what does not fit, the fullest last.
    A job whose ranks do not fit together does not run."""
    quick = a_result(1)
    slow = replace(quick, times=[replace(step, tokens_per_second=0.1) for step in quick.times])
    found = {
        "much too large": too_small(quick, 20),
        "does not meet": replace(quick, faults=["ranks 0 and 1 wait for each other"]),
        "slow": slow,
        "no time": replace(quick, times=[]),
        "too large": too_small(quick, 40),
        "quick": quick,
    }
    names = [variant.cfg for variant, _ in best_first([(Variant((), name), each) for name, each in found.items()])]
    assert names == ["quick", "slow", "no time", "does not meet", "too large", "much too large"]


def test_axes() -> None:
    """A comma inside brackets or quotes ends no value."""
    assert parse_axes(["rewards=[{a: 1},{b: 2}],[]"]) == [Axis("rewards", ("[{a: 1},{b: 2}]", "[]"))]
    assert parse_axes(["a.b='x,y',z"]) == [Axis("a.b", ("'x,y'", "z"))]
    axes = parse_axes(["a.b=1,2", "actor.parallel.layers_per_stage=[1,3],[2,2],null"])
    assert axes == [Axis("a.b", ("1", "2")), Axis("actor.parallel.layers_per_stage", ("[1,3]", "[2,2]", "null"))]
    for texts, names in ((["a.b=1,1"], ("a.b=1,1", "twice")), (["a=1", "a=2"], ("names a", "twice"))):
        with refuses("--sweep", *names):
            parse_axes(texts)


STAYS = ("parameters", "gradients", "main parameters", "optimizer state", "engine's weights")
FP32 = {"dtype": "fp32"}
LEAST: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], int]] = {
    "sft": ("sft", "dense", {}, {}, 2),
    "sft in fp32": ("sft", "dense", {}, FP32, 1),
    "uneven stages": ("sft", "dense", {"pp": 2, "layers_per_stage": [3, 1]}, {}, 2),
    "tied embeddings": ("rm", "tied", {"tp": 2}, FP32, 2),
    "experts": ("sft", "experts", {"tp": 2, "sequence_parallel": True}, {}, 4),
    "experts over ranks": ("sft", "experts", {"ep": 4}, {}, 4),
    "rl": ("rl", "dense", {}, {}, 4),
    "rl, experts": ("rl", "experts", {}, {}, 4),
}


@pytest.mark.parametrize("name", LEAST)
def test_nothing_needs_less(name, tmp_path) -> None:
    """A lower bound of the parameters and their kin on the fullest rehearsed rank (of each stage one is rehearsed), and
    no idle one: at least a third, the embeddings of these small models apart."""
    command, model, parallel, dtype, world = LEAST[name]
    tree = job_tree(command, tmp_path, model, **parallel)
    if "layers_per_stage" in parallel:
        write_model(tmp_path / model, {**DENSE, "num_hidden_layers": 4})
    else:
        write_model(tmp_path / model, {**MODELS[model], "hidden_size": 128})
    for role in ("actor", "critic", "reward_model"):
        if role in tree:
            tree[role] = {**tree[role], "model": tree[role]["model"] | dtype}
    if command == "rl":
        tree["reward_model"]["parallel"] = {"sequence_parallel": True, "tp": 4} if model == "experts" else {"tp": 4}
        tree["rollout"]["vllm"] = {"gpu_memory_utilization": 0.01}
    request = request_of(command, tree, tmp_path, world_size=world, steps=1, device_bytes=2**30)
    ranks = range(0, world, 2 if parallel.get("tp") else 1) if "pp" in parallel else (0,)
    records = records_of(request, tmp_path / "standing_in", *ranks)
    held = max(sum(row.by_kind.get(kind, 0) for kind in STAYS) for record in records for row in record.memory)
    least = least_bytes(request.cfg, world)
    assert held / 3 < least <= held
    assert isinstance(request.cfg, RLConfig) == (command == "rl")
