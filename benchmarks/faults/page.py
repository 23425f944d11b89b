"""The tables of docs/reliability.md, made of the results in JSON: `python -m benchmarks.faults --markdown FILE`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.machine import ROOT

Tree = Mapping[str, Any]
UNKNOWN = "…"
"""Where there is no result yet."""
FAULTS_JSON, RESUME_JSON = (ROOT / "benchmarks/results" / name for name in ("faults.json", "resume.json"))

TITLES = {
    "sigkill_sft": "SIGKILL of a rank or of all processes, SFT",
    "sigkill_ppo": "SIGKILL of a rank or of all processes, PPO",
    "sigkill_slices": "SIGKILL of a rank or of all processes, GRPO in three slices",
    "sigkill_newest_removed": "the same after two resume points, and the newest is removed",
    "sigkill_ahead": "SIGKILL of a rank or of all processes, GRPO in two slices and a step ahead",
    "sigkill_while_writing": "SIGKILL while a resume point is written, SFT and PPO",
    "corrupted_checkpoint": "a flipped bit, a truncated or a missing file in the newest one or two resume points",
    "signal_sft": "SIGTERM, SIGUSR1 or SIGINT, SFT",
    "signal_ppo": "SIGTERM, SIGUSR1 or SIGINT, PPO",
    "rank_stopped": "a rank stops answering (SIGSTOP)",
    "writer_killed": "the process that writes a resume point is killed",
    "launcher_killed": "only the launcher is killed",
    "disk_full": "the disk is full",
    "read_only_directory": "the run directory is read-only at the next start",
    "changed_data": "two lines of the data change places before the next start",
    "changed_configuration": "another learning rate at the next start",
    "second_job": "the same command is started while the run is going",
    "hanging_reward": "a reward function does not return",
    "engine_exception": "vLLM raises an exception in a rollout",
    "nan_gradient": "NaN in a gradient",
    "time_limit": "the time of a Slurm job is nearly over",
    "sigkill_third_turn": "SIGKILL while third turns of conversations are answered, GRPO",
    "sigkill_other_engine": "the same with two engines, and one engine of two ranks goes on",
    "sigkill_turn_slices": "SIGKILL while third turns of conversations are answered, GRPO in three slices",
    "environment_killed": "a process of an environment is killed",
    "environment_hangs": "an environment does not answer",
    "environment_exits": "an environment ends its process",
    "environment_drifts": "SIGKILL, and an environment answers a repeated turn otherwise",
    "engine_exception_talks": "vLLM raises an exception in the middle of conversations",
}
"""By fault, for people."""


class Expected(Protocol):
    """What is known of a fault before it is tried; `benchmarks.faults.__main__.Fault`."""

    @property
    def trials(self) -> int: ...
    @property
    def recovered(self) -> str: ...


def update(page: Path, faults: Mapping[str, Expected]) -> None:
    """Put the newest results into the page."""
    text = page.read_text(encoding="utf-8")
    page.write_text(filled(text, faults, _read(FAULTS_JSON), _read(RESUME_JSON)), encoding="utf-8")


def filled(text: str, faults: Mapping[str, Expected], tried: Tree | None, cost: Tree | None) -> str:
    """The page with both tables; `tried` and `cost` are None where they were not measured yet."""
    about = [*about_conversations(tried), _about("make test-faults", tried)]
    text = replaced(text, "faults", [*table_of_faults(faults, tried), "", *about])
    return replaced(text, "cost", [*table_of_cost(cost), "", _about("make bench-resume", cost)])


def table_of_faults(faults: Mapping[str, Expected], tried: Tree | None) -> list[str]:
    """One row for each fault."""
    columns = (
        "fault",
        "trials",
        "recovered means",
        "recovered",
        "metrics equal",
        "optimizer steps done again: most (mean)",
        "beyond what is promised",
    )
    found, skipped = (tried["faults"], tried["skipped"]) if tried else ({}, {})
    rows = []
    for name, fault in faults.items():
        cells = [UNKNOWN] * 4
        number = str(fault.trials) if tried is None else "0"
        if name in found:
            of = found[name]
            equal = "" if of["metrics_equal"] is None else f"{of['metrics_equal']} of {of['compared']}"
            again = f"{of['steps_lost']['most']} ({of['steps_lost']['mean']})"
            number = str(of["trials"])
            cells = [str(of["recovered"]), equal, again, str(of["beyond_promise"])]
        elif name in skipped:
            number = f"0: {skipped[name]}"
        rows.append([TITLES[name], number, fault.recovered, *cells])
    return _table(columns, rows)


def about_conversations(tried: Tree | None) -> list[str]:
    """How many conversations were not drawn again from their beginning."""
    kept = [of["conversations"] for of in (tried["faults"] if tried else {}).values() if "conversations" in of]
    if not kept:
        return []
    went_on, trials = (sum(of[name] for of in kept) for name in ("went_on", "trials"))
    return [f"After SIGKILL, {went_on} conversations went on behind their last answered turn, in {trials} trials.", ""]


def table_of_cost(cost: Tree | None) -> list[str]:
    """What resume points cost."""
    figures = [UNKNOWN] * 9
    if cost is not None:
        still, complete = cost["standing_still_seconds"], cost["complete_seconds"]
        size, first = cost["bytes"], cost.get("first_step_seconds")
        figures[:6] = [
            f"{size['state'] / 1e6:.0f} MB",
            f"{size['written'] / 1e6:.0f} MB: {cost['written_over_state']:.3f} of it",
            _seconds(still["background"]),
            f"{_seconds(still['waiting'])}; in the background {cost['background_over_waiting']:.2f} of that",
            f"{_seconds(complete['background'])}; {_seconds(complete['waiting'])} where training waits",
            f"{cost['step_beside_a_write_over_step']:.2f} of a step without",
        ]
        if first is not None:
            figures[6:] = [
                _seconds(first["fresh"]),
                _seconds(first["resumed"]),
                f"{cost['resumed_over_fresh']:.2f}",
            ]
    names = (
        "parameters and optimizer state",
        "written for a resume point",
        "training stands still, written in the background (default)",
        "training stands still, `checkpoint.background=false`",
        "until the resume point is complete",
        "time of a step during which a resume point is written",
        "from the start of the process to the first optimizer step, fresh run",
        "the same, resumed run",
        "resumed over fresh",
    )
    return _table(("what", "figure"), list(zip(names, figures, strict=True)))


def replaced(text: str, name: str, lines: Sequence[str]) -> str:
    """The page with `lines` between its comments `<!-- NAME: ... -->` and `<!-- /NAME -->`.

    Raises: ValueError when the page has not exactly one such place.
    """
    begin, end = f"<!-- {name}: made by `python -m benchmarks.faults --markdown` -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page needs one line {begin!r}, and one line {end!r} below it")
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{rest.split(end)[1]}"


def _about(command: str, result: Tree | None) -> str:
    """What the figures are from."""
    if result is None:
        return f"Not run yet: `{command}`."
    machine = f"{result['cores']} cores, {result['platform']}, Python {result['python']}, torch {result['torch']}"
    model = ""
    if sizes := result.get("model"):
        model = f"; a Llama of {result['bytes']['parameters'] / 1e6:.1f} M parameters, {sizes['layers']} layers"
    commits: dict[str, list[str]] = {}
    for name, of in result.get("faults", {}).items():
        commits.setdefault(of.get("commit", result["commit"]), []).append(TITLES[name])
    others = "".join(
        f" ({commit}: {'; '.join(titles)})"
        for commit, titles in commits.items()
        if len(commits) > 1 and len(titles) < 9
    )
    newest = max(commits, key=lambda commit: len(commits[commit]), default=result["commit"])
    return f"`{result['command']}`, commit {newest}{others}; {machine}{model}."


def _seconds(spread: Tree) -> str:
    return f"{spread['median']:.2g} s ({spread['least']:.2g} to {spread['most']:.2g}, {spread['rounds']} times)"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return [head, "|" + "---|" * len(columns), *body]


def _read(file: Path) -> Tree | None:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
