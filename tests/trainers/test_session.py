"""Opening a run: rank 0 decides about the directory, and all ranks end alike. Not covered: NCCL."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megarlhf.config import SFTConfig
from megarlhf.observe.metrics import read_metrics
from megarlhf.runtime import Runtime
from megarlhf.trainers.session import open_session
from tests.ranks import RankPool


def _open_twice(runtime: Runtime, directory: str) -> tuple[str, int]:
    """What each rank is told of a second run in the directory of the first; and a sum that takes both ranks."""
    cfg = SFTConfig.model_validate(
        {
            "run": {"dir": Path(directory) / "run"},
            "actor": {"model": {"path": "model"}},
            "data": {"train": "train.jsonl"},
            "train": {"num_steps": 1, "mini_batch_samples": 1, "micro_batch_samples": 1},
        }
    )
    told = ""
    with open_session(cfg, cfg.run, cfg.checkpoint, runtime, "sft", 1) as session:
        session.log(1, {"loss": 0.5})
    try:
        with open_session(cfg, cfg.run, cfg.checkpoint, runtime, "sft", 1):
            told = "opened"
    except ValueError as error:
        told = str(error)
    total = torch.ones(())
    dist.all_reduce(total)
    return told, int(total)


def test_a_used_directory_is_refused_on_every_rank_alike(tmp_path: Path, ranks: RankPool) -> None:
    first, second = ranks.run(2, _open_twice, str(tmp_path))
    assert first == second
    assert first[0].startswith(f"run.dir = {tmp_path}/run holds an earlier run (config.yaml, metrics.jsonl, tensorboar")
    assert first[1] == 2
    assert read_metrics(tmp_path / "run") == [{"step": 1, "loss": 0.5}]
