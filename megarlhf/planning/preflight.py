"""Everything that can be decided about a run without starting it, and the table that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.placements import vllm_placements
from megarlhf.config import (
    DPOConfig,
    EvaluateConfig,
    GenerateConfig,
    RLConfig,
    RMConfig,
    RoleConfig,
    SFTConfig,
    dump_config,
    roles_of,
)
from megarlhf.config.ask import AskConfig
from megarlhf.layout import MeshLayout
from megarlhf.memory import available_bytes
from megarlhf.observe.records.run_directory import require_writable_output
from megarlhf.observe.records.wandb_run import require_wandb
from megarlhf.observe.terminal.progress import make_console, table
from megarlhf.planning.adapters import check_trained
from megarlhf.planning.batch import (
    BatchNumber,
    dpo_batch_numbers,
    rl_batch_numbers,
    schedule_notes,
    supervised_batch_numbers,
)
from megarlhf.planning.data.end_tokens import end_notes, scorer_notes
from megarlhf.planning.data.first_rows import check_data, same_data
from megarlhf.planning.data.formatting import check_writing
from megarlhf.planning.data.rewards import check_rules, try_rewards
from megarlhf.planning.data.unread_fields import check_unread_fields
from megarlhf.planning.data.whole_sets import look_at_all_records
from megarlhf.planning.kl_reference import check_anchor
from megarlhf.planning.layout import check_role
from megarlhf.planning.machine.capabilities import (
    AnyConfig,
    check_host_memory,
    check_kernels,
    draws,
    head_of,
    host_bytes,
)
from megarlhf.planning.models import check_heads, check_retokenized, check_vocabularies
from megarlhf.planning.unused_keys import changed_meanings, rarely_meant, without_effect
from megarlhf.resume.claim.on_existing import require_usable, require_writable, strangers_in
from megarlhf.rollout.rewards.accuracy import find_accuracy
from megarlhf.rollout.vllm.arguments import cpu_experts_multiple, cpu_head_sizes, unknown_arguments
from megarlhf.runtime import capabilities
from megarlhf.weights.checkpoint.dtype import has_weights, resolve_dtype


@dataclass(frozen=True)
class Preflight:
    """What a checked run will be."""

    title: str
    config: str
    numbers: tuple[BatchNumber, ...]
    roles: tuple[tuple[str, str, str], ...]
    """Role, model and layout in words."""
    notes: tuple[str, ...] = ()
    """What else a user should know, in sentences."""

    def print(self) -> None:
        """The resolved configuration and numbers, for people."""
        console = make_console()
        console.print(self.config, highlight=False, markup=False)
        console.print(table(f"{self.title}: roles", self.roles, ("role", "model", "layout")))
        if self.numbers:
            rows = [(number.words, number.value) for number in self.numbers]
            console.print(table(f"{self.title}: batch arithmetic", rows, ("per", "n")))
        for note in self.notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)


def preflight(
    command: str,
    cfg: AnyConfig,
    world_size: int,
    *,
    device_type: str | None = None,
    weights: bool = True,
    local_ranks: int = 0,
    all_records: bool = False,
) -> Preflight:
    """Check the whole run.

    device_type: of the machines that it is for, in torch's words; None: of this one
    weights: whether models must have weights; if not, heads are looked at where they have
    local_ranks: see `check_layouts`
    all_records: look at all records of small sets, beyond the first ones

    Raises: ValueError, saying what does not fit and what to change.
    """
    if draws(cfg):
        check_rules(cfg.rewards)
    device_type = device_type or capabilities().device_type
    on_cpu = device_type == "cpu"
    roles, retokenized = roles_of(cfg), _retokenized(cfg)
    stored = {name: section for name, section in roles.items() if weights or has_weights(section.model)}
    described = []
    checked = check_layouts(cfg, world_size, local_ranks=local_ranks, device_type=device_type)
    notes = (
        without_effect(cfg, world_size, on_cpu=on_cpu)
        + check_vocabularies(roles, _read_apart(cfg, retokenized))
        + [check_retokenized(name, roles[name], cfg.data.template_mode) for name in retokenized]
        + check_heads(stored, trains_reward_model=isinstance(cfg, RMConfig))
    )
    for name, section in roles.items():
        arch, layout = checked[name]
        dtype = resolve_dtype(name, section.model, head_of(name))
        if draws(cfg) and name not in retokenized:  # its texts are measured one by one
            _check_positions(cfg, name, section, arch)
        size = f"{arch.num_layers} layers of {arch.hidden_size}"
        model = f"{section.model.path} ({arch.model_type}, {size}, {dtype.name} {dtype.why})"
        described.append((name, model, f"{section.parallel.describe(layout)} = {in_words(layout, world_size)}"))
    notes += check_trained(cfg, roles, {name: arch for name, (arch, _) in checked.items()})
    of_data, texts = ([], False) if isinstance(cfg, AskConfig) else check_data(command, cfg)
    notes += end_notes(*next(iter(roles.items())), cfg.data, generates=draws(cfg), texts=texts) + of_data
    notes += check_writing(cfg)
    if isinstance(cfg, RLConfig):
        notes += check_anchor(cfg) + rarely_meant(cfg)
    if draws(cfg):
        notes += try_rewards(cfg) if weights else []
        notes += check_unread_fields(cfg) if weights and isinstance(cfg, RLConfig | EvaluateConfig) else []
        accuracy = find_accuracy(cfg.eval.accuracy, cfg.rewards)
        held_out = isinstance(cfg, EvaluateConfig) or (
            isinstance(cfg, RLConfig) and (cfg.data.has_validation or cfg.data.test)
        )
        if accuracy.note and held_out:
            notes.append(accuracy.note)
        if isinstance(cfg, RLConfig) and accuracy.label is None and "eval_accuracy" in cfg.chosen_by:
            raise ValueError(f"a choice is made by eval_accuracy, and {accuracy.note}")
        if isinstance(cfg, EvaluateConfig) and cfg.eval.pass_at and accuracy.label is None:
            raise ValueError(
                f"eval.pass_at = {list(cfg.eval.pass_at)} needs to know which responses are right: {accuracy.note}"
            )
    if isinstance(cfg, RLConfig) and "reward_model" in roles and "reward_model" not in retokenized:
        notes += scorer_notes(cfg.actor, roles["reward_model"], cfg.data)
    notes += [] if isinstance(cfg, AskConfig) else _check_outputs(command, cfg)
    notes += look_at_all_records(command, cfg) if all_records else []
    if isinstance(cfg, DPOConfig):
        notes.append(cfg.describe_loss())
    if not isinstance(cfg, GenerateConfig | EvaluateConfig):
        notes += cfg.profile.start_notes(world_size, on_cpu=on_cpu)
        notes += schedule_notes(cfg) + changed_meanings(cfg)
    return Preflight(
        title=command,
        config=dump_config(cfg),
        numbers=tuple(_numbers(cfg, world_size)),
        roles=tuple(described),
        notes=tuple(notes),
    )


def check_layouts(
    cfg: AnyConfig, world_size: int, *, local_ranks: int = 0, device_type: str | None = None
) -> dict[str, tuple[Architecture, MeshLayout]]:
    """What needs no more than a look at each config.json, so that every rank can ask it before it joins the others:
    roles on their ranks, engines, batches, and what the machine can do. Returns architecture and layout by role.

    local_ranks: those that start on this machine; 0: another one is meant, whose memory is not known

    Raises: ValueError, saying what does not fit and what to change.
    """
    device_type = device_type or capabilities().device_type
    roles = roles_of(cfg)
    checked = {name: check_role(name, section, world_size) for name, section in roles.items()}
    if draws(cfg):
        for name in {"actor", "against"} & checked.keys():
            _check_engine(cfg, roles[name], checked[name][0], world_size, on_cpu=device_type == "cpu")
    check_kernels(roles, device_type)
    _numbers(cfg, world_size)
    if not isinstance(cfg, GenerateConfig | EvaluateConfig):
        cfg.profile.require_ranks(world_size)
    if local_ranks:
        needed = host_bytes(cfg, roles, checked, device_type=device_type)
        check_host_memory(needed, local_ranks, available_bytes())
    return checked


def _numbers(cfg: AnyConfig, world_size: int) -> list[BatchNumber]:
    """Raises: ValueError where the batches do not divide."""
    if isinstance(cfg, DPOConfig):
        return dpo_batch_numbers(cfg, world_size)
    if isinstance(cfg, RLConfig):
        return rl_batch_numbers(cfg, world_size)
    if isinstance(cfg, GenerateConfig | EvaluateConfig):
        return []
    ((role, section),) = roles_of(cfg).items()
    sample = "sequences" if isinstance(cfg, SFTConfig) else "preference pairs (two sequences each)"
    return supervised_batch_numbers(cfg.train, section.parallel.layout(world_size, role).dp, role, sample)


def in_words(layout: MeshLayout, world_size: int) -> str:
    """The ranks of a role in a run of `world_size`."""
    count, ranks = layout.world_size, layout.ranks
    return f"{count} ranks" + (f" of {world_size}: {ranks[0]} to {ranks[-1]}" if count < world_size else "")


def _retokenized(cfg: AnyConfig) -> list[str]:
    """The roles that read text instead of the actor's token ids."""
    return (
        ["reward_model"]
        if isinstance(cfg, RLConfig | EvaluateConfig) and cfg.uses_reward_model and cfg.retokenizes
        else []
    )


