"""Make the demo's records, as conversations: `python -m tools.demo_chat.make_data --out runs/demo-chat/data --seed 0`.

Three splits share no task: training, validation (for choices, such as when to stop) and test (for figures). The same
seed and sizes give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.demo_chat.tasks import Task, all_tasks

SIZES = {"sft": 800, "spoiled": 300, "pairs": 256, "prompts": 512, "validation": 64, "test": 128}
"""Records by file. The first four are of training tasks; a task may come up again in another wording."""
QUESTIONS = Path(__file__).parent / "questions.txt"
"""Fifty questions that have nothing to do with the task."""
REPLAY_QUESTIONS = Path(__file__).parent / "replay_questions.txt"
"""Other questions, whose answers by the released model are learnt again; of the fifty none begins like one of them, or
is about the same."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="records")
    options = vars(parser.parse_args(argv))
    try:
        make(options["out"], options["seed"], {name: options[name] for name in SIZES})
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def sizes_with(changes: Sequence[str]) -> dict[str, int]:
    """The usual numbers of records with these in place of some, each as `test=16`.

    Raises: ValueError for a file that there is not, and for what is no number of records.
    """
    sizes = dict(SIZES)
    for change in changes:
        name, _, number = change.partition("=")
        if name not in sizes or not re.fullmatch(r"[1-9][0-9]*", number):
            raise ValueError(f"data:{change}: expected NAME=NUMBER, NAME one of {', '.join(SIZES)}, and 1 or more")
        sizes[name] = int(number)
    return sizes


def make(out: Path, seed: int, sizes: dict[str, int]) -> None:
    """Write all files that are not there.

    Raises: ValueError, before any is written, where one is there with other records: of another seed or size, or of
    another version of the demo; as `records_by_file`.
    """
    files = {out / f"{name}.jsonl": lines_of(records) for name, records in records_by_file(seed, sizes).items()}
    missing = {path: text for path, text in files.items() if not path.exists()}
    if other := [path for path in files if path not in missing and path.read_text() != files[path]]:
        raise ValueError(
            f"{other[0]} holds other records than seed {seed}, these sizes and this version of the demo make; name "
            "another directory, or remove what is there"
        )
    for path, text in missing.items():
        write_text(path, text)


def records_by_file(seed: int, sizes: dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """All of it. Raises: ValueError where validation and test leave no task to train on."""
    draw = random.Random(f"demo-chat {seed}")
    tasks = all_tasks()
    if (held_out := sizes["validation"] + sizes["test"]) >= len(tasks):
        raise ValueError(
            f"validation and test are of {held_out} tasks, and there are {len(tasks)}, of which some must "
            "be left to train on; give fewer"
        )
    draw.shuffle(tasks)
    cut = {"validation": tasks[: sizes["validation"]]}
    rest = tasks[sizes["validation"] :]
    cut["test"], train = rest[: sizes["test"]], rest[sizes["test"] :]
    for name in ("sft", "pairs", "prompts"):
        cut[name] = [draw.choice(train) for _ in range(sizes[name])]
    made = {name: [record(task, draw, answered=name == "sft") for task in chosen] for name, chosen in cut.items()}
    spoiled = [draw.choice(train) for _ in range(sizes["spoiled"])]
    made["spoiled"] = [pair(task, draw) for task in spoiled]
    made["sft_validation"] = [record(task, draw, answered=True) for task in cut["validation"]]
    for path in (REPLAY_QUESTIONS, QUESTIONS):
        made[path.stem] = [{"messages": [user(line)]} for line in path.read_text(encoding="utf-8").splitlines()]
    return made


def record(task: Task, draw: random.Random, *, answered: bool) -> dict[str, Any]:
    messages = [user(task.prompt(draw))]
    if answered:
        messages.append({"role": "assistant", "content": task.answer(draw)})
    return {"messages": messages, **task.fields()}


def pair(task: Task, draw: random.Random) -> dict[str, Any]:
    """As `rm` reads it."""
    asked = [user(task.prompt(draw))]
    chosen, rejected = task.spoiled(draw)
    return {"prompt": asked, "chosen": chosen, "rejected": rejected, **task.fields()}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Whole or not at all."""
    write_text(path, lines_of(records))


def lines_of(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(each) + "\n" for each in records)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
