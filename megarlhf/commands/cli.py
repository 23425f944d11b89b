"""The commands. Each loads and checks a configuration, starts ranks, and calls a trainer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megarlhf.commands.arguments.completion import HELP, SHELLS
from megarlhf.commands.arguments.parser import Once, Parser, add_families, command_first, positive
from megarlhf.commands.arguments.piped import without_pipes
from megarlhf.commands.chat import add_arguments as add_ask_arguments
from megarlhf.commands.chat import ask, is_asked
from megarlhf.commands.process_tree import end_with_parent
from megarlhf.commands.versions import ShowVersions
from megarlhf.config import (
    DPOConfig,
    EvaluateConfig,
    FrozenModel,
    GenerateConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    load_config,
)
from megarlhf.config.serve import ServeRewardConfig
from megarlhf.errors import WatchdogTimeout
from megarlhf.errors import raised_here as _raised_here
from megarlhf.resume.signals import TO_BE_QUEUED_AGAIN, StopRun
from megarlhf.trainers.entries import ENTRIES


@dataclass(frozen=True)
class Command:
    """A command that runs on ranks."""

    config: type[FrozenModel]
    help: str


COMMANDS: dict[str, Command] = {
    "sft": Command(SFTConfig, "supervised fine-tuning"),
    "rm": Command(RMConfig, "train a reward model on preference pairs"),
    "dpo": Command(DPOConfig, "preference optimisation: DPO, IPO, SimPO, ORPO, KTO"),
    "rl": Command(RLConfig, "PPO, GRPO and their relatives"),
    "generate": Command(GenerateConfig, "sample responses into a JSON lines file"),
    "eval": Command(EvaluateConfig, "figures of a model, each with its interval"),
}
"""Commands that run on ranks. Their functions are in `trainers/entries.py`."""

DIRECTORY = "MEGARLHF_DIRECTORY"
"""Variable that the batch scripts in slurm/ set to their working directory."""

EXIT_STATUS: dict[type[Exception], int] = {
    StopRun: TO_BE_QUEUED_AGAIN,  # saved; 130 after Ctrl-C
    WatchdogTimeout: 3,  # a phase has passed its limit
    FloatingPointError: 4,  # training cannot go on with these numbers
    ValueError: 2,  # the user's mistake
}
"""Exit statuses of errors that are printed as a sentence, if our own code raised them. Any other error keeps its
traceback and ends with 1. Ctrl-C ends with 130, also if it saved (`megarlhf/__main__.py`)."""

OWN_PARSERS = {
    "convert": "megarlhf.commands.convert_arguments:parser",
    "plan": "megarlhf.commands.plan_arguments:parser",
    "rehearse": "megarlhf.commands.rehearse:parser",
}
"""Commands with a parser of their own."""
_OWN_MAINS: dict[str, Callable[[list[str]], int]] = {
    "convert": lambda argv: _named("megarlhf.commands.convert:main")(argv, prog="megarlhf convert"),
    "plan": lambda argv: _named("megarlhf.commands.plan:main")(argv),
    "rehearse": lambda argv: _named("megarlhf.commands.rehearse:main")(argv),
}


def configurations() -> dict[str, type[FrozenModel]]:
    """The configuration class of each command that reads a configuration."""
    return {name: command.config for name, command in COMMANDS.items()} | {"serve-reward": ServeRewardConfig}


def parser() -> Parser:
    """The command line."""
    root = Parser(prog="megarlhf", description="Alignment of language models at Megatron scale.")
    text = "versions of megarlhf and of the libraries that matter"
    root.add_argument("--version", action=ShowVersions, nargs=0, help=text)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help)
        _add_config(sub, name, "section.key=value")
        if name == "generate":
            add_ask_arguments(sub)
        sub.add_argument("--dry-run", action="store_true", help="check and print what would run, then stop")
    keys = commands.add_parser("keys", help="keys of configurations: all, below `rl.algo`, or by a word")
    text = "a command (rl), a section or key of it (rl.algo.kl), or a word of a name or a sentence (lr)"
    keys.add_argument("words", nargs="*", metavar="WORD", help=text)
    _add_init(commands)
    completion = commands.add_parser("completion", help="script by which a shell completes commands, options and keys")
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    completion.epilog, completion.formatter_class = HELP, argparse.RawDescriptionHelpFormatter
    commands.add_parser("doctor", help="parts of this machine, and the meaning of each missing one")
    for name, text in {
        "report": "one self-contained HTML page of one or more runs",
        "compare": "final figures, configurations and curves of several runs on one page",
    }.items():
        page = commands.add_parser(name, help=text)
        page.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
        page.add_argument("-o", "--out", type=Path, default=Path(f"{name}.html"), action=Once, metavar="FILE")
        page.add_argument("--title", default="megarlhf")
    replay = commands.add_parser("replay", help="repeat a skipped optimizer step: which tensor is not finite")
    replay.add_argument("failure", type=Path, metavar="FAILURE_DIR", help="a folder of RUN_DIR/failures")
    replay.add_argument("overrides", nargs="*", metavar="section.key=value", help="override the run's configuration")
    _add_config(
        commands.add_parser("serve-reward", help="give rewards to other runs over HTTP"), "serve-reward", "key=value"
    )
    calibrate = commands.add_parser("calibrate", help="measure this machine, for a rehearsal's estimate of time")
    calibrate.add_argument("-o", "--out", required=True, action=Once, metavar="FILE", help="hardware file to write")
    text = "ranks of this machine (default: one for each GPU, 2 on a CPU)"
    calibrate.add_argument("--nproc", type=positive, action=Once, metavar="N", help=text)
    calibrate.add_argument("--quick", action="store_true", help="few sizes: to try the command, not to be used")
    commands.add_parser("plan", help="bytes and time from trainer to rollout: `megarlhf plan -h`")
    commands.add_parser("rehearse", help="what a job will need, before it is queued: `megarlhf rehearse -h`")
    commands.add_parser("convert", help="checkpoints between Hugging Face and Megatron: `megarlhf convert -h`")
    root.set_defaults(commands=commands.choices)
    return root


def _add_config(sub: Parser, name: str, metavar: str) -> None:
    """Add the arguments of a configuration, and all its keys at the end of the help."""
    text = "YAML configuration; - is standard input"
    sub.add_argument("-c", "--config", required=name != "generate", action=Once, metavar="FILE", help=text)
    sub.add_argument("overrides", nargs="*", metavar=metavar, help="override configured values")
    sub.below = partial(_keys_below, name)


def _add_init(commands: Any) -> None:
    init = commands.add_parser("init", help="write a configuration for a model and data, which it looks at")
    init.add_argument("--model", required=True, type=Path, action=Once, metavar="DIR", help="the model to train")
    text = "the data: a file, a directory, or a pattern of files"
    add_families(init)
    init.add_argument("--data", required=True, action=Once, metavar="FILE", help=text)
    init.add_argument("--split", action=Once, help="split of data that has several")
    text = "command of the configuration (default: by the kind of data)"
    init.add_argument("--command", dest="for_command", choices=("sft", "rm", "rl", "dpo"), action=Once, help=text)
    init.add_argument("-o", "--out", action=Once, metavar="FILE", help="file to write (default: COMMAND.yaml)")
    text = "run.dir (default: runs/COMMAND, or the next that is free)"
    init.add_argument("--run-dir", action=Once, metavar="DIR", help=text)
    text = "ranks (default: one for each GPU, or 1)"
    init.add_argument("--nproc", type=positive, action=Once, metavar="N", help=text)
    init.add_argument(
        "--device", choices=("cpu", "gpu"), action=Once, help="device to run on (default: this machine's)"
    )
    init.add_argument("--gpu-memory-gib", type=positive, action=Once, metavar="N", help="memory of a GPU (80)")
    init.add_argument(
        "--reward-model", type=Path, action=Once, metavar="DIR", help="rl: the model that scores responses"
    )
    text = "rl: a rule instead of a model (default: exact_match if the data has a column 'answer')"
    init.add_argument("--reward", action=Once, metavar="RULE", help=text)


def _keys_below(name: str) -> str:
    from megarlhf.commands.arguments.keys import help_on_keys

    title = f"keys of the configuration of {name} (a part of them: `megarlhf keys {name}.SECTION`):"
    return f"{title}\n\n{help_on_keys(configurations()[name])}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse words with options anywhere, also behind the overrides. argparse allows that in each command only."""
    root = parser()
    if argv and argv[0] in root.get_default("commands"):
        return root.get_default("commands")[argv[0]].parse_intermixed_args(
            argv[1:], argparse.Namespace(command=argv[0])
        )
    return root.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. An error of `EXIT_STATUS` is printed without a traceback."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        end_with_parent()
        _refuse_another_directory()
        argv = _command_first(argv)
        with without_pipes(argv) as arguments:
            return _run(arguments)
    except Exception as error:
        from megarlhf.commands import launch

        status = exit_status(error)
        if status is not None:
            launch.print_error(argv[0], str(error), status)
        elif launch.another_rank_has_failed():
            status = 1
        else:
            raise
        return status


