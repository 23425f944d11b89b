"""Check the words of the package: how docstrings begin, and that a public class name stands in one file only.

    python -m tools.plain_words

Prints every violation as FILE:LINE, and exits with 1 if there is one. Part of `make lint`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.count import RELATIVE, ROOT, names_in_several_files

UNANCHORED = RELATIVE.union(
    ("In", "By", "As", "It", "Its", "Their", "They", "These", "From", "On", "None", "Nothing", "With")
)
"""First words that no docstring of the package may have. Those of `make count` stay as they are, for comparisons."""
IMPLEMENTATIONS: frozenset[str] = frozenset()
"""Class names that stand in several files because each file implements the same interface."""


def violations(trees: Mapping[str, ast.Module]) -> list[str]:
    """Sentences about modules of the package, by their paths."""
    problems = [
        f"{path}:{line} begins with {word!r}: a docstring begins with a noun or a verb, and can be read alone"
        for path, tree in trees.items()
        for line, word in sorted(first_words(tree))
        if word in UNANCHORED
    ]
    problems += [
        f"{paths[0]}: class {name} stands in {', '.join(paths[1:])} too: one name, one thing"
        for name, paths in names_in_several_files(trees).items()
        if name not in IMPLEMENTATIONS
    ]
    return problems


def first_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, first word) of every docstring: of modules, classes, functions, and fields and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for n, statement in enumerate(body):
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            text = statement.value.value
            is_documented = n == 0 or isinstance(body[n - 1], ast.Assign | ast.AnnAssign)
            if is_documented and isinstance(text, str) and text.split():
                yield statement.lineno, text.split()[0].rstrip(".,:;")


def main() -> None:
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(Path(ROOT, "megarlhf").rglob("*.py"))
    }
    problems = violations(trees)
    print("\n".join(problems) if problems else f"plain words: {len(trees)} files")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
