"""Everything that can be decided about a run without starting it, and the table that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.placements import vllm_placements
from megarlhf.config import (
    FrozenModel,
    GenerateConfig,
    RLConfig,
    RMConfig,
    RoleConfig,
    SFTConfig,
    dump_config,
)
from megarlhf.data.sources import require_path
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.observe.progress import make_console, table
from megarlhf.planning.batch import BatchNumber, rl_batch_numbers, supervised_batch_numbers
from megarlhf.planning.legality import check_role
from megarlhf.rollout.rewards.rules import load_rule


@dataclass(frozen=True)
class Preflight:
    """What a checked run will be."""

    title: str
    config: str
    numbers: tuple[BatchNumber, ...]
    roles: tuple[tuple[str, str, str], ...]
    """Role, model and layout in words."""

    def print(self) -> None:
        """The resolved configuration and numbers, for people."""
        console = make_console()
        console.print(self.config, highlight=False, markup=False)
        console.print(table(f"{self.title}: roles", self.roles, ("role", "model", "layout")))
        console.print(
            table(f"{self.title}: batch arithmetic", [(f.words, f.value) for f in self.numbers], ("per", "n"))
        )


def preflight(command: str, cfg: FrozenModel, world_size: int) -> Preflight:
    """Check the whole run.

    Raises: ValueError, saying what does not fit and what to change.
    """
    roles = _roles(cfg)
    described, dp = [], 1
    for name, section in roles.items():
        arch, layout = check_role(name, section, world_size)
        if isinstance(cfg, RLConfig | GenerateConfig):
            _check_positions(cfg, name, section, arch)
            if name == "actor":
                _check_engine(cfg, section, arch, world_size)
        described.append(
            (
                name,
                f"{section.model.path} ({arch.model_type}, {arch.num_layers} layers of {arch.hidden_size})",
                f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp} = {world_size} ranks",
            )
        )
        dp = layout.dp
    _check_files(cfg)
    _check_vocabulary(roles)
    if isinstance(cfg, RLConfig | GenerateConfig):
        for reward in cfg.rewards:
            if reward.rule is not None:
                load_rule(reward.rule)
    numbers: list[BatchNumber] = []
    if isinstance(cfg, SFTConfig):
        numbers = supervised_batch_numbers(cfg.train, dp, "actor", "sequences")
    elif isinstance(cfg, RMConfig):
        numbers = supervised_batch_numbers(cfg.train, dp, "reward_model", "preference pairs (two sequences each)")
    elif isinstance(cfg, RLConfig):
        numbers = rl_batch_numbers(cfg, world_size)
    return Preflight(title=command, config=dump_config(cfg), numbers=tuple(numbers), roles=tuple(described))


def _roles(cfg: FrozenModel) -> dict[str, RoleConfig]:
    if isinstance(cfg, RLConfig):
        return cfg.roles()
    if isinstance(cfg, RMConfig):
        return {"reward_model": cfg.reward_model}
    assert isinstance(cfg, SFTConfig | GenerateConfig)
    return {"actor": cfg.actor}


def _check_files(cfg: FrozenModel) -> None:
    """Data must be there, unless its name may be one of the Hugging Face hub."""
    assert isinstance(cfg, SFTConfig | RMConfig | RLConfig | GenerateConfig)
    for key, path in (("data.train", cfg.data.train), ("data.heldout", cfg.data.heldout)):
        if path is not None:
            try:
                require_path(path)
            except ValueError as error:
                raise ValueError(f"{key}: {error}; working directory: {Path.cwd()}") from None


def _check_vocabulary(roles: Mapping[str, RoleConfig]) -> None:
    """Every role reads what the first one's tokenizer wrote; a token without an embedding would read padding."""
    path = next(iter(roles.values())).model.hf_directory()
    num_tokens = load_tokenizer(path).vocab_size
    for role, section in roles.items():
        vocab_size = architecture_from_hf(section.model.hf_directory()).vocab_size
        if num_tokens > vocab_size:
            raise ValueError(
                f"{role}: the tokenizer of {path} has {num_tokens} tokens, {section.model.path} has vocab_size = "
                f"{vocab_size}; do tokenizer and model belong together?"
            )


def _check_engine(cfg: RLConfig | GenerateConfig, section: RoleConfig, arch: Architecture, world_size: int) -> None:
    """Whether vLLM's engines fit the ranks, and whether the table knows where vLLM keeps every parameter."""
    if cfg.rollout.engine != "vllm":
        return
    tp = cfg.rollout.tp(section)
    if world_size % tp:
        raise ValueError(f"rollout.parallel.tp = {tp} does not divide the {world_size} ranks of the run")
    try:
        vllm_placements(arch, tp=tp, tp_rank=0, rank=0)
    except ValueError as error:
        raise ValueError(
            f"rollout.parallel.tp = {tp} of vLLM and {section.model.path}: {error}; or use rollout.engine=megatron"
        ) from None


def _check_positions(cfg: RLConfig | GenerateConfig, role: str, section: RoleConfig, arch: Architecture) -> None:
    """Every role reads prompt and response; the longest that may come must fit its positions."""
    prompt, response = cfg.data.max_prompt_tokens, cfg.rollout.max_response_tokens
    if prompt + response > arch.max_positions:
        raise ValueError(
            f"{role}: data.max_prompt_tokens + rollout.max_response_tokens = {prompt} + {response} = "
            f"{prompt + response} tokens, but {section.model.path} has max_position_embeddings = "
            f"{arch.max_positions}; lower either limit by {prompt + response - arch.max_positions} tokens or more"
        )
