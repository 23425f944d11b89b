"""Rehearsed ranks say of memory and messages what real ones do: a spread of `benchmarks/rehearsal/truth.py`.

Not covered: the path of a GPU, whose kernels and process groups are not here; engines; families other than a Llama and
a mixture of experts.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks.rehearsal.cases import Case, job_of
from benchmarks.rehearsal.real_run import Place, Seen, real_rank
from benchmarks.rehearsal.rehearsed_run import rehearsed_rank
from benchmarks.rehearsal.truth import compare, outcome, summary
from megarlhf.parallel.mesh import forget_scratch_buffer
from megarlhf.rehearsal.job import Job
from megarlhf.runtime import Runtime

MOST = 0.02
"""Of the error of a phase's peak."""
TRAIN, PLANTED = (1, "train/actor"), 64 << 20
TRAINED = "optimizer/reward_model"

CASES = (
    Case(command="sft", parallel={"tp": 2}, world_size=2),
    Case(command="sft", world_size=2, dtype="bf16", model="balanced", skew=2.0, parallel={"ep": 2}),
    Case(command="rm", parallel={"pp": 2}, world_size=2, dtype="bf16", packed=True),
    Case(command="sft", parallel={"pp": 2, "vpp": 2}, world_size=2, dtype="bf16", packed=True),
    Case(command="rl", advantage="group_relative", world_size=2, engine_tp=2),
    Case(command="rl", parallel={"tp": 2}, world_size=2, packed=True, frozen={"ranks": [1, 2]}),
    Case(command="sft", parallel={"cp": 2}, world_size=2, packed=True),
    Case(command="rl", dtype="bf16", recompute="full", offload={"parameters": True, "optimizer": "stream"}),
    Case(command="rl", advantage="group_relative", parallel={"tp": 2}, world_size=2, engine_tp=2, dtype="bf16", lora=8),
    Case(
        command="rl", advantage="group_relative", parallel={"tp": 2}, world_size=2, engine_tp=1, packed=True, slices=3
    ),
)


RUN_ON = Case(command="sft", world_size=2, dtype="bf16", packed=True, gathers_run_on=True)


def rehearsed(runtime: Runtime, job: Job) -> Seen:
    """This rank, by itself, on a machine that has little memory left, of which nothing may depend."""
    dist.destroy_process_group()
    with patch("megarlhf.runtime.available_bytes", lambda: 1 << 20):
        told = rehearsed_rank(job, runtime.rank)
    forget_scratch_buffer()  # a real run of another test follows in this process
    return told


def small(case: Case) -> Case:
    """Two layers, or one for each virtual stage."""
    return replace(case, samples=4, layers=2 * case.parallel.get("vpp", 1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_peaks_and_messages_are_those_of_real_ranks(case, ranks, tmp_path) -> None:
    """Each phase of each step on each rank: the peak within 2%, every message with its bytes."""
    job = job_of(small(case), tmp_path)
    real, told = (ranks.run(case.world_size, each, job) for each in (real_rank, rehearsed))
    found = compare(case.name, real, told)
    assert found.mismatches == []
    assert [row for row in found.rows if row.error > MOST] == []
    assert {row.step for row in found.rows} == {*range(case.num_steps + 1)}


def test_gathers_that_run_on_into_the_next_phase(ranks, tmp_path) -> None:
    """Every message is there; memory of gloo's, which is given back sooner or later, is never more than rehearsed."""
    job = job_of(small(RUN_ON), tmp_path)
    real, told = (ranks.run(2, each, job) for each in (real_rank, rehearsed))
    found = compare(RUN_ON.name, real, told)
    assert found.mismatches == []
    assert [row for row in found.rows if row.real > (1 + MOST) * row.rehearsed] == []
    assert any(row.phase.startswith("train/") for row in found.rows)
    assert found.num_messages > 20
    # No release was missed, in the real run nor in the rehearsal: once the second step's forward has waited for the
    # gathers of the first update, what is there is alike. After an update gloo may or may not be done with them.
    for ran, heard in zip(real, told, strict=True):
        assert heard.ends[2, TRAIN[1]] == pytest.approx(ran.ends[2, TRAIN[1]], rel=MOST)
    # Not by constants: what the second step finds (Adam's state) is more than what the first one found.
    first, second = (max(row.real for row in found.rows if row.step == step) for step in (1, 2))
    assert second > first


KEPT: list[torch.Tensor] = []


def planted_tensor(place: Place) -> None:
    if place == TRAIN:
        KEPT.append(torch.empty(PLANTED, dtype=torch.uint8))


def planted_message(place: Place) -> None:
    if place == TRAIN:
        dist.all_reduce(torch.zeros(8))


def test_a_tensor_or_a_message_more_is_noticed(ranks, tmp_path) -> None:
    """Planted in the real run at the beginning of the first training phase."""
    job = job_of(small(Case(command="sft")), tmp_path)
    (told,) = ranks.run(1, rehearsed, job)
    plain, fatter, louder = (ranks.run(1, real_rank, job, plant) for plant in (None, planted_tensor, planted_message))
    assert summary(outcome([compare("plain", plain, [told])]))["memory_error_max"] <= MOST

    more = {(row.step, row.phase): row for row in compare("fatter", fatter, [told]).rows}
    assert more[TRAIN].real - more[TRAIN].rehearsed == pytest.approx(PLANTED, rel=0.01)
    assert more[TRAIN].error > MOST
    assert more[0, "build"].error <= MOST

    (mismatch,) = compare("louder", louder, [told]).mismatches
    assert (mismatch.message.step, mismatch.message.phase) == TRAIN
    assert mismatch.message.operation == "all_reduce"
    counts, nbytes = zip(mismatch.real, mismatch.rehearsed, strict=True)
    assert (counts[0] - counts[1], nbytes[0] - nbytes[1]) == (1, 32)


def test_a_phase_that_only_one_of_the_two_has_is_an_error_of_all() -> None:
    """By hand; otherwise a phase that is never rehearsed would go unnoticed."""
    real = Seen(0, {(1, "train/actor"): 100, (1, "eval"): 50}, {}, {})
    (train, missing) = reversed(compare("by hand", [real], [Seen(0, {(1, "train/actor"): 99}, {}, {})]).rows)
    assert (train.error, missing.error) == (pytest.approx(0.01), 1.0)
