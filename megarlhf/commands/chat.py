"""`megarlhf generate` at a terminal: its options, its checks and its start."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from megarlhf.commands.arguments.parser import Once
from megarlhf.config import load_config
from megarlhf.config.ask import AskConfig
from megarlhf.config.load import config_of, names_section
from megarlhf.config.roles import with_hub_models

ENTRY = "megarlhf.trainers.generation.chat:run"
MOST_TOKENS = 4096
"""Longest prompt of a model without a configuration. Its cache also fits beside a large model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a chat to those of `generate`."""
    text = "print the response to this prompt, and write nothing; may be given several times"
    parser.add_argument("--prompt", action="append", metavar="TEXT", help=text)
    text = "respond to typed lines; this is the default at a terminal if the file names no data"
    parser.add_argument("--interactive", action="store_true", help=text)
    text = "respond by this model, without a configuration: by its chat template if it has one, greedily, on one rank"
    parser.add_argument("--model", type=Path, action=Once, metavar="DIR", help=text)


def is_asked(arguments: argparse.Namespace) -> bool:
    """Whether responses are printed instead of written. Raises: ValueError unless there is one of -c and --model."""
    if (arguments.config is None) == (arguments.model is None):
        raise ValueError("give one of -c FILE, a configuration, and --model DIR, a model whose responses are printed")
    if arguments.prompt or arguments.interactive:
        return True
    if arguments.model is not None and not sys.stdin.isatty():
        raise ValueError(
            f"--model {arguments.model} without -c prints responses to prompts: give --prompt TEXT, or --interactive, "
            "which reads lines; for prompts in a file give a configuration"
        )
    if arguments.model is not None:
        return True
    return sys.stdin.isatty() and not names_section(arguments.config, "data", arguments.overrides)


def ask(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Check the run, and start its ranks or join them."""
    from megarlhf.architectures.own_families import register_families_of
    from megarlhf.commands import launch
    from megarlhf.commands.checked import refuse_shell_of_step
    from megarlhf.planning.machine.determinism import environment
    from megarlhf.planning.machine.gpu_environment import gpu_environment
    from megarlhf.planning.preflight import preflight
    from megarlhf.runtime import RankInfo, detect_rank

    if arguments.prompt and arguments.interactive:
        raise ValueError("--prompt and --interactive: give one of the two")
    if arguments.model is None:
        cfg = load_config(AskConfig, arguments.config, arguments.overrides)
    else:
        cfg = config_of(AskConfig, tree_of(arguments.model), arguments.overrides, source=f"--model {arguments.model}")
    cfg = with_hub_models(cfg)
    register_families_of(cfg.roles())
    if arguments.model is not None:
        cfg = with_defaults(cfg)
    cfg = with_room(cfg)
    os.environ.update(environment(cfg) | gpu_environment(cfg.roles()))
    refuse_shell_of_step(cfg.run, "generate", os.environ)
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


def tree_of(model: Path) -> dict[str, Any]:
    """A configuration for a model alone. Nothing is written to its run directory."""
    return {"run": {"dir": "."}, "actor": {"model": {"path": model}}}


def with_defaults(cfg: AskConfig) -> AskConfig:
    """Set lengths that fit the model, and its chat template if it has one, where no override has set them.

    A model that was trained on texts alone by an earlier run gets texts.
    """
    from megarlhf.architectures.hf_config import architecture_from_hf
    from megarlhf.data.text.templates import has_template
    from megarlhf.data.tokenizers.tokenizer import load_tokenizer
    from megarlhf.provenance import read_provenance

    model = cfg.actor.model
    longest = architecture_from_hf(model.hf_directory()).longest_sequence
    rollout, data = cfg.rollout, cfg.data
    if "max_response_tokens" not in rollout.model_fields_set:
        rollout = rollout.model_copy(update={"max_response_tokens": min(rollout.max_response_tokens, longest // 2)})
    if "max_prompt_tokens" not in data.model_fields_set:
        room = max(1, min(longest - rollout.max_response_tokens, MOST_TOKENS))
        data = data.model_copy(update={"max_prompt_tokens": room})
    if "template" not in data.model_fields_set and data.template_mode == "auto":
        stated = read_provenance(model.path)
        learnt_texts = stated is not None and bool(stated.writing) and "conversations" not in (stated.writing or {})
        if not learnt_texts and has_template(load_tokenizer(model.tokenizer_place())):
            data = data.model_copy(update={"template": "chat"})
    return cfg.model_copy(update={"rollout": rollout, "data": data})


def with_room(cfg: AskConfig) -> AskConfig:
    """Set the limit of prompts, if none is given: all positions of the model but the response's."""
    from megarlhf.architectures.hf_config import architecture_from_hf

    room = architecture_from_hf(cfg.actor.model.hf_directory()).longest_sequence - cfg.rollout.max_response_tokens
    if "max_prompt_tokens" in cfg.data.model_fields_set or room < 1:
        return cfg
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"max_prompt_tokens": room})})