def _run(argv: list[str]) -> int:
    if argv and argv[0] in _OWN_MAINS:
        return _OWN_MAINS[argv[0]](argv[1:])
    return _dispatch(parse(argv), argv)


def _command_first(argv: list[str]) -> list[str]:
    """`megarlhf -c FILE run.seed=3 sft` is `megarlhf sft -c FILE run.seed=3`."""
    if not argv or not (argv[0].startswith("-") or "=" in argv[0]):
        return argv
    known = parser().get_default("commands")
    own = {name: _named(parser_name) for name, parser_name in OWN_PARSERS.items()}
    return command_first(argv, {name: partial(known.get, name) for name in known} | own)


def _named(function: str) -> Any:
    """A function by its name, `module:function`. The module is imported only then."""
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)


def exit_status(error: Exception) -> int | None:
    """The exit status of an error that is printed as a sentence; None for one that keeps its traceback."""
    if isinstance(error, StopRun):
        return error.status
    if not _raised_here(error):
        return None
    return next((status for kind, status in EXIT_STATUS.items() if isinstance(error, kind)), None)


def _refuse_another_directory() -> None:
    """Refuse a container's own working directory: relative paths such as `run.dir` would name other files."""
    current, expected = os.path.realpath(os.getcwd()), os.path.realpath(os.environ.get(DIRECTORY) or os.getcwd())
    if current != expected:
        raise ValueError(
            f"this task works in {current}, and the batch script in {expected}: relative paths would name other files. "
            'Start the container there (pyxis: --container-workdir="$PWD", apptainer: --pwd "$PWD"), or unset '
            f"{DIRECTORY}"
        )


