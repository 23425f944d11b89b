"""Shared parts of HTML pages: one file without network, with plotly's script inside, written whole or not at all.

Templates are the `*.html` files of this folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megarlhf.atomic_write import atomic_write


def fill(template: str, **values: Any) -> Markup:
    """HTML from a template. Values are escaped unless they are HTML already (`Markup`)."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return Markup(environment.get_template(template).render(values))


def written_by(command: str) -> str:
    """The text by which `check_replaceable` recognizes a command's own pages."""
    return f'<p class="soft">megarlhf {command}, written '


def document(
    title: str,
    command: str,
    parts: Sequence[str],
    figures: Sequence[dict[str, Any]],
    *,
    style: str = "",
    script: str = "",
) -> str:
    """The whole page.

    parts:   HTML, one after the other
    figures: plotly's; `script` reads them under the name FIGURES (default: each element of class `chart` gets its own)
    """
    from plotly.offline import get_plotlyjs

    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    html = {"written_by": written_by(command), "plotly": get_plotlyjs(), "figures": data}
    html |= {"style": style, "script": script}
    return fill(
        "base.html",
        title=title,
        now=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        parts=map(Markup, parts),
        **{name: Markup(text) for name, text in html.items()},
    )


def check_replaceable(out: Path, own: str, kind: str) -> None:
    """Refuse to replace a file of the user's: one without the text `own`. `kind` is what `out` should be, for the
    message. Raises: ValueError."""
    if out.exists() and not (out.is_file() and own in out.read_text(encoding="utf-8", errors="replace")):
        raise ValueError(f"{out} is there and is no {kind}; nothing is replaced: name another file (-o FILE)")


def write_whole(out: Path, text: str) -> None:
    """Write a file completely or not at all; make the folders above it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, text)
