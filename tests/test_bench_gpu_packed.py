"""The GPU benchmark of packed rows, rehearsed on a CPU: the result's form, the gate, the floor, the goal.

Not covered: CUDA events, the Triton kernels, varlen_attn, the peers, and what the figures are.
"""

import json

import pytest
import torch

from benchmarks import gpu_packed
from benchmarks.gpu_packed_work import Candidate, Rows, Work, gae_work, lengths_of
from benchmarks.gpu_timing import Ceilings, Clock, Deadline

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    out = tmp_path_factory.mktemp("rehearsal") / "result.json"
    gpu_packed.main(["--rehearse", "--longest", "40", "--out", str(out)])
    return json.loads(out.read_text())


def test_a_rehearsal_measures_everything_and_says_what_it_is(rehearsal):
    assert rehearsal["rehearsal"]
    assert rehearsal["finished"]
    assert rehearsal["goals"] == []
    assert {"commit", "torch", "device", "command"} <= rehearsal["machine"].keys()
    assert [work["kind"] for work in rehearsal["works"]] == [
        "GAE", "whitening", "GAE", "GAE", "whitening", "pack", "unpack", "attention, forward",
        "attention, forward+backward",
    ]  # fmt: skip
    for work in rehearsal["works"]:
        assert 0 < work["tokens"] <= work["padded_tokens"]
        assert len(work["rows"]) >= (1 if "attention" in work["kind"] else 2)
        for row in work["rows"].values():
            assert row["status"] == "timed", row
            assert len(row["rounds"]) == 2
            assert row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["max"]
            if work["floor_ms"]:
                assert row["over_floor"] == pytest.approx(row["ms"]["median"] / work["floor_ms"])


def test_the_floor_and_the_goal_by_hand():
    """1000 bytes at 1 MB/s are 1 ms; 1.9 ms meet a goal of 2, 2.1 do not."""
    works = []
    for ms in (1.9, 2.1):
        candidate = Candidate(name="megarlhf", call=lambda: None, wrong=lambda output: None)
        work = Work(kind="GAE", name="1 x 1", num_bytes=1000, candidates=[candidate])
        works.append(gpu_packed.timed(work, lambda call, ms=ms: ms, Ceilings(1e6, 1.0), 3, Deadline(60.0)))
        assert works[-1]["floor_ms"] == pytest.approx(1.0)
    assert [gpu_packed.goals([work])[0]["met"] for work in works] == [True, False]
    assert gpu_packed.goals([works[1]])[0] == {
        "goal": "GAE 1 x 1 over its floor", "wanted": 2.0, "got": pytest.approx(2.1), "met": False,
    }  # fmt: skip
    assert gpu_packed.goals([]) == []


def test_bytes_of_gae():
    """Five arrays of 4-byte numbers, and a score a sequence."""
    assert gae_work("", Rows(torch.tensor([3, 1, 2]), CPU)).num_bytes == 4 * (5 * 6 + 3)


def test_wrong_and_failing_candidates_are_not_timed():
    def fails():
        raise RuntimeError("no such kernel")

    right = gae_work("", Rows(torch.tensor([30, 2]), CPU)).candidates[0]
    slipped = Candidate(name="slip", call=lambda: [1.0001 * output for output in right.call()], wrong=right.wrong)
    failing = Candidate(name="fails", call=fails, wrong=right.wrong)
    work = Work(kind="GAE", name="", num_bytes=1, candidates=[right, slipped, failing])
    rows = gpu_packed.timed(work, Clock(CPU), Ceilings(1.0, 1.0), 1, Deadline(60.0))["rows"]
    assert [row["status"] for row in rows.values()] == ["timed", "refused", "failed"]
    assert "off by" in rows["slip"]["reason"]
    assert rows["fails"]["reason"] == "RuntimeError: no such kernel"
    assert "ms" not in rows["slip"].keys() | rows["fails"].keys()
    late = gpu_packed.timed(work, Clock(CPU), Ceilings(1.0, 1.0), 1, Deadline(1.0))["rows"]
    assert {row["status"] for row in late.values()} == {"no time left"}


def test_lengths():
    assert lengths_of("equal", 3, 7).tolist() == [7, 7, 7]
    ragged_N = lengths_of("ragged", 1000, 8192)
    assert torch.equal(ragged_N, lengths_of("ragged", 1000, 8192))
    assert 1 <= ragged_N.min() < ragged_N.median() < ragged_N.double().mean() < ragged_N.max() <= 8192
    assert 0.1 < float(ragged_N.double().mean()) / 8192 < 0.2
