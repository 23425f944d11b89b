"""`megarlhf rehearse`: memory, traffic and time of a job, before it is queued. No GPU is needed."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import megarlhf
from megarlhf.commands.arguments.parser import Once, Parser, command_first, positive, positive_float
from megarlhf.config import DPOConfig, FrozenModel, RLConfig, RMConfig, SFTConfig, load_config

CONFIGS: dict[str, type[FrozenModel]] = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig, "rl": RLConfig}
HARDWARE = Path(megarlhf.__file__).resolve().parents[1] / "configs" / "hardware" / "h100.yaml"
"""The default of `--hardware`."""
DOES_NOT_FIT = 1
"""Exit status of a rehearsal whose job does not run."""
MOST_GIB = 1_000_000


def parser() -> Parser:
    """The command line."""
    root = Parser(
        prog="megarlhf rehearse",
        description="Run a job's program for one rank of each kind, on devices without numbers: memory by phase, bytes "
        "on the wire, an estimate of the time.",
    )
    root.add_argument("command", choices=tuple(CONFIGS), metavar="COMMAND", help=", ".join(CONFIGS))
    root.add_argument("-c", "--config", required=True, action=Once, metavar="FILE", help="configuration of the job")
    root.add_argument("overrides", nargs="*", metavar="section.key=value", help="override configured values")
    root.add_argument("--world-size", type=positive, metavar="N", help="ranks of the job (default: run.world_size)")
    root.add_argument("--ranks-per-node", type=positive, default=8, metavar="N", help="default: %(default)s")
    root.add_argument("--steps", type=positive, metavar="N", help="steps to rehearse (default: 2, if the job has them)")
    text = "which ranks: all, or numbers such as 0,8,16 (default: one of each kind)"
    root.add_argument("--ranks", type=_ranks, metavar="all|LIST", help=text)
    text = "a hardware file (default: configs/hardware/h100.yaml)"
    root.add_argument("--hardware", type=Path, action=Once, metavar="FILE", help=text)
    text = "memory of a device (default: the hardware file's)"
    root.add_argument("--gpu-memory-gib", type=_gibibytes, metavar="X", help=text)
    text = "YAML with memory that a rehearsal cannot see, such as context_mib (docs/rehearsal-gpu.md)"
    root.add_argument("--margin", type=Path, action=Once, metavar="FILE", help=text)
    text = "te: TransformerEngine's layers, by a table of their saved tensors; local: ours (default: te)"
    root.add_argument("--layers", choices=("te", "local"), help=text)
    text = "tokens of a layer's busiest expert, as a multiple of the mean (default: %(default)s: balanced)"
    root.add_argument("--routing-skew", type=positive_float, default=1.0, metavar="F", help=text)
    lengths = "constant:N, uniform:LOW,HIGH, lognormal:mean=M,sigma=S, a file of numbers, or an earlier run's directory"
    root.add_argument("--prompt-lengths", action=Once, metavar="WORDS", help=f"lengths of made-up prompts: {lengths}")
    text = f"lengths of responses; of conversations the sampled tokens of all turns: {lengths}"
    root.add_argument("--response-lengths", action=Once, metavar="WORDS", help=text)
    text = f"of conversations with an environment, turns of the model: {lengths} (default: uniform:1,MAX_TURNS)"
    root.add_argument("--turns", action=Once, metavar="WORDS", help=text)
    text = f"of conversations, tokens between turns that were not sampled, all together: {lengths}"
    root.add_argument("--observed-lengths", action=Once, metavar="WORDS", help=text)
    text = "response tokens per second of one rollout engine (default: by the roofline of decoding)"
    root.add_argument("--rollout-tokens-per-second", type=positive_float, metavar="X", help=text)
    text = "rehearse every combination of values of keys, and order them"
    root.add_argument("--sweep", nargs="+", default=[], metavar="section.key=A,B", help=text)
    root.add_argument("--workers", type=positive, metavar="N", help="ranks at a time (default: the cores)")
    text = "folder for rehearsal.json and rehearsal.html (default: runs/rehearsal/COMMAND-FILE)"
    root.add_argument("-o", "--out", action=Once, metavar="DIR", help=text)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. 0: the job runs; 1: it does not; 2: the user's mistake.

    An interrupted rehearsal leaves nothing behind, and its status is 128 + the number of the signal.
    """
    ordered = command_first(sys.argv[1:] if argv is None else argv, dict.fromkeys(CONFIGS, parser))
    arguments = parser().parse_intermixed_args(ordered)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # missing models and data are replaced
    warnings.filterwarnings("ignore", module="megatron")  # about packages that a machine without a GPU lacks
    from megarlhf.rehearsal.processes import RankFailed

    try:
        with _terminated_like_interrupted():
            return _sweep(arguments) if arguments.sweep else _one(arguments)
    except ValueError as error:
        status, message = 2, str(error)
    except (RankFailed, _NotWritten) as error:
        status, message = DOES_NOT_FIT, str(error)
    except _Terminated as stop:
        status, message = 128 + stop.args[0], "terminated; nothing is written"
    except KeyboardInterrupt:
        status, message = 128 + signal.SIGINT, "interrupted; nothing is written"
    print(f"{parser().prog}: {message}", file=sys.stderr)
    return status


