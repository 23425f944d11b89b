"""`megarlhf calibrate -o FILE`: measure the machine at hand and write a hardware file for `megarlhf rehearse`.

A plain start measures with ranks of this machine: one for each GPU, or two on a CPU. Under srun or torchrun it uses
the launcher's ranks, and measures between nodes too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarlhf.runtime import RankInfo  # it imports torch


def calibrate(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises: ValueError for a file that cannot be written."""
    from megarlhf.commands import launch

    launch.silence_libraries()
    from megarlhf.planning.machine.nodes import require_gpus
    from megarlhf.rehearsal.calibrate.run import require_writable
    from megarlhf.runtime import RankInfo, capabilities, detect_rank

    out = Path(arguments.out)
    info = detect_rank(os.environ)
    if info is None or info.rank == 0:
        require_writable(out)
    if info is None:
        nproc = arguments.nproc or capabilities().device_count or 2
        if nproc > 1:
            return launch.local_ranks(nproc, argv)
        info = RankInfo()
    elif arguments.nproc is not None and launch.MARK not in os.environ:
        raise ValueError(
            f"--nproc {arguments.nproc} under a launcher that has started {info.world_size} rank(s): they are "
            "measured; leave --nproc out"
        )
    require_gpus(info.rank)
    _as_rank(info, out, quick=arguments.quick)
    return 0


def _as_rank(info: RankInfo, out: Path, *, quick: bool) -> None:
    from megarlhf import runtime
    from megarlhf.collective_errors import on_first_rank
    from megarlhf.rehearsal.calibrate.run import calibrate as measure
    from megarlhf.rehearsal.calibrate.run import write_hardware

    joined = runtime.initialize(info, seed=0)
    hardware = measure(joined, quick=quick)

    def write() -> None:
        assert hardware is not None
        write_hardware(hardware, out)
        print(f"wrote {out}")

    on_first_rank(write)
    runtime.shutdown()
