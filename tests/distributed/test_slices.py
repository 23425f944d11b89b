"""Responses drawn in slices. Where the weights do not change: samples, columns and metrics of whole responses. Where
they change: the same bits whatever the timing and the number of engines, and after a kill.

Bit for bit in fp32 on a CPU. Not covered: GPUs (tests/rollout/test_slices_on_gpu.py); kills by SIGKILL (`make
test-faults`).
"""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.resume.points.point import find_points
from tests.command import argv_of
from tests.distributed.interrupted_jobs import command_until
from tests.distributed.slices_jobs import command_with_columns, command_with_fault
from tests.distributed.test_resume import ENGINE, TRAIN, assert_refused, flip_a_byte, rows, weights
from tests.distributed.test_rl_layouts import config
from tests.refuses import lines_naming

OF_AGE = ("gap", "staleness", "in_flight", "idle")
"""Parts of the names of metrics that are of slices, or of weights of another age."""
SAME_WEIGHTS = {"lr": 1e-30}
"""A learner that changes nothing: its updates are lost in rounding."""


def tree(models: dict[str, Path], data: dict[str, Path], *, tp: int = 1, **rollout: Any) -> dict[str, Any]:
    """GRPO of 4 steps with 16 responses of up to 6 tokens each."""
    made = config({**models, "other": models["scorer"]}, data["prompts"], {"tp": tp}, advantage="group_relative")
    del made["critic"]
    made["train"] |= {"num_steps": 4}
    made["rollout"] |= rollout
    correction = {"kind": "truncate"}
    made["algo"] |= {"rollout_correction": correction, "entropy_coef": 0.0, "kl": {"log": True}}
    return made


