"""`make demo-tools`: a real language model learns to use a tool, by GRPO, with figures of questions that it never saw.

Goes on where it was stopped: stages that have finished are not run again. Figures go to runs/demo-tools/summary.json,
curves and conversations to runs/demo-tools/report.html.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import ROOT, commit_of_sources
from megarlhf.observe.records.run_directory import FINISHED_FILE
from megarlhf.observe.report.page import write_report
from megarlhf.observe.terminal.progress import format_number, make_console, table
from megarlhf.resume.points.file_digest import digest_of_directory
from tools.demo.pipeline import Stage, call, run_timed, stage_command, write_json
from tools.demo_chat.pipeline import COMMON
from tools.demo_tools import weather
from tools.demo_tools.figures import FIGURES, conversations, figures, shown
from tools.pretrained import directory

DEMO = "demo-tools"
DEFAULT_ROOT = Path("runs") / DEMO
SEEDS = (5, 6, 7)
"""Seeds of the figures; settings were chosen on seed 4. `make demo-tools` has the first."""
GRPO = Stage("grpo", "rl", {"data.train": "data/train.jsonl", "data.validation": "data/validation.jsonl"}, DEMO)
TEST = Stage("test", "eval", {"data.train": "data/test.jsonl"}, DEMO)
RELEASED = "released"
MODELS = (RELEASED, GRPO.name)
FILES = ("configs/demo-tools/*", "tools/demo_tools/weather.py", "tools/demo_tools/cities.txt")
"""Files that say what is run, and on which data."""


@dataclass(frozen=True)
class Demo:
    """Runs stages that have not finished yet, under a root."""

    root: Path
    model: Path
    """The released model."""
    seed: int = SEEDS[0]
    overrides: Sequence[str] = ()
    """Overrides of the configurations, each `STAGE:section.key=value`."""
    call: Callable[[Sequence[str]], int] = call
    """Runs a command and returns its exit status."""
    console: Console = make_console()  # noqa: RUF009 - it has no state

    def begin(self) -> None:
        """Make the data.

        Raises: ValueError for an override that is of no stage, and where the root holds another demo.
        """
        require_of_a_stage(self.overrides)
        if not (self.model / "config.json").is_file():
            raise ValueError(f"{self.model} is no model directory: it has no config.json; name one with --model")
        path = self.root / "settings.json"
        settings = {"seed": self.seed, "overrides": list(self.overrides), **settings_of(self.model)}
        known = json.loads(path.read_text()) if path.exists() else settings
        if changed := [name for name in settings if known.get(name) != settings[name]]:
            was = "; ".join(f"{name} {known.get(name)}, now {settings[name]}" for name in changed)
            raise ValueError(f"{self.root} holds another demo ({was}); name another --root, or remove it")
        weather.write(self.root / "data", self.seed)
        write_json(path, settings)

    def run(self, stage: Stage, name: str, changes: Sequence[str] = ()) -> None:
        """Run a stage, or go on with it. Raises: SystemExit with its exit status if it fails."""
        if (self.root / name / FINISHED_FILE).exists():
            self.console.print(f"{self.root / name}: finished before; remove it to run it again")
            return
        own = [f"run.seed={self.seed}", *changes]
        own += ["run.on_existing=resume", "checkpoint.every_minutes=3", "checkpoint.keep=1"] * (stage is GRPO)
        own += [each.partition(":")[2] for each in self.overrides if each.startswith(f"{stage.name}:")]
        begun, before = time.monotonic(), self.kept("seconds").get(name, 0.0) if (self.root / name).exists() else 0.0
        # A run that goes on at another commit is of both.
        known = self.kept("commits").get(name, "").split(", ") if (self.root / name).exists() else []
        commits = ", ".join(dict.fromkeys(each for each in (*known, commit_of_sources()) if each))
        write_json(self.root / "commits.json", self.kept("commits") | {name: commits})
        try:
            run_timed(self.console, name, stage_command(stage, self.root, own, run=name), self.call)
        finally:
            seconds = {name: round(before + time.monotonic() - begun, 1)}
            write_json(self.root / "seconds.json", self.kept("seconds") | seconds)

    def train(self, name: str = GRPO.name, changes: Sequence[str] = ()) -> None:
        """Train the released model."""
        self.run(GRPO, name, [f"actor.model.path={self.model}", *changes])

    def test(self, name: str) -> None:
        """Test the released model, or the actor of a run."""
        model = self.model if name == RELEASED else self.root / name / "checkpoints/latest/actor"
        trained, tested = (self.root / each / FINISHED_FILE for each in (name, f"test-{name}"))
        if trained.exists() and tested.exists() and trained.stat().st_mtime_ns > tested.stat().st_mtime_ns:
            self.console.print(f"{tested.parent}: of an earlier {name}; tested again")
            shutil.rmtree(tested.parent)
        self.run(TEST, f"test-{name}", [f"actor.model.path={model}"])

    def kept(self, what: str) -> dict[str, Any]:
        """Seconds or commits by run."""
        path = self.root / f"{what}.json"
        return json.loads(path.read_text()) if path.exists() else {}


def require_of_a_stage(overrides: Sequence[str]) -> None:
    """Raises: ValueError for an override that names no stage, and for one of what all stages must have in common."""
    for each in overrides:
        stage, _, key = each.partition("=")[0].partition(":")
        if stage not in (GRPO.name, TEST.name) or not key or "=" not in each:
            raise ValueError(f"{each}: expected grpo:section.key=value or test:section.key=value")
        if key in COMMON:
            raise ValueError(f"{each}: it is of all stages and of the data; give {COMMON[key]}")


def settings_of(model: Path) -> dict[str, str]:
    """Digests of the model and of the task's files."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in FILES for path in ROOT.glob(pattern)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return {"model_sha256": digest_of_directory(model), "files_sha256": digest.hexdigest()}


