"""Notes on keys that a configuration sets without effect, and on rarely meant combinations.

Certain mistakes are refused when the configuration is loaded. These keys may be shared by several files.
"""

from __future__ import annotations

from typing import Any

from megarlhf.config import (
    ROLES,
    AlgoConfig,
    CheckpointConfig,
    DPOConfig,
    EvaluateConfig,
    FrozenModel,
    GenerateConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    trained_roles,
)
from megarlhf.own_code.load import is_path
from megarlhf.planning.machine.capabilities import AnyConfig, draws, works_in_turns
from megarlhf.rollout.engines import engine_of

_Rule = tuple[str, bool, str]
"""Keys, whether nothing reads them, and why."""
_TRAINING_ONLY = (
    "optim recompute recompute_layers router_aux_loss_coef offload.gradients offload.optimizer freeze train_only "
    "lora.export"
)
"""Keys of a role that only its training reads."""


def without_effect(cfg: AnyConfig, world_size: int | None = None, *, on_cpu: bool | None = None) -> list[str]:
    """A sentence for each key that is set to another value than its default and that nothing reads.

    world_size: ranks of the run
    on_cpu:     whether the run has no GPUs
    None: not known; rules that depend on it are left out
    """
    if isinstance(cfg, EvaluateConfig):
        rules = _evaluation_rules(cfg)
    else:
        rules = _generation_rules(cfg) if isinstance(cfg, GenerateConfig) else _training_rules(cfg)
    rules += _role_rules(cfg, world_size)
    if isinstance(cfg, RLConfig):
        rules += _rl_rules(cfg) + _advantage_rules(cfg.algo) + _loss_rules(cfg)
    if draws(cfg):
        engine = engine_of(cfg.rollout)
        is_one = engine.has_own_weights and cfg.actor is not None and cfg.rollout.tp(cfg.actor) == world_size
        rules += [(f"rollout.{key}", True, why) for key, why in engine.unread_keys(on_cpu=on_cpu).items()]
        rules.append(("rollout.balance", is_one, f"rollout.parallel.tp = {world_size} makes one engine of all ranks"))
    unread: dict[str, str] = {}
    for keys, is_unread, why in rules:
        for key in keys.split() if is_unread else ():
            unread.setdefault(key, why)  # one reason for a key is enough
    return [f"set, but without effect here: {key} ({why})" for key, why in unread.items() if _is_set(cfg, key)]


def rarely_meant(cfg: RLConfig) -> list[str]:
    """A sentence for each combination of keys that works and is rarely wanted."""
    algo, notes = cfg.algo, []
    if algo.dynamic_sampling.is_on and not algo.traits.compares_groups:
        notes.append(
            "algo.dynamic_sampling drops groups of equal rewards, from which algo.advantage = "
            f"{algo.advantage} would learn: it compares no responses within a group"
        )
    if algo.dynamic_sampling.is_on and any(source.weight is not None for source in cfg.data.train):
        notes.append(
            "algo.dynamic_sampling takes further prompts from all of data.train alike, whatever weight their sources "
            "have: the mixture that is trained on may differ from the weights"
        )
    if algo.policy_loss == "policy_gradient" and (updates := cfg.updates_per_step) > 1:
        notes.append(
            f"algo.policy_loss = policy_gradient makes {updates} updates from the samples of a step, and has no ratio "
            "to correct for the policy's change after the first: one update per step, or another policy_loss"
        )
    return notes


def changed_meanings(checkpoint: CheckpointConfig) -> list[str]:
    """A sentence for each key that is set and once had another meaning."""
    keys = checkpoint.model_fields_set
    return [
        f"checkpoint.{key} is about resume points, from which a run goes on; for exports (Hugging Face directories) "
        f"there is checkpoint.export_{key}, which is not set"
        for key in ("every", "keep")
        if key in keys and f"export_{key}" not in keys
    ]


def _keys(section: str, names: str) -> str:
    return " ".join(f"{section}.{name}" for name in names.split())


def _role_rules(cfg: AnyConfig, world_size: int | None) -> list[_Rule]:
    roles, rules = cfg.roles(), list[_Rule]()
    is_alone, trained = not works_in_turns(cfg, roles), trained_roles(cfg)
    for name, section in roles.items():
        is_trained, new_adapter = name in trained, section.lora is not None and section.lora.path is None
        layout = None if world_size is None else section.parallel.layout(world_size, name)
        is_one = layout is not None and layout.dp * layout.cp == 1
        overlaps = _keys(f"{name}.optim", "overlap_grad_reduce overlap_param_gather")
        all_logits = section.kernels.logprobs == "reference"
        rules += [
            (f"{name}.offload.parameters", is_alone, f"nobody works in turns with {name}"),
            (f"{name}.model.fresh_head", section.model.random_init, "random_init draws every weight"),
            (f"{name}.lora", new_adapter and not is_trained, "nothing is trained, and a new adapter adds nothing"),
            (f"{name}.kernels.save_mib", all_logits, f"{name}.kernels.logprobs = reference keeps all logits"),
            (overlaps, is_one and is_trained, "one data-parallel rank sums and gathers nothing"),
        ]
    return rules


