"""All checks of a run that do not need its start, and the tables of a dry run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.architectures.architecture import Architecture
from megarlhf.config import (
    ROLES,
    DPOConfig,
    EvaluateConfig,
    GenerateConfig,
    RLConfig,
    RMConfig,
    RoleConfig,
    SFTConfig,
)
from megarlhf.config.ask import AskConfig
from megarlhf.config.load import dump_changed
from megarlhf.layout import MeshLayout
from megarlhf.memory import available_bytes
from megarlhf.observe.records.run_directory import CONFIG_FILE, require_writable_output
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
from megarlhf.planning.kl_reference import check_reference
from megarlhf.planning.layout import check_role
from megarlhf.planning.machine.capabilities import (
    AnyConfig,
    check_host_memory,
    check_kernels,
    draws,
    engine_host_weights,
    host_bytes,
)
from megarlhf.planning.models import check_heads, check_retokenized, check_vocabularies
from megarlhf.planning.own_code import check_own_code
from megarlhf.planning.unused_keys import changed_meanings, rarely_meant, without_effect
from megarlhf.resume.claim.on_existing import require_usable, require_writable, strangers_in
from megarlhf.rollout.engines import engine_of
from megarlhf.rollout.rewards.accuracy import find_accuracy
from megarlhf.runtime import capabilities
from megarlhf.weights.checkpoint.dtype import has_weights, resolve_dtype


@dataclass(frozen=True)
class Preflight:
    """The description of a checked run."""

    title: str
    config: str
    """YAML of the keys that are not as by default."""
    numbers: tuple[BatchNumber, ...]
    roles: tuple[tuple[str, str, str], ...]
    """Role, model and layout in words."""
    notes: tuple[str, ...] = ()
    """Notes for the user, in sentences."""

    def print(self) -> None:
        """Print what the configuration changes, the tables and the notes."""
        console = make_console()
        console.print(f"keys that are not as by default (the run's {CONFIG_FILE} has all):", highlight=False)
        console.print(self.config, highlight=False, markup=False)
        console.print(table(f"{self.title}: roles", self.roles, ("role", "model", "layout")))
        if self.numbers:
            rows = [(number.unit, number.value) for number in self.numbers]
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

    device_type: torch's name for the device of the run; None: this machine's
    weights:     whether models must have weights; if not, heads are checked only of models that have
    local_ranks: see `check_layouts`
    all_records: check all records of small sets, beyond the first ones

    Raises: ValueError that names the mistake and the remedy.
    """
    if draws(cfg):
        check_rules(cfg.rewards)
    device_type = device_type or capabilities().device_type
    on_cpu = device_type == "cpu"
    roles, retokenized = cfg.roles(), _retokenized(cfg)
    stored = {name: section for name, section in roles.items() if weights or has_weights(section.model)}
    checked = check_layouts(cfg, world_size, local_ranks=local_ranks, device_type=device_type)
    notes = without_effect(cfg, world_size, on_cpu=on_cpu)
    notes += check_vocabularies(roles, _with_own_tokens(cfg, retokenized))
    notes += [check_retokenized(name, roles[name], cfg.data.template_mode) for name in retokenized]
    notes += check_heads(stored, trains_reward_model=isinstance(cfg, RMConfig))
    described = []
    for name, section in roles.items():
        arch, layout = checked[name]
        dtype = resolve_dtype(name, section.model, ROLES[name].head)
        if draws(cfg) and name not in retokenized:  # texts of those are measured one by one
            check_positions(cfg, name, section, arch)
        size = f"{arch.num_layers} layers of {arch.hidden_size}"
        model = f"{section.model.path} ({arch.model_type}, {size}, {dtype.name} {dtype.why})"
        described.append((name, model, f"{section.parallel.describe(layout)} = {describe_ranks(layout, world_size)}"))
    notes += check_trained(cfg, roles, {name: arch for name, (arch, _) in checked.items()})
    data_notes, texts = ([], False) if isinstance(cfg, AskConfig) else check_data(command, cfg)
    notes += end_notes(*next(iter(roles.items())), cfg.data, generates=draws(cfg), texts=texts) + data_notes
    notes += check_writing(cfg) + check_own_code(cfg)
    if isinstance(cfg, RLConfig):
        notes += check_reference(cfg) + rarely_meant(cfg)
    if draws(cfg):
        notes += _check_rewards(cfg, weights=weights)
    if isinstance(cfg, RLConfig) and "reward_model" in roles and "reward_model" not in retokenized:
        notes += scorer_notes(cfg.actor, roles["reward_model"], cfg.data)
    notes += [] if isinstance(cfg, AskConfig) else _check_outputs(command, cfg)
    notes += look_at_all_records(command, cfg) if all_records else []
    if isinstance(cfg, DPOConfig):
        notes.append(cfg.describe_loss())
    if not isinstance(cfg, GenerateConfig | EvaluateConfig):
        notes += cfg.profile.start_notes(world_size, on_cpu=on_cpu) + schedule_notes(cfg)
        notes += changed_meanings(cfg.checkpoint)
    numbers = tuple(_numbers(cfg, world_size))
    return Preflight(command, dump_changed(cfg), numbers, roles=tuple(described), notes=tuple(notes))


