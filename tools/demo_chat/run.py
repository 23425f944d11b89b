"""`make demo-chat`: a real language model through SFT, a reward model, PPO and GRPO, with figures of test data.

Goes on where it was stopped: what has finished is not run again. Figures go to runs/demo-chat/summary.json, curves and
samples to runs/demo-chat/report.html.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarlhf.commands.cli import COMMANDS
from megarlhf.config import load_config
from megarlhf.observe.report.page import write_report
from megarlhf.observe.terminal.progress import make_console, table
from megarlhf.resume.points.file_digest import digest_of_directory
from tools.demo.pipeline import call, write_json
from tools.demo_chat.figures import figures, read_lines, said
from tools.demo_chat.make_data import make, sizes_with, write_lines
from tools.demo_chat.page import sections
from tools.demo_chat.pipeline import (
    ANSWERS,
    DEFAULT_ROOT,
    DRIFT,
    GRPO,
    MODELS,
    PPO,
    RM,
    SEEDS,
    SFT,
    STAGES,
    TEST,
    Overrides,
    Planned,
    Runner,
)
from tools.demo_chat.result_file import files_digest
from tools.pretrained import directory

SPECIAL = frozenset(""",#[]{}"'""")
"""What YAML does not read as it stands."""


def main(argv: Sequence[str] | None = None, call: Callable[[Sequence[str]], int] = call) -> int:
    """Run the stages in order; a failing stage ends it with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="where everything is written")
    parser.add_argument("--seed", type=int, default=SEEDS[0], help="of data, order and samples")
    parser.add_argument("--model", type=Path, help="another model directory than that of `make pretrained`")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="[STAGE:]section.key=value",
        help="for every stage that trains, or for one: grpo:train.num_steps=4; data:test=16 is a number of records",
    )
    options = parser.parse_args(argv)
    try:
        overrides = Overrides(tuple(options.overrides))
        model = (options.model or directory()).absolute()
        runner = Runner(options.root, make_console(), model, options.seed, overrides, call)
        run(runner)
    except (ValueError, FileNotFoundError) as error:
        print(f"make demo-chat: {error}", file=sys.stderr)
        return 2
    return 0


def run(runner: Runner) -> None:
    """All of it. Raises: as `train`."""
    train(runner)
    evaluate_all(runner, MODELS)
    finish(runner)


def train(runner: Runner) -> None:
    """The stages. Raises: ValueError for files of another demo under the root; SystemExit as `Runner.run`."""
    start(runner)
    for stage in STAGES:
        runner.run(stage)


def start(runner: Runner) -> None:
    """Says what the demo under the root is of, and makes its data.

    Raises: ValueError where one of another seed, of another model, with other overrides or other data is there, and,
    before anything is written, for what a stage would refuse and for what is older than what it was made from.
    """
    require_valid(runner)
    sizes = sizes_with(runner.overrides.of("data"))
    path = runner.root / "settings.json"
    settings = {
        "seed": runner.seed,
        "model": str(runner.model),
        "digest of the model": digest_of_directory(runner.model),
        "overrides": list(runner.overrides.given),
        "digest of configs/demo-chat and of the task's files": files_digest(),
    }
    known = known_settings(path) or settings
    if changed := [name for name in settings if known.get(name) != settings[name]]:
        was = "; ".join(f"{name} {known.get(name)}; now {settings[name]}" for name in changed)
        raise ValueError(f"{runner.root} holds another demo ({was}); name another --root, or remove it")
    runner.require_current([*((stage, (), stage.name) for stage in (*STAGES, ANSWERS)), *evaluations(runner, MODELS)])
    make(runner.root / "data", runner.seed, sizes)
    write_json(path, settings)


def known_settings(path: Path) -> dict[str, Any]:
    """Empty where there are none. Raises: ValueError for a file that is none."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path} is not what this command writes ({error}); remove {path.parent}") from error


def require_valid(runner: Runner) -> None:
    """Raises: ValueError for a root that cannot be, for a model that is not there, and for an override that a later
    stage would refuse."""
    if files := [each for each in (runner.root, *runner.root.parents) if each.exists() and not each.is_dir()]:
        raise ValueError(f"{files[0]} is no directory; name another --root")
    for path in (runner.root, runner.model):
        if special := sorted(set(str(path)) & SPECIAL):
            raise ValueError(f"{path} has {' '.join(special)} in its name, which configurations read as syntax")
    if not (runner.model / "config.json").is_file():
        raise ValueError(f"{runner.model} is no model directory: it has no config.json; name one with --model")
    for stage in (*STAGES, ANSWERS, TEST, DRIFT):
        overrides = runner.command(stage, (), stage.name)
        try:
            load_config(COMMANDS[stage.command].config, stage.config, overrides[overrides.index("-c") + 2 :])
        except ValueError as error:
            raise ValueError(f"{stage.name}: {error}") from error


def evaluate_all(runner: Runner, names: Sequence[str]) -> None:
    """Each model on the test prompts, and on the released model's answers to other questions."""
    runner.run(ANSWERS)
    write_drift_data(runner.root)
    for stage, changes, run in evaluations(runner, names):
        runner.run(stage, changes, run)


def evaluations(runner: Runner, names: Sequence[str]) -> list[Planned]:
    """Of these models."""
    changes = {name: [f"actor.model.path={runner.model_of(name)}"] for name in names}
    return [(stage, changes[name], f"{stage.name}-{name}") for name in names for stage in (TEST, DRIFT)]


def write_drift_data(root: Path) -> None:
    """The released model's answers, as texts and to be compared with."""
    rows = read_lines(root / ANSWERS.paths["out"])
    kept = ("prompt", "response", "finished")
    write_lines(
        root / DRIFT.paths["data.train"],
        ({**{key: row[key] for key in kept}, "released": row["response"]} for row in rows),
    )


def finish(runner: Runner) -> None:
    """summary.json, report.html and the closing table."""
    root, console, found = runner.root, runner.console, figures(runner.root)
    own = {each.name for each in (*STAGES, ANSWERS)}.union(run for _, _, run in evaluations(runner, MODELS))
    found |= {"seed": runner.seed, "commits": runner.commits(own.__contains__)}
    seconds = {name: each for name, each in runner.seconds().items() if name in own}  # not those of variants
    write_json(root / "summary.json", found | {"seconds": seconds, "minutes": round(sum(seconds.values()) / 60, 1)})
    runs = [root / each.name for each in (SFT, RM, PPO, GRPO)]
    write_report(runs, root / "report.html", title="megarlhf demo: chat", first=sections(root, found))
    console.rule("[bold]test data")
    rows = rows_of(found["models"]) + rows_of(found["differences"])
    console.print(
        table("figures of test data, 95% intervals over prompts", rows, ("model", "figure", "value", "from", "to"))
    )
    console.print(f"{sum(seconds.values()) / 60:.0f} minutes; {root / 'summary.json'}, {root / 'report.html'}")


def rows_of(figures: Mapping[str, Any]) -> list[tuple[str | None, ...]]:
    """Of the closing table."""
    bounds = ("value", "low", "high")
    return [
        (name, words, *(None if figure[key] is None else said(words, figure[key]) for key in bounds))
        for name, of in figures.items()
        for words, figure in of.items()
    ]


if __name__ == "__main__":
    raise SystemExit(main())
