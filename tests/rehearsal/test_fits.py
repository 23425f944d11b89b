"""A configuration for real GPUs is rehearsed, and the figures of `make bench-fits` are taken from it.

Not covered: the large ones, which take minutes each.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.rehearsal import fits
from benchmarks.rehearsal.scale import GIB, longest_sequence
from tests.rehearsal.jobs import run_command

CONFIG = "configs/llama-3-8b/ppo-8.yaml"
FEW = ("train.prompts_per_step=2", "train.mini_batch_samples=8", "rollout.num_samples_per_prompt=4")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """Of the one stage of an 8B model, with few samples."""
    lengths = ("--response-lengths", "lognormal:mean=4000,sigma=0.8")
    options = (*lengths, "--steps", "1", "--ranks", "0", *FEW)
    return run_command("rl", Path(CONFIG), tmp_path_factory.mktemp("fits") / "out", *options).json()


def test_the_8b_job_fits(found) -> None:
    assert found["fits"]
    (rank,) = found["ranks"]
    assert rank["need"] <= fits.MOST_GIB * GIB
    assert found["host_per_node"] <= fits.HOST_MOST_GIB * GIB
    assert longest_sequence(found, fits.MOST_GIB * GIB) >= 16384


def test_peaks_follow_the_phase(found) -> None:
    """Weights of 8.03e9 parameters on 2 ranks and their gradients in fp32 are there in training, the engine is not."""
    (rank,) = found["ranks"]
    peaks = fits.peaks(rank)
    weights = 8.03e9 / 2 * 2 / GIB
    training = next(row for row in rank["memory"] if row["phase"] == "train/actor")
    assert training["by_kind"]["gradients"] / GIB == pytest.approx(2 * weights, rel=0.05)
    assert not any(kind.startswith("engine") for kind in training["by_kind"])
    assert peaks["rollout"] > 0.7 * 79 > peaks["reward"] > 0.9 * weights  # which has no vocabulary at its end


def test_prices_are_those_of_the_phases() -> None:
    def phase(name: str, again: float = 0.0, offload: float = 0.0) -> dict[str, Any]:
        return {"phase": name, "again": again, "offload": offload}

    phases = [phase("train/actor", again=3.0), phase("offload", offload=2.0), phase("optimizer/actor", offload=1.5)]
    assert fits.prices({"phases": phases}) == {
        "recomputation": 3.0, "roles and engine come and go": 2.0, "optimizer state is streamed": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize("case", fits.CASES.values(), ids=fits.CASES)
def test_slices_shorten_every_rollout(case) -> None:
    """Whole responses take longer, on this engine and on the one that the file had before slices."""
    assert 1.5 * fits.seconds_of_rollout(case) < fits.seconds_of_whole(case)
