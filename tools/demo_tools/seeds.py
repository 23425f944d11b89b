"""`make demo-tools-seeds`: the tools demo for several seeds, each with a control.

The control permutes the rewards of each step over its samples, so that they say nothing about the answers. What has
been run is kept under runs/demo-tools-seeds: the command goes on where it was stopped. Writes
benchmarks/results/demo_tools.json, from which `python -m tools.demo_tools.tables --page` makes the tables of
docs/demo-tools.md; seeds that are in the file and are not asked for stay, if the settings are the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from tools.demo.pipeline import call, write_json
from tools.demo_chat.result_file import earlier, mean_over
from tools.demo_tools.figures import FIGURES, figures
from tools.demo_tools.run import MODELS, SEEDS, Demo, run, settings_of
from tools.pretrained import directory

RESULTS = Path("benchmarks/results/demo_tools.json")
DEFAULT_ROOT = Path("runs/demo-tools-seeds")
CONTROL = "control"
COMMAND = "make demo-tools-seeds"


def main(argv: Sequence[str] | None = None, call: Callable[[Sequence[str]], int] = call) -> int:
    """Run all seeds; a failing stage ends it with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--model", type=Path, help="another model directory than that of `make pretrained`")
    parser.add_argument("--set", nargs="+", default=[], metavar="STAGE:section.key=value", help="as of demo-tools")
    options = parser.parse_args(argv)
    try:
        model = (options.model or directory()).absolute()
        settings = {**settings_of(model), "overrides": options.set}
        earlier(options.out, settings)
        for seed in options.seeds:
            demo = Demo(options.root / f"seed-{seed}", model, seed, options.set, call)
            keep(options.out, settings, seed, of_seed(demo))
    except (ValueError, FileNotFoundError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


def of_seed(demo: Demo) -> dict[str, Any]:
    """The demo with a seed, and its control."""
    run(demo)
    demo.train(CONTROL, ["algo.shuffle_rewards=true"])
    demo.test(CONTROL)
    commits = list(dict.fromkeys(demo.kept("commits").values()))
    about = machine(COMMAND) | {"commit": ", ".join(commits)}
    return figures(demo.root, (*MODELS, CONTROL)) | {"seconds": demo.kept("seconds"), "about": about}


def keep(path: Path, settings: Mapping[str, Any], seed: int, found: Mapping[str, Any]) -> None:
    """Write a seed's figures beside those of others. Raises: ValueError where the file is of other settings."""
    seeds = {**earlier(path, settings).get("seeds", {}), str(seed): found}
    seeds = {number: seeds[number] for number in sorted(seeds, key=int)}
    models = next(iter(seeds.values()))["models"]
    summary = {
        name: {words: mean_over([each["models"][name][words]["value"] for each in seeds.values()]) for words in FIGURES}
        for name in models
    }
    write_json(path, {"settings": settings, "seeds": seeds, "summary": summary})


if __name__ == "__main__":
    raise SystemExit(main())
