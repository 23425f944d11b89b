"""Prompts of groups computed once against once for each response, on one GPU. `make bench-gpu-prompts`.

A training phase of GRPO in bf16 (old log-probs, forward, backward, two optimizer steps) of a model in the shape of
Llama-3.2-1B with 8 prompts of 8 responses, prompt to response 1:1 (512 tokens each), 4:1 (1024 to 256) and 1:4. Both
sides train the same roles in the same process, in turn, to and fro; the first round of each is not counted. Beside the
seconds: floating-point operations by formula, the most memory, and what a rehearsal said of it. Before that, attention
of one layer alone: merged by the kernels of varlen_attn, with copies of the prompts (plain), and unshared.

    python -m benchmarks.gpu_prompts                      # within --limit seconds; what is measured is written at once
    python -m benchmarks.gpu_prompts --quick              # one mix, the shape of SmolLM2-135M, fewer rounds
    python -m benchmarks.gpu_prompts --rehearsed          # adds a rehearsal's memory to what was measured; needs no GPU
    python -m benchmarks.gpu_prompts --rehearse           # the same code on a CPU with tiny shapes
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_packed import write
from benchmarks.gpu_prompts_work import (
    MIXES,
    PHASES,
    SIDES,
    Sizes,
    Trainer,
    as_dict,
    attention_ms,
    attention_pairs,
    configuration,
    flops,
    way_of,
    write_model,
)
from benchmarks.gpu_timing import Clock, Deadline, spread
from benchmarks.machine import ROOT, machine
from megarlhf.runtime import RankInfo, initialize, shutdown

RESULT = ROOT / "benchmarks" / "results" / "gpu_prompts.json"
REHEARSED = ROOT / "build" / "gpu_prompts_rehearsal.json"
Rounds = dict[str, list[dict[str, Any]]]
"""By side, the first among them."""


def measured(trainer: Trainer, mix: str, rounds: int, deadline: Deadline) -> Rounds | str:
    """Rounds of both sides, to and fro, or why there are too few to compare."""
    found: Rounds = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            last = found[side][-1]["seconds"] if found[side] else 0.0
            if deadline.left() < 10.0 + 1.5 * last:
                return found if all(len(each) > 1 for each in found.values()) else "no time left"
            found[side].append(trainer.round(mix, side))
            print(f"  {mix} {side}: {found[side][-1]['seconds']:.3f} s", flush=True)
    return found


def summary(rounds: Rounds, operations: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Seconds, memory and operations of both sides, and ratios: of seconds and operations unshared over shared, of
    memory shared over unshared."""
    ways: dict[str, Any] = {}
    for side, each in rounds.items():
        seconds = spread(one["seconds"] for one in each[1:])
        ways[side] = {
            "seconds": seconds,
            "by_phase": {phase: spread(one["by_phase"][phase] for one in each[1:]) for phase in PHASES},
            "peak_bytes": max((one["peak_bytes"] for one in each if one["peak_bytes"]), default=None),
            "flops": operations[side],
            "flops_per_second": operations[side]["all"] / seconds["median"],
            "grad_norm": each[0]["grad_norm"],
            "prompts_computed": each[0]["prompts_computed"],
            "rounds": [one["seconds"] for one in each[1:]],
        }
    shared, unshared = ways["shared"], ways["unshared"]
    ratio = unshared["seconds"]["median"] / shared["seconds"]["median"]
    of_flops = {part: unshared["flops"][part] / shared["flops"][part] for part in shared["flops"]}
    norms = shared["grad_norm"], unshared["grad_norm"]
    return {
        "unshared_over_shared": ratio,
        "flop_ratio": of_flops["all"],
        "share_of_flop_ratio": ratio / of_flops["all"],
        "by_phase": {
            phase: unshared["by_phase"][phase]["median"] / max(shared["by_phase"][phase]["median"], 1e-9)
            for phase in PHASES
        },
        "flop_ratio_by_phase": {"score/actor": of_flops["score"], "train/actor": of_flops["train"]},
        "shared_memory_over_unshared": shared["peak_bytes"] / unshared["peak_bytes"] if shared["peak_bytes"] else None,
        "grad_norms_differ_by": max(norms) / min(norms) - 1,
        "ways": ways,
    }


def in_words(mix: str, found: dict[str, Any]) -> str:
    memory = found["shared_memory_over_unshared"]
    told = "" if memory is None else f", memory shared over unshared {memory:.3f}"
    return (
        f"{mix}: unshared over shared {found['unshared_over_shared']:.2f}, operations {found['flop_ratio']:.2f}{told}; "
        f"gradient norms differ by {found['grad_norms_differ_by']:.2g}"
    )


