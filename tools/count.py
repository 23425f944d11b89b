"""Count the code and the pages at a commit: lines, folders, names, docstrings, long functions, words.

    python -m tools.count [COMMIT ...]     (default: HEAD)

Prints one column for each commit. It reads the files that git has there, so that it can count commits that are older
than itself. Seconds of the tests and the number of cases are counted by `make test`.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
RELATIVE = frozenset(("Of", "Those", "That", "Whose", "What", "Which", "Such", "Who"))
"""First words of docstrings that need the line above them to be understood."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
LONG = 60
"""Lines of a function, its docstring included."""
_LOOPS = (("megarlhf/trainers/rl/loop.py", "train"), ("megarlhf/trainers/" + "rl.py", "run"))
"""Where the training loop of `rl` stands, now and before."""


def files_at(commit: str) -> dict[str, str]:
    """The text of each Python file and page that git has at a commit, by path."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith((".py", ".md")) and (file := tar.extractfile(member)):
                texts[member.name] = file.read().decode()
    return texts


def counts(texts: Mapping[str, str]) -> dict[str, object]:
    """All figures of one commit, by a description of each."""
    package, tests = (within(texts, folder, ".py") for folder in ("megarlhf/", "tests/"))
    trees = {path: ast.parse(text) for path, text in package.items()}
    folders = Counter(str(PurePosixPath(path).parent) for path in package if not path.endswith("__init__.py"))
    folder, modules = folders.most_common(1)[0]
    too_long = sum(_lines(node) > LONG for tree in trees.values() for node in functions_of(tree))
    docstrings = [text for tree in trees.values() for text in docstrings_of(tree)]
    pages = within(texts, "docs/", ".md")
    return {
        "lines of megarlhf/": sum(map(_count_lines, package.values())),
        "files of megarlhf/": len(package),
        "lines of tests/": sum(map(_count_lines, tests.values())),
        "modules of the largest folder": f"{modules} ({folder})",
        "docstrings": len(docstrings),
        "docstrings that begin with a relative word": sum(text.split()[0] in RELATIVE for text in docstrings),
        "public class names in several files": len(names_in_several_files(trees)),
        f"functions of more than {LONG} lines": too_long,
        "lines of the loop": next((_lines(node) for node in _loops(trees)), None),
        "test functions": sum(
            node.name.startswith("test_") for text in tests.values() for node in functions_of(ast.parse(text))
        ),
        "words of docs/": sum(len(text.split()) for text in pages.values()),
        "words of README.md": len(texts.get("README.md", "").split()),
    }


def within(texts: Mapping[str, str], folder: str, suffix: str) -> dict[str, str]:
    """Files of a folder."""
    return {path: text for path, text in texts.items() if path.startswith(folder) and path.endswith(suffix)}


def docstrings_of(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and text.strip():
                yield text


def names_in_several_files(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Public classes of one name, each with the files that define them."""
    files = defaultdict[str, list[str]](list)
    for path, tree in trees.items():
        for name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}:
            if not name.startswith("_"):
                files[name].append(path)
    return {name: paths for name, paths in files.items() if len(paths) > 1}


def _loops(trees: Mapping[str, ast.Module]) -> Iterator[Function]:
    """The function `train`, or the method `run` of a class `Loop`."""
    for path, name in _LOOPS:
        for node in ast.walk(trees.get(path, ast.Module([], []))):
            if isinstance(node, ast.ClassDef) and node.name == "Loop":
                yield from (method for method in functions_of(node) if method.name == name)
            elif isinstance(node, ast.FunctionDef) and node.name == name == "train":
                yield node


def functions_of(tree: ast.AST) -> Iterator[Function]:
    """All functions and methods, also those within others."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _count_lines(text: str) -> int:
    return text.count("\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.count", description=__doc__)
    parser.add_argument("commits", nargs="*", default=["HEAD"], metavar="COMMIT")
    commits = parser.parse_args().commits
    columns = [counts(files_at(commit)) for commit in commits]
    print("| | " + " | ".join(commits) + " |\n" + "|---" * (len(commits) + 1) + "|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{column[name]}" for column in columns) + " |")


if __name__ == "__main__":
    main()
