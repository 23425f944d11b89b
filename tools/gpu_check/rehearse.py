"""One rank of a measured job, rehearsed: `python -m tools.gpu_check.rehearse LAUNCH RANK KIND LAYERS OUT`.

A process of its own: a rehearsal takes over process group and device. It sees no GPU.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megarlhf.config import RLConfig, SFTConfig
from megarlhf.rehearsal.cost_model.decoding import RolloutTime
from megarlhf.rehearsal.fake_device.torch_patches import Kind
from megarlhf.rehearsal.fakes.inputs import stand_in
from megarlhf.rehearsal.fakes.lengths import Constant
from megarlhf.rehearsal.job import Job as Rehearsed
from megarlhf.rehearsal.program import Rank
from tools.gpu_check import memory
from tools.gpu_check.cases import Job, Launch

ROOT = Path(__file__).parents[2]


Layers = Literal["te", "local"]


class Free:
    """Prices nothing: only memory is asked for. See `rehearsal.program.RankPrice`."""

    def operation_seconds(self, *asked: Any, **options: Any) -> float:
        return 0.0

    def offload_seconds(self, nbytes: int) -> float:
        return 0.0

    def decode_seconds(self, *asked: Any, **options: Any) -> tuple[list[RolloutTime], list[int]]:
        raise AssertionError("the responses of a measured job are given")


def config_of(job: Job) -> SFTConfig | RLConfig:
    """Of the job's command."""
    kinds: Mapping[str, type[SFTConfig] | type[RLConfig]] = {"sft": SFTConfig, "rl": RLConfig}
    return kinds[job.command].model_validate(job.config)


def rehearse(launch: Launch, rank: int, kind: Kind, layers: Layers) -> list[memory.PhasePeak]:
    """Takes this process over."""
    (job,) = launch.jobs
    cfg, lengths = config_of(job), Constant(max(job.constant, 1))
    # The responses of other commands are data, which is there.
    given = lengths if isinstance(cfg, RLConfig) else None
    steps = cfg.train.num_steps
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as directory:
        ready = stand_in(cfg, Path(directory), prompt_lengths=None, response_lengths=given, steps=steps)
        rehearsed = Rehearsed(
            command=job.command,
            cfg=ready.cfg,
            rank=rank,
            world_size=launch.ranks,
            ranks_per_node=launch.ranks // launch.nodes,
            kind=kind,
            layers=layers,
            num_steps=steps,
            response_lengths=lengths,
            bare_engine=True,
        )
        record = Rank(rehearsed, Free()).run()
    return [memory.PhasePeak(each.step, each.phase, each.peak) for each in record.memory]


def rehearsed_peaks(
    path: Path, launch: Launch, kind: Kind, layers: Layers, seconds: float = 600.0
) -> dict[int, list[memory.PhasePeak]]:
    """Of every rank: one of each pipeline stage is rehearsed, in a process of its own, and stands for its
    tensor-parallel neighbours. Raises: RuntimeError with what a process said."""
    mesh = config_of(launch.jobs[0]).actor.parallel.layout(launch.ranks)
    assert mesh.dp == 1, "data-parallel ranks have other micro-batches, and are no neighbours"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    peaks: dict[int, list[memory.PhasePeak]] = {}
    for rank in range(launch.ranks):
        first = mesh.rank_at(pp=mesh.coordinates(rank).pp)
        if first in peaks:
            peaks[rank] = peaks[first]
            continue
        out = path.parent / f"rehearsed.{rank}.json"
        command = [sys.executable, "-m", "tools.gpu_check.rehearse", str(path), str(rank), kind, layers, str(out)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"the rehearsal of rank {rank} ended with exit status {done.returncode}: {last}")
        peaks[rank] = memory.load(out)
    return peaks


def main(argv: Sequence[str] | None = None) -> int:
    path, rank, kind, layers, out = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level="ERROR")
    peaks = rehearse(
        Launch.load(Path(path)), int(rank), "cpu" if kind == "cpu" else "gpu", "te" if layers == "te" else "local"
    )
    memory.dump(Path(out), peaks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
