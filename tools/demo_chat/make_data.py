"""Make the demo's records, as conversations: `python -m tools.demo_chat.make_data --out runs/demo-chat/data --seed 0`.

Three splits share no task: training, validation (for choices, such as when to stop) and test (for figures). The same
seed and sizes give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.demo_chat.tasks import Task, all_tasks

SIZES = {"sft": 800, "spoiled": 700, "pairs": 160, "prompts": 512, "validation": 64, "test": 128}
"""Records by file. The first four are of training tasks; a task may come up again in another wording."""
QUESTIONS = Path(__file__).parent / "questions.txt"
"""Fifty questions that have nothing to do with the task."""
REPLAY_QUESTIONS = Path(__file__).parent / "replay_questions.txt"
"""Others of the kind, whose answers by the released model are learnt again."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="records")
    options = vars(parser.parse_args(argv))
    make(options["out"], options["seed"], {name: options[name] for name in SIZES})
    return 0


def make(out: Path, seed: int, sizes: dict[str, int]) -> None:
    """Write all files."""
    draw = random.Random(f"demo-chat {seed}")
    tasks = all_tasks()
    draw.shuffle(tasks)
    cut = {"validation": tasks[: sizes["validation"]]}
    rest = tasks[sizes["validation"] :]
    cut["test"], train = rest[: sizes["test"]], rest[sizes["test"] :]
    for name in ("sft", "pairs", "prompts"):
        cut[name] = [draw.choice(train) for _ in range(sizes[name])]
    for name, chosen in cut.items():
        write_lines(out / f"{name}.jsonl", [record(task, draw, answered=name == "sft") for task in chosen])
    spoiled = [draw.choice(train) for _ in range(sizes["spoiled"])]
    write_lines(out / "spoiled.jsonl", [pair(task, draw) for task in spoiled])
    write_lines(out / "sft_validation.jsonl", [record(task, draw, answered=True) for task in cut["validation"]])
    for path in (REPLAY_QUESTIONS, QUESTIONS):
        lines = path.read_text(encoding="utf-8").splitlines()
        write_lines(out / f"{path.stem}.jsonl", ({"messages": [user(line)]} for line in lines))


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
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(each) + "\n" for each in records))
    partial.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