def _dispatch(arguments: argparse.Namespace, argv: list[str]) -> int:
    if arguments.command == "doctor":
        from megarlhf.commands.doctor import examine, report
        from megarlhf.runtime import capabilities

        return report(examine(capabilities()))
    if arguments.command == "keys":
        from megarlhf.commands.arguments.keys import print_keys

        print_keys(arguments.words, configurations())
        return 0
    if arguments.command == "init":
        from megarlhf.commands.init import init

        return init(arguments, configurations())
    if arguments.command == "completion":
        from megarlhf.commands.arguments.completion import script

        own = {name: _named(parser_name)() for name, parser_name in OWN_PARSERS.items()}
        print(script(arguments.shell, parser(), own, configurations()), end="")
        return 0
    if arguments.command in ("report", "compare"):
        from megarlhf.observe.report.compare import write_comparison
        from megarlhf.observe.report.page import write_report

        write = write_report if arguments.command == "report" else write_comparison
        write(arguments.run_dirs, arguments.out, title=arguments.title)
        print(f"wrote {arguments.out}")
        return 0
    if arguments.command == "calibrate":
        from megarlhf.commands.calibrate import calibrate

        return calibrate(arguments, argv)
    if arguments.command == "serve-reward":
        from megarlhf.commands.serve_reward import serve

        return serve(arguments.config, arguments.overrides)
    if arguments.command == "replay":
        from megarlhf.commands.replay import replay

        return replay(arguments.failure, arguments.overrides, argv)
    if arguments.command == "generate" and is_asked(arguments):
        return ask(arguments, argv)
    cfg = load_config(COMMANDS[arguments.command].config, arguments.config, arguments.overrides)
    return _run_on_ranks(arguments, argv, cfg)


def _run_on_ranks(arguments: argparse.Namespace, argv: list[str], cfg: Any) -> int:
    """Check the run once, in the process that starts the ranks or on the first rank, and run it."""
    from megarlhf.architectures.own_families import register_families_of
    from megarlhf.commands import launch
    from megarlhf.commands.checked import checked_run, rank_notes, rank_notes_in_errors, refuse_shell_of_step
    from megarlhf.config.roles import with_hub_models
    from megarlhf.planning.machine.determinism import environment
    from megarlhf.planning.machine.gpu_environment import gpu_environment
    from megarlhf.planning.preflight import check_layouts
    from megarlhf.runtime import RankInfo, detect_rank

    cfg = with_hub_models(cfg)
    # Before the check, which may import libraries that read these variables.
    os.environ.update(environment(cfg) | gpu_environment(cfg.roles()))
    register_families_of(cfg.roles())
    refuse_shell_of_step(cfg.run, arguments.command, os.environ)
    info = detect_rank(os.environ)
    planned, starts = cfg.run.planned_ranks, info.world_size if info else cfg.run.nproc

    def check() -> None:
        # A dry run without a launcher checks the job for which the file was written.
        ranks = planned if arguments.dry_run and info is None else starts
        local = ranks if info is None and not arguments.dry_run else 0
        checked_run(
            arguments.command,
            cfg,
            ranks,
            starts=starts,
            launched=info is not None,
            local_ranks=local,
            all_records=arguments.dry_run,
            overrides=arguments.overrides,
        ).print()

    if info is None or (arguments.dry_run and info.rank == 0):
        check()
    if arguments.dry_run:
        return 0
    if info is None and cfg.run.nproc > 1:
        return launch.local_ranks(cfg.run.nproc, argv)
    is_checked = info is None or launch.MARK in os.environ
    if info is not None and not is_checked:  # every rank by itself, before they can talk to each other
        with rank_notes_in_errors(cfg.run, starts, rank_notes(cfg.run, starts, starts, launched=True)):
            check_layouts(cfg, starts, local_ranks=info.local_world_size)
    return launch.as_rank(info or RankInfo(), cfg, ENTRIES[arguments.command], check=None if is_checked else check)