def attention(sizes: Sizes, device: torch.device, calls: int) -> dict[str, Any]:
    """By mix."""
    clock, found = Clock(device), {}
    for mix in MIXES:
        ms = attention_ms(clock, sizes, mix, calls)
        ratios = {
            "unshared_over_merged": ms["unshared"] / ms["merged"],
            "plain_over_merged": ms["plain"] / ms["merged"],
        }
        found[mix] = {"ms": ms, **ratios, "pairs_unshared_over_shared": attention_pairs(sizes, mix)}
        print(f"attention {mix}: {', '.join(f'{name} {value:.3f} ms' for name, value in ms.items())}", flush=True)
    return found


# --- a rehearsal's memory -------------------------------------------------------------------------


def add_rehearsed(path: Path) -> None:
    """Beside the bytes of every way what a rehearsal of its configuration says, the most of the same phases."""
    from tools.gpu_check.cases import Job, Launch
    from tools.gpu_check.rehearse import rehearsed_peaks

    result = json.loads(path.read_text())
    sizes = Sizes(**{name: result["sizes"][name] for name in Sizes.__dataclass_fields__})
    with tempfile.TemporaryDirectory(prefix="gpu_prompts-") as directory:
        out = Path(directory)
        model = write_model(out / "model", sizes.model)
        for mix, found in result["mixes"].items():
            prompt, response = sizes.lengths(mix)
            data = out / f"{mix}.jsonl"
            # The tokenizer puts a token in front, and makes one of each digit.
            data.write_text((json.dumps({"prompt": "7" * (prompt - 1), "response": ""}) + "\n") * sizes.prompts)
            for side, way in found.get("ways", {}).items():
                config = configuration(model, sizes, mix, side, out / "run", str(data))
                job = Job(name=f"{mix} {side}", command="rl", config=config, constant=response, measured=True)
                launch = Launch(check="memory", case=job.name, ranks=1, jobs=[job])
                kind = "cpu" if result["rehearsal"] else "gpu"
                peaks = rehearsed_peaks(launch.dump(out), launch, kind, "local")[0]
                way["rehearsed_bytes"] = max(each.nbytes for each in peaks if each.phase in PHASES)
                if way["peak_bytes"]:
                    way["rehearsed_over_measured"] = way["rehearsed_bytes"] / way["peak_bytes"]
                print(f"{mix} {side}: rehearsed {way['rehearsed_bytes'] / 2**30:.2f} GiB", flush=True)
                write(result, path)


# --- the command ----------------------------------------------------------------------------------


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU with tiny shapes; marked so in the result")
    parser.add_argument("--rehearsed", action="store_true", help="add a rehearsal's memory to the result that is there")
    parser.add_argument("--quick", action="store_true", help="one mix, the smaller model, two rounds")
    parser.add_argument("--model", choices=("1b", "135m"))
    parser.add_argument("--only", choices=tuple(MIXES), action="append", help="a mix; may be given several times")
    parser.add_argument("--rounds", type=int, help="of each side that count")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for the whole run")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    small = arguments.quick or arguments.rehearse
    arguments.model = "tiny" if arguments.rehearse else arguments.model or ("135m" if small else "1b")
    arguments.only = arguments.only or (["1_1"] if small else list(MIXES))
    arguments.rounds = arguments.rounds or (2 if small else 3)
    arguments.out = arguments.out or (REHEARSED if arguments.rehearse else RESULT)
    if not (arguments.rehearse or arguments.rehearsed or torch.cuda.is_available()):
        parser.error("torch sees no CUDA device; use --rehearse to try the same code on a CPU")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parsed(argv)
    if arguments.rehearsed:
        add_rehearsed(arguments.out)
        return
    deadline = Deadline(arguments.limit)
    sizes = Sizes(model=arguments.model)
    if arguments.rehearse:
        sizes = replace(sizes, prompts=4, budget=9216 // 32, shrink=32)
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    result: dict[str, Any] = {
        "rehearsal": arguments.rehearse,
        "finished": False,
        "machine": machine(shlex.join(["python", "-m", "benchmarks.gpu_prompts", *argv]), device, arguments.commit),
        "sizes": as_dict(sizes),
        "way": way_of(device, sizes),
        "attention": attention(sizes, device, 3 if arguments.rehearse else 10),
        "mixes": {},
    }
    write(result, arguments.out)
    with tempfile.TemporaryDirectory(prefix="gpu_prompts-") as directory:
        model = write_model(Path(directory) / "model", sizes.model)
        trainer = Trainer(model, sizes, initialize(RankInfo(), seed=0), Path(directory))
        print(f"built, {deadline.left():.0f} s left", flush=True)
        for mix in arguments.only:
            rounds = measured(trainer, mix, arguments.rounds, deadline)
            if isinstance(rounds, str):
                result["mixes"][mix] = {"left_out": rounds}
            else:
                result["mixes"][mix] = summary(rounds, {side: flops(model, sizes, mix, side) for side in SIDES})
                print(in_words(mix, result["mixes"][mix]), flush=True)
            write(result, arguments.out)
        trainer.close()
    result["finished"] = True
    write(result, arguments.out)
    shutdown()


if __name__ == "__main__":
    main()
