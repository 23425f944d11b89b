"""`megarlhf generate` at a terminal: its options, its checks and its start."""

from __future__ import annotations

import argparse
import os
import sys

from megarlhf.config import load_config
from megarlhf.config.ask import AskConfig
from megarlhf.config.load import names_section

ENTRY = "megarlhf.trainers.generation.chat:run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a chat to those of `generate`."""
    text = "print the response to this prompt, and write nothing; may be given several times"
    parser.add_argument("--prompt", action="append", metavar="TEXT", help=text)
    text = "respond to typed lines; this is the default at a terminal if the file names no data"
    parser.add_argument("--interactive", action="store_true", help=text)


def is_asked(arguments: argparse.Namespace) -> bool:
    """Whether responses are printed instead of written."""
    if arguments.prompt or arguments.interactive:
        return True
    return sys.stdin.isatty() and not names_section(arguments.config, "data", arguments.overrides)


def ask(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Check the run, and start its ranks or join them."""
    from megarlhf.architectures.own_families import register_families_of
    from megarlhf.commands import launch
    from megarlhf.planning.machine.determinism import environment
    from megarlhf.planning.machine.gpu_environment import gpu_environment
    from megarlhf.planning.preflight import preflight
    from megarlhf.runtime import RankInfo, detect_rank

    if arguments.prompt and arguments.interactive:
        raise ValueError("--prompt and --interactive: give one of the two")
    cfg = load_config(AskConfig, arguments.config, arguments.overrides)
    register_families_of(cfg.roles())
    cfg = with_room(cfg)
    os.environ.update(environment(cfg) | gpu_environment(cfg.roles()))
    info = detect_rank(os.environ)
    launched = info is not None and launch.MARK not in os.environ
    if launched and not arguments.prompt:
        raise ValueError(
            "typed text does not reach ranks that torchrun or srun has started; give --prompt TEXT, or start megarlhf "
            "itself (run.nproc is the number of ranks)"
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
    """Set the limit of prompts, if none is given: all positions of the model but the response's."""
    from megarlhf.architectures.hf_config import architecture_from_hf

    room = architecture_from_hf(cfg.actor.model.hf_directory()).longest_sequence - cfg.rollout.max_response_tokens
    if "max_prompt_tokens" in cfg.data.model_fields_set or room < 1:
        return cfg
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"max_prompt_tokens": room})})
