"""The commands. No logic: a configuration is loaded and checked, ranks are started, a trainer is called."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import megarlhf
from megarlhf.commands.arguments.parser import Once, Parser, command_first, positive
from megarlhf.commands.arguments.piped import without_pipes
from megarlhf.commands.arguments.shells import HELP_OF_COMPLETION, SHELLS
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
    RunConfig,
    SFTConfig,
    load_config,
    roles_of,
)
from megarlhf.config.load import repeated_overrides
from megarlhf.config.serve import ServeRewardConfig
from megarlhf.errors import WatchdogTimeout
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
"""Where each starts: `trainers/entries.py`."""


DIRECTORY = "MEGARLHF_DIRECTORY"
"""Set by the batch scripts in slurm/, to the directory that they run in."""

EXIT_STATUS: dict[type[Exception], int] = {
    StopRun: TO_BE_QUEUED_AGAIN,  # saved; 130 after Ctrl-C
    WatchdogTimeout: 3,  # a phase has passed its limit
    FloatingPointError: 4,  # numbers that no training can go on with
    ValueError: 2,  # the user's mistake
}
"""Of errors that are printed as a sentence, where our own code raised them. Any other error keeps its traceback and
ends with 1; Ctrl-C ends with 130, be it saved or not (`megarlhf/__main__.py`)."""


OF_THEIR_OWN = {
    "convert": "megarlhf.commands.convert_arguments:parser",
    "plan": "megarlhf.commands.plan_arguments:parser",
    "rehearse": "megarlhf.commands.rehearse:parser",
}
"""Commands that read their words by a parser of their own."""


def configurations() -> dict[str, type[FrozenModel]]:
    """What each command that reads a configuration reads."""
    return {name: command.config for name, command in COMMANDS.items()} | {"serve-reward": ServeRewardConfig}


def parser() -> Parser:
    """The command line."""
    root = Parser(prog="megarlhf", description="Alignment of language models at Megatron scale.")
    words = "versions of megarlhf and of the libraries that matter"
    root.add_argument("--version", action=ShowVersions, nargs=0, help=words)
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help)
        sub.add_argument("-c", "--config", required=True, action=Once, metavar="FILE", help="YAML configuration")
        sub.add_argument("overrides", nargs="*", metavar="section.key=value", help="override configured values")
        if name == "generate":
            add_ask_arguments(sub)
        sub.add_argument("--dry-run", action="store_true", help="check and print what would run, then stop")
        sub.below = partial(_keys_below, name)
    _add_finding(commands)
    commands.add_parser("doctor", help="what this machine has, and what each missing part means")
    report = commands.add_parser("report", help="one self-contained HTML page of one or more runs")
    report.add_argument("run_dirs", nargs="+", metavar="RUN_DIR")
    report.add_argument("-o", "--out", default="report.html", action=Once, metavar="FILE")
    report.add_argument("--title", default="megarlhf")
    compare = commands.add_parser(
        "compare", help="final figures, configurations and curves of several runs on one page"
    )
    compare.add_argument("run_dirs", nargs="+", metavar="RUN_DIR")
    compare.add_argument("-o", "--out", default="compare.html", action=Once, metavar="FILE")
    compare.add_argument("--title", default="megarlhf")
    replay = commands.add_parser("replay", help="repeat a skipped optimizer step: which tensor is not finite")
    replay.add_argument("failure", metavar="FAILURE_DIR", help="a folder of RUN_DIR/failures")
    replay.add_argument("overrides", nargs="*", metavar="section.key=value", help="override the run's configuration")
    serve = commands.add_parser("serve-reward", help="give rewards to other runs over HTTP")
    serve.add_argument("-c", "--config", required=True, action=Once, metavar="FILE", help="YAML configuration")
    serve.add_argument("overrides", nargs="*", metavar="key=value", help="override configured values")
    serve.below = partial(_keys_below, "serve-reward")
    calibrate = commands.add_parser("calibrate", help="measure this machine, for a rehearsal's estimate of time")
    calibrate.add_argument("-o", "--out", required=True, action=Once, metavar="FILE", help="hardware file to write")
    words = "ranks of this machine (default: one for each GPU, 2 on a CPU)"
    calibrate.add_argument("--nproc", type=positive, action=Once, metavar="N", help=words)
    calibrate.add_argument("--quick", action="store_true", help="few sizes: to try the command, not to be used")
    commands.add_parser("plan", help="bytes and time from trainer to rollout: `megarlhf plan -h`")
    commands.add_parser("rehearse", help="what a job will need, before it is queued: `megarlhf rehearse -h`")
    commands.add_parser("convert", help="checkpoints between Hugging Face and Megatron: `megarlhf convert -h`")
    root.set_defaults(commands=commands.choices)
    return root


def _add_finding(commands: Any) -> None:
    """The commands by which one finds one's way."""
    keys = commands.add_parser("keys", help="what a configuration may say: all, below `rl.algo`, or by a word")
    words = "a command (rl), a section or key of it (rl.algo.kl), or a word of a name or a sentence (lr)"
    keys.add_argument("words", nargs="*", metavar="WORD", help=words)
    _add_init(commands)
    completion = commands.add_parser("completion", help="what makes a shell complete commands, options and keys")
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    completion.epilog = HELP_OF_COMPLETION
    completion.formatter_class = argparse.RawDescriptionHelpFormatter