def _read_apart(cfg: AnyConfig, retokenized: Sequence[str]) -> list[str]:
    """The roles that read no token ids of the first one: they are given text, or have data of their own."""
    if not isinstance(cfg, EvaluateConfig):
        return list(retokenized)
    scores_ids = cfg.uses_reward_model and not cfg.retokenizes
    return ["against", "reward_model"] if not scores_ids else []


def _check_outputs(command: str, cfg: AnyConfig) -> list[str]:
    """Nothing that is there may be lost. Returns what an overwriting run removes, and the like, in sentences."""
    if cfg.run.wandb.project is not None:
        require_wandb(cfg.run.wandb)
    if isinstance(cfg, GenerateConfig) and cfg.out is not None:
        require_writable_output(cfg, cfg.run, cfg.out)
    notes = []
    notes += same_data(cfg.data)
    usable = require_usable(cfg, cfg.run, command)
    require_writable(cfg.run)
    notes += strangers_in(cfg.run)
    if usable.removed:
        notes.append(f"run.dir = {cfg.run.dir}: the earlier run's {len(usable.removed)} files and folders are removed")
    return notes + usable.notes


def _check_engine(
    cfg: RLConfig | GenerateConfig | EvaluateConfig,
    section: RoleConfig,
    arch: Architecture,
    world_size: int,
    *,
    on_cpu: bool,
) -> None:
    """Whether vLLM's engines fit the ranks, and whether the table knows where vLLM keeps every parameter."""
    if cfg.rollout.engine != "vllm":
        return
    tp = cfg.rollout.tp(section)
    if world_size % tp:
        raise ValueError(f"rollout.parallel.tp = {tp} does not divide the {world_size} ranks of the run")
    unknown = unknown_arguments(cfg.rollout.engine_args)
    if unknown:
        raise ValueError(f"rollout.engine_args: {'; '.join(unknown)}")
    try:
        vllm_placements(arch, tp=tp, tp_rank=0, rank=0)
    except ValueError as error:
        raise ValueError(
            f"rollout.parallel.tp = {tp} of vLLM and {section.model.path}: {error}; or use rollout.engine=megatron"
        ) from None
    sizes = cpu_head_sizes() if on_cpu else ()
    if sizes and arch.head_dim not in sizes:
        raise ValueError(
            f"{section.model.path} has heads of {arch.head_dim} (head_dim), and vLLM's attention on a CPU takes "
            f"{', '.join(map(str, sizes))} only; use another model, a GPU, or rollout.engine=megatron"
        )
    multiple = cpu_experts_multiple() if on_cpu and arch.num_experts else 1
    if arch.hidden_size % multiple:
        raise ValueError(
            f"{section.model.path} has experts and hidden_size = {arch.hidden_size}, and vLLM's experts on a CPU take "
            f"multiples of {multiple} only; use another model, a GPU, or rollout.engine=megatron"
        )


def _check_positions(
    cfg: RLConfig | GenerateConfig | EvaluateConfig, role: str, section: RoleConfig, arch: Architecture
) -> None:
    """Every role reads prompt and response; the longest that may come must fit its positions."""
    prompt, response = cfg.data.max_prompt_tokens, cfg.rollout.max_response_tokens
    if prompt + response > arch.longest_sequence:
        raise ValueError(
            f"{role}: data.max_prompt_tokens + rollout.max_response_tokens = {prompt} + {response} = "
            f"{prompt + response} tokens, but {section.model.path} has {arch.limit_of_sequences}; lower either limit "
            f"by {prompt + response - arch.longest_sequence} tokens or more"
        )
