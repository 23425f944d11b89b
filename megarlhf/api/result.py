"""Results of a run, read from its directory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megarlhf.observe.records.metrics import METRICS_FILE, read_metrics
from megarlhf.observe.records.run_directory import CONFIG_FILE, written_by
from megarlhf.resume.claim.on_existing import finished
from megarlhf.resume.points.point import find_points

_FILES = ("responses.jsonl", "responses_of_against.jsonl", "eval.json", "calibration.json")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Metrics, checkpoints and files of a run.

    result = megarlhf.RunResult.of("runs/sft")
    result.column("step"), result.column("loss")  # to plot
    result.exports["actor"]                       # a Hugging Face directory
    """

    command: str
    run_dir: Path
    metrics: list[dict[str, Any]] = field(repr=False)
    """A row for each line of metrics.jsonl, with `step` and the metrics by name. Step 0 is before training."""
    steps: int
    """Steps that are done."""
    exports: dict[str, Path]
    """Hugging Face directory of each trained role, of the newest export."""
    best: dict[str, Path]
    """The same of the best step, where the configuration chooses one (`checkpoint.best`)."""
    files: dict[str, Path]
    """Files of results by name: responses.jsonl of `generate`, eval.json of `eval`."""
    finished: bool
    """Whether the run has done all that it was to do."""
    stop_reason: str | None
    """Rule that has ended a finished run early; None without one."""
    can_resume: bool
    """Whether the same call goes on with it: it has not finished, and it has a resume point."""

    @staticmethod
    def of(run_dir: str | Path) -> RunResult:
        """Read the directory of a run that has finished, has stopped, or is still running.

        Raises: ValueError for a directory without a run.
        """
        run_dir = Path(run_dir)
        command = written_by(run_dir / CONFIG_FILE)
        if command is None:
            raise ValueError(
                f"{run_dir} holds no run: there is no {CONFIG_FILE} of megarlhf; give the run.dir of a run"
            )
        rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
        end, points = finished(run_dir), find_points(run_dir)
        done = [end.step] if end is not None else [row["step"] for row in rows[-1:]]
        return RunResult(
            command=command,
            run_dir=run_dir,
            metrics=rows,
            steps=max(done, default=0),
            exports=_roles_in(run_dir / "checkpoints" / "latest"),
            best=_roles_in(run_dir / "checkpoints" / "best"),
            files=_files(run_dir),
            finished=end is not None,
            stop_reason=None if end is None or end.reason == "num_steps" else end.reason,
            can_resume=end is None and bool(points),
        )

    def column(self, name: str) -> list[Any]:
        """A metric's value in each row; None in rows that have none. `step` gives the steps.

        Raises: ValueError for an unknown name, listing the known ones.
        """
        if name not in self.names:
            raise ValueError(f"no metric {name!r} in {self.run_dir}; the known ones are {', '.join(self.names)}")
        return [row.get(name) for row in self.metrics]

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in alphabetical order, after `step`."""
        return ["step", *sorted({name for row in self.metrics for name in row} - {"step"})]

    def read(self, name: str) -> Any:
        """Content of one of `files`: a list of rows of a .jsonl file, a mapping of a .json file."""
        if name not in self.files:
            raise ValueError(f"no file {name!r} in {self.run_dir}; there are {', '.join(self.files) or 'none'}")
        text = self.files[name].read_text(encoding="utf-8")
        if name.endswith(".jsonl"):
            return [json.loads(line) for line in text.splitlines()]
        return json.loads(text)


def _roles_in(export: Path) -> dict[str, Path]:
    directory = export.resolve()
    return {path.name: path for path in sorted(directory.iterdir())} if directory.is_dir() else {}


def _files(run_dir: Path) -> dict[str, Path]:
    files = {name: run_dir / name for name in _FILES if (run_dir / name).is_file()}
    out = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8")).get("out")  # of `generate`
    return files | ({"responses.jsonl": Path(out)} if out and Path(out).is_file() else {})