def _training_rules(cfg: SFTConfig | RMConfig | DPOConfig | RLConfig) -> list[_Rule]:
    is_plain, one_export = cfg.data.template_mode == "plain", cfg.checkpoint.export_every == 0
    rules: list[_Rule] = [
        ("data.loss_on data.inexact", is_plain, "data.template = plain reads texts, which have one answer"),
        ("eval.every eval.max_samples", not cfg.data.has_validation, "there is no data.validation to evaluate on"),
        ("checkpoint.export_keep", one_export, "checkpoint.export_every = 0 writes one export, after the last step"),
        ("profile.ranks", not cfg.profile.recorded, "profile names no step"),
        ("train.share_prompts", bool(why := shares_nothing(cfg)), why),
    ]
    for name in cfg.roles():
        is_frozen, has_logprobs = name not in trained_roles(cfg), ROLES[name].head == "lm"
        rules += [
            (_keys(name, _TRAINING_ONLY), is_frozen, f"{cfg.command} does not train the {name.replace('_', ' ')}"),
            (f"{name}.kernels.save_mib", is_frozen and has_logprobs, "only training keeps logits"),
            (f"{name}.kernels", not has_logprobs, "log-probs are of language models"),
        ]
    return rules


def shares_nothing(cfg: SFTConfig | RMConfig | DPOConfig | RLConfig) -> str:
    """The reason why no prompt is computed once for several responses; empty if some may be."""
    if isinstance(cfg, SFTConfig):
        return "each sample of sft is one sequence"
    if isinstance(cfg, RLConfig) and cfg.rollout.num_samples_per_prompt == 1:
        return "rollout.num_samples_per_prompt = 1"
    if cfg.train.max_tokens_per_micro_batch is None:
        return "padded rows hold one sequence each"
    if all(section.parallel.cp > 1 for section in cfg.roles().values()):
        return "context parallelism cuts whole sequences"
    return ""


def _rl_rules(cfg: RLConfig) -> list[_Rule]:
    kl, stop, scores = cfg.algo.kl, cfg.train.stop, cfg.uses_reward_model
    no_held_out, no_kl = not (cfg.data.has_validation or cfg.data.test), not cfg.needs_reference
    no_reader = "nothing reads the KL: algo.kl.coef = 0, algo.kl.log = false, and no train.stop.max_kl"
    is_measured = kl.coef > 0 or stop.max_kl is not None
    return [
        ("eval.accuracy", no_held_out, "there is no data.validation to evaluate on"),
        ("samples.every", cfg.samples.count == 0, "samples.count = 0 writes no tables"),
        ("train.max_policy_kl", cfg.updates_per_step == 1, "a step has one update of the actor"),
        ("rollout.gap_probe_samples", not cfg.rollout.is_stale, "all tokens are compared without slices"),
        ("train.stop.max_kl_steps", stop.max_kl is None, "train.stop.max_kl is not set"),
        ("algo.kl.horizon", kl.controller == "fixed", "algo.kl.controller = fixed"),
        ("algo.kl.placement", kl.coef == 0, "algo.kl.coef = 0"),
        ("reference", no_kl, no_reader),
        ("algo.kl.estimator algo.kl.clamp", no_kl, "no KL is measured"),
        ("algo.kl.log", is_measured, "the KL is measured anyway, for algo.kl.coef or train.stop.max_kl"),
        ("reward_model", not scores, "no entry of rewards has kind: model"),
    ]


def _advantage_rules(algo: AlgoConfig) -> list[_Rule]:
    advantage = algo.advantage
    given, is_relative = f"algo.advantage = {advantage}", advantage == "group_relative"
    if is_path(advantage):  # an own one may read each of them
        return [("algo.value_clip train.critic_warmup_steps critic", not algo.needs_critic, f"{given} has no critic")]
    no_credit = advantage not in ("leave_one_out", "group_relative") or not algo.kl_in_reward
    unscaled = "algo.scale_by_group_std = false" if is_relative else f"{given} scales by no group"
    std = _keys("algo", "group_std group_std_over group_std_eps group_std_floor")
    return [
        ("algo.gamma", not algo.traits.discounts, f"{given} reads none"),
        ("algo.lam algo.critic_lam", advantage != "gae", f"{given} reads none"),
        ("algo.whiten_over algo.whiten_variance", not algo.whitens, "the advantages are not whitened"),
        ("algo.value_clip train.critic_warmup_steps critic", not algo.needs_critic, f"{given} has no critic"),
        ("algo.scale_by_group_std", not is_relative, unscaled),
        (std, not (is_relative and algo.scale_by_group_std), unscaled),
        ("algo.group_of_one", not algo.traits.compares_groups, f"{given} compares no group"),
        ("algo.kl.credit", no_credit, "only read with the KL in the reward of leave_one_out and group_relative"),
    ]