def _add_init(commands: Any) -> None:
    init = commands.add_parser("init", help="write a configuration for a model and data, which it looks at")
    init.add_argument("--model", required=True, type=Path, action=Once, metavar="DIR", help="the model to train")
    init.add_argument(
        "--data", required=True, action=Once, metavar="FILE", help="or a directory, or a pattern of files"
    )
    init.add_argument("--split", action=Once, help="of data that has several")
    words = "what it is for (default: what such data is for)"
    init.add_argument("--command", dest="for_command", choices=("sft", "rm", "rl", "dpo"), action=Once, help=words)
    init.add_argument("-o", "--out", action=Once, metavar="FILE", help="file to write (default: COMMAND.yaml)")
    init.add_argument(
        "--run-dir", action=Once, metavar="DIR", help="run.dir (default: runs/COMMAND, or the next that is free)"
    )
    init.add_argument(
        "--nproc", type=positive, action=Once, metavar="N", help="ranks (default: one for each GPU, or 1)"
    )
    init.add_argument("--device", choices=("cpu", "gpu"), action=Once, help="what it is for (default: what is here)")
    init.add_argument("--gpu-memory-gib", type=positive, action=Once, metavar="N", help="of a GPU (80)")
    init.add_argument("--reward-model", type=Path, action=Once, metavar="DIR", help="of rl: what scores responses")
    words = "of rl: a rule in its place (default: exact_match where the data has a column 'answer')"
    init.add_argument("--reward", action=Once, metavar="RULE", help=words)


def _keys_below(name: str) -> str:
    from megarlhf.commands.arguments.keys import keys_in_words

    title = f"keys of the configuration of {name} (a part of them: `megarlhf keys {name}.SECTION`):"
    return f"{title}\n\n{keys_in_words(configurations()[name])}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Options may stand anywhere, also behind the overrides; argparse's sub-commands allow that only one by one."""
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
        with without_pipes(argv) as given:
            return _run(given)
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
    if argv[:1] == ["convert"]:  # has commands of its own
        from megarlhf.commands.convert import main as convert

        return convert(argv[1:], prog="megarlhf convert")
    if argv[:1] == ["rehearse"]:
        from megarlhf.commands.rehearse import main as rehearse

        return rehearse(argv[1:])
    if argv[:1] == ["plan"]:
        from megarlhf.commands.plan import main as plan

        return plan(argv[1:])
    return _dispatch(parse(argv), argv)


def _command_first(argv: list[str]) -> list[str]:
    """`megarlhf -c FILE run.seed=3 sft` is `megarlhf sft -c FILE run.seed=3`."""
    if not argv or not (argv[0].startswith("-") or "=" in argv[0]):
        return argv

    known = parser().get_default("commands")
    parsers = {name: partial(known.get, name) for name in known} | {name: partial(_own, name) for name in OF_THEIR_OWN}
    return command_first(argv, parsers)


def _own(name: str) -> Parser:
    """The parser of a command that has one of its own."""
    module, function = OF_THEIR_OWN[name].split(":")
    made: Parser = getattr(import_module(module), function)()
    return made


def exit_status(error: Exception) -> int | None:
    """The exit status of an error that is printed as a sentence; None for one that keeps its traceback."""
    if isinstance(error, StopRun):
        return error.status
    if not _raised_here(error):
        return None
    return next((status for kind, status in EXIT_STATUS.items() if isinstance(error, kind)), None)


