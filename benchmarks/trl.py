"""TRL and ours on a real model, side by side on the CPU: steps of GRPO, of SFT, and of a reward model.

SmolLM2-135M-Instruct in fp32 (`make pretrained`), one process and the same threads for each side, the same prompts,
reward, samples, optimizer and precision. Comparisons:

  grpo_mixed, grpo_equal   whole steps with a KL to the reference: 8 prompts of the list task (trl_task.py) with 8
                           responses each, up to 64 tokens as they come, or all of 64 tokens to prompts of one length;
                           each side generates with its own engine: ours with vLLM, TRL with transformers
  sft_mixed, sft_equal     an optimizer step on 32 texts, lengths lognormal or equal
  rm_mixed, rm_equal       the same of a reward model on 16 pairs

Figures are OUR seconds over TRL's: below 1, ours is faster. How one is found: trl_compare.py. What a comparison has
found is kept in build/bench-trl/: a run of the same commit goes on from there. Learning curves: trl_curves.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.kept import Kept, commit_at_end
from benchmarks.machine import ROOT, machine
from benchmarks.packing_children import Message, trl_environment
from benchmarks.page import load_result
from benchmarks.peers import UnavailableError
from benchmarks.trl_compare import Comparison, Peer, Setting, compare
from benchmarks.trl_data import Data, prepare, prepare_tiny
from benchmarks.trl_figures import DIRECTION, RESULT, figures, goals, in_words, machine_of

KEPT = ROOT / "build" / "bench-trl"
GROUPED = {"train_sampling_strategy": "group_by_length"}
GROUPED_PAIRS = GROUPED | {"remove_unused_columns": False}
"""Pairs have no `input_ids`, so that the sampler reads the data's column `length`."""
REBALANCED = {"train_sampling_strategy": "batch_rebalance"}
PADDING_FREE = {"padding_free": True}
COMPARISONS = {
    "grpo_mixed": Comparison(
        command="grpo",
        workload="long_tailed",
        budgets=(256,),
        peers=(Peer(micro=2), Peer(micro=1)),
    ),
    "grpo_equal": Comparison(command="grpo", workload="equal", budgets=(768,), peers=(Peer(micro=4), Peer(micro=2))),
    "sft_mixed": Comparison(
        command="sft",
        workload="long_tailed",
        budgets=(1024,),
        peers=(
            Peer(micro=8, settings=PADDING_FREE, word="padding-free"),
            Peer(micro=16, settings=PADDING_FREE, word="padding-free"),
            Peer(micro=16, settings=REBALANCED, word="rebalanced"),
            Peer(micro=4, settings=GROUPED, word="grouped"),
            Peer(micro=2, settings=GROUPED, word="grouped"),
            Peer(micro=8, settings=GROUPED, word="grouped"),
        ),
    ),
    "sft_equal": Comparison(
        command="sft",
        workload="equal",
        budgets=(1024,),
        peers=(
            Peer(micro=8),
            Peer(micro=4),
            Peer(micro=16),
            Peer(micro=8, settings=PADDING_FREE, word="padding-free"),
        ),
    ),
    "rm_mixed": Comparison(
        command="rm",
        workload="long_tailed",
        budgets=(1024,),
        peers=(
            Peer(micro=2, settings=GROUPED_PAIRS, word="grouped"),
            Peer(micro=1, settings=GROUPED_PAIRS, word="grouped"),
            Peer(micro=4, settings=GROUPED_PAIRS, word="grouped"),
        ),
    ),
    "rm_equal": Comparison(
        command="rm", workload="equal", budgets=(768,), peers=(Peer(micro=8), Peer(micro=4), Peer(micro=16))
    ),
}
QUICK_ROUNDS, ROUNDS = 1, 3


def environment_of_trl(arguments: argparse.Namespace, left_out: dict[str, str]) -> dict[str, str] | None:
    """None, and the reason, where there is no TRL."""
    try:
        if arguments.no_trl:
            raise UnavailableError("--no-trl")
        return trl_environment(arguments.threads)
    except UnavailableError as reason:
        left_out["trl"] = str(reason)
        return None


def setting_of(arguments: argparse.Namespace, data: Data, trl: dict[str, str] | None) -> Setting:
    setting = Setting(
        data=data,
        threads=arguments.threads,
        rounds=arguments.rounds,
        trl=trl,
        most_tries=1 if arguments.quick else None,
    )
    if not arguments.rehearse:
        return setting
    engine = "megatron" if arguments.no_vllm else "vllm"
    return dataclasses.replace(setting, engine=engine, budget=96, micro=2, together=True)


def model_of(arguments: argparse.Namespace) -> Path:
    """Raises: FileNotFoundError, which says what to do, where `make pretrained` has not been run."""
    if arguments.model is not None:
        return Path(arguments.model)
    from tools.pretrained import directory

    return directory()


def require_model(parser: argparse.ArgumentParser, model: str | None) -> None:
    """Ends the command where the directory that was named is none."""
    if model is not None and not (Path(model) / "config.json").is_file():
        parser.error(f"--model {model} is no model directory: it has no config.json")


