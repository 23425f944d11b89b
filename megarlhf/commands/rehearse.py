"""`megarlhf rehearse`: what a job will need and how long it will take, before it is queued. No GPU is needed."""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarlhf.commands.arguments import Once, positive, positives
from megarlhf.config import DPOConfig, FrozenModel, RLConfig, RMConfig, SFTConfig, load_config

CONFIGS: dict[str, type[FrozenModel]] = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig, "rl": RLConfig}
HARDWARE = Path(__file__).resolve().parents[2] / "configs" / "hardware" / "h100.yaml"
"""Where `--hardware` names none."""
DOES_NOT_FIT = 1
"""Exit status of a rehearsal that has found that the job does not run."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(
        prog="megarlhf rehearse",
        description="Run a job's program for one rank of each kind, on devices that hold no numbers: memory by phase, "
        "bytes on the wire, an estimate of the time.",
    )
    root.add_argument("command", choices=tuple(CONFIGS), metavar="COMMAND", help=", ".join(CONFIGS))
    root.add_argument("-c", "--config", required=True, action=Once, metavar="FILE", help="configuration of the job")
    root.add_argument("overrides", nargs="*", metavar="section.key=value", help="override configured values")
    root.add_argument("--world-size", type=positive, metavar="N", help="ranks of the job (default: run.world_size)")
    root.add_argument("--ranks-per-node", type=positive, default=8, metavar="N", help="default: %(default)s")
    root.add_argument("--steps", type=positive, default=2, metavar="N", help="steps to rehearse (default: %(default)s)")
    words = "which ranks: all, or numbers such as 0,8,16 (default: one of each kind)"
    root.add_argument("--ranks", type=_ranks, metavar="all|LIST", help=words)
    words = "a hardware file (default: configs/hardware/h100.yaml)"
    root.add_argument("--hardware", type=Path, action=Once, metavar="FILE", help=words)
    words = "memory of a device (default: the hardware file's)"
    root.add_argument("--gpu-memory-gib", type=_number, metavar="X", help=words)
    words = "YAML with numbers of what cannot be seen, such as context_mib (docs/rehearsal-gpu.md)"
    root.add_argument("--margin", type=Path, action=Once, metavar="FILE", help=words)
    words = "te: TransformerEngine's layers, by a table of what they keep; local: ours (default: %(default)s)"
    root.add_argument("--layers", choices=("te", "local"), default="te", help=words)
    words = "tokens of the busiest expert of a layer, in means (default: %(default)s: balanced)"
    root.add_argument("--routing-skew", type=_number, default=1.0, metavar="F", help=words)
    lengths = "constant:N, uniform:LOW,HIGH, lognormal:mean=M,sigma=S, a file of numbers, or an earlier run's directory"
    root.add_argument("--prompt-lengths", action=Once, metavar="WORDS", help=f"of prompts that stand in: {lengths}")
    root.add_argument("--response-lengths", action=Once, metavar="WORDS", help=f"of responses: {lengths}")
    words = "response tokens per second of one rollout engine (default: by the roofline of decoding)"
    root.add_argument("--rollout-tokens-per-second", type=_number, metavar="X", help=words)
    words = "rehearse every combination of values of keys, and order them"
    root.add_argument("--sweep", nargs="+", default=[], metavar="section.key=A,B", help=words)
    root.add_argument("--workers", type=positive, metavar="N", help="ranks at a time (default: the cores)")
    words = "folder for rehearsal.json and rehearsal.html (default: runs/rehearsal/COMMAND-FILE)"
    root.add_argument("-o", "--out", type=Path, action=Once, metavar="DIR", help=words)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. 0: the job runs; 1: it does not; 2: the user's mistake."""
    arguments = parser().parse_intermixed_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what is not here is stood in for
    warnings.filterwarnings("ignore", module="megatron")  # of what a machine without a GPU does not have
    try:
        return _sweep(arguments) if arguments.sweep else _one(arguments)
    except ValueError as error:
        print(f"{parser().prog}: {error}", file=sys.stderr)
        return 2


