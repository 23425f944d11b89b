"""One rank of a measured job, rehearsed: `python -m tools.gpu_check.rehearse LAUNCH RANK KIND OUT`.

A process of its own: a rehearsal takes over process group and device. It sees no GPU, so that the layers are ours and
not TransformerEngine's, which cannot be made without one.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.gpu_check import memory
from tools.gpu_check.cases import Job, Launch

ROOT = Path(__file__).parents[2]


class Free:
    """Prices nothing: only memory is asked for. See `rehearsal.work.Price`."""

    def operation_seconds(
        self, work: str, flops: float, nbytes: int, dtype: str, shape: tuple[int, ...] | None = None
    ) -> float:
        return 0.0


def rehearse(job: Job, launch: Launch, rank: int, kind: str, ranks_per_node: int) -> list[memory.PhasePeak]:
    """Takes this process over."""
    from megarlhf.config import RLConfig, SFTConfig
    from megarlhf.rehearsal.lengths import Constant
    from megarlhf.rehearsal.program import Job as Rehearsed
    from megarlhf.rehearsal.program import Rank
    from megarlhf.rehearsal.stand_ins import stand_in

    kinds: dict[str, type[SFTConfig] | type[RLConfig]] = {"sft": SFTConfig, "rl": RLConfig}
    cfg = kinds[job.command].model_validate(job.config)
    lengths = Constant(max(job.constant, 1))
    steps = cfg.train.num_steps
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as directory:
        ready = stand_in(cfg, Path(directory), prompt_lengths=None, response_lengths=lengths, steps=steps)
        rehearsed = Rehearsed(
            command=job.command,
            cfg=ready.cfg,
            rank=rank,
            world_size=launch.ranks,
            ranks_per_node=ranks_per_node,
            kind="cpu" if kind == "cpu" else "gpu",
            num_steps=steps,
            response_lengths=lengths,
            bare_engine=True,
        )
        record = Rank(rehearsed, Free()).run()
    return [memory.PhasePeak(each.step, each.phase, each.peak) for each in record.memory]


def rehearsed_peaks(path: Path, launch: Launch, kind: str, seconds: float = 600.0) -> dict[int, list[memory.PhasePeak]]:
    """Of every rank of the launch, one process after the other. Raises: RuntimeError with what a process said."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    peaks = {}
    for rank in range(launch.ranks):
        out = path.parent / f"rehearsed.{rank}.json"
        command = [sys.executable, "-m", "tools.gpu_check.rehearse", str(path), str(rank), kind, str(out)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"the rehearsal of rank {rank} ended with exit status {done.returncode}: {last}")
        peaks[rank] = memory.load(out)
    return peaks


def main(argv: Sequence[str] | None = None) -> int:
    path, rank, kind, out = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level="ERROR")
    launch = Launch.load(Path(path))
    (job,) = launch.jobs
    memory.dump(Path(out), rehearse(job, launch, int(rank), kind, max(1, launch.ranks // launch.nodes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