def require_whole(out: Path, result: Path, left_out: Mapping[str, str]) -> None:
    """Raises: ValueError where what would be written in place of the result lacks something."""
    if out == result and left_out:
        raise ValueError(
            f"{result.name} stays as it is, as {'; '.join(f'{k}: {v}' for k, v in left_out.items())}: give --out"
        )


def earlier(arguments: argparse.Namespace) -> dict[str, Message]:
    """Of the result those that are not measured anew: where some were named, and all the others are there already.

    Raises: ValueError where they were measured with other settings."""
    if not arguments.only or arguments.out != RESULT:
        return {}
    result = load_result(RESULT) or {"comparisons": {}}
    missing = COMPARISONS.keys() - result["comparisons"].keys() - set(arguments.only)
    if missing:
        raise ValueError(f"{RESULT.name} lacks {', '.join(sorted(missing))}, and a part is no result: give --out")
    settings = {name: getattr(arguments, name) for name in ("rounds", "threads")} | {"model": model_of(arguments).name}
    if other := {name: result.get(name) for name, value in settings.items() if result.get(name) != value}:
        raise ValueError(f"{RESULT.name} was measured with {other}, not {settings}: measure all, or give --out")
    kept = {name: found for name, found in result["comparisons"].items() if name not in arguments.only}
    return {name: found | {"machine": machine_of(result, found)} for name, found in kept.items()}


def run(arguments: argparse.Namespace) -> Message:
    """All comparisons, or those that were named."""
    left_out: dict[str, str] = {}
    trl = environment_of_trl(arguments, left_out)
    names = arguments.only or tuple(COMPARISONS)
    if not arguments.rehearse and importlib.util.find_spec("vllm") is None:
        left_out |= {name: "vllm is not installed" for name in names if COMPARISONS[name].command == "grpo"}
    require_whole(arguments.out, RESULT, left_out)
    for what, why in left_out.items():
        print(f"left out: {what}: {why}", flush=True)
    about = machine("make bench-trl")
    comparisons = earlier(arguments)
    with tempfile.TemporaryDirectory() as directory:
        data = prepare_tiny(Path(directory)) if arguments.rehearse else prepare(KEPT, model_of(arguments))
        setting = setting_of(arguments, data, trl)
        key = {"machine": about, "rounds": setting.rounds, "threads": setting.threads, "trl": trl is not None}
        kept = None if arguments.rehearse else Kept(KEPT, key | {"tries": setting.most_tries, "model": str(data.model)})
        for name in [name for name in names if name not in left_out]:
            found = kept.found(name) if kept else None
            if found is None:
                found = compare(COMPARISONS[name], setting)
                found["machine"] = about | {"commit": commit_at_end(about["commit"])}
                if kept:
                    kept.keep(name, found)
            comparisons[name] = found
            print(in_words(name, found), flush=True)
    comparisons = {name: comparisons[name] for name in COMPARISONS if name in comparisons}
    found = figures(comparisons)
    return {
        **found,
        "direction": DIRECTION,
        "goals": goals(found),
        "rehearsal": arguments.rehearse,
        "quick": arguments.quick,
        "left_out": left_out,
        "comparisons": comparisons,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "model": "a tiny random model" if arguments.rehearse else data.model.name,
        "machine": about,
    }


def positive(text: str) -> int:
    """A number of an option. Raises: ValueError, which argparse says, for less than 1."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def require_rehearsal(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the command where an option would have no effect."""
    if arguments.no_vllm and not arguments.rehearse:
        parser.error("--no-vllm is for --rehearse: ours is compared with the engine that its users have")


def add_arguments(parser: argparse.ArgumentParser, out: Path) -> None:
    """Those of the learning curves too."""
    parser.add_argument(
        "--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of each side's one process"
    )
    parser.add_argument("--model", help="a Hugging Face directory; default: that of make pretrained")
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--no-vllm", action="store_true", help="of a rehearsal: generate with the actor itself")
    parser.add_argument("--rehearse", action="store_true", help="a tiny random model: whether it runs, not how fast")
    parser.add_argument("--out", type=Path, default=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=None, help=f"that count; default: {ROUNDS}, of --quick 1")
    parser.add_argument(
        "--only", nargs="+", choices=COMPARISONS, help="default: all; the result keeps what it has of the others"
    )
    parser.add_argument("--quick", action="store_true", help="one round, and of each side's ways the first alone")
    add_arguments(parser, RESULT)
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    part = arguments.rehearse or arguments.quick or arguments.no_trl or arguments.rounds < ROUNDS
    if arguments.out == RESULT and part:
        parser.error(f"a rehearsal, or a part, or less than {ROUNDS} rounds, are no result: give --out")
    require_rehearsal(parser, arguments)
    require_model(parser, arguments.model)
    try:
        result = run(arguments)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    for goal in (goal for goal in result["goals"] if goal["met"] is not None):
        print(goal["in_words"])


if __name__ == "__main__":
    main()
