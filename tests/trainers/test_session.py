"""Opening a run: rank 0 decides about the directory, and all ranks end alike. Not covered: NCCL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.config import SFTConfig
from megarlhf.observe.records.cost_metrics import reproducible
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.runtime import Runtime
from megarlhf.trainers.run.exports import save_roles, set_exports_aside
from megarlhf.trainers.run.open_session import open_session
from megarlhf.trainers.supervised.loop import rescale
from tests.ranks import RankPool
from tests.refuses import missing_names


def _open_twice(runtime: Runtime, directory: str) -> tuple[str, int]:
    """What each rank is told of a second run in the directory of the first; and a sum that takes both ranks."""
    cfg = SFTConfig.model_validate(
        {
            "run": {"dir": Path(directory) / "run", "on_existing": "refuse"},
            "actor": {"model": {"path": "model"}},
            "data": {"train": "train.jsonl"},
            "train": {"num_steps": 1, "mini_batch_samples": 1, "micro_batch_samples": 1},
        }
    )
    outcome = ""
    with open_session(cfg, cfg.run, runtime, "sft", 1) as session:
        session.log(1, {"loss": 0.5})
    try:
        with open_session(cfg, cfg.run, runtime, "sft", 1):
            outcome = "opened"
    except ValueError as error:
        outcome = str(error)
    total = torch.ones(())
    dist.all_reduce(total)
    return outcome, int(total)


def test_a_used_directory_is_refused_on_every_rank_alike(tmp_path: Path, ranks: RankPool) -> None:
    first, second = ranks.run(2, _open_twice, str(tmp_path))
    assert first == second
    assert first[0].startswith(f"run.dir = {tmp_path}/run holds an earlier run (config.yaml, metrics.jsonl, tensorboar")
    assert first[1] == 2
    assert [reproducible(row) for row in read_metrics(tmp_path / "run")] == [{"step": 1, "loss": 0.5}]


def _save_where_something_is(runtime: Runtime, root: str) -> tuple[str, int]:
    """What each rank is told; and a sum that takes both ranks."""
    try:
        save_roles(Path(root), 2, [])
        outcome = "saved"
    except ValueError as error:
        outcome = str(error)
    total = torch.ones(())
    dist.all_reduce(total)
    return outcome, int(total)


def test_a_checkpoint_replaces_nothing_and_every_rank_says_so(tmp_path: Path, ranks: RankPool) -> None:
    """What came after the start; an empty folder is no loss. Not covered: what appears during the export."""
    mine = tmp_path / "step_000002/model.safetensors"
    mine.parent.mkdir()
    assert ranks.run(2, _save_where_something_is, str(tmp_path)) == [("saved", 2)] * 2
    mine.write_text("mine")
    first, second = ranks.run(2, _save_where_something_is, str(tmp_path))
    assert first == second
    assert missing_names(first[0], str(mine.parent), "run.dir") == []
    assert first[1] == 2
    assert mine.read_text() == "mine"
    assert (tmp_path / "latest").readlink() == Path("step_000002")


def test_no_point_of_scaled_weights_is_asked_for() -> None:
    """A stop that is asked for before the weights change saves the last boundary; afterwards none is possible."""
    events: list[str] = []

    class Recorder:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments: events.append(name)

        @contextlib.contextmanager
        def stoppable(self, name: str) -> Iterator[None]:
            yield
            events.append("stop_if_asked")

    session: Any = Recorder()
    rescale(session, session, [], session)
    assert events == ["save_boundary", "measure_scale", "stop_if_asked", "discard_boundary", "rescale", "note"]


def test_exports_after_the_step_that_a_run_goes_on_from_are_set_aside(tmp_path):
    """They may be of another configuration, and `latest` is of the run as it goes on."""
    root = tmp_path / "checkpoints"
    for step in (2, 4, 6):
        (root / f"step_{step:06d}/actor").mkdir(parents=True)
    (root / "latest").symlink_to("step_000006")
    set_exports_aside(tmp_path, 6)
    assert (root / "latest").resolve().name == "step_000006"
    set_exports_aside(tmp_path, 5)
    assert (root / "latest").resolve().name == "step_000004"
    names = {path.name for path in root.iterdir()}
    assert names == {"latest", "step_000002", "step_000004", "step_000006.passed_over"}
    set_exports_aside(tmp_path, -1)
    assert not (root / "latest").is_symlink()
    assert len(list(root.glob("step_??????"))) == 0
