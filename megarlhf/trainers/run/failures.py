"""Files that a run keeps for a skipped optimizer step, in `run.dir/failures/step_NNNNNN[_update_MMMM]_ROLE/`.

failure.json     the step, the reason why it was skipped, its numbers
config.yaml      the resolved configuration of the run
rank_RRRRR.pt    a rank's micro-batches; rank_RRRRR.json: the norms of its gradients
point/           the role's weights before the step: a resume point without optimizer (`resume/points/kept_weights.py`)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megarlhf.atomic_write import atomic_write
from megarlhf.config import DPOConfig, RLConfig, RMConfig, RoleConfig, SFTConfig, load_config
from megarlhf.observe.records.run_directory import CONFIG_FILE
from megarlhf.resume.claim.config_changes import TrainingConfig

FAILURE_FILE = "failure.json"
POINT = "point"
FORMAT = 2
CONFIGS: Mapping[str, type[TrainingConfig]] = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig, "rl": RLConfig}
"""Configuration by the command that writes failures."""


@dataclass(frozen=True)
class Failure:
    """Content of `failure.json`, a skipped step. Numbers that are not finite are texts in the file."""

    command: str
    role: str
    step: int
    """1 is the first, as in the metrics."""
    update: int | None
    """Number of updates done before it in its step, so 0 is the first; None if a step has only one."""
    samples: Sequence[int]
    """Samples of the mini-batch, by their number in the data (sft, rm, dpo) or in the step (rl)."""
    reason: str
    sums: Mapping[str, float]
    """Sums of the loss over the mini-batch; `loss` is among them."""
    gradient_norm: float
    denominators: Mapping[str, int]
    """Denominators of the loss over the whole mini-batch, by field of the loss."""
    coefficients: Mapping[str, float]
    """Coefficients that change over a run, by field of the loss."""
    counters: Mapping[str, int]
    """Steps of the role's optimizer and learning-rate schedule before this one."""
    layout: str
    """The role's layout, such as `tp 2 x pp 1 x dp 4`."""
    world_size: int

    @property
    def title(self) -> str:
        """Title for messages."""
        return title(self.step, self.update, self.role)

    def write(self, directory: Path) -> None:
        """Write `failure.json`."""
        tree = {"format": FORMAT, **asdict(self)}
        tree |= {"sums": plain(self.sums), **plain({"gradient_norm": self.gradient_norm})}
        atomic_write(directory / FAILURE_FILE, json.dumps(tree, indent=1))

    @classmethod
    def read(cls, directory: Path) -> Failure:
        """Read a failure. Raises: ValueError when the directory is not one, or is not complete."""
        file = directory / FAILURE_FILE
        try:
            tree = json.loads(file.read_text(encoding="utf-8"))
            if tree["format"] != FORMAT:
                raise ValueError(f"it has format {tree['format']!r}, and this version reads format {FORMAT}")
            values = {field.name: tree[field.name] for field in fields(cls)}
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(_no_failure(directory)) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{file} cannot be read ({type(error).__name__}: {error}); name another failure of the run"
            ) from None
        values["sums"] = {name: float(value) for name, value in values["sums"].items()}
        values["gradient_norm"] = float(values["gradient_norm"])
        failure = cls(**values)
        names = [CONFIG_FILE, *(rank_file(rank) for rank in range(failure.world_size))]
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise ValueError(
                f"{directory} is not complete: {', '.join(missing[:5])} of {failure.world_size} rank(s) missing; the "
                "run was ended while it wrote them, or the disk was full. Name another failure of the run"
            )
        return failure

    def config(self, directory: Path, overrides: Sequence[str]) -> TrainingConfig:
        """The run's configuration with `overrides`."""
        return load_config(CONFIGS[self.command], directory / CONFIG_FILE, overrides, of_a_run=True)

    def section(self, cfg: TrainingConfig) -> RoleConfig:
        """Section of the role in a configuration. Raises: ValueError if the configuration has no such role."""
        sections = cfg.roles()
        if self.role not in sections:
            raise ValueError(
                f"{self.title}: this configuration has no {self.role}; leave out the override that removes it"
            )
        return sections[self.role]


def title(number: int, update: int | None, role: str) -> str:
    """Words for an optimizer step, such as `step 12, update 4 of critic`. Both count from 1 there.

    number: number of the step, from 1
    update: number of updates before it in the step; None if a step has only one
    """
    return f"step {number}{'' if update is None else f', update {update + 1}'} of {role}"


def rank_file(rank: int, kind: str = "pt") -> str:
    """Name of the file with a rank's micro-batches (pt), or with the norms of its gradients (json)."""
    return f"rank_{rank:05d}.{kind}"


def plain(numbers: Mapping[str, float]) -> dict[str, float | str]:
    """Numbers for JSON; a number that is not finite becomes a text."""
    return {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}


def _no_failure(directory: Path) -> str:
    """Message about a directory without `failure.json`, with the failures below it."""
    if not directory.is_dir():
        return f"{directory} is no directory (working directory: {Path.cwd()}); name a folder of RUN_DIR/failures"
    below = [path.parent for pattern in ("*", "failures/*") for path in directory.glob(f"{pattern}/{FAILURE_FILE}")]
    known = f"name one of {', '.join(map(str, sorted(below)))}" if below else "name a folder of RUN_DIR/failures"
    return f"{directory} is not what a run keeps of a skipped step: it has no {FAILURE_FILE}; {known}"