class _Terminated(BaseException):
    """This process was terminated by a signal, whose number is the argument."""


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Scope in which SIGTERM and SIGHUP (a closed terminal) end ranks and remove temporary files, as Ctrl-C does.

    Signals that are ignored, such as SIGHUP under nohup, stay ignored.
    """

    def stop(signum: int, frame: Any) -> None:
        raise _Terminated(signum)

    heard = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, stop) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class _NotWritten(Exception):
    """The result was printed, but could not be written."""


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _NotWritten(f"--out {out} could not be written: {error}; the answer is above") from error


def _one(arguments: argparse.Namespace) -> int:
    from megarlhf.observe.terminal.progress import make_console
    from megarlhf.rehearsal.progress import show_progress
    from megarlhf.rehearsal.rehearse import rehearse
    from megarlhf.rehearsal.report.console import print_result
    from megarlhf.rehearsal.report.page import check_out, write

    out, options = _out(arguments), _options(arguments)
    cfg = _load(arguments)
    request = _request(arguments, options, cfg)
    check_out(out)
    with show_progress() as on_progress:
        result = rehearse(request, on_progress)
    console = make_console()
    print_result(result, console)
    with _writing(out):
        console.print(f"wrote {' and '.join(map(str, write(result, out)))}", highlight=False)
    return 0 if result.runs else DOES_NOT_FIT


def _sweep(arguments: argparse.Namespace) -> int:
    from megarlhf.observe.terminal.progress import make_console
    from megarlhf.rehearsal.progress import show_progress
    from megarlhf.rehearsal.run_sweep import check_sweep_out, print_sweep, run_sweep, write_sweep
    from megarlhf.rehearsal.sweep import parse_axes

    axes, out, options = parse_axes(arguments.sweep), _out(arguments), _options(arguments)

    check_sweep_out(out)
    sweep = run_sweep(axes, partial(_load, arguments), lambda cfg: _request(arguments, options, cfg), show_progress)
    console = make_console()
    print_sweep(sweep, console)
    with _writing(out):
        for path in write_sweep(sweep, out):
            console.print(f"wrote {path}", highlight=False)
    return DOES_NOT_FIT if sweep.best is None else 0


def _load(arguments: argparse.Namespace, overrides: Sequence[str] = ()) -> Any:
    """The configuration, with `overrides` beside the user's. Raises: ValueError."""
    from megarlhf.architectures.own_families import register_families_of

    cfg: Any = load_config(CONFIGS[arguments.command], arguments.config, [*_overrides(arguments), *overrides])
    register_families_of(cfg.roles())
    return cfg


