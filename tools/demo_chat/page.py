"""What the chat demo's models say, as sections of its report: the same prompts side by side, before and after."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarlhf.observe.terminal.progress import format_number
from tools.demo_chat.figures import Row, by_prompt, read_lines, responses, said
from tools.demo_chat.tasks import checks

SHOWN_PROMPTS = 64
"""Of the test prompts in the report; all are in the folders `test-...`."""
TRAINING = {
    "steps": "steps",
    "kl_k3": "KL to the SFT model, nats a token",
    "reward_mean": "reward",
    "entropy": "entropy, nats",
    "rollout_logprob_gap_max": "gap to the engine, nats",
    "certificates": "certificates of the engine's weights",
}
"""Of `figures.of_training`, and what it says."""
FIRST = 8
"""Rows that stand open; the others are folded."""


def sections(root: Path, found: Mapping[str, Any]) -> list[str]:
    """In HTML: figures, answers to test prompts and to unrelated questions."""
    names = list(found["models"])
    questions = [row["messages"][-1]["content"] for row in read_lines(root / "data/questions.jsonl")]
    tests = {name: [rows[0] for rows in by_prompt(responses(root, "test", name)).values()] for name in names}
    asked = [row["messages"][-1]["content"] for row in read_lines(root / "data/test.jsonl")]
    others = {name: responses(root, "drift", name) for name in names}
    of = f"Seed {found['seed']}, commit {html.escape(', '.join(found['commits']))}."
    return [
        "<h2>Figures of test data</h2>",
        f'<p class="soft">{of} Means and their 95% intervals over prompts, which no stage has read.</p>',
        _figures(found["models"]),
        '<p class="soft">Differences prompt by prompt, with the intervals of the differences.</p>',
        _differences(found["differences"]),
        '<p class="soft">Runs of reinforcement learning: of the last step; the gap is the largest of all steps.</p>',
        _training(found["training"]),
        "<h2>Answers to test prompts</h2>",
        '<p class="soft">The first of the answers that each model has drawn, and which of the checks do not hold.</p>',
        *side_by_side(asked, tests, _said_of_checks),
        "<h2>Answers to questions that have nothing to do with the task</h2>",
        '<p class="soft">Cut after some tokens. What has been forgotten would be seen here.</p>',
        *side_by_side(questions, others, _said_of_drift),
    ]


def side_by_side(asked: Sequence[str], answers: Mapping[str, Sequence[Row]], remark: Any) -> list[str]:
    """A table of prompts with a column of answers for each model; rows after the first ones are folded.

    asked: what the prompts ask, without the template around it; a prompt that is none of them is shown as it stands
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("prompt", *answers))
    rows = []
    for each in list(zip(*answers.values(), strict=True))[:SHOWN_PROMPTS]:
        whole = each[0]["prompt"]
        prompt = max((text for text in asked if text in whole), key=len, default=whole)
        cells = "".join(f"<td><pre>{_text(row)}</pre>{remark(row)}</td>" for row in each)
        rows.append(f"<tr><td><pre>{html.escape(prompt)}</pre></td>{cells}</tr>")
    parts = [_table(head, rows[:FIRST])]
    if rows[FIRST:]:
        parts.append(f"<details><summary>{len(rows) - FIRST} more</summary>{_table(head, rows[FIRST:])}</details>")
    return parts


def _said_of_checks(row: Row) -> str:
    found = checks(row["prompt"], row["response"], row)
    if not found["form"]:
        return '<div class="soft warning">not a list of items with commas</div>'
    missed = [name for name, value in found.items() if name != "score" and not value]
    return (
        '<div class="soft">right</div>' if not missed else f'<div class="soft warning">not: {", ".join(missed)}</div>'
    )


def _said_of_drift(row: Row) -> str:
    return '<div class="soft">as released</div>' if row["response"] == row["released"] else ""


def _text(row: Row) -> str:
    """With what does not show."""
    if not row["response"]:
        return '<span class="soft">(nothing)</span>'
    return html.escape(row["response"]) + ("" if row["finished"] else '<span class="soft"> … (cut)</span>')


def _figures(models: Mapping[str, Any]) -> str:
    words = list(next(iter(models.values())))
    rows = [
        f"<tr><td>{html.escape(each)}</td>{''.join(_figure(each, figures[each]) for figures in models.values())}</tr>"
        for each in words
    ]
    return _table("".join(f"<th>{html.escape(name)}</th>" for name in ("figure", *models)), rows)


def _differences(found: Mapping[str, Any]) -> str:
    words = list(next(iter(found.values()), {}))
    rows = [
        f"<tr><td>{html.escape(name)}</td>{''.join(_figure(each, of[each]) for each in words)}</tr>"
        for name, of in found.items()
    ]
    return _table("".join(f"<th>{html.escape(name)}</th>" for name in ("model", *words)), rows)


def _training(found: Mapping[str, Any]) -> str:
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in ("run", *TRAINING.values()))
    rows = [
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{format_number(of[key])}</td>' for key in TRAINING)}</tr>"
        for name, of in found.items()
    ]
    return _table(heads, rows)


def _figure(words: str, figure: Mapping[str, Any]) -> str:
    return f"<td><b>{said(words, figure['value'])}</b> {in_brackets(words, figure)}</td>"


def in_brackets(words: str, figure: Mapping[str, Any]) -> str:
    """The interval; nothing where there is none."""
    if figure["low"] is None or figure["high"] is None:
        return ""
    return f"[{said(words, figure['low'])}, {said(words, figure['high'])}]"


def _table(head: str, rows: Sequence[str]) -> str:
    body = f'<table class="samples"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="panel scroll">{body}</div>'
