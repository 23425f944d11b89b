"""Reward and test accuracy over time, ours and TRL side by side: GRPO on one task, step for step in turn, some seeds.

A task is two JSON lines files and a rule (trl_task.py); without arguments it is the list task. Both sides begin with
the same model, and see the same prompts in the same order, which follows from the seed. Seconds are those of steps;
greedy responses to the test prompts, before the first step and after every few, are not in them. Each side samples for
itself, so that rewards agree within their spread only; that both make the same of the same responses is looked at
first. What a seed has found is kept in build/bench-trl/: a run of the
same commit goes on from there. The result file keeps the other seeds that it has, if their settings are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.interleaved import Ask, norm_of, require_same
from benchmarks.kept import Kept, commit_at_end
from benchmarks.machine import machine
from benchmarks.packing_children import Child, Message
from benchmarks.page import load_result
from benchmarks.trl import (
    COMPARISONS,
    KEPT,
    add_arguments,
    environment_of_trl,
    model_of,
    positive,
    require_model,
    require_rehearsal,
    require_whole,
    setting_of,
)
from benchmarks.trl_compare import Setting, start_ours, start_theirs
from benchmarks.trl_data import Data, Step, prepare_tiny, step_of
from benchmarks.trl_figures import CURVES, machine_of
from benchmarks.trl_task import Task, read_records, right, write_records, write_task
from megarlhf.resume.points.file_digest import digest_of

COMPARISON = dataclasses.replace(COMPARISONS["grpo_mixed"], peers=COMPARISONS["grpo_mixed"].peers[:1])
"""Of each side the way that `make bench-trl` compares on lengths as they come."""
UPDATES = 3
"""Of both sides on the responses that TRL draws, before any course."""
DIRECTION = "ours_over_trl is OUR seconds to the same mean test reward over TRL's: below 1, ours is there earlier."


Children = dict[str, tuple[Child, Message]]
"""By side: its process, and what a round is told."""


@contextlib.contextmanager
def both_sides(
    setting: Setting, step: Step, records: Sequence[Message], seed: int, arguments: argparse.Namespace
) -> Iterator[Children]:
    """Both sides, at the model's weights, on these prompts in this order, again and again."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        prompts = write_records(Path(directory) / "prompts.jsonl", records)
        data = dataclasses.replace(setting.data, steps={"long_tailed": dataclasses.replace(step, prompts=prompts)})
        options = {"seed": seed, "lr": arguments.lr, "beta": arguments.beta}
        here = dataclasses.replace(setting, data=data)
        children: Children = {}
        ours = start_ours(COMPARISON, here, **options)
        stack.callback(ours.stop)
        children["ours"] = ours, {"way": next(iter(ours.facts["ways"]))}
        for peer in here.peers(COMPARISON):
            theirs = start_theirs(COMPARISON, here, peer, **options)
            stack.callback(theirs.stop)
            children["trl"] = theirs, {}
        yield children


def compare(setting: Setting, step: Step, seed: int, arguments: argparse.Namespace) -> Message:
    """Both sides' courses for one seed."""
    records = read_records(step.prompts)
    require_whole_steps(len(records), step.num_prompts, arguments.steps)
    random.Random(seed).shuffle(records)
    with both_sides(setting, step, records, seed, arguments) as children:
        return courses(children, arguments.steps, arguments.every)


def updates_on_the_same(setting: Setting, step: Step, arguments: argparse.Namespace) -> Message:
    """Some steps of TRL's, and ours on the responses that TRL has drawn in them: gradient norms, and what the test
    prompts say of both models then. Where they agree, what differs between two courses comes from what each side has
    drawn for itself.

    Raises: AssertionError where norms do not."""
    norms: dict[str, list[float]] = {}
    differ = []
    with both_sides(setting, step, read_records(step.prompts), 0, arguments) as children:
        for _ in range(UPDATES):
            drawn: Message = {}
            for name, (child, told) in reversed(children.items()):
                answer = child.ask("round", **told, **drawn)
                norms.setdefault(name, []).append(norm_of(answer))
                if "trl" in children:
                    drawn = child.ask("drawn") if name == "trl" else {}
            differ.append(require_same({name: each[-1] for name, each in norms.items()}))
        rewards = {name: statistics.mean(child.ask("evaluate")["rewards"]) for name, (child, _) in children.items()}
    return {"grad_norms": norms, "norms_differ_by": [each for each in differ if each is not None], "rewards": rewards}


