"""`make demo-chat-seeds`: the chat demo for several seeds, with a control and an adapter, and at several layouts.

What has been run is kept under runs/demo-chat-seeds: the command goes on where it was stopped. Settings were chosen on
the seeds 0 to 4; figures are of other seeds' test prompts, which nothing else reads. The control permutes the rewards
of each step over its samples, so that they say nothing about the answers. Writes benchmarks/results/demo_chat.json,
from which `python -m tools.demo_chat.tables --page` makes the tables of docs/demo-chat.md; with --add it keeps what is
in that file of other seeds and parts, such as other machines have run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.runs import differences, results
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.observe.terminal.progress import make_console, table
from tools.demo.pipeline import call, write_json
from tools.demo_chat.figures import DIFFERENCES, figures
from tools.demo_chat.killed import call_and_kill
from tools.demo_chat.pipeline import GRPO, MODELS, SEEDS, SFT, Overrides, Runner
from tools.demo_chat.rehearsed import rehearsed
from tools.demo_chat.result_file import about, added, earlier, settings
from tools.demo_chat.run import evaluate_all, rows_of, run, start, train
from tools.demo_chat.sliced import SLICED, sliced
from tools.pretrained import directory

RESULTS = Path("benchmarks/results/demo_chat.json")
DEFAULT_ROOT = Path("runs/demo-chat-seeds")
VARIANTS: Mapping[str, Sequence[str]] = {
    "control": ("algo.shuffle_rewards=true",),
    "grpo-lora": ("actor.lora={rank: 16, targets: all-linear, export: merged}", "actor.optim.lr=1.0e-4"),
}
"""GRPO in other ways, by name: what differs from its configuration."""
PRECISE = ("test:rollout.num_samples_per_prompt=8",)
"""With two answers to each prompt, as `make demo-chat` draws for want of time, most of what spreads a difference of two
models over seeds is the draws."""
COMPARED = (*DIFFERENCES, ("control", "sft"), ("grpo-lora", "sft"), ("grpo-lora", "grpo"))
LAYOUTS: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "one rank": (1, {}),
    "TP3": (3, {"tp": 3}),
    "PP2": (2, {"pp": 2}),
    "TP3 x PP2": (6, {"tp": 3, "pp": 2}),
}
"""Ranks, and `actor.parallel`; the model has nine heads. vLLM is at TP1 everywhere."""
FIRST_STEP: Mapping[str, Sequence[str]] = {
    "sft": ("loss", "grad_norm"),
    "grpo": ("reward_mean", "entropy", "policy_loss", "kl", "actor_grad_norm", "rollout_logprob_gap_max"),
}
"""What is compared of the first step, by stage."""
SHORT = ("train.num_steps=2", "eval.every=0")
SMALL_STEP = ("train.prompts_per_step=4", "rollout.num_samples_per_prompt=8", "train.mini_batch_samples=32")
PARTS = ("seeds", "layouts", "killed", "rehearsed", "slices")
RUNS: Mapping[str, tuple[str, ...]] = {
    "layouts": ("layouts-",),
    "killed": ("killed", "undisturbed"),
    "rehearsed": ("profiled-",),
    "slices": tuple(prefix + name for prefix in ("", "test-") for name in SLICED),
}
"""How the names of a part's runs begin; those of `seeds` are all others."""