def _loss_rules(cfg: RLConfig) -> list[_Rule]:
    algo = cfg.algo
    loss, average = algo.policy_loss, algo.loss_average
    given, given_average = f"algo.policy_loss = {loss}", f"algo.loss_average = {average}"
    no_ratio = loss == "policy_gradient" and not algo.kl.ratio_weighted
    no_gate = loss != "sapo" and not is_path(loss)
    kind, level = cfg.rollout_correction.kind, algo.rollout_correction.level
    given_kind = f"algo.rollout_correction.kind = {kind}"
    return [
        ("algo.clip_low algo.clip_high", loss in ("sapo", "policy_gradient"), f"{given} has no such bound"),
        ("algo.clip_dual algo.clip_delta", loss != "clip" and not is_path(loss), f"{given} has no such bound"),
        (_keys("algo", "sapo_temperature_positive sapo_temperature_negative"), no_gate, f"{given} has no gate"),
        ("algo.ratio", no_ratio, "algo.policy_loss = policy_gradient has no ratio"),
        ("algo.loss_constant", average != "constant", given_average),
        ("algo.loss_block_samples", average != "bnpo", given_average),
        ("algo.loss_counts_left_out", average in ("token", "bnpo"), f"{given_average} counts tokens"),
        (_keys("algo.rollout_correction", "level high"), kind == "none", given_kind),
        ("algo.rollout_correction.low algo.rollout_correction.mask_weight", kind != "mask", given_kind),
        (
            "algo.rollout_correction.mask_weight",
            level == "token",
            "algo.rollout_correction.level = token has one ratio",
        ),
    ]


def _generation_rules(cfg: GenerateConfig) -> list[_Rule]:
    return [
        ("rollout.temperature", cfg.greedy, "greedy = true takes the likeliest token"),
        ("rollout.logprob_gap rollout.verify_weights_every", True, "no step follows the first samples"),
        (_keys("actor", f"{_TRAINING_ONLY} kernels"), True, "nothing is trained"),
        (engine_of(cfg.rollout).sleep_key, True, "nobody else works on the device"),
    ]


def _evaluation_rules(cfg: EvaluateConfig) -> list[_Rule]:
    tasks, rollout = ", ".join(cfg.tasks()), " ".join(type(cfg.rollout).model_fields)
    has_forwards = not cfg.generates or not engine_of(cfg.rollout).has_own_weights or cfg.uses_reward_model
    micro_batch = _keys("forward", "micro_batch_samples max_tokens_per_micro_batch share_prompts")
    reads_responses, has_perplexity = bool({"perplexity", "pairs"} & set(cfg.tasks())), "perplexity" in cfg.tasks()
    rules: list[_Rule] = [
        (f"greedy {_keys('rollout', rollout)}", not cfg.generates, f"the tasks draw no responses: {tasks}"),
        ("rollout.temperature", cfg.generates and cfg.greedy, "greedy = true takes the likeliest token"),
        ("rollout.logprob_gap rollout.verify_weights_every", cfg.generates, "no step follows the first samples"),
        ("data.max_response_tokens data.over_long", not reads_responses, "of responses that are read"),
        ("eval.perplexity_of", not has_perplexity, f"the tasks are {tasks}"),
        (micro_batch, not (has_forwards or reads_responses), "of forwards of our own"),
    ]
    for role in cfg.roles():
        rules.append((_keys(role, _TRAINING_ONLY), True, "nothing is trained"))
        rules.append((f"{role}.kernels", not (role == "actor" and has_perplexity), "no log-probs of it are made"))
    return rules


def _is_set(cfg: FrozenModel, key: str) -> bool:
    """Whether the file sets a key to another value than its default. In a resolved file every key is set.

    A section that is left out has the values that its parent gives it: `forward` of `eval`, say.
    """
    *sections, last = key.split(".")
    section: Any = cfg
    default: Any = None
    for name in sections:
        default = getattr(default, name, None) or type(section).model_fields[name].default
        is_given, section = name in section.model_fields_set, getattr(section, name)
        if section is None or not is_given:
            return False
    if last not in section.model_fields_set:  # not every command has every key
        return False
    usual = getattr(default, last) if isinstance(default, type(section)) else type(section).model_fields[last].default
    return bool(getattr(section, last) != usual)
