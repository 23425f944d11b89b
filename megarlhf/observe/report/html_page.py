"""What our HTML files share: one file without network, plotly's script inside, written whole or not at all."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megarlhf.atomic_write import atomic_write

HOW_TO_READ = "Drag in a chart to zoom, double-click to go back; click a name to hide its curve."

STYLE = """
:root { color-scheme: light;
        --ink: #1b2130; --soft: #646c7c; --line: #e2e5eb; --panel: #fff; --page: #f6f7f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
       font: 15px/1.5 system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { margin: 0; font-size: 26px; } h2 { margin: 44px 0 4px; font-size: 20px; }
h3 { margin: 0; font-size: 15px; }
p { margin: 4px 0 12px; } .soft { color: var(--soft); font-size: 13px; }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
         min-width: 0; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; margin-top: 12px; }
.wide { grid-column: 1 / -1; }
@media (max-width: 800px) { .grid { grid-template-columns: minmax(0, 1fr); } }
.scroll { overflow-x: auto; margin-top: 12px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th.n, td.n { text-align: right; } tr.first td { border-top: 2px solid var(--line); }
tbody tr:last-child td, td[rowspan] { border-bottom: 0; } td[rowspan] { vertical-align: top; }
.run { font-weight: 600; } .warning { color: #9a3412; }
details { margin-top: 16px; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; margin: 12px 0 0; font-size: 13px; line-height: 1.45; }
"""

DRAW = """
for (const element of document.querySelectorAll('.chart')) {
  const figure = FIGURES[Number(element.dataset.figure)];
  const draw = () => Plotly.newPlot(element, figure.data, figure.layout,
                                    {responsive: true, displaylogo: false, displayModeBar: false});
  const folded = element.closest('details');
  if (folded) { folded.addEventListener('toggle', draw, {once: true}); } else { draw(); }
}
"""


def written_by(command: str) -> str:
    """What every page of a command holds, and by which `check_replaceable` knows it."""
    return f'<p class="soft">megarlhf {command}, written '


def document(
    title: str, command: str, parts: Sequence[str], figures: Sequence[dict[str, Any]], *, style: str = "", script: str
) -> str:
    """The whole page.

    parts:   HTML, one after the other
    figures: of plotly, which `script` finds under the name FIGURES
    """
    from plotly.offline import get_plotlyjs

    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n<main>",
            f"<h1>{html.escape(title)}</h1>",
            f"{written_by(command)}{now}. {HOW_TO_READ}</p>",
            *parts,
            f"</main>\n<script>{get_plotlyjs()}</script>",
            f"<script>\nconst FIGURES = {data};\n{script}</script>\n</body>\n</html>\n",
        ]
    )


def check_replaceable(out: Path, own: str, kind: str) -> None:
    """Raises ValueError where `out` is there and does not hold the text `own`: it is the user's. `kind`: what it would
    have to be, in words."""
    if out.exists() and not (out.is_file() and own in out.read_text(encoding="utf-8", errors="replace")):
        raise ValueError(f"{out} is there and is no {kind}; nothing is replaced: name another file (-o FILE)")


def write_whole(out: Path, text: str) -> None:
    """Complete or not at all; folders above it are made."""
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, text)
