"""Tables of samples for people: prompts, responses and their rewards.

`samples/step_N.jsonl` holds samples of training step N, `samples/eval_step_N.jsonl` those of the evaluation after step
N (0: before training), one JSON object per line. A file is complete or absent. A resume removes those of later steps.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megarlhf.atomic_write import atomic_write, partial_name

FOLDER = "samples"
Kind = Literal["train", "eval"]
Row = Mapping[str, Any]
"""`step`, `sample` (its number in the step, or among the held-out prompts), `prompt`, `answer` where the record has
one, `response`, `length` (tokens), `finished` (false: cut at the limit), `reward` (the total), `rewards` by name (None:
the reward does not apply), `kl` (to the reference, mean over the response's tokens). A conversation with an environment
also has `turns`, each with `observed` (what came before it), `text` and `reward`, and `ended_by`."""

_NAME = re.compile(r"(eval_)?step_(\d+)\.jsonl")

log = logging.getLogger(__name__)


def spread(count: int, total: int) -> list[int]:
    """Choose `count` of `total` indices, evenly spread and always the same; all of them if there are no more."""
    count = max(0, min(count, total))
    return [n * total // count for n in range(count)]


@dataclass(frozen=True)
class ShownTables:
    """Tables of a run that a report shows, by step, in order."""

    evaluations: Mapping[int, Sequence[Row]] = field(default_factory=dict)
    """The first table, the latest, and some between."""
    training: Mapping[int, Sequence[Row]] = field(default_factory=dict)
    """The latest table."""


class SampleTables:
    """Writes the tables of a run, on rank 0.

    resume_step: the last step of the resumed checkpoint; tables of later steps are removed. None: a new run
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        self._folder = run_dir / FOLDER
        self._pending: dict[Path, str] = {}
        if resume_step is not None:
            for leftover in self._folder.glob(partial_name("*")):
                leftover.unlink()
            for (_, step), path in _tables(self._folder).items():
                if step > resume_step:
                    path.unlink()

    def write(self, kind: Kind, step: int, rows: Sequence[Row]) -> None:
        """Write a table. Called before the step's metrics are logged, so that a resume point has the tables of its
        steps. What a full disk does not take is kept, and written by a later call."""
        path = self._folder / f"{'eval_' if kind == 'eval' else ''}step_{step:06d}.jsonl"
        self._pending[path] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self.flush()

    def flush(self) -> None:
        """Write what could not be written yet."""
        try:
            for path in list(self._pending):
                self._folder.mkdir(exist_ok=True)
                atomic_write(path, self._pending[path])
                del self._pending[path]
        except OSError as error:
            log.warning(
                "%s: %d tables of samples could not be written yet: %s", self._folder, len(self._pending), error
            )


def steps_of(run_dir: Path, kind: Kind) -> list[int]:
    """Steps that have a table of this kind, in order."""
    return sorted(step for kind_of_table, step in _tables(run_dir / FOLDER) if kind_of_table == kind)


def read_table(run_dir: Path, kind: Kind, step: int) -> list[dict[str, Any]]:
    """Read the rows of a table. Raises: ValueError if it is damaged."""
    path = _tables(run_dir / FOLDER)[kind, step]
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except ValueError as error:
        raise ValueError(f"{path} is no table of samples ({error}); remove it") from error


def read_shown(run_dir: Path, num_evaluations: int = 4) -> ShownTables:
    """Read at most `num_evaluations` evaluations, and one table of training. Raises: ValueError for a damaged one."""
    evaluations, training = steps_of(run_dir, "eval"), steps_of(run_dir, "train")
    earlier = [evaluations[n] for n in spread(num_evaluations - 1, len(evaluations) - 1)]
    return ShownTables(
        {step: read_table(run_dir, "eval", step) for step in earlier + evaluations[-1:]},
        {step: read_table(run_dir, "train", step) for step in training[-1:]},
    )


def as_markdown(rows: Sequence[Row]) -> str:
    """Markdown for TensorBoard. Texts are indented, so that nothing in them is taken for markup."""
    return "\n\n".join(
        f"**sample {row['sample']}**: {describe_sample(row)}\n\n{_indented(row['prompt'])}\n\nresponse:\n\n"
        f"{_indented(written(row))}"
        for row in rows
    )


def written(row: Row, shorten: Callable[[str], str] = str) -> str:
    """The response of a row; of a conversation with an environment all turns, and the answers before them."""
    if "turns" not in row:
        return shorten(row["response"])
    parts = []
    for number, turn in enumerate(row["turns"], 1):
        observed = turn["observed"] or ()
        messages = [{"role": "environment", "content": observed}] if isinstance(observed, str) else observed
        parts += [f"[{message['role']}] {shorten(str(message['content']))}" for message in messages]
        reward = "" if turn["reward"] is None else f", reward {_number(turn['reward'])}"
        parts.append(f"[turn {number}{reward}] {shorten(turn['text'] or '')}")
    return "\n".join([*parts, f"[ended by {row['ended_by']}]"])


def describe_sample(row: Row) -> str:
    """Everything in a row but its texts, in one line."""
    parts = [f"{name} {_number(value)}" for name, value in {"reward": row["reward"], **row["rewards"]}.items()]
    parts += [f"kl {_number(row['kl'])}"] if "kl" in row else []
    parts += [f"length {row['length']}", "finished" if row["finished"] else "cut at the limit"]
    return ", ".join(parts)


def columns_and_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Names of columns, and cells by row, of a flat table. Each reward is a column `reward/NAME`."""
    flat = [{**row, **{f"reward/{name}": value for name, value in row["rewards"].items()}} for row in rows]
    flat = [{**row, "turns": written(row)} if "turns" in row else row for row in flat]
    columns = [name for name in dict.fromkeys(name for row in flat for name in row) if name != "rewards"]
    return columns, [[row.get(name) for name in columns] for row in flat]


def _tables(folder: Path) -> dict[tuple[Kind, int], Path]:
    tables: dict[tuple[Kind, int], Path] = {}
    for path in sorted(folder.glob("*.jsonl")):
        if match := _NAME.fullmatch(path.name):
            tables["eval" if match[1] else "train", int(match[2])] = path
    return tables


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
