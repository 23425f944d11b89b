"""Text of the site: links that leave docs/, pages of source files, and what a built page would fetch from elsewhere.

Pages are written for two readers: of the repository, where `../megarlhf/layout.py` is a file, and of the site,
which then has a page of that file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What stands in code is left alone: a fence, an indented block's line, a span.
_LINK = re.compile(
    r"(?P<code>^(`{3,}|~{3,}).*?^\2|^    .*?$|`[^`\n]*`(?!\]))|\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)", re.M | re.S
)


def links(markdown: str) -> list[str]:
    """Targets of the links of a page, in order."""
    return [match["target"] for match in _LINK.finditer(markdown) if match["target"]]


def place(target: str, folder: str) -> tuple[str, str]:
    """(path from the repository's root, anchor) of a link in a page that lies in `folder`."""
    path, _, anchor = target.partition("#")
    return posixpath.normpath(posixpath.join(folder, path)) if path else "", anchor


def is_external(target: str) -> bool:
    """Whether a link leads to another site."""
    return bool(re.match(r"[a-z]+:", target))


def sources(markdown: str, folder: str) -> set[str]:
    """Files outside docs/ to which a page links, as paths from the root."""
    paths = {place(target, folder)[0] for target in links(markdown) if not is_external(target)}
    return {path for path in paths if path and not path.startswith("docs/") and (ROOT / path).is_file()}


def for_the_site(markdown: str, folder: str, uri: str) -> str:
    """The page with every link as the site has it.

    folder: where the page lies in the repository; uri: where it lies in the site, below docs/.
    """

    def link(path: str) -> str:
        inside = path.removeprefix("docs/") if path.startswith("docs/") else source_uri(path)
        return posixpath.relpath(inside, posixpath.dirname(uri) or ".")

    def replaced(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or is_external(target) or target.startswith("#"):
            return match[0]
        path, anchor = place(target, folder)
        if not path.startswith("docs/") and not (ROOT / path).is_file():
            return match[0]  # MkDocs reports it
        return f"[{match['text']}]({link(path)}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(replaced, markdown)


def source_uri(path: str) -> str:
    """Where the site has the page of a source file."""
    return "index.md" if path == "README.md" else f"source/{path}.md"


def source_page(path: str) -> str:
    """A page that shows a source file; one in Markdown is shown as a page."""
    language = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return for_the_site(text, posixpath.dirname(path), source_uri(path))
    fence = "~" * 12
    return f'---\nsearch: {{exclude: true}}\n---\n# {path}\n\n{fence}{language} linenums="1"\n{text}{fence}\n'


PLACEHOLDERS = {
    "ROLE": ("actor", "against", "critic", "reference", "reward_model"),
    "SET": ("data.train", "data.validation", "data.test", "ptx.data"),
}
"""Prefixes of keys in the configuration reference, and the sections that each stands for."""
_KEY = re.compile(r"(<tr>\s*<td>)<code>([\w.\[\]]+)</code>")


def with_key_anchors(page: str) -> tuple[str, list[str]]:
    """The built configuration page with a link to each key of its reference, and the anchors.

    `algo.kl.coef` is at `configuration.html#algo.kl.coef`, `ROLE.optim.lr` also at `#actor.optim.lr` and so on,
    `rewards[].kind` at `#rewards.kind`. A key with several rows has its anchor at the first.
    """
    introduction, marker, reference = page.partition("<!-- made by")
    assert marker, "the configuration page has no mark where its reference begins"
    anchors: list[str] = []

    def row(match: re.Match[str]) -> str:
        key = match[2].replace("[]", "")
        if key in anchors:
            return match[0]
        prefix, _, rest = key.partition(".")
        others = [f"{section}.{rest}" for section in PLACEHOLDERS.get(prefix, ())]
        anchors.extend([key, *others])
        places = "".join(f'<span id="{other}"></span>' for other in others)
        link = f'<a class="headerlink" href="#{key}" title="Link to this key">&para;</a>'
        return f'{match[1]}{places}<span class="key" id="{key}"><code>{match[2]}</code>{link}</span>'

    return introduction + marker + _KEY.sub(row, reference), anchors


_FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source|video|audio|embed|object)\b[^>]*?"
    r"\b(?:src|href|data|srcset)=[\"']?((?:https?:)?//[^\"'\s>]+)|(?:url\(|@import\s)\s*[\"']?((?:https?:)?//[^\"')\s]+)",
    re.I,
)


def fetched_from_elsewhere(text: str) -> list[str]:
    """What a browser would load from another host when it shows this page or style sheet. Plain links are none."""
    canonical = re.compile(r"<link[^>]*rel=[\"']?canonical", re.I)
    return [match[1] or match[2] for match in _FETCHED.finditer(text) if not canonical.match(match[0])]


def check_site(directory: Path, read: Callable[[Path], str] = lambda path: path.read_text(encoding="utf-8")) -> None:
    """Raises: ValueError when a page of the built site would load something from another host."""
    files = [path for path in sorted(directory.rglob("*")) if path.suffix in (".html", ".css")]
    if not files:
        raise ValueError(f"{directory} has no pages; expected a built site")
    wrong = [f"{path.relative_to(directory)}: {url}" for path in files for url in fetched_from_elsewhere(read(path))]
    if wrong:
        raise ValueError(
            f"{len(wrong)} resources come from other hosts, and the site has to work without a network: "
            f"{', '.join(wrong[:5])}; keep a copy under docs/"
        )