def require_whole_steps(records: int, per_step: int, steps: int) -> None:
    """Raises: ValueError where the sides would see other prompts: the last ones, which fill no step, are left out by
    TRL's loader, and ours goes on with them."""
    if steps * per_step > records and records % per_step:
        raise ValueError(
            f"{records} prompts are {records // per_step} steps of {per_step} and {records % per_step} more, and "
            f"{steps} steps were asked for; give a multiple of {per_step}, or less --steps"
        )


def courses(children: Children, steps: int, every: int) -> Message:
    """By side its steps and its evaluations; sides take turns, to and fro."""
    found: Message = {name: {"steps": [], "evaluations": []} for name in children}
    seconds = dict.fromkeys(children, 0.0)
    asks: dict[str, Ask] = {
        name: (lambda child=child, told=told: child.ask("round", **told)) for name, (child, told) in children.items()
    }
    for step in range(steps + 1):
        for name in asks if step % 2 == 0 else reversed(asks):
            if step:
                answer = asks[name]()
                seconds[name] += answer["step_seconds"]
                row = {key: answer[key] for key in ("reward", "response_length", "step_seconds", "generated_tokens")}
                found[name]["steps"].append({"step": step, "seconds": seconds[name], **row})
            if step % every == 0 or step == steps:
                found[name]["evaluations"].append(
                    {"step": step, "seconds": seconds[name], **evaluated(children[name][0].ask("evaluate"))}
                )
                print(name, found[name]["evaluations"][-1], flush=True)
    return found


def evaluated(answer: Message) -> Message:
    """Mean reward, the share that is right, and some responses to look at."""
    rewards = answer["rewards"]
    return {"reward": statistics.mean(rewards), "right": statistics.mean(map(right, rewards)), "texts": answer["texts"]}


def means(seeds: dict[str, Message], side: str) -> list[Message]:
    """Of all seeds, by evaluation: seconds, reward and share right, the latter with their range."""
    rows = []
    for at in zip(*(found[side]["evaluations"] for found in seeds.values()), strict=True):
        row: dict[str, Any] = {"step": at[0]["step"], "seconds": statistics.mean(each["seconds"] for each in at)}
        for key in ("reward", "right"):
            values = [each[key] for each in at]
            row |= {key: statistics.mean(values), f"{key}_range": [min(values), max(values)]}
        rows.append(row)
    return rows


def seconds_until(rows: list[Message], reward: float) -> float | None:
    """When the mean test reward first is so large, between two evaluations as on a straight line; None where never."""
    for before, after in zip(rows[:1] + rows, rows, strict=False):
        if after["reward"] >= reward:
            rise = after["reward"] - before["reward"]
            part = (reward - before["reward"]) / rise if rise > 0 else 1.0
            return float(before["seconds"] + part * (after["seconds"] - before["seconds"]))
    return None


def to_the_same(courses: dict[str, list[Message]]) -> Message:
    """Seconds to the reward that both sides reach, the lesser of their best, and all seconds."""
    level = min(max(row["reward"] for row in rows) for rows in courses.values())
    until = {side: seconds_until(rows, level) for side, rows in courses.items()}
    ours, trl = until["ours"], until["trl"]
    return {
        "level": level,
        "seconds_until": until,
        "ours_over_trl": ours / trl if ours and trl else None,
        "steps_ours_over_trl": courses["ours"][-1]["seconds"] / courses["trl"][-1]["seconds"],
    }


def summary(seeds: dict[str, Message]) -> Message:
    """Mean courses, and what they and those of each seed say of both sides."""
    sides = [side for side in ("ours", "trl") if all(side in found for found in seeds.values())]
    found: Message = {"means": {side: means(seeds, side) for side in sides}, "ours_over_trl": None}
    if "trl" not in sides:
        return found
    each = {seed: to_the_same({side: of[side]["evaluations"] for side in sides}) for seed, of in seeds.items()}
    return found | to_the_same(found["means"]) | {"of_seeds": each}


