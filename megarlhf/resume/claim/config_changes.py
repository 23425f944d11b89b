"""Changes of the configuration between an earlier run and the start that resumes it.

Every key has a kind:

- mathematics: it changes what is computed, or from which data
- neutral: it changes how a run is carried out. Numbers stay the same up to rounding, which follows the order of sums
- place: it names a model, its code or data, which may have moved, such as to a node's own disk. Digests tell whether
  the content is the same (`restore.Identity`)
- choice: it picks one of the run's checkpoints; the checkpoints themselves do not change
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarlhf.config import ROLES, DPOConfig, RewardConfig, RLConfig, RMConfig, RoleConfig, SFTConfig, trained_roles

TrainingConfig = SFTConfig | RMConfig | DPOConfig | RLConfig
"""Configurations of the commands that resume."""

Kind = Literal["neutral", "mathematics", "place", "choice"]


_NEUTRAL = {
    "where a run stands, what starts it, where it is logged": (
        "run.dir run.on_existing run.allow_changes run.nproc run.world_size run.wandb.* samples.*"
    ),
    "when it is saved, and as what": "checkpoint.* ROLE.lora.export",
    "when it ends because something hangs, and who is named as slow": "watchdog.*",
    "which steps are recorded": "profile.*",
    "counted in train.num_steps, which is compared": "train.num_epochs",
    "a model cut over other ranks is the same model": "ROLE.parallel.* ROLE.model.vocab_multiple rollout.parallel.*",
    "the same sums in another order": (
        "ROLE.kernels.* rollout.lora train.micro_batch_samples train.max_tokens_per_micro_batch rollout.vllm.args.* "
        "train.share_prompts run.deterministic"
    ),
    "when sums of gradients and weights travel": "ROLE.optim.overlap_grad_reduce ROLE.optim.overlap_param_gather",
    "which rank updates which part of a model": "ROLE.optim.distributed",
    "what is kept in memory, and what is computed again": "ROLE.recompute ROLE.recompute_layers ROLE.offload.*",
    "which engine draws which samples": "rollout.balance",
    "how an environment is called, not what it says": (
        "environment.workers environment.seconds_per_step environment.on_failure environment.python"
    ),
    "where tokenized data is kept, and by how many processes it is made": "data.cache data.workers",
    "records for figures only": "data.test",
    "own code that looks and changes nothing": "observe.*",
    "memory": (
        "rollout.vllm.sleep_level rollout.vllm.gpu_memory_utilization rollout.vllm.cpu_cache_gib "
        "rollout.reshard_bucket_mib"
    ),
    "how a reward is called, not what it says": "rewards.calls.*",
    "which of the rewards is called an accuracy": "eval.accuracy",
    "whether a KL that nothing else reads is measured": "algo.kl.log",
    "checks, which end a run or let it be": (
        "algo.unrewarded rollout.verify_weights_every rollout.poison_weights rollout.logprob_gap.* "
        "rollout.gap_probe_samples rollout.max_engine_rebuilds train.max_skipped_in_a_row data.max_skipped "
        "data.other_writing"
    ),
}
_FIGURES = "eval.every eval.max_samples"
"""Neutral where held-out figures are only looked at: see `_validation_decides`."""
_MATHEMATICS = {
    "everything random follows from it": "run.seed",
    "the model": "ROLE.model.random_init ROLE.model.fresh_head ROLE.model.dtype",
    "what of it is trained": (
        "ROLE.lora.rank ROLE.lora.alpha ROLE.lora.rslora ROLE.lora.targets ROLE.lora.dropout ROLE.freeze "
        "ROLE.train_only"
    ),
    "the optimizer": "ROLE.optim.* train.skip_grad_norm_above train.skip_grad_norm_factor",
    "the data": (
        "data.template data.chat_template data.template_args data.inexact data.template_may_drop data.loss_on "
        "data.sequence_length data.max_prompt_tokens data.max_response_tokens data.over_long data.validation_share "
        "data.phases data.split_seed "
        "train.mini_batch_samples train.prompts_per_step train.shuffle train.sampler"
    ),
    "the loss": (
        "loss center_coef margin unit_variance beta label_smoothing simpo_margin ipo_length_normalised "
        "kto_desirable_weight kto_undesirable_weight sft_coef sft_average algo.* rewards train.epochs_per_step "
        "train.critic_warmup_steps ptx.coef ptx.mini_batch_samples ptx.max_tokens ema.decay reference_update.* "
        "train.max_policy_kl ROLE.router_aux_loss_coef"
    ),
    "how responses are drawn": (
        "rollout.engine rollout.dtype rollout.num_samples_per_prompt rollout.max_response_tokens rollout.temperature "
        "rollout.top_p rollout.top_k rollout.min_p rollout.stop rollout.stop_token_ids "
        "rollout.slices rollout.steps_ahead "
        "environment.function environment.interface environment.args.* environment.max_turns "
        "environment.max_turn_tokens environment.history "
        "environment.tools environment.parser environment.max_result_characters "
        "rollout.vllm.args.kv_cache_dtype"
    ),
    "when the run ends": "train.stop.*",
}
_PLACES = (
    "ROLE.model.path ROLE.model.hf ROLE.model.tokenizer ROLE.model.families ROLE.lora.path data.train data.validation "
    "ptx.data"
)
_CHOICES = "checkpoint.best.*"
SOURCES = ("data.train", "data.validation", "data.test", "ptx.data")
"""Sets of records, each of which is one value, in whatever form it is written."""
_HORIZON = "train.num_steps"
"""Neutral where nothing is computed from it but the end of the run: see `_horizon_counts`."""


def _table() -> dict[str, Kind]:
    table: dict[str, Kind] = {key: "neutral" for keys in _NEUTRAL.values() for key in keys.split()}
    table |= {key: "mathematics" for keys in _MATHEMATICS.values() for key in keys.split()}
    return table | dict.fromkeys(_PLACES.split(), "place") | dict.fromkeys(_CHOICES.split(), "choice")


KINDS: Mapping[str, Kind] = _table()
"""Kind of each key, of each section (`section.*`) where all of its keys are alike; ROLE stands for every role."""
_CALL_KEYS = ("url", "token_env", "timeout_seconds", "retries", "workers", "on_failure", "check")
"""Keys of a reward that say where it is and how it is called, whether its failure ends the run, and whether it is tried
before the run."""
CONDITIONAL = (_HORIZON, *_FIGURES.split())
"""Keys whose kind depends on the rest of the configuration."""


@dataclass(frozen=True)
class Change:
    """A key whose value has changed."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