def check_layouts(
    cfg: AnyConfig, world_size: int, *, local_ranks: int = 0, device_type: str | None = None
) -> dict[str, tuple[Architecture, MeshLayout]]:
    """Check layouts of roles, engines, batches, kernels and host memory; returns architecture and layout by role.

    Reads no more than each config.json, so that every rank can call it before it joins the others.

    local_ranks: number of ranks that start on this machine; 0: the run is for other machines, of unknown memory

    Raises: ValueError that names the mistake and the remedy.
    """
    device_type = device_type or capabilities().device_type
    roles = cfg.roles()
    checked = {name: check_role(name, section, world_size) for name, section in roles.items()}
    if draws(cfg):
        for name in {"actor", "against"} & checked.keys():
            arch, on_cpu = checked[name][0], device_type == "cpu"
            engine_of(cfg.rollout).check(cfg.rollout, roles[name], arch, world_size, on_cpu=on_cpu)
    check_kernels(roles, device_type)
    _numbers(cfg, world_size)
    if not isinstance(cfg, GenerateConfig | EvaluateConfig):
        cfg.profile.require_ranks(world_size)
    if local_ranks:
        needed = host_bytes(cfg, roles, checked, device_type=device_type)
        check_host_memory(needed, engine_host_weights(cfg), local_ranks, available_bytes())
    return checked


def _numbers(cfg: AnyConfig, world_size: int) -> list[BatchNumber]:
    """Batch arithmetic of the command. Raises: ValueError if the batches do not divide."""
    if isinstance(cfg, DPOConfig):
        return dpo_batch_numbers(cfg, world_size)
    if isinstance(cfg, RLConfig):
        return rl_batch_numbers(cfg, world_size)
    if isinstance(cfg, GenerateConfig | EvaluateConfig):
        return []
    ((role, section),) = cfg.roles().items()
    sample = "sequences" if isinstance(cfg, SFTConfig) else "preference pairs (two sequences each)"
    return supervised_batch_numbers(cfg.train, section.parallel.layout(world_size, role).dp, role, sample)


def describe_ranks(layout: MeshLayout, world_size: int) -> str:
    """`8 ranks`, or `4 ranks of 8: 0 to 3` for a role on some of the ranks."""
    count, ranks = layout.world_size, layout.ranks
    return f"{count} ranks" + (f" of {world_size}: {ranks[0]} to {ranks[-1]}" if count < world_size else "")


def _retokenized(cfg: AnyConfig) -> list[str]:
    """Roles that read text instead of the actor's token ids."""
    is_text = isinstance(cfg, RLConfig | EvaluateConfig) and cfg.uses_reward_model and cfg.retokenizes
    return ["reward_model"] if is_text else []


def _with_own_tokens(cfg: AnyConfig, retokenized: Sequence[str]) -> list[str]:
    """Roles that read no token ids of the first role: they are given text, or have data of their own."""
    if not isinstance(cfg, EvaluateConfig):
        return list(retokenized)
    return [] if cfg.uses_reward_model and not cfg.retokenizes else ["against", "reward_model"]


def _check_rewards(cfg: RLConfig | GenerateConfig | EvaluateConfig, *, weights: bool) -> list[str]:
    """Try rewards, and check that accuracy is known where it decides. Returns notes. Raises: ValueError."""
    notes = try_rewards(cfg) if weights else []
    notes += check_unread_fields(cfg) if weights and isinstance(cfg, RLConfig | EvaluateConfig) else []
    accuracy = find_accuracy(cfg.eval.accuracy, cfg.rewards)
    evaluates = isinstance(cfg, EvaluateConfig)
    if accuracy.note and (evaluates or (isinstance(cfg, RLConfig) and (cfg.data.has_validation or cfg.data.test))):
        notes.append(accuracy.note)
    if isinstance(cfg, RLConfig) and accuracy.label is None and "eval_accuracy" in cfg.chosen_by:
        raise ValueError(f"a choice is made by eval_accuracy, and {accuracy.note}")
    if isinstance(cfg, EvaluateConfig) and cfg.eval.pass_at and accuracy.label is None:
        raise ValueError(
            f"eval.pass_at = {list(cfg.eval.pass_at)} needs to know which responses are right: {accuracy.note}"
        )
    return notes


def _check_outputs(command: str, cfg: AnyConfig) -> list[str]:
    """Check that no existing file is lost. Returns notes, for example on files that an overwriting run removes."""
    if cfg.run.wandb.project is not None:
        require_wandb(cfg.run.wandb)
    if isinstance(cfg, GenerateConfig) and cfg.out is not None:
        require_writable_output(cfg, cfg.run, cfg.out)
    notes = same_data(cfg.data)
    usable = require_usable(cfg, cfg.run, command)
    require_writable(cfg.run)
    notes += strangers_in(cfg.run)
    if usable.removed:
        notes.append(f"run.dir = {cfg.run.dir}: the earlier run's {len(usable.removed)} files and folders are removed")
    return notes + usable.notes


def check_positions(
    cfg: RLConfig | GenerateConfig | EvaluateConfig, role: str, section: RoleConfig, arch: Architecture
) -> None:
    """Check that the longest prompt and response fit the role's positions. Raises: ValueError."""
    prompt, response = cfg.data.max_prompt_tokens, cfg.rollout.max_response_tokens
    if prompt + response > arch.longest_sequence:
        raise ValueError(
            f"{role}: data.max_prompt_tokens + rollout.max_response_tokens = {prompt} + {response} = "
            f"{prompt + response} tokens, but {section.model.path} has {arch.limit_of_sequences}; lower either limit "
            f"by {prompt + response - arch.longest_sequence} tokens or more"
        )