def _overrides(arguments: argparse.Namespace) -> list[str]:
    """The user's overrides, and --world-size as one of them, so that results name it. Raises: ValueError."""
    world_size = arguments.world_size
    named = [text for text in (*arguments.overrides, *arguments.sweep) if text.startswith("run.world_size=")]
    if world_size and named:
        raise ValueError(f"--world-size {world_size} and {named[0]} say the same; leave one of them out")
    return [*arguments.overrides, *([f"run.world_size={world_size}"] if world_size else [])]


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of a `Request` that no configuration changes. Raises: ValueError."""
    from megarlhf.rehearsal.cost_model.hardware import load_hardware
    from megarlhf.rehearsal.cost_model.margin import MarginConfig
    from megarlhf.rehearsal.fake_device.routing import Routing
    from megarlhf.rehearsal.fakes.lengths import parse_lengths

    if arguments.hardware is None and not HARDWARE.is_file():
        raise ValueError("give --hardware FILE: megarlhf is installed without its folder configs/hardware")
    hardware = load_hardware(arguments.hardware or HARDWARE)
    if hardware.kind == "cpu" and (arguments.layers or arguments.margin):
        name = f"--layers {arguments.layers}" if arguments.layers else "--margin"
        raise ValueError(f"{name} is for a GPU, and {arguments.hardware} describes a CPU; leave it out")
    memory_gib = arguments.gpu_memory_gib
    return {
        "hardware": hardware,
        "ranks_per_node": arguments.ranks_per_node,
        "device_bytes": int(memory_gib * 2**30) if memory_gib else int(hardware.memory.value),
        "margin": load_config(MarginConfig, arguments.margin) if arguments.margin else MarginConfig(),
        "layers": arguments.layers or ("te" if hardware.kind == "gpu" else "local"),
        "routing": Routing(skew=arguments.routing_skew),
        "prompt_lengths": _lengths(arguments.prompt_lengths, "prompts", parse_lengths),
        "response_lengths": _lengths(arguments.response_lengths, "responses", parse_lengths),
        "observed_lengths": _lengths(arguments.observed_lengths, "observed", parse_lengths),
        "turns": _lengths(arguments.turns, "turns", parse_lengths),
        "rollout_tokens_per_second": arguments.rollout_tokens_per_second,
        **({"workers": arguments.workers} if arguments.workers else {}),
    }


def _lengths(spec: str | None, column: str, parse: Callable[[str, str], Any]) -> Any:
    try:
        return parse(spec, column) if spec else None
    except ValueError as error:
        option = "--turns" if column == "turns" else f"--{column.removesuffix('s')}-lengths"
        raise ValueError(f"{option}: {error}") from None


def _request(arguments: argparse.Namespace, options: Mapping[str, Any], cfg: Any) -> Any:
    """The checked request. Raises: ValueError."""
    from megarlhf.rehearsal.request import DEFAULT_STEPS, Request, check_request

    world_size = cfg.run.planned_ranks
    request = Request(
        command=arguments.command,
        cfg=cfg,
        world_size=world_size,
        steps=arguments.steps or max(1, min(DEFAULT_STEPS, cfg.train.num_steps)),
        ranks=tuple(range(world_size)) if arguments.ranks == "all" else arguments.ranks,
        **options,
    )
    check_request(request)
    return request


def _out(arguments: argparse.Namespace) -> Path:
    """The output folder. Raises: ValueError if it is a file, is below one, or cannot be written."""
    default = Path("runs") / "rehearsal" / f"{arguments.command}-{Path(arguments.config).stem}"
    if arguments.out == "":
        raise ValueError("--out is empty; name a folder, or leave it out")
    out = default if arguments.out is None else Path(arguments.out)
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"--out {out}: {existing} is a file; name a folder")
    try:
        with tempfile.TemporaryFile(dir=existing):  # permissions are not enough: not in /proc, not on a full disk
            pass
    except OSError as error:
        raise ValueError(
            f"--out {out}: nothing can be written into the folder {existing} ({error.strerror}); name another"
        ) from error
    return out


def _ranks(text: str) -> str | tuple[int, ...]:
    if text == "all":
        return text
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is neither all nor numbers of ranks such as 0,8,16")
    return tuple(map(int, text.split(",")))


def _gibibytes(text: str) -> float:
    value = positive_float(text)
    if value > MOST_GIB:
        raise argparse.ArgumentTypeError(f"{text!r} is more than any device has; expected at most {MOST_GIB:,} (GiB)")
    return value