@dataclass(frozen=True)
class Changes:
    """Changed keys by kind."""

    neutral: list[Change]
    mathematics: list[Change]
    places: list[Change]
    choices: list[Change]


def compare(old: TrainingConfig, new: TrainingConfig) -> Changes:
    """The changes from the configuration of an earlier run to that of this start, of the same command."""
    before, after = _flat(old), _flat(new)
    # A role that only one of them builds follows from another key, which is named.
    alone = old.roles().keys() ^ new.roles().keys()
    changes = [
        Change(key, before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if before.get(key) != after.get(key) and key.partition(".")[0] not in alone
    ]
    result = Changes([], [], [], [])
    lists = {"neutral": result.neutral, "mathematics": result.mathematics, "place": result.places}
    lists["choice"] = result.choices
    for change in changes:
        lists[kind_of(change.key, old, new)].append(change)
    return result


def kind_of(key: str, old: TrainingConfig, new: TrainingConfig) -> Kind:
    """Kind of a key, between these two configurations.

    Raises: KeyError for a key without an entry in the tables above.
    """
    if key == _HORIZON:
        return "mathematics" if _horizon_counts(old) or _horizon_counts(new) else "neutral"
    if key in CONDITIONAL:
        return "mathematics" if _validation_decides(key, old) or _validation_decides(key, new) else "neutral"
    first, _, rest = key.partition(".")
    general = f"ROLE.{rest}" if first in ROLES else key
    sections = general.split(".")
    names = [general, *(".".join([*sections[:end], "*"]) for end in range(len(sections) - 1, 0, -1))]
    return KINDS[next((name for name in names if name in KINDS), key)]


def mathematics_of(cfg: TrainingConfig) -> dict[str, Any]:
    """Values of all keys of kind mathematics, by dotted key."""
    return {key: value for key, value in _flat(cfg).items() if kind_of(key, cfg, cfg) == "mathematics"}


def _horizon_counts(cfg: TrainingConfig) -> bool:
    """Tell whether the number of steps changes what a step computes: the learning rate falls towards the end, the
    entropy bonus changes until then, the head is rescaled there, or the last steps begin no samples of later ones."""
    rescales = isinstance(cfg, RMConfig) and cfg.unit_variance
    fades = isinstance(cfg, RLConfig) and cfg.algo.entropy_coef_end not in (None, cfg.algo.entropy_coef)
    begins = isinstance(cfg, RLConfig) and cfg.rollout.is_stale
    return rescales or fades or begins or any(role.optim.schedule != "constant" for role in _trained(cfg).values())


def _validation_decides(key: str, cfg: TrainingConfig) -> bool:
    """Tell whether held-out figures decide about the resulting model."""
    if cfg.train.stop.patience is not None:
        return True
    return isinstance(cfg, RMConfig) and cfg.unit_variance and key != "eval.every"


def _trained(cfg: TrainingConfig) -> dict[str, RoleConfig]:
    return {name: role for name, role in cfg.roles().items() if name in trained_roles(cfg)}


def _flat(cfg: TrainingConfig) -> dict[str, Any]:
    """Values by dotted key. Of the roles those that are built, and of a frozen one no optimizer: the rest is unread."""
    tree = cfg.model_dump(mode="json", exclude=set(ROLES))
    if isinstance(cfg, RLConfig):
        tree["algo"]["rollout_correction"]["kind"] = cfg.rollout_correction.kind  # what `auto` stands for
        # Two keys of the list, as one change of it may be of either kind.
        tree["rewards.calls"] = {
            f"{n}.{key}": value
            for n, reward in enumerate(tree["rewards"])
            for key in _CALL_KEYS
            if (value := reward.pop(key)) != RewardConfig.model_fields[key].default
        }
    for name in ("ptx", "ema", "reference_update", "environment"):
        if tree.get(name, 0) is None:
            del tree[name]
    unread = {"optim", "router_aux_loss_coef"}
    for name, role in cfg.roles().items():
        tree[name] = role.model_dump(mode="json", exclude=None if name in _trained(cfg) else unread)
        if role.lora is None:
            del tree[name]["lora"]
    values: dict[str, Any] = {}

    def walk(node: Mapping[str, Any], prefix: str) -> None:
        for name, value in node.items():
            if isinstance(value, Mapping) and prefix + name not in SOURCES:
                walk(value, f"{prefix}{name}.")
            else:
                values[prefix + name] = value

    walk(tree, "")
    return values


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
