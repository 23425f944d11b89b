"""`megarlhf generate` at a terminal: whether it is asked for, its checks, its start."""

from __future__ import annotations

import argparse
import os
import sys

from megarlhf.config import load_config, roles_of
from megarlhf.config.ask import AskConfig
from megarlhf.config.load import names_section

ENTRY = "megarlhf.trainers.generation.chat:run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """To those of `generate`."""
    words = "print the response to this prompt, and write nothing; may be given several times"
    parser.add_argument("--prompt", action="append", metavar="TEXT", help=words)
    words = "respond to what is typed, line by line; so it is at a terminal where the file names no data"
    parser.add_argument("--interactive", action="store_true", help=words)


def is_asked(arguments: argparse.Namespace) -> bool:
    """Whether responses are to be printed."""
    if arguments.prompt or arguments.interactive:
        return True
    return sys.stdin.isatty() and not names_section(arguments.config, "data", arguments.overrides)


def ask(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Check, and become the ranks."""
    from megarlhf.commands import launch
    from megarlhf.planning.machine.determinism import environment
    from megarlhf.planning.machine.gpu_environment import gpu_environment
    from megarlhf.planning.preflight import preflight
    from megarlhf.runtime import RankInfo, detect_rank

    if arguments.prompt and arguments.interactive:
        raise ValueError("--prompt and --interactive: give one of the two")
    cfg = with_room(load_config(AskConfig, arguments.config, arguments.overrides))
    os.environ.update(environment(cfg) | gpu_environment(roles_of(cfg)))
    info = detect_rank(os.environ)
    launched = info is not None and launch.MARK not in os.environ
    if launched and not arguments.prompt:
        raise ValueError(
            "what is typed does not reach ranks that torchrun or srun has started; give --prompt TEXT, or start "
            "megarlhf itself (run.nproc says on how many ranks)"
        )
    if info is None or launched:
        checked = preflight("generate", cfg, info.world_size if info else cfg.run.nproc)
        if arguments.dry_run:
            checked.print()
            return 0
    if info is None and cfg.run.nproc > 1:
        return launch.local_ranks(cfg.run.nproc, argv)
    cfg = cfg.model_copy(update={"prompts": tuple(arguments.prompt or ())})
    return launch.as_rank(info or RankInfo(), cfg, ENTRY, reads=cfg.actor.model.path)


def with_room(cfg: AskConfig) -> AskConfig:
    """Where no limit is set, a prompt may take what the model has beside the response."""
    from megarlhf.architectures.hf_config import architecture_from_hf

    room = architecture_from_hf(cfg.actor.model.hf_directory()).longest_sequence - cfg.rollout.max_response_tokens
    if "max_prompt_tokens" in cfg.data.model_fields_set or room < 1:
        return cfg
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"max_prompt_tokens": room})})