def task_of(arguments: argparse.Namespace) -> Task:
    """The one that was named, or the list task."""
    named = arguments.prompts, arguments.test, arguments.rule
    if not any(named):
        return write_task(KEPT / "task")
    if not all(named):
        raise ValueError("a task is three things: give --prompts, --test and --rule, or none of them")
    return Task(Path(arguments.prompts), Path(arguments.test), arguments.rule)


def earlier(arguments: argparse.Namespace, settings: Message) -> tuple[dict[str, Message], Message | None]:
    """Of the result file the seeds that are not measured anew, those of another day, or of another machine; and the
    updates on the same responses.

    Raises: ValueError where they were measured with other settings."""
    result = load_result(arguments.out) or {}
    seeds = {
        seed: found | {"machine": machine_of(result, found)}
        for seed, found in result.get("seeds", {}).items()
        if int(seed) not in arguments.seeds
    }
    other = {name: result.get(name) for name, value in settings.items() if result.get(name) != value}
    if seeds and other:
        asked = {name: settings[name] for name in other}
        raise ValueError(
            f"{arguments.out.name} has the seeds {', '.join(seeds)} measured with {other}, not {asked}: measure them "
            "anew too (--seeds), or give --out"
        )
    return seeds, None if other else result.get("updates")


def run(arguments: argparse.Namespace) -> Message:
    """All seeds. Raises: as `require_whole`, `earlier` and `task_of`."""
    left_out: dict[str, str] = {}
    trl = environment_of_trl(arguments, left_out)
    require_whole(arguments.out, CURVES, left_out)
    about = machine("make bench-trl-curves")
    with tempfile.TemporaryDirectory() as directory:
        if arguments.rehearse:
            data = prepare_tiny(Path(directory))
            step = data.steps["long_tailed"]
        else:
            task = task_of(arguments)
            step = step_of(task.train, task.test, task.rule)
            model = model_of(arguments)
            data = Data(model, model, {"long_tailed": step}, {})
        setting = setting_of(arguments, data, trl)
        told = {name: getattr(arguments, name) for name in ("steps", "every", "lr", "beta", "threads")}
        files = {"prompts": digest_of(step.prompts).sha256, "test": digest_of(step.test).sha256}
        settings = {
            **told,
            "rule": step.rule,
            "model": data.model.name,
            "files_sha256": files,
            "trl": trl is not None,
            "rehearsal": arguments.rehearse,
        }
        seeds, updates = earlier(arguments, settings)
        key = {"machine": about, **settings, "model": str(data.model.absolute())}
        kept = None if arguments.rehearse else Kept(KEPT, key)

        def measured(name: str, measure: Callable[[], Message]) -> Message:
            if kept and (found := kept.found(name)) is not None:
                return found
            found = measure()
            found["machine"] = about | {"commit": commit_at_end(about["commit"])}
            if kept:
                kept.keep(name, found)
            return found

        updates = updates or measured("curve_updates", lambda: updates_on_the_same(setting, step, arguments))
        for seed in arguments.seeds:
            seeds[str(seed)] = measured(f"curve_{seed}", lambda seed=seed: compare(setting, step, seed, arguments))
    seeds = {seed: seeds[seed] for seed in sorted(seeds, key=int)}
    return {
        **summary(seeds),
        "direction": DIRECTION,
        "left_out": left_out,
        "updates": updates,
        "seeds": seeds,
        **settings,
        "machine": about,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=positive, default=12)
    parser.add_argument("--every", type=positive, default=3, help="steps from one evaluation to the next")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--beta", type=float, default=0.02)
    parser.add_argument("--prompts", help="JSON lines with `prompt` and what the rule reads")
    parser.add_argument("--test", help="the same, for figures")
    parser.add_argument("--rule", help="package.module:function of prompt, response and the record's other columns")
    add_arguments(parser, CURVES)
    arguments = parser.parse_args()
    if arguments.out == CURVES and (arguments.rehearse or arguments.no_trl):
        parser.error("a rehearsal, or one side, is no result: give --out")
    require_rehearsal(parser, arguments)
    arguments.rounds, arguments.quick = 1, False
    require_model(parser, arguments.model)
    try:
        result = run(arguments)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    if result["ours_over_trl"] is not None:
        print(f"ours_over_trl: {result['ours_over_trl']:.2f} (seconds to a mean test reward of {result['level']:.3f})")


if __name__ == "__main__":
    main()