def run(
    pool: Any,
    world: int,
    cfg: dict[str, Any],
    path: Path,
    *overrides: str,
    delayed: int | None = None,
    backwards: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Columns of each step, and metrics but those of age."""
    path.mkdir()
    argv = argv_of("rl", {**cfg, "run": {"dir": str(path / "run")}}, path / "cfg.yaml")
    _, steps = pool.run(world, command_with_columns, delayed, backwards, *argv, *overrides)[0]
    metrics = [{k: v for k, v in row.items() if not any(part in k for part in OF_AGE)} for row in rows(path / "run")]
    return steps, metrics


def assert_equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    """All columns of all steps, and all metrics."""
    for step, (mine, theirs) in enumerate(zip(one[0], other[0], strict=True)):
        assert mine["columns"].keys() == theirs["columns"].keys()
        for name, column in mine["columns"].items():
            assert theirs["columns"][name] == column, (step, name)
    pairs = zip(one[1], other[1], strict=True)
    assert {k: (a.get(k), b.get(k)) for a, b in pairs for k in a.keys() | b.keys() if a.get(k) != b.get(k)} == {}


def by_rule(slices: int, ahead: int, steps: list[dict[str, Any]]) -> list[Any]:
    size = -(-6 // slices)
    return [
        [
            [max(0, step - ahead - (slices - 1) + token // size) for token in range(len(row))]
            for row in each["columns"]["responses"]
        ]
        for step, each in enumerate(steps)
    ]


CASES: dict[str, tuple[int, dict[str, Any], tuple[int, int]]] = {
    "the actor itself": (1, {"engine": "megatron"}, (3, 0)),
    "one engine": (1, {}, (3, 0)),
    "two engines, an empty last slice": (2, {}, (4, 0)),
    "one engine of two ranks": (2, {"tp": 2}, (3, 0)),
    "prompts longer than a batch": (1, {"vllm": {"args": {"max_num_batched_tokens": 8, "max_num_seqs": 4}}}, (3, 0)),
    "a step ahead": (1, {"engine": "megatron"}, (1, 1)),
    "slices and a step ahead": (1, {"engine": "megatron"}, (2, 1)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_slices_of_unchanged_weights_are_the_whole_responses(case, ranks, vllm_ranks, one_layer, data, tmp_path):
    world, keys, (slices, ahead) = CASES[case]
    cfg = tree(one_layer, data, **{"engine": "vllm", **keys})
    pool = ranks if cfg["rollout"]["engine"] == "megatron" else vllm_ranks
    cfg["actor"]["optim"] = SAME_WEIGHTS
    if case == "a step ahead":  # each update is skipped, and is a version all the same
        cfg["train"] |= {"skip_grad_norm_above": 1e-9, "max_skipped_in_a_row": 99}
    whole = run(pool, world, cfg, tmp_path / "whole")
    sliced = run(pool, world, cfg, tmp_path / "sliced", f"rollout.slices={slices}", f"rollout.steps_ahead={ahead}")
    assert_equal(whole, sliced)
    assert [each["versions"] for each in sliced[0]] == by_rule(slices, ahead, sliced[0])
    lengths = {len(row) for each in sliced[0] for row in each["columns"]["responses"]}
    assert min(lengths) < max(lengths) == 6, "no response ends early"
    assert [each["versions"] for each in whole[0]] == by_rule(1, 0, whole[0])


def test_a_stop_text_across_a_cut_ends_the_response_there(vllm_ranks, one_layer, data, tmp_path):
    """The text is that of the second and third token of a response, with cuts after every second token."""
    cfg = tree(one_layer, data, engine="vllm")
    cfg["actor"]["optim"] = SAME_WEIGHTS
    cfg["samples"], cfg["train"]["num_steps"] = {"every": 1, "count": 16}, 2
    free = run(vllm_ranks, 1, cfg, tmp_path / "free")
    texts = sample_texts(tmp_path / "free")
    stops = [text[1:3] for text in texts if len(text) > 4][:3]
    cfg["rollout"]["stop"] = stops
    whole = run(vllm_ranks, 1, cfg, tmp_path / "whole")
    assert_equal(whole, run(vllm_ranks, 1, cfg, tmp_path / "sliced", "rollout.slices=3"))
    ended = [text for text in sample_texts(tmp_path / "sliced") if text[1:3] in stops]
    assert ended
    assert all(len(text) == 3 for text in ended)
    assert whole[0][0]["columns"]["responses"] != free[0][0]["columns"]["responses"]


def sample_texts(path: Path) -> list[str]:
    """Responses in the tables of samples."""
    tables = sorted((path / "run/samples").glob("step_*.jsonl"))
    return [json.loads(line)["response"] for table in tables for line in table.read_text().splitlines()]


def test_greedy_baselines_are_drawn_in_the_same_slices(ranks, one_layer, data, tmp_path):
    """ReMax with weights that do not change. With weights that change, cut off in the third step: the same end. Another
    advantage had no baselines, which the newest weights draw where a resume asks for them."""
    cfg = tree(one_layer, data, engine="megatron")
    cfg["algo"] |= {"advantage": "remax"}
    cfg["train"]["epochs_per_step"] = 1
    moving = copy.deepcopy(cfg)
    cfg["actor"]["optim"] = SAME_WEIGHTS
    whole = run(ranks, 1, cfg, tmp_path / "whole")
    assert_equal(whole, run(ranks, 1, cfg, tmp_path / "sliced", "rollout.slices=3"))
    assert "greedy_rewards" in whole[0][0]["columns"]

    moving["rollout"]["slices"], moving["checkpoint"] = 3, {"every": 1, "every_minutes": 0, "background": False}
    ranks.run(1, "command", *killed(moving, tmp_path / "undisturbed"))
    for name, cut in (("again", moving), ("changed", {**moving, "algo": {**moving["algo"], "advantage": "rloo"}})):
        calls = 5 if name == "again" else 3  # with greedy responses twice in a step
        cut_argv = killed(cut, tmp_path / name)
        assert ranks.run(1, command_until, calls, ENGINE, "generate", *cut_argv)[0][0] == "killed"
        argv = killed(moving, tmp_path / name)
        ranks.run(1, "command", *argv, *["run.allow_changes=true"][: name == "changed"])
        assert (rows(tmp_path / name) == rows(tmp_path / "undisturbed")) is (name == "again")


def test_neither_timing_nor_engines_change_a_bit(vllm_ranks, one_layer, data, tmp_path):
    """PPO's learner at its usual rate, four slices, waits at random moments. Two engines of one rank, in two runs with
    other waits: equal bits. One engine of two ranks: equal up to the rounding of its sums."""
    cfg = tree(one_layer, data, engine="vllm", slices=4)
    two = [run(vllm_ranks, 2, cfg, tmp_path / f"two{seed}", delayed=seed) for seed in (1, 2)]
    assert_equal(*two)
    for each, step in zip(by_rule(4, 0, two[0][0]), two[0][0], strict=True):
        assert step["versions"] == each
    assert weights(tmp_path / "two1/run") == weights(tmp_path / "two2/run")
    moved = read_metrics(tmp_path / "two1/run")[4]
    assert moved["staleness_max"] == 3
    assert moved["staleness_kl"] != 0.0
    alone = run(vllm_ranks, 2, cfg, tmp_path / "alone", "rollout.parallel.tp=2")
    at_tp2 = run(vllm_ranks, 2, tree(one_layer, data, engine="vllm", slices=4, tp=2), tmp_path / "tp2")
    for other in (alone, at_tp2):
        for mine, theirs in zip(two[0][1][1:], other[1][1:], strict=True):
            for name in ("policy_loss", "actor_grad_norm", "reward_mean", "response_length_mean"):
                assert theirs[name] == pytest.approx(mine[name], rel=2e-4, abs=1e-5), name


def killed(cfg: dict[str, Any], path: Path) -> list[str]:
    return argv_of("rl", {**cfg, "run": {"dir": str(path)}}, path.with_suffix(".yaml"))


CUTS = [(ENGINE, "generate", 3), (TRAIN, "step", 3), (ENGINE, "generate", 2)]
"""One after the other in one run: while the third step draws; in the second step that then follows; in a later one."""


@pytest.mark.parametrize("slices, ahead", [(3, 0), (2, 1)])
def test_a_run_that_is_cut_off_goes_on_with_the_slices_in_flight(slices, ahead, ranks, one_layer, data, tmp_path):
    """Points at each update, and a sampler that learns from rewards some steps after its choice. The newest point is
    damaged at the last start: the one before has slices of its own."""
    cfg = tree(one_layer, data, engine="megatron", slices=slices, steps_ahead=ahead)
    cfg["train"] |= {"num_steps": 7, "epochs_per_step": 1, "sampler": "tests.distributed.own_functions:Hardest"}
    cfg["checkpoint"] = {"every_updates": 1, "every_minutes": 0, "keep": 3, "background": False}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ranks.run(2, "command", *killed(cfg, whole))
    argv = killed(cfg, cut)
    for owner, method, calls in CUTS:
        outcome, said = ranks.run(2, command_until, calls, owner, method, *argv)[0]
        assert outcome == "killed", said
    points = find_points(cut)
    assert all((point.path / "state/slices.pt").is_file() for point in points)
    flip_a_byte(points[-1].path / "state/slices.pt")
    for names, change in {
        ("rollout.slices", "otherwise than they were begun"): f"rollout.slices={slices + 1}",
        ("rollout.steps_ahead", f"{ahead} -> {1 - ahead}"): f"rollout.steps_ahead={1 - ahead}",
        ("rollout.temperature", "0.9 -> 1.0"): "rollout.temperature=1.0",
        ("run.seed", "0 -> 5"): "run.seed=5",
        ("data.train", "responses to the former ones"): f"data.train={other_prompts(data, tmp_path)}",
    }.items():
        said = assert_refused(ranks, cut, [*argv, change, "run.allow_changes=true"], *names)
        assert ("as stored" in said) is ("data.train" in names), "models are built before the refusal"
    said = ranks.run(2, "command", *argv)[0]
    assert lines_naming(said, points[-1].position.name, "passed over", "state/slices.pt")
    assert rows(cut) == rows(whole)
    assert weights(cut) == weights(whole)
    assert not (find_points(cut)[-1].path / "state/slices.pt").exists(), "all samples are trained on"


def other_prompts(data: dict[str, Path], path: Path) -> Path:
    lines = data["prompts"].read_text().splitlines(keepends=True)
    (path / "others.jsonl").write_text("".join(reversed(lines)))
    return path / "others.jsonl"


def test_a_run_that_ends_early_or_is_prolonged_says_what_becomes_of_slices(ranks, one_layer, data, tmp_path):
    cfg = tree(one_layer, data, engine="megatron", slices=3)
    cfg["checkpoint"] = {"every": 1, "every_minutes": 0, "background": False}
    cfg["train"] |= {"num_steps": 4, "stop": {"max_kl": 1e-9, "max_kl_steps": 1}}
    said = ranks.run(1, "command", *killed(cfg, tmp_path / "early"))[0]
    assert lines_naming(said, "tokens of samples of later steps are thrown away")
    del cfg["train"]["stop"]
    cfg["train"]["num_steps"] = 2
    argv = killed(cfg, tmp_path / "short")
    said = ranks.run(1, "command", *argv)[0]
    assert "thrown away" not in said
    shutil.copytree(tmp_path / "short", tmp_path / "kept")
    longer = [*argv, "train.num_steps=4"]
    assert_refused(ranks, tmp_path / "short", longer, "train.num_steps", "2 -> 4")
    said = ranks.run(1, "command", *longer, "run.allow_changes=true")[0]
    assert lines_naming(said, "step 3 begins the samples of steps 3 to 4", "train.num_steps")
    assert read_metrics(tmp_path / "short")[4]["staleness_max"] == 1

    cfg["train"]["num_steps"] = 6
    argv = killed(cfg, tmp_path / "long")
    assert ranks.run(1, command_until, 3, ENGINE, "generate", *argv)[0][0] == "killed"
    said = ranks.run(1, "command", *argv, "train.num_steps=3", "run.allow_changes=true")[0]
    assert lines_naming(said, "samples after step 3", "thrown away")
    assert read_metrics(tmp_path / "long")[3]["tokens_in_flight"] == 0


FAULTS = ("no update", "stale tensor", "temperature", "prefix cache")


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_the_probe_finds_faults_and_not_the_age_of_weights(fault, vllm_ranks, one_layer, data, tmp_path):
    """Six slices, so that tokens are up to five steps old, and a limit that rounding does not reach. The learner moves
    the weights by 1% in each step."""
    cfg = tree(one_layer, data, engine="vllm", slices=6, gap_probe_samples=2, logprob_gap={"mean": 1e-4, "steps": 1})
    cfg["train"]["num_steps"] = 8
    if fault in ("", "prefix cache"):  # which has whole blocks of 32 tokens
        prompts = [{"prompt": f"{number}{'1+2=' * 10}", "answer": "3"} for number in range(4)]
        (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, prompts)))
        cfg["data"] = {"train": str(tmp_path / "long.jsonl"), "max_prompt_tokens": 48}
    argv = killed(cfg, tmp_path / "run")
    ((status, said, probed),) = vllm_ranks.run(1, command_with_fault, fault, *argv)
    assert status == (4 if fault else 0), said
    if fault:
        assert lines_naming(said, "rollout and trainer disagree", "rollout_logprob_gap_mean")
        return
    metrics = read_metrics(tmp_path / "run")
    assert all(row["rollout_logprob_gap_mean"] < 1e-4 for row in metrics[1:])
    assert metrics[8]["staleness_max"] == 5
    assert abs(metrics[8]["staleness_kl"]) > 1e-3, "a gap over all tokens would be above the limit"
    for step in range(2):
        assert [of_step for at, of_step in probed if at == step] == [n for n in range(step, step + 6) for _ in range(2)]


@pytest.mark.parametrize(
    "change, names",
    [
        ("rollout.slices=7", ("rollout.slices = 7", "rollout.max_response_tokens = 6")),
        ("algo.rollout_correction.kind=none", ("algo.rollout_correction.kind = none", "rollout.slices = 3", "auto")),
        (
            "algo.dynamic_sampling.max_refills=1",
            ("max_refills = 1", "rollout.slices = 3", "algo.dynamic_sampling.surplus"),
        ),
        ("algo.dynamic_sampling.surplus=61", ("= 4 + 61", "65 different prompts", "has 64")),
        ("rollout.steps_ahead=2", ("rollout.steps_ahead", "0 or 1")),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_ranks_start(change, names, ranks, one_layer, data, tmp_path):
    cfg = tree(one_layer, data, engine="megatron", slices=3)
    status, said = ranks.run(1, "command_status", *killed(cfg, tmp_path / "run"), change)[0]
    assert (status, bool(lines_naming(said, *names))) == (2, True), said
    assert not (tmp_path / "run").exists()