def _one(arguments: argparse.Namespace) -> int:
    from megarlhf.observe.progress import make_console
    from megarlhf.rehearsal.console import print_result
    from megarlhf.rehearsal.page import write_json, write_page
    from megarlhf.rehearsal.progress import shown
    from megarlhf.rehearsal.rehearse import rehearse

    request = _request(arguments, load_config(CONFIGS[arguments.command], arguments.config, arguments.overrides))
    with shown(request) as told:
        result = rehearse(request, told)
    console = make_console()
    print_result(result, console)
    out = _out(arguments)
    out.mkdir(parents=True, exist_ok=True)
    write_json(result, out / "rehearsal.json")
    write_page(result, out / "rehearsal.html")
    console.print(f"wrote {out / 'rehearsal.json'} and {out / 'rehearsal.html'}", highlight=False)
    return 0 if result.fits and not result.faults else DOES_NOT_FIT


def _sweep(arguments: argparse.Namespace) -> int:
    from megarlhf.observe.progress import make_console
    from megarlhf.rehearsal.progress import shown
    from megarlhf.rehearsal.run_sweep import print_sweep, run_sweep, write_sweep
    from megarlhf.rehearsal.sweep import parse_axes

    axes = parse_axes(arguments.sweep)

    def load(overrides: Sequence[str]) -> Any:
        return load_config(CONFIGS[arguments.command], arguments.config, [*arguments.overrides, *overrides])

    sweep = run_sweep(axes, load, lambda cfg: _request(arguments, cfg), shown)
    console = make_console()
    print_sweep(sweep, console)
    out = _out(arguments)
    out.mkdir(parents=True, exist_ok=True)
    for path in write_sweep(sweep, out):
        console.print(f"wrote {path}", highlight=False)
    return 0 if sweep.done and sweep.done[0][1].fits else DOES_NOT_FIT


def _request(arguments: argparse.Namespace, cfg: Any) -> Any:
    """What is asked for, checked. Raises: ValueError."""
    from megarlhf.rehearsal.hardware import load_hardware
    from megarlhf.rehearsal.lengths import parse
    from megarlhf.rehearsal.margin import MarginConfig
    from megarlhf.rehearsal.request import Request
    from megarlhf.rehearsal.routing import Routing

    if arguments.hardware is None and not HARDWARE.is_file():
        raise ValueError("give --hardware FILE: megarlhf is installed without its folder configs/hardware")
    hardware = load_hardware(arguments.hardware or HARDWARE)
    given = arguments.gpu_memory_gib
    world_size = arguments.world_size or cfg.run.planned_ranks
    ranks = tuple(range(world_size)) if arguments.ranks == "all" else arguments.ranks
    if ranks is not None and max(ranks) >= world_size:
        raise ValueError(f"--ranks {max(ranks)}: the job has ranks 0 to {world_size - 1}")
    others = {"workers": arguments.workers} if arguments.workers else {}
    return Request(
        command=arguments.command,
        cfg=cfg,
        world_size=world_size,
        hardware=hardware,
        ranks_per_node=arguments.ranks_per_node,
        steps=arguments.steps,
        device_bytes=int(given * 2**30) if given else int(hardware.memory.value),
        margin=load_config(MarginConfig, arguments.margin) if arguments.margin else MarginConfig(),
        layers=arguments.layers,
        routing=Routing(skew=arguments.routing_skew),
        ranks=ranks,
        prompt_lengths=parse(arguments.prompt_lengths, "prompts") if arguments.prompt_lengths else None,
        response_lengths=parse(arguments.response_lengths, "responses") if arguments.response_lengths else None,
        rollout_tokens_per_second=arguments.rollout_tokens_per_second,
        **others,
    )


def _out(arguments: argparse.Namespace) -> Path:
    if arguments.out is not None:
        return Path(arguments.out)
    return Path("runs") / "rehearsal" / f"{arguments.command}-{Path(arguments.config).stem}"


def _ranks(text: str) -> str | tuple[int, ...]:
    if text == "all":
        return text
    if text.replace(",", "").isdecimal() and "0" in text.split(","):
        return tuple(int(part) for part in text.split(",") if part)
    return positives(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive, finite number")
    return value