def run(demo: Demo) -> dict[str, Any]:
    """Run all of it. Returns the figures."""
    demo.begin()
    demo.test(RELEASED)
    demo.train()
    demo.test(GRPO.name)
    found = figures(demo.root, MODELS)
    seconds = {name: demo.kept("seconds")[name] for name in ("test-released", "grpo", "test-grpo")}
    found |= {"seed": demo.seed, "commits": demo.kept("commits"), "seconds": seconds}
    write_json(demo.root / "summary.json", found)
    sections = ["<h2>Questions that training never asked</h2>", conversations(demo.root, MODELS)]
    write_report([demo.root / GRPO.name], demo.root / "report.html", title="megarlhf demo: tools", first=sections)
    demo.console.rule("[bold]test data")
    demo.console.print(table("figures of test questions, 95% intervals over questions", rows_of(found["models"]),
                             ("model", *FIGURES)))  # fmt: skip
    demo.console.print("rewards of the steps:", ", ".join(map(format_number, found["rewards"][GRPO.name])))
    demo.console.print(table("time", list(seconds.items()), ("stage", "seconds")))
    minutes = sum(seconds.values()) / 60
    demo.console.print(f"{minutes:.0f} minutes; {demo.root / 'summary.json'}, {demo.root / 'report.html'}")
    return found


def rows_of(models: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows of the closing table."""
    return [(name, *(shown(words, of[words]) for words in FIGURES)) for name, of in models.items()]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages in order; a failing stage ends it with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="where everything is written")
    parser.add_argument("--seed", type=int, default=SEEDS[0], help="of data, order and samples")
    parser.add_argument("--model", type=Path, help="another model directory than that of `make pretrained`")
    parser.add_argument(
        "overrides", nargs="*", metavar="STAGE:section.key=value", help="such as grpo:train.num_steps=4"
    )
    options = parser.parse_args(argv)
    try:
        run(Demo(options.root, (options.model or directory()).absolute(), options.seed, options.overrides))
    except (ValueError, FileNotFoundError) as error:
        print(f"make demo-tools: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
