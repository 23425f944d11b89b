"""`make test-gpu` on a CPU: its checks over gloo, and that each finds what is planted.

Not covered: GPUs, NCCL, Triton's kernels outside its interpreter, srun. The check with vLLM: test_gpu_check_engine.py.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarlhf.config import SFTConfig, describe_sources
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.runtime import capabilities
from tests.data.in_memory import build_prompts, build_sft
from tests.distributed.gpu_check_jobs import PoolStart
from tests.distributed.samples import records_of
from tests.refuses import lines_naming, missing_names
from tools.gpu_check import __main__ as command
from tools.gpu_check import checks, start
from tools.gpu_check.cases import (
    DTYPES,
    LAYOUTS,
    PACKED,
    RESUME_LAYOUTS,
    Job,
    Launch,
    MemorySize,
    memory_jobs,
    ppo_job,
    resume_jobs,
    sft_job,
    write_inputs,
)
from tools.gpu_check.memory import PhasePeak, compare
from tools.gpu_check.plan import CHECKS, Machine, launches
from tools.gpu_check.rank import CONFIGS
from tools.gpu_check.rows import Row, exit_status, judged, show

ON_A_CPU = Machine(gpus_per_node=4, on_gpus=False)
CERTIFIED = [{"version": 0, "digest": "a"}, {"version": 1, "digest": "b"}]
WITHIN = {"rollout_logprob_gap_mean": 0.001, "rollout_logprob_gap_p999": 0.01}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return checks.load_expected()


@pytest.fixture(scope="module")
def single(ranks, inputs, tmp_path_factory) -> tuple[Launch, list[dict[str, Any]]]:
    """One job of each check on one rank: the launch and its results."""
    out = tmp_path_factory.mktemp("single")
    jobs = [sft_job(inputs, out, "experts", "fp32", {}), ppo_job(inputs, out, "dense", "fp32", {})]
    launch = Launch(check="sft", case="tp1", ranks=1, jobs=jobs)
    path = launch.dump(out)
    assert PoolStart(ranks)(launch, path) == ""
    return launch, start.results_of(path)


# --- parity ---------------------------------------------------------------------------------------


def test_what_is_stored_is_what_this_version_computes(single, expected) -> None:
    """Two of the twelve jobs anew, within 1e-5: whoever changes what is computed has to make the file anew. Not
    covered: the jobs in bf16, whose rounding depends on the CPU."""
    _, results = single
    assert [result["job"] for result in results] == ["sft experts fp32", "ppo dense fp32"]
    for result in results:
        figures = checks.figures_of(result)
        assert figures.keys() == expected["figures"][result["job"]].keys()
        for name, values in figures.items():
            figure = checks.Figure(result["job"], "auto", name, values, expected["figures"][result["job"]][name])
            assert figure.error < 1e-5, f"{figure}: python -m tools.gpu_check --make-expected"
    assert {f"{kind} {model} {dtype}" for kind in ("sft", "ppo") for model in PACKED for dtype in DTYPES} == set(
        expected["figures"]
    )
    assert len(figures["advantages"]) == 24
    assert min(map(abs, (*figures["kl"], *figures["policy_loss"], *figures["value_loss"]))) > 1e-2


def test_two_ranks_pass_and_a_changed_number_does_not(ranks, inputs, tmp_path, expected) -> None:
    """Through the command's own functions, at TP2 for fine-tuning and PP2 for PPO; then with one stored number that is
    off by a thousandth: that figure alone is named."""
    for check, make, layout in (("sft", sft_job, "tp2"), ("ppo", ppo_job, "pp2")):
        num_ranks, parallel = LAYOUTS[layout]
        job = make(inputs, tmp_path / check, "grouped", "fp32", parallel)
        launch = Launch(check=check, case=layout, ranks=num_ranks, jobs=[job])
        rows = command.run_launch(launch, tmp_path, PoolStart(ranks), expected, ON_A_CPU)
        (row,) = rows
        assert row.status == "passed", row
        assert row.measured is not None
        assert row.limit == checks.LIMITS["fp32"]
        results = start.results_of(tmp_path / launch.name / "launch.json")
        name = "grad_norm" if check == "sft" else "critic_grad_norm"
        changed = {name: [value * 1.001 for value in expected["figures"][job.name][name]]}
        other = {job.name: expected["figures"][job.name] | changed}
        (row,) = checks.parity(launch, results, other)
        assert (row.status, row.figure) == ("FAILED", name)
        assert exit_status(rows) == 0
        assert exit_status([*rows, row]) == 1


@pytest.mark.parametrize("planted", ["missing", "nan", "shorter"])
def test_a_number_that_is_not_there_fails(planted, single, expected) -> None:
    launch, results = single
    broken = json.loads(json.dumps(results))
    for row in broken[0]["metrics"]:
        if planted == "nan":
            row["loss"] = None
        elif planted == "missing":
            row.pop("loss", None)
    if planted == "shorter":
        broken[0]["metrics"].pop()
    rows = checks.parity(launch, broken, expected["figures"])
    named = {row.figure for row in rows if row.status == "FAILED"}
    assert named == ({"loss", "grad_norm"} if planted == "shorter" else {"loss"})


def test_a_job_that_fails_is_told_with_its_error_and_the_next_is_not_begun(ranks, inputs, tmp_path, expected) -> None:
    """The second of three: TP2 on one rank."""
    jobs = [sft_job(inputs, tmp_path, "grouped", "fp32", parallel) for parallel in ({}, {"tp": 2}, {})]
    jobs[1] = replace(jobs[1], name="sft grouped too wide fp32")
    launch = Launch(check="sft", case="tp1", ranks=1, jobs=jobs)
    good, bad, after = command.run_launch(launch, tmp_path, PoolStart(ranks), expected, ON_A_CPU)
    assert good.status == "passed"
    assert (bad.status, bad.case) == ("FAILED", "tp1: sft grouped too wide fp32")
    log = str(tmp_path / launch.name / "output.log")
    assert not missing_names(bad.note, "ValueError", "actor.parallel", "world size 1", "2 x 1 x 1", log)
    assert (after.status, "not begun" in after.note) == ("FAILED", True)


def test_a_run_that_goes_on_passes_and_one_without_its_resume_point_does_not(ranks, inputs, tmp_path) -> None:
    """On one rank, to the bit. Then without a resume point, as runs on a GPU once were: the start that is to go on from
    it is refused."""
    launch = Launch(check="resume", case="tp1", ranks=1, jobs=resume_jobs(inputs, tmp_path / "runs", {}))
    rows = command.run_launch(launch, tmp_path, PoolStart(ranks), {}, ON_A_CPU)
    assert [(row.status, row.measured) for row in rows] == [("passed", 0.0)] * 2, rows
    (whole, _, rest, _) = start.results_of(tmp_path / launch.name / "launch.json")
    assert [step["step"] for step in rest["metrics"]] == [step["step"] for step in whole["metrics"]]
    rest["metrics"][-1]["loss"] *= 1.001
    assert [row.status for row in checks.resume(launch, [whole, rest])] == ["FAILED"]
    shutil.rmtree(tmp_path / "runs" / "parts" / "resume")
    grown = {"train": {**launch.jobs[2].config["train"], "num_steps": 8}}
    again = replace(launch, case="lost", jobs=[replace(launch.jobs[2], config={**launch.jobs[2].config, **grown})])
    (row,) = command.run_launch(again, tmp_path, PoolStart(ranks), {}, ON_A_CPU)
    assert (row.status, "resume" in row.note) == ("FAILED", True), row


# --- memory ---------------------------------------------------------------------------------------


SEEN = {
    "ppo": {(2, "train/critic"), (1, "optimizer/actor"), (2, "score/reference"), (1, "rollout")},
    "sft": {(2, "train/actor"), (1, "optimizer/actor")},
}


@pytest.mark.parametrize("name", SEEN)
def test_the_rehearsal_of_a_measured_run(name, ranks, inputs, tmp_path) -> None:
    """Two steps on one rank, with tensors counted as an allocator would; the rehearsal in its own process says the same
    within a thousandth, of fine-tuning by the lengths of its data. Not covered: more ranks (benchmarks of rehearsals),
    a GPU's allocator (benchmarks/results/gpu_memory.json)."""
    size = MemorySize(model="grouped", data="sums", prompt=32, response=24, micro_batch=256)
    (job,) = [job for job in memory_jobs(inputs, tmp_path / "runs", {}, size) if job.name == name]
    launch = Launch(check="memory", case=job.name, ranks=1, jobs=[job])
    (row,) = command.run_launch(launch, tmp_path, PoolStart(ranks, counted=True), {}, ON_A_CPU)
    assert row.status == "passed", row
    assert row.measured is not None
    assert row.measured < 1e-3
    (result,) = start.results_of(tmp_path / launch.name / "launch.json")
    measured = {0: [PhasePeak(*peak) for peak in result["peaks"]["0"]]}
    assert {(peak.step, peak.phase) for peak in measured[0]} >= SEEN[name]
    smaller = {0: [replace(peak, nbytes=peak.nbytes - 4 * peak.nbytes // 50) for peak in measured[0]]}
    assert {row.status for row in checks.memory(launch, result, smaller)} == {"FAILED"}
    (unmeasured,) = checks.memory(launch, {**result, "peaks": None}, {})
    assert (unmeasured.status, "CPU" in unmeasured.note) == ("skipped", True)


def test_phases_are_compared_by_their_largest_stay_and_worst_rank() -> None:
    """By hand: train/actor was entered twice, rank 1 is off by 25 of 100, and two phases and a rank have no other."""
    measured = {
        0: [PhasePeak(1, "train/actor", 60), PhasePeak(1, "train/actor", 100), PhasePeak(0, "build", 7)],
        1: [PhasePeak(1, "train/actor", 100), PhasePeak(1, "between phases", 9), PhasePeak(1, "eval", 3)],
        2: [],
    }
    rehearsed = {
        0: [PhasePeak(1, "train/actor", 90), PhasePeak(1, "train/actor", 20)],
        1: [PhasePeak(1, "train/actor", 125), PhasePeak(1, "reshard", 4)],
    }
    (only,), missing = compare(measured, rehearsed)
    assert (only.rank, only.measured, only.rehearsed, only.error) == (1, 100, 125, 0.25)
    assert missing == [
        "eval of step 1 was measured only", "rank 2 was not rehearsed", "reshard of step 1 was rehearsed only"
    ]  # fmt: skip


# --- engine and kernels ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("certificates", "step", "says"),
    [
        (CERTIFIED, WITHIN, {}),
        (CERTIFIED, {**WITHIN, "rollout_logprob_gap_mean": 0.5}, {"rollout_logprob_gap_mean": ["nats"]}),
        (CERTIFIED, {**WITHIN, "rollout_logprob_gap_p999": None}, {"rollout_logprob_gap_p999": ["nats"]}),
        (CERTIFIED[:1], WITHIN, {"": ["1 certificates", "expected 2"]}),
        ([CERTIFIED[1], CERTIFIED[0]], WITHIN, {"": ["first weights: b", "CPU a"]}),
        ([CERTIFIED[0], CERTIFIED[0]], WITHIN, {"": ["after the step", "before it: a"]}),
    ],
)
def test_rows_of_an_engine(certificates, step, says) -> None:
    launch = Launch(check="engine", case="tp2pp2_to_tp2", ranks=4)
    result = {"job": "engine bf16", "metrics": [{"step": 1, **step}], "certificates": certificates}
    rows = checks.engine(launch, [result], {"engine bf16": "a"})
    failed = {row.figure: row.note for row in rows if row.status != "passed"}
    assert failed.keys() == says.keys()
    assert all(not missing_names(failed[figure], *names) for figure, names in says.items())
    assert len(rows) == 3


def test_rows_of_kernels() -> None:
    found = [
        {"check": "a", "passed": True, "reason": None},
        {"check": "b", "passed": None, "reason": "skipped: needs 50 GiB"},
        {"check": "c", "passed": False, "reason": "logprob is off by 3"},
    ]
    rows = checks.kernels("log-probs", found)
    assert [(row.status, row.case) for row in rows] == [
        ("passed", "log-probs"), ("skipped", "log-probs: b"), ("FAILED", "log-probs: c")
    ]  # fmt: skip
    assert [row.status for row in checks.kernels("log-probs", [])] == ["FAILED"]


# --- what a machine allows ------------------------------------------------------------------------


def test_a_machine_that_is_too_small_says_so_case_by_case(inputs, tmp_path) -> None:
    """One GPU: whatever needs more is a row with its reason. Eight: nothing is skipped. Two nodes: every even number of
    ranks up to a node's also over both. TransformerEngine: each job with our layers too."""
    one, skipped = launches(Machine(gpus_per_node=1), CHECKS, inputs, tmp_path)
    assert [(launch.check, launch.case) for launch in one] == [
        ("sft", "tp1"), ("ppo", "tp1"), ("prompts", "tp1"), ("resume", "tp1"), ("engine", "tp1_to_tp1"),
        ("memory", "sft tp1"), ("memory", "sft_streamed tp1"), ("memory", "sft_recomputed tp1"),
        ("memory", "sft_core_attention tp1"), ("memory", "sft_experts tp1"), ("memory", "ppo tp1"),
    ]  # fmt: skip
    assert {row.note for row in skipped} == {f"needs {n} GPUs, there is 1" for n in (2, 4, 8)}
    assert {row.status for row in skipped} == {"skipped"}
    eight, none = launches(Machine(gpus_per_node=8), CHECKS, inputs, tmp_path)
    assert (len(eight), none) == (len(one) + len(skipped), [])
    assert {launch.check for launch in eight} | {"kernels"} == set(CHECKS)
    over, _ = launches(Machine(gpus_per_node=8, nodes=2), ["sft"], inputs, tmp_path)
    assert [launch.case for launch in over if launch.nodes == 2] == [
        f"{layout} over 2 nodes" for layout, (num_ranks, _) in LAYOUTS.items() if num_ranks > 1
    ]
    odd, skipped = launches(Machine(gpus_per_node=3, nodes=3), ["sft"], inputs, tmp_path)
    assert (odd[-1].ranks, odd[-1].nodes) == (4, 2)
    assert [missing_names(row.note, "8 ranks", "3 nodes", "3 GPUs") for row in skipped] == [[]]
    (of_a_cpu,) = {row.note for row in launches(Machine(gpus_per_node=8, on_gpus=False), CHECKS, inputs, tmp_path)[1]}
    assert "CPU's allocator" in of_a_cpu
    small, _ = launches(Machine(gpus_per_node=4, nodes=2), ["ppo"], inputs, tmp_path)
    assert [(launch.ranks, launch.nodes) for launch in small][-3:] == [(4, 1), (4, 2), (8, 2)]
    both, _ = launches(Machine(gpus_per_node=1, transformer_engine=True), ["sft"], inputs, tmp_path)
    assert [job.layers for job in both[0].jobs] == ["auto", "local"] * 6
    (path,) = [launch.dump(tmp_path) for launch in both]
    assert Launch.load(path) == both[0]


def test_without_a_gpu_the_command_says_so_and_writes_nothing(tmp_path, capsys) -> None:
    if capabilities().device_count:
        pytest.skip("this machine has a GPU")
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert lines_naming(message, "make test-gpu", "torch sees no GPU") == message.splitlines()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit, match="2"):
        command.main(["--only", "kernel"])


def test_a_folder_of_the_user_is_not_emptied(tmp_path, capsys) -> None:
    """One of an earlier check is."""
    (tmp_path / "mine").write_text("mine")
    assert command.main(["--cpu", "1", "--only", "kernels", "--out", str(tmp_path)]) == 2
    assert not missing_names(capsys.readouterr().err, str(tmp_path), "no folder of an earlier check")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    command.empty(tmp_path / "out")
    (tmp_path / "out" / "left").touch()
    command.empty(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [command.MARK]


def test_the_table_and_the_exit_status(capsys) -> None:
    """Nothing but skipped rows is no success: nothing was shown."""
    passed, failed = judged("sft", "tp1", "loss", 1e-6, 1e-4), judged("sft", "tp2", "loss", float("nan"), 1e-4)
    skipped = Row(check="sft", case="tp2", status="skipped", note="needs 2 GPUs, there is 1")
    assert [exit_status(rows) for rows in ([passed], [passed, skipped], [skipped], [passed, failed], [])] == [
        0, 0, 1, 1, 1
    ]  # fmt: skip
    show([passed, failed, skipped])
    printed = capsys.readouterr().out
    assert "1 passed, 1 FAILED, 1 skipped" in printed
    assert "needs 2 GPUs, there is 1" in printed


# --- the jobs -------------------------------------------------------------------------------------


def test_no_record_is_too_long_and_no_batch_larger_than_the_data(inputs, tmp_path) -> None:
    """Of every job of a machine with eight GPUs."""
    planned, _ = launches(Machine(gpus_per_node=8), CHECKS, inputs, tmp_path)
    seen = set()
    for job in (job for launch in planned for job in launch.jobs):
        cfg = CONFIGS[job.command].model_validate(job.config)
        directory, data = cfg.actor.model.hf_directory(), cfg.data
        key = (describe_sources(data.train), data.max_prompt_tokens, getattr(data, "max_response_tokens", 0))
        if key in seen:
            continue
        seen.add(key)
        records, tokenizer = records_of(data.train, "prompt", "response"), load_tokenizer(directory)
        limits, build = {"max_prompt_tokens": data.max_prompt_tokens}, build_prompts
        if isinstance(cfg, SFTConfig):
            limits["max_response_tokens"], build = cfg.data.max_response_tokens, build_sft
        built, skipped = build(records, tokenizer, **limits)
        assert not skipped.reasons, (job.name, skipped)
        assert len(built) == (16 if "long" in describe_sources(data.train) else 64)
    assert len(seen) == 5


def test_every_job_has_a_run_directory_of_its_own(inputs, tmp_path) -> None:
    """Of one kind of layers: the second kind overwrites the first, whose metrics have been read."""
    planned, _ = launches(Machine(gpus_per_node=8), CHECKS, inputs, tmp_path)
    jobs: list[Job] = [job for launch in planned for job in launch.jobs]
    alone = [job for job in jobs if job.name != "resume rest"]  # which goes on in the directory of the one before it
    assert len({job.config["run"]["dir"] for job in alone}) == len(alone) == len(jobs) - len(RESUME_LAYOUTS)
