"""The pages of the documentation, and the repository that they speak of."""

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PRESENT = [page for page in PAGES if page.name != "log.md"]
"""The log speaks of the past: it names what is no more."""

CODE = re.compile(r"^```.*?^```$|(?:^    [^\n]*\n)+|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code(page: Path) -> list[str]:
    """Code spans and blocks of a page, without their marks."""
    return [span.strip("`\n") for span in CODE.findall(text(page))]


def folder(page: Path) -> str:
    return page.parent.relative_to(ROOT).as_posix().removeprefix(".")


@cache
def files() -> list[str]:
    """The repository's files, with a slash in front."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = [f"/{name}" for name in names.stdout.splitlines() if (ROOT / name).is_file()]
    assert len(paths) > 300, "the repository was not read"
    return paths


def path_of(page: Path) -> str:
    """For the names of tests."""
    return page.relative_to(ROOT).as_posix()