def main(argv: Sequence[str] | None = None, call: Callable[[Sequence[str]], int] = call) -> int:
    """Run all parts; a failing stage ends it with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), help="settings were chosen on 0 to 4")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--add", action="store_true", help="keep the other seeds and parts that the file has")
    parser.add_argument("--model", type=Path, help="another model directory than that of `make pretrained`")
    parser.add_argument("--set", nargs="+", default=[], metavar="[STAGE:]section.key=value", help="as of demo-chat")
    options = parser.parse_args(argv)
    try:
        model, overrides = (options.model or directory()).absolute(), Overrides((*PRECISE, *options.set))
        console = make_console()
        runners = {
            seed: Runner(options.root / f"seed-{seed}", console, model, seed, overrides, call, False)
            for seed in options.seeds
        }
        found: dict[str, Any] = {"settings": settings(model, overrides.given, VARIANTS), "about": {}}
        before = earlier(options.out, found["settings"])
        if not options.add and (lost := not_measured(before, options.parts, options.seeds)):
            raise ValueError(
                f"{options.out} has {', '.join(lost)}, which would be lost: --add keeps them, and --out names another "
                "file"
            )
        if "seeds" in options.parts:
            found["seeds"] = {str(seed): of_seed(runner) for seed, runner in runners.items()}
            found["about"] |= {f"seed {seed}": about(runner.commits(is_of_seed)) for seed, runner in runners.items()}
        if "slices" in options.parts:
            found["slices"] = sliced(runners)
            commits = [commit for each in runners.values() for commit in each.commits(partial(is_of, RUNS["slices"]))]
            found["about"]["slices"] = about(list(dict.fromkeys(commits)))
        first = next(iter(runners.values()))
        if set(options.parts) & {"layouts", "killed", "rehearsed"}:
            train(first)
        for name, part in (("layouts", layouts), ("killed", killed), ("rehearsed", rehearsed)):
            if name in options.parts:
                found[name] = part(first)
                found["about"][name] = about(first.commits(partial(is_of, RUNS[name])))
        found = added(before if options.add else {}, found)
    except (ValueError, FileNotFoundError) as error:
        print(f"make demo-chat-seeds: {error}", file=sys.stderr)
        return 2
    write_json(options.out, found)
    if "summary" in found:
        print_summary(console, found["summary"])
    console.print(f"wrote {options.out}")
    return 0


def not_measured(before: Mapping[str, Any], parts: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """What a result has that is not asked for."""
    again = seeds if "seeds" in parts else ()
    return [
        *(f"seed {seed}" for seed in before.get("seeds", {}) if int(seed) not in again),
        *(part for part in PARTS if part != "seeds" and part in before and part not in parts),
    ]


def of_seed(runner: Runner) -> dict[str, Any]:
    """The demo with this seed, and its variants."""
    start(runner)
    run(runner)
    for name, changes in VARIANTS.items():
        runner.run(GRPO, changes, name=name)
    evaluate_all(runner, tuple(VARIANTS))
    return figures(runner.root, (*MODELS, *VARIANTS), COMPARED) | {"seconds": runner.seconds()}


def is_of(beginnings: tuple[str, ...], run: str) -> bool:
    return run.startswith(beginnings)


def is_of_seed(run: str) -> bool:
    return not any(is_of(beginnings, run) for beginnings in RUNS.values())


def layouts(runner: Runner) -> dict[str, Any]:
    """The first step of SFT and of GRPO at each layout, from the same models and data."""
    found: dict[str, Any] = {}
    for stage, more in ((SFT, ()), (GRPO, SMALL_STEP)):
        found[stage.name] = {}
        for layout, (ranks, parallel) in LAYOUTS.items():
            changes = [f"run.nproc={ranks}", *SHORT, *more]
            changes += [f"actor.parallel.{key}={size}" for key, size in parallel.items()]
            changes += ["rollout.parallel.tp=1"] if stage is GRPO else []
            name = f"layouts-{stage.name}-{layout.lower().replace(' ', '')}"
            runner.run(stage, changes, name=name)
            found[stage.name][layout] = first_step(runner.root / name, FIRST_STEP[stage.name])
    return found


def first_step(run: Path, names: Sequence[str]) -> dict[str, Any]:
    row = next(row for row in read_metrics(run) if row["step"] == 1)
    return {name: row[name] for name in names}


def killed(runner: Runner) -> dict[str, Any]:
    """GRPO that is killed when its second resume point is there and goes on, and GRPO that nothing happens to."""
    changes = ["train.num_steps=4", "eval.every=0", "checkpoint.every=1", *SMALL_STEP]
    runner.run(GRPO, changes, name="undisturbed")
    run = runner.root / "killed"
    note = run / "killed.json"
    if not note.exists():
        runner.note_start("killed", changes)
        call_and_kill(runner.command(GRPO, changes, "killed"), run / "resume/step_000002")
        write_json(note, {"killed_at_step": max(row["step"] for row in read_metrics(run))})
    runner.run(GRPO, changes, name="killed")
    found = differences(results(run), results(runner.root / "undisturbed"))
    return {"steps": 4, **json.loads(note.read_text()), "equal": not found, "differences": found}


def print_summary(console: Any, summary: Mapping[str, Any]) -> None:
    rows = [row for kind in summary.values() for row in rows_of(kind)]
    console.print(table("means over seeds and their 95% intervals", rows, ("model", "figure", "value", "from", "to")))


if __name__ == "__main__":
    raise SystemExit(main())
