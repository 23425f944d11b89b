"""Configurations from Python: typed and frozen, and checked without a start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from megarlhf.api.process import borrowed_process
from megarlhf.architectures.own_families import register_families_of
from megarlhf.commands.cli import COMMANDS
from megarlhf.config import (
    DPOConfig,
    EvaluateConfig,
    FrozenModel,
    GenerateConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    config_of,
)
from megarlhf.config import load_config as read_config
from megarlhf.config.loop import LoopConfig

if TYPE_CHECKING:
    from megarlhf.planning.preflight import Preflight

Command = Literal["sft", "rm", "dpo", "rl", "generate", "eval"]
"""Commands that run on ranks."""

Config = Mapping[str, Any] | str | Path | FrozenModel
"""A configuration: a mapping of sections, the path of a YAML file, or a result of `load_config`."""

_CLASSES: Mapping[str, type[FrozenModel]] = {name: command.config for name, command in COMMANDS.items()} | {
    "loop": LoopConfig
}


@overload
def load_config(command: Literal["sft"], config: Config, overrides: Sequence[str] = ()) -> SFTConfig: ...
@overload
def load_config(command: Literal["rm"], config: Config, overrides: Sequence[str] = ()) -> RMConfig: ...
@overload
def load_config(command: Literal["dpo"], config: Config, overrides: Sequence[str] = ()) -> DPOConfig: ...
@overload
def load_config(command: Literal["rl"], config: Config, overrides: Sequence[str] = ()) -> RLConfig: ...
@overload
def load_config(command: Literal["generate"], config: Config, overrides: Sequence[str] = ()) -> GenerateConfig: ...
@overload
def load_config(command: Literal["eval"], config: Config, overrides: Sequence[str] = ()) -> EvaluateConfig: ...
@overload
def load_config(command: Literal["loop"], config: Config, overrides: Sequence[str] = ()) -> LoopConfig: ...
def load_config(command: str, config: Config, overrides: Sequence[str] = ()) -> FrozenModel:
    """Load a configuration: typed, frozen, every key checked.

        cfg = megarlhf.load_config("sft", "sft.yaml", ["train.num_steps=10"])
        cfg.train.num_steps  # 10

    command:   sft, rm, dpo, rl, generate or eval; `loop` for `megarlhf.Loop`
    config:    a mapping of sections, the path of a YAML file, or a loaded configuration
    overrides: `section.key=value` texts, as on the command line

    Raises: ValueError with one line for each mistake.
    """
    kind = config_class(command)
    if isinstance(overrides, str):
        raise ValueError(f"overrides is a text, {overrides!r}; give a list of texts such as [{overrides!r}]")
    if isinstance(config, FrozenModel):
        if type(config) is not kind:
            raise ValueError(f"{command} takes a {kind.__name__}, got a {type(config).__name__}")
        return config_of(kind, config.model_dump(mode="json"), overrides) if overrides else config
    if isinstance(config, Mapping):
        _require_no_functions(config)
        return config_of(kind, config, overrides)
    if isinstance(config, str | Path):
        return read_config(kind, config, overrides)
    raise ValueError(
        f"a configuration is a mapping of sections, the path of a YAML file, or a result of load_config; got a "
        f"{type(config).__name__}"
    )


def _require_no_functions(value: Any, key: str = "") -> None:
    """Raises: ValueError for a function in the mapping, which ranks could not import."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            _require_no_functions(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for part in value:
            _require_no_functions(part, key)
    elif callable(value):
        module, name = getattr(value, "__module__", "module"), getattr(value, "__name__", "name")
        raise ValueError(f"{key} is a function or class, {name}; name it by its import path, {module}:{name}")


def config_class(command: str) -> type[FrozenModel]:
    """The configuration class of a command. Raises: ValueError for an unknown one."""
    if command not in _CLASSES:
        raise ValueError(f"unknown command {command!r}; the known ones are {', '.join(_CLASSES)}")
    return _CLASSES[command]


def config_of_command(command: str, config: Config, overrides: Sequence[str], nproc: int | None) -> Any:
    """The configuration of a command that runs on ranks, with `run.nproc` if it is given; the user's model families in
    it are known afterwards. Raises: ValueError."""
    if command not in COMMANDS:
        raise ValueError(f"unknown command {command!r}; the known ones are {', '.join(COMMANDS)}")
    numbered = overrides if nproc is None else [*overrides, f"run.nproc={nproc}"]
    cfg = load_config(cast(Any, command), config, numbered)
    register_families_of(cfg.roles())
    return cfg


def check(command: Command, config: Config, *, overrides: Sequence[str] = (), nproc: int | None = None) -> Preflight:
    """Check a run as `--dry-run` does, and describe it. Nothing starts, and nothing is printed.

        plan = megarlhf.check("rl", "rl.yaml", nproc=8)
        plan.roles    # each model with its layout
        plan.numbers  # batch arithmetic
        plan.notes    # sentences
        plan.print()

    nproc: number of ranks; default: that of the configuration (`run.world_size`, else `run.nproc`)

    Raises: ValueError that names the mistake and the remedy.
    """
    cfg = config_of_command(command, config, overrides, nproc)
    ranks = nproc or cfg.run.planned_ranks
    with borrowed_process("check", cfg):
        from megarlhf.commands.checked import checked_run

        return checked_run(
            command, cfg, ranks, starts=nproc or cfg.run.nproc, launched=False, all_records=True, overrides=overrides
        )
