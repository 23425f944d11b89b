"""What the model said, in a report: held-out prompts with the responses of several evaluations side by side.

A report stays small: few evaluations, few rows, and of a long text its beginning and its end.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from megarlhf.observe.records.sample_tables import Row, in_words
from megarlhf.observe.report.charts import RecordedRun

MAX_ROWS = 12
MAX_CHARACTERS = 1200
"""Of a prompt or response."""

STYLE = """
.samples td, .samples th { white-space: normal; vertical-align: top; min-width: 160px; }
.samples pre { margin: 0; overflow-x: visible; white-space: pre-wrap; overflow-wrap: anywhere;
               font-family: inherit; font-size: 14px; }
"""


def section_of_samples(runs: Sequence[RecordedRun]) -> str:
    """The tables of the runs that have any; nothing where none has."""
    parts = [_of_run(run) for run in runs if run.tables.evaluations or run.tables.training]
    return "\n".join(["<h2>Samples</h2>", *parts]) if parts else ""


def _of_run(run: RecordedRun) -> str:
    parts = [f'<p class="run">{html.escape(run.name)}</p>']
    if run.tables.evaluations:
        parts.append('<p class="soft">Held-out prompts and greedy responses: the same prompts at each evaluation.</p>')
        parts.append(_evaluations(run))
    for step, rows in run.tables.training.items():
        head = "<tr><th>prompt</th><th>response</th></tr>"
        body = "".join(f"<tr>{_prompt(row)}{_response(row)}</tr>" for row in rows[:MAX_ROWS])
        title = f"<summary>Samples of training, step {step}</summary>"
        parts.append(f'<details class="panel">{title}{_table(head, body)}</details>')
    return "\n".join(parts)


def _evaluations(run: RecordedRun) -> str:
    """A column for each evaluation; the rows are those of the latest one."""
    tables = run.tables.evaluations
    steps = list(tables)
    by_prompt = {step: {(row["sample"], row["prompt"]): row for row in rows} for step, rows in tables.items()}
    head = "".join(f"<th>step {step}</th>" for step in steps)
    body = []
    for latest in tables[steps[-1]][:MAX_ROWS]:
        rows = [by_prompt[step].get((latest["sample"], latest["prompt"])) for step in steps]
        cells = "".join("<td>-</td>" if row is None else _response(row) for row in rows)
        body.append(f"<tr>{_prompt(latest)}{cells}</tr>")
    return f'<div class="panel">{_table(f"<tr><th>prompt</th>{head}</tr>", "".join(body))}</div>'


def _table(head: str, body: str) -> str:
    return f'<div class="scroll"><table class="samples"><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _prompt(row: Row) -> str:
    answer = f'<div class="soft">answer: {_text(row["answer"])}</div>' if "answer" in row else ""
    return f"<td><pre>{_text(row['prompt'])}</pre>{answer}</td>"


def _response(row: Row) -> str:
    return f'<td><pre>{_text(row["response"])}</pre><div class="soft">{html.escape(in_words(row))}</div></td>'


def _text(text: str) -> str:
    """Escaped; a long one without its middle."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return html.escape(text)
