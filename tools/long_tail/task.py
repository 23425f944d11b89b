"""A task whose answers are long-tailed, and whose lengths follow from the prompt: count, and star some numbers.

    Count with stars from 36 to 42.   ->   36 37 38* 39 40 41* 42

Numbers that end in 1, 5 or 8 get a star. Of 24 prompts 23 ask for 3 to 18 numbers (10 to 80 tokens), one asks for 185
to 215 (790 to 930). The answers that SFT learns forget some stars; GRPO has to learn that none is forgotten.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tools.demo_chat.make_data import write_lines

SYSTEM = {"role": "system", "content": "Count."}
"""Shorter than the one that the chat template writes where there is none."""
SIZES = {"sft": 640, "short": 800, "long": 40, "test": 192}
"""Records by file. `short` and `long` are GRPO's prompts. `test` is short ones: they are drawn in seconds."""
SFT_LONG = 40
"""One of this many answers of SFT is long."""
FORGOTTEN = {1: 0.1, 5: 0.3, 8: 0.5}
"""Last digits of the numbers that get a star, and the chance that an answer that SFT learns forgets it."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Numbers to count, from the first to the last."""

    first: int
    last: int

    def prompt(self) -> str:
        return f"Count with stars from {self.first} to {self.last}."

    def items(self, draw: random.Random | None = None) -> list[str]:
        """Items of the right answer; with `draw` some stars are forgotten."""
        return [
            f"{number}*"
            if (chance := FORGOTTEN.get(number % 10)) and (draw is None or draw.random() >= chance)
            else str(number)
            for number in range(self.first, self.last + 1)
        ]


def draw_task(draw: random.Random, *, long: bool) -> Task:
    """Draw a short or a long task."""
    first = draw.randint(100, 300) if long else draw.randint(10, 300)
    count = draw.randint(185, 215) if long else min(max(3, round(draw.lognormvariate(1.9, 0.5))), 18)
    return Task(first=first, last=first + count - 1)


def record(task: Task, draw: random.Random | None = None) -> dict[str, Any]:
    """Record as `rl` reads it; with `draw` as `sft` does, with an answer in which stars are forgotten."""
    messages = [SYSTEM, {"role": "user", "content": task.prompt()}]
    if draw is not None:
        messages.append({"role": "assistant", "content": " ".join(task.items(draw))})
    return {"messages": messages, **asdict(task)}


def make(out: Path, seed: int, sizes: Mapping[str, int] = SIZES) -> None:
    """Write all files. No two prompts are equal, so what is held out is not trained on. The same seed and sizes give
    the same bytes."""
    draw, seen = random.Random(f"long-tail {seed}"), set[Task]()
    for name, size in sizes.items():
        tasks: list[Task] = []
        while len(tasks) < size:
            of_sft = name == "sft" and len(tasks) % SFT_LONG == SFT_LONG - 1
            task = draw_task(draw, long=of_sft or name == "long")
            if task not in seen:
                seen.add(task)
                tasks.append(task)
        write_lines(out / f"{name}.jsonl", (record(task, draw if name == "sft" else None) for task in tasks))


def share(prompt: str, response: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """GRPO's reward: the share of items that are right, each in its place. Missing and further ones count as wrong. And
    as a metric, whether all are right."""
    pairs = list(zip_longest(_asked(fields).items(), response.split(" ")))
    share_right = sum(asked == given for asked, given in pairs) / len(pairs)
    return {"score": share_right, "right": float(share_right == 1)}


def right(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """1 where every item is right."""
    return float(response.split(" ") == _asked(fields).items())


def _asked(fields: Mapping[str, Any]) -> Task:
    return Task(first=fields["first"], last=fields["last"])


right.is_accuracy = True  # type: ignore[attr-defined]
share.required_fields = right.required_fields = ("first", "last")  # type: ignore[attr-defined]