def _raised_here(error: Exception) -> bool:
    """Whether our own code raised it, and so wrote its message for people; torch's ValueErrors keep their traceback."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and Path(frame.tb_frame.f_code.co_filename).is_relative_to(Path(megarlhf.__file__).parent)


def _refuse_another_directory() -> None:
    """A container that begins in a directory of its own would take relative paths for others, `run.dir` among them."""
    here, expected = os.path.realpath(os.getcwd()), os.path.realpath(os.environ.get(DIRECTORY) or os.getcwd())
    if here != expected:
        raise ValueError(
            f"this task works in {here}, and the batch script in {expected}: relative paths would name other files. "
            'Let the container begin there (pyxis: --container-workdir="$PWD", apptainer: --pwd "$PWD"), or '
            f"unset {DIRECTORY}"
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

        own = {name: _own(name) for name in OF_THEIR_OWN}
        print(script(arguments.shell, parser(), own, configurations()), end="")
        return 0
    if arguments.command == "report":
        from megarlhf.observe.report.page import write_report

        write_report([Path(run_dir) for run_dir in arguments.run_dirs], Path(arguments.out), title=arguments.title)
        print(f"wrote {arguments.out}")
        return 0
    if arguments.command == "compare":
        from megarlhf.observe.report.compare import compare

        compare([Path(run_dir) for run_dir in arguments.run_dirs], Path(arguments.out), title=arguments.title)
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

        return replay(Path(arguments.failure), arguments.overrides, argv)
    if arguments.command == "generate" and is_asked(arguments):
        return ask(arguments, argv)
    cfg = load_config(COMMANDS[arguments.command].config, arguments.config, arguments.overrides)
    return _run_on_ranks(arguments, argv, cfg)


def _run_on_ranks(arguments: argparse.Namespace, argv: list[str], cfg: Any) -> int:
    """Check the run once, in the process that starts the ranks or on the first of them, and run it."""
    from megarlhf.commands import launch
    from megarlhf.planning.machine.determinism import environment
    from megarlhf.planning.machine.gpu_environment import gpu_environment
    from megarlhf.planning.preflight import check_layouts, preflight
    from megarlhf.runtime import RankInfo, detect_rank

    # Before the check, which may import a library that reads them.
    os.environ.update(environment(cfg) | gpu_environment(roles_of(cfg)))
    info = detect_rank(os.environ)
    planned, starts = cfg.run.planned_ranks, info.world_size if info else cfg.run.nproc

    def check() -> None:
        # A dry run starts nothing: it is of the job that the file is for, unless a launcher's ranks are there.
        ranks = planned if arguments.dry_run and info is None else starts
        other = _other_ranks(cfg.run, ranks, starts, launched=info is not None)
        here = ranks if info is None and not arguments.dry_run else 0
        with _other_ranks_meant(cfg.run, ranks, other):
            preflight(arguments.command, cfg, ranks, local_ranks=here, all_records=arguments.dry_run).print()
        for sentence in [*repeated_overrides(arguments.overrides), *other]:
            print(sentence)

    if info is None or (arguments.dry_run and info.rank == 0):
        check()
    if arguments.dry_run:
        return 0
    if info is None and cfg.run.nproc > 1:
        return launch.local_ranks(cfg.run.nproc, argv)
    checked = info is None or launch.MARK in os.environ
    if info is not None and not checked:  # every rank by itself: nobody is there yet to be told
        with _other_ranks_meant(cfg.run, starts, _other_ranks(cfg.run, starts, starts, launched=True)):
            check_layouts(cfg, starts, local_ranks=info.local_world_size)
    return launch.as_rank(info or RankInfo(), cfg, ENTRIES[arguments.command], check=None if checked else check)


@contextlib.contextmanager
def _other_ranks_meant(run: RunConfig, checked: int, sentences: Sequence[str]) -> Iterator[None]:
    """An error inside says also that the file is for other ranks than are checked: it may fit those."""
    try:
        yield
    except ValueError as error:
        if run.world_size in (None, checked) or not _raised_here(error):
            raise
        raise ValueError("; ".join([str(error), *sentences])) from error


def _other_ranks(run: RunConfig, checked: int, starts: int, *, launched: bool) -> list[str]:
    """A sentence where the run was checked for other ranks than start, or starts on others than the file names."""
    if checked != starts:
        words = f"checked for the {checked} ranks of run.world_size; a plain start has run.nproc = {starts} of them"
        return [f"{words}, which --dry-run run.world_size= (nothing behind it) checks"]
    if run.world_size is None:
        unused = launched and starts != run.nproc
        return [f"the launcher started {starts} rank(s); run.nproc = {run.nproc} is not used"] if unused else []
    if run.world_size == starts:
        return []
    return [f"this file is for {run.world_size} ranks (run.world_size); this start has {starts}"]
