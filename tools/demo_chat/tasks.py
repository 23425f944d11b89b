"""The demo's task: name things of a kind in a given form, which a program can check.

    Name three animals, in capital letters, separated by commas, ending with a full stop.   ->   CAT, BEAR, DOG.

An answer is judged by six checks (`judge`), each of which a reader can repeat by eye; it is right when all hold.
GRPO's reward is how far they do (`graded`), and answers become pairs by it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from tools.demo_chat.words import FAMILIAR, belongs, name_of

Case = Literal["any", "upper"]

COUNTS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
CAPITALS = ("in upper case", "in capital letters")
FULL_STOP = ("ending with a full stop", "with a full stop at the end")
VERBS = ("Name", "List", "Give me", "Write down")
CHECKS = ("form", "count", "kind", "distinct", "case", "end")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked for."""

    category: str
    count: int
    case: Case
    full_stop: bool
    """At the end."""

    def prompt(self, draw: random.Random) -> str:
        """In one of several wordings."""
        case = f", {draw.choice(CAPITALS)}" if self.case == "upper" else ""
        end = f", {draw.choice(FULL_STOP)}" if self.full_stop else ""
        return f"{draw.choice(VERBS)} {COUNTS[self.count]} {self.category}{case}, separated by commas{end}."

    def answer(self, draw: random.Random) -> str:
        """A right one."""
        return self._list(draw.sample(FAMILIAR[self.category], self.count))

    def spoiled(self, draw: random.Random) -> tuple[str, str]:
        """A right answer, and the same answer with one thing wrong: all checks but one hold of it.

        What the pairs of a model's own answers seldom differ in comes more often, the count above all: of what a
        reward model does not know that it is wrong, PPO finds more.
        """
        items = draw.sample(FAMILIAR[self.category], self.count)
        ways = [self._miscounted] * 3 + [self._repeated] * 2 + [self._strange] * 2
        ways += [self._small] * 2 if self.case == "upper" else []
        ways += [self._unended] * 2 if self.full_stop else []
        return self._list(items), draw.choice(ways)(items, draw)

    def _list(self, items: Sequence[str]) -> str:
        return ", ".join(cased(item, self.case) for item in items) + ("." if self.full_stop else "")

    def _shuffled(self, items: Sequence[str], draw: random.Random) -> str:
        """So that what is wrong stands anywhere."""
        return self._list(draw.sample(items, len(items)))

    def _miscounted(self, items: Sequence[str], draw: random.Random) -> str:
        if self.count > 2 and draw.random() < 0.5:
            return self._list(draw.sample(items, self.count - 1))
        more = [item for item in FAMILIAR[self.category] if item not in items]
        return self._shuffled([*items, draw.choice(more)], draw)

    def _strange(self, items: Sequence[str], draw: random.Random) -> str:
        """With an item of another kind, or a word that there is not: the beginning of one and the end of another."""
        other = draw.choice([word for name in FAMILIAR for word in FAMILIAR[name] if not belongs(word, self.category)])
        first, last = draw.sample(FAMILIAR[self.category], 2)
        blend = first[: len(first) // 2 + 1] + last[len(last) // 2 :]
        strange = other if draw.random() < 0.75 or belongs(blend, self.category) else blend
        return self._shuffled([strange, *items[1:]], draw)

    def _repeated(self, items: Sequence[str], draw: random.Random) -> str:
        kept = draw.sample(items, self.count - 1)
        return self._shuffled([*kept, draw.choice(kept)], draw)

    def _small(self, items: Sequence[str], draw: random.Random) -> str:
        return replace(self, case="any")._list(items)

    def _unended(self, items: Sequence[str], draw: random.Random) -> str:
        return replace(self, full_stop=False)._list(items)

    def fields(self) -> dict[str, Any]:
        """As columns of a record."""
        return asdict(self)


def cased(item: str, case: Case) -> str:
    return item.upper() if case == "upper" else " ".join(word[:1].upper() + word[1:] for word in item.split())


def task_of(fields: Mapping[str, Any]) -> Task:
    return Task(**{name: fields[name] for name in Task.__dataclass_fields__})


def all_tasks() -> list[Task]:
    return [
        Task(category=category, count=count, case=case, full_stop=full_stop)
        for category in FAMILIAR
        for count in COUNTS
        for case in get_args(Case)
        for full_stop in (False, True)
    ]


def judge(task: Task, answer: str) -> dict[str, float]:
    """What holds of an answer, by check, 0 or 1: of one that is no list with commas nothing."""
    return {name: float(degree == 1) for name, degree in degrees(task, answer).items()}


def degrees(task: Task, answer: str) -> dict[str, float]:
    """How far each check holds, from 0 to 1: the share of items of which it does; of the count, how near it is."""
    items = items_of(answer)
    if items is None:
        return dict.fromkeys(CHECKS, 0.0)
    return {
        "form": 1.0,
        "count": max(0.0, 1 - abs(len(items) - task.count) / task.count),
        "kind": share(belongs(item, task.category) for item in items),
        "distinct": len({name_of(item, task.category) or item.lower() for item in items}) / len(items),
        "case": share(task.case == "any" or item == item.upper() for item in items),
        "end": float(not task.full_stop or answer.strip().endswith(".")),
    }


def share(holds: Iterable[float]) -> float:
    values = list(holds)
    return sum(values) / len(values)


def items_of(answer: str) -> list[str] | None:
    """The items of an answer that is one line of them with commas between; None for another. A full stop may end it."""
    items = [item.strip() for item in answer.strip().removesuffix(".").split(",")]
    return items if len(items) > 1 and all(_ITEM.fullmatch(item) for item in items) else None


_ITEM = re.compile(r"[A-Za-z][A-Za-z'-]*( [A-Za-z][A-Za-z'-]*){0,3}")


def checks(prompt: str, response: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The share of checks that hold, and each of them as a metric."""
    found = judge(task_of(fields), response)
    return {"score": share(found.values()), **found}


def graded(prompt: str, response: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """GRPO's reward, and what makes pairs: how far the checks hold, in the mean, and each as a metric.

    Most groups of eight have no list of which every item is of the kind, and yet lists that are nearer to it.
    """
    found = degrees(task_of(fields), response)
    return {"score": share(found.values()), **found}


def right(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """1 where every check holds."""
    return float(all(judge(task_of(fields), response).values()))


right.is_accuracy = True  # type: ignore[attr-defined]
checks.required_fields = graded.required_fields = right.required_fields = tuple(  # type: ignore[attr-defined]
    Task.__dataclass_fields__
)
