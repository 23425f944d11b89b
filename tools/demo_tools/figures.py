"""Figures and conversations of the tools demo."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from megarlhf.algo.intervals import share_of
from megarlhf.observe.records.metrics import read_metrics

Row = Mapping[str, Any]
REWARD = "tools.demo_tools.weather:reward"
FIGURES: Mapping[str, Callable[[Row], float]] = {
    "right answers": lambda row: row["rewards"][REWARD] == 1.0,
    "the value was returned": lambda row: row["rewards"][REWARD] >= 0.5,
    "a call was executed": lambda row: row["rewards"][REWARD] > 0.0,
}
"""Shares of a model's answers to test questions."""
SHOWN_QUESTIONS, OPEN = 48, 8
"""Questions in the report, and how many of them stand open."""
BEFORE = 4
"""Messages of the example in each prompt."""


def figures(root: Path, names: Sequence[str]) -> dict[str, Any]:
    """Figures of models on the test questions, and the rewards of the steps of runs."""
    trained = [name for name in names if (root / name / "metrics.jsonl").exists()]
    return {
        "models": {name: tested(root, name) for name in names},
        "rewards": {
            name: [row["reward_mean"] for row in read_metrics(root / name) if "reward_mean" in row] for name in trained
        },
    }


def tested(root: Path, name: str) -> dict[str, dict[str, Any]]:
    """Shares with intervals over questions, of which each has several answers."""
    by_question: dict[str, list[Row]] = {}
    for row in responses(root, name):
        by_question.setdefault(json.dumps(row["messages"][: BEFORE + 1]), []).append(row)
    return {
        words: vars(share_of(torch.tensor([fmean(holds(row) for row in rows) for rows in by_question.values()])))
        for words, holds in FIGURES.items()
    }


def responses(root: Path, name: str) -> list[dict[str, Any]]:
    """Answers of a model to the test questions."""
    text = (root / f"test-{name}" / "responses.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def shown(words: str, figure: Mapping[str, Any]) -> str:
    """A share, such as `62.5% [53.0 to 71.2]`.

    The interval ends at 0 and 100. There is none where one value, or equal ones, say nothing of the spread.
    """
    if figure["low"] is None or figure["high"] - figure["low"] < 1e-9:
        return f"{figure['value']:.1%}"
    low, high = (100 * min(max(figure[bound], 0.0), 1.0) for bound in ("low", "high"))
    return f"{figure['value']:.1%} [{low:.1f} to {high:.1f}]"


def conversations(root: Path, names: Sequence[str]) -> str:
    """The first answer to test questions by each model, side by side, in HTML. The example of the prompt is left
    out."""
    answers = {name: first_answers(responses(root, name)) for name in names}
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("question", "right", *names))
    rows = []
    for question, row in list(answers[names[0]].items())[:SHOWN_QUESTIONS]:
        cells = [html.escape(question), row["answer"], *(_spoken(of[question]) for of in answers.values())]
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")

    def part(rows: Sequence[str]) -> str:
        body = f'<table class="samples"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        return f'<div class="panel scroll">{body}</div>'

    folded = f"<details><summary>{len(rows) - OPEN} more</summary>{part(rows[OPEN:])}</details>" * (len(rows) > OPEN)
    return part(rows[:OPEN]) + folded


def first_answers(rows: Sequence[Row]) -> dict[str, Row]:
    """The first answer to each question, by its words."""
    found: dict[str, Row] = {}
    for row in rows:
        found.setdefault(row["messages"][BEFORE]["content"], row)
    return found


def _spoken(row: Row) -> str:
    """Turns of the model and results of the tool."""
    reward = row["rewards"][REWARD]
    parts = [
        f"<div{'' if message['role'] == 'assistant' else ' class=soft'}>{html.escape(message['content'])}</div>"
        for message in row["messages"][BEFORE + 1 :]
    ]
    end = "" if row["ended_by"] == "model" else f", ended by {row['ended_by']}"
    return "".join(parts) + f'<div class="soft{"" if reward == 1.0 else " warning"}">reward {reward:g}{end}</div>'
