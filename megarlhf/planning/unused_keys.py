"""What a configuration sets and the run does not read, in sentences. What is certainly a mistake is refused when the
configuration is loaded; what stands here may be a line that several files share."""

from __future__ import annotations

from typing import Any

from megarlhf.config import (
    DPOConfig,
    EvaluateConfig,
    FrozenModel,
    GenerateConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    roles_of,
)
from megarlhf.config.algo import DISCOUNTED, GROUPED
from megarlhf.planning.machine.capabilities import AnyConfig, draws, trained_roles, works_in_turns

_VLLM_ONLY = (
    "gpu_memory_utilization cpu_cache_gib reshard_bucket_mib poison_weights sleep_level balance max_engine_rebuilds"
)


def without_effect(
    cfg: AnyConfig,
    world_size: int | None = None,
    *,
    on_cpu: bool | None = None,
) -> list[str]:
    """A sentence for each key that has another value than its default, which nothing reads.

    world_size: ranks of the run; on_cpu: whether it has no GPUs; None: not known, and what depends on it is left out
    """
    if isinstance(cfg, EvaluateConfig):
        rows = _of_evaluate(cfg)
    else:
        rows = _of_generate(cfg) if isinstance(cfg, GenerateConfig) else _of_training(cfg)
    rows += _of_roles(cfg, world_size)
    if isinstance(cfg, RLConfig):
        rows += _of_rl(cfg)
    if draws(cfg):
        keys = " ".join(f"rollout.{name}" for name in _VLLM_ONLY.split())
        rows.append((keys, cfg.rollout.engine != "vllm", "of the engine vllm only"))
        if cfg.rollout.engine == "vllm" and on_cpu is not None:
            rows.append(("rollout.gpu_memory_utilization", on_cpu, "on a CPU rollout.cpu_cache_gib says it"))
            rows.append(("rollout.cpu_cache_gib", not on_cpu, "on a GPU rollout.gpu_memory_utilization says it"))
        alone = cfg.rollout.engine == "vllm" and cfg.actor is not None and cfg.rollout.tp(cfg.actor) == world_size
        rows.append(("rollout.balance", alone, f"rollout.parallel.tp = {world_size} makes one engine of all ranks"))
    unread = dict.fromkeys((key, why) for keys, holds, why in rows if holds for key in keys.split())
    return [f"set, but without effect here: {key} ({why})" for key, why in unread if _is_set(cfg, key)]


def rarely_meant(cfg: RLConfig) -> list[str]:
    """A sentence for each combination that does what it says, and is rarely what is wanted."""
    algo, notes = cfg.algo, []
    if algo.dynamic_sampling.max_refills and algo.advantage not in GROUPED:
        notes.append(
            "algo.dynamic_sampling drops groups of equal rewards, from which algo.advantage = "
            f"{algo.advantage} would learn: it compares no responses within a group"
        )
    if algo.policy_loss == "policy_gradient" and (updates := cfg.updates_per_step) > 1:
        notes.append(
            f"algo.policy_loss = policy_gradient makes {updates} updates from the samples of a step, and has no ratio "
            "to correct for the policy's change after the first: one update a step, or another policy_loss"
        )
    return notes


def changed_meanings(cfg: SFTConfig | RMConfig | DPOConfig | RLConfig) -> list[str]:
    """A sentence for each key that is set and once meant something else."""
    given, notes = cfg.checkpoint.model_fields_set, []
    for key in ("every", "keep"):
        if key in given and f"export_{key}" not in given:
            notes.append(
                f"checkpoint.{key} is about resume points, from which a run goes on; for exports (Hugging Face "
                f"directories) there is checkpoint.export_{key}, which is not set"
            )
    return notes


_Row = tuple[str, bool, str]
"""Keys, whether nothing reads them, and why."""


_KEPT = "reference.kernels.save_mib"


def _of_training_only(role: str) -> str:
    """Keys of a role that only its training reads."""
    keys = (
        "optim recompute recompute_layers router_aux_loss_coef offload.gradients offload.optimizer freeze train_only "
        "lora.export"
    )
    return " ".join(f"{role}.{key}" for key in keys.split())


def _of_roles(cfg: AnyConfig, world_size: int | None) -> list[_Row]:
    """Of every role that the run builds."""
    roles, rows = roles_of(cfg), list[_Row]()
    alone, trained = not works_in_turns(cfg, roles), trained_roles(cfg, roles)
    for name, section in roles.items():
        rows.append((f"{name}.offload.parameters", alone, f"nobody works in turns with {name}"))
        rows.append((f"{name}.model.fresh_head", section.model.random_init, "random_init draws every weight"))
        if name not in trained and section.lora is not None and section.lora.path is None:
            rows.append((f"{name}.lora", True, "nothing is trained, and a new adapter adds nothing"))
        if section.kernels.logprobs == "reference":
            rows.append((f"{name}.kernels.save_mib", True, f"{name}.kernels.logprobs = reference keeps all logits"))
        if world_size is not None and name in trained:
            layout = section.parallel.layout(world_size, name)
            keys = " ".join(f"{name}.optim.overlap_{what}" for what in ("grad_reduce", "param_gather"))
            rows.append((keys, layout.dp * layout.cp == 1, "one data-parallel rank sums and gathers nothing"))
    return rows


def _of_training(cfg: SFTConfig | RMConfig | DPOConfig | RLConfig) -> list[_Row]:
    return [
        (
            "data.loss_on data.inexact",
            cfg.data.template_mode == "plain",
            "data.template = plain reads texts, which have one answer",
        ),
        ("eval.every eval.max_samples", not cfg.data.has_validation, "there is no data.validation to evaluate on"),
        (
            "checkpoint.export_keep",
            cfg.checkpoint.export_every == 0,
            "checkpoint.export_every = 0 writes one export, after the last step",
        ),
        ("reward_model.kernels", isinstance(cfg, RMConfig), "log-probs are of language models"),
        (f"{_of_training_only('reference')} {_KEPT}", isinstance(cfg, DPOConfig), "the reference is not trained"),
        ("profile.ranks", not cfg.profile.recorded, "profile names no step"),
        ("train.share_prompts", bool(why := shares_nothing(cfg)), why),
    ]


def shares_nothing(cfg: SFTConfig | RMConfig | DPOConfig | RLConfig) -> str:
    """Why no prompt is computed once for several responses; empty where it may be."""
    if isinstance(cfg, SFTConfig):
        return "each sample of sft is one sequence"
    if isinstance(cfg, RLConfig) and cfg.rollout.num_samples_per_prompt == 1:
        return "rollout.num_samples_per_prompt = 1"
    if cfg.train.max_tokens_per_micro_batch is None:
        return "padded rows hold one sequence each"
    if all(section.parallel.cp > 1 for section in roles_of(cfg).values()):
        return "context parallelism cuts whole sequences"
    return ""


def _of_rl(cfg: RLConfig) -> list[_Row]:
    algo, advantage = cfg.algo, cfg.algo.advantage
    without_critic = f"algo.advantage = {advantage} has no critic"
    reads_none = f"algo.advantage = {advantage} reads none"
    ungrouped = f"algo.advantage = {advantage} compares no group"
    unscaled = f"algo.advantage = {advantage} scales by no group"
    if advantage == "group_relative" and not algo.scale_by_group_std:
        unscaled = "algo.scale_by_group_std = false"
    clipless = f"algo.policy_loss = {algo.policy_loss} has no such bound"
    of_clip = algo.policy_loss != "clip"
    correction, level = algo.rollout_correction.kind, algo.rollout_correction.level
    return [
        ("eval.accuracy", not (cfg.data.has_validation or cfg.data.test), "there is no data.validation to evaluate on"),
        ("samples.every", cfg.samples.count == 0, "samples.count = 0 writes no tables"),
        ("algo.gamma", advantage not in DISCOUNTED, reads_none),
        ("algo.lam algo.critic_lam", advantage != "gae", reads_none),
        ("algo.whiten_over algo.whiten_variance", not algo.whitens, "the advantages are not whitened"),
        ("algo.value_clip train.critic_warmup_steps critic", not algo.needs_critic, without_critic),
        ("algo.scale_by_group_std", advantage != "group_relative", unscaled),
        (
            "algo.group_std algo.group_std_over algo.group_std_eps algo.group_std_floor",
            advantage != "group_relative" or not algo.scale_by_group_std,
            unscaled,
        ),
        ("algo.group_of_one", advantage not in GROUPED, ungrouped),
        ("algo.clip_low algo.clip_high", algo.policy_loss in ("sapo", "policy_gradient"), clipless),
        ("algo.clip_dual algo.clip_delta", of_clip, clipless),
        (
            "algo.sapo_temperature_positive algo.sapo_temperature_negative",
            algo.policy_loss != "sapo",
            f"algo.policy_loss = {algo.policy_loss} has no gate",
        ),
        (
            "algo.ratio",
            algo.policy_loss == "policy_gradient" and not algo.kl.ratio_weighted,
            "algo.policy_loss = policy_gradient has no ratio",
        ),
        ("algo.loss_constant", algo.loss_average != "constant", f"algo.loss_average = {algo.loss_average}"),
        ("algo.loss_block_samples", algo.loss_average != "bnpo", f"algo.loss_average = {algo.loss_average}"),
        (
            "algo.loss_counts_left_out",
            algo.loss_average in ("token", "bnpo"),
            f"algo.loss_average = {algo.loss_average} counts tokens",
        ),
        ("algo.kl.horizon", algo.kl.controller == "fixed", "algo.kl.controller = fixed"),
        ("algo.rollout_correction.level", correction == "none", "algo.rollout_correction.kind = none"),
        ("algo.rollout_correction.high", correction == "none", "algo.rollout_correction.kind = none"),
        (
            "algo.kl.credit",
            advantage not in ("leave_one_out", "group_relative") or not algo.kl_in_reward,
            "only read with the KL in the reward of leave_one_out and group_relative",
        ),
        (
            "algo.rollout_correction.low algo.rollout_correction.mask_weight",
            correction != "mask",
            f"algo.rollout_correction.kind = {correction}",
        ),
        (
            "algo.rollout_correction.mask_weight",
            level == "token",
            "algo.rollout_correction.level = token has one ratio",
        ),
        ("train.max_policy_kl", cfg.updates_per_step == 1, "a step has one update of the actor"),
        ("train.stop.max_kl_steps", cfg.train.stop.max_kl is None, "train.stop.max_kl is not set"),
        ("algo.kl.placement", cfg.algo.kl.coef == 0, "algo.kl.coef = 0"),
        (
            "reference",
            not cfg.needs_reference,
            "nothing reads the KL: algo.kl.coef = 0, algo.kl.log = false, and no train.stop.max_kl",
        ),
        ("algo.kl.estimator algo.kl.clamp", not cfg.needs_reference, "no KL is measured"),
        (
            "algo.kl.log",
            algo.kl.coef > 0 or cfg.train.stop.max_kl is not None,
            "the KL is measured anyway, for algo.kl.coef or train.stop.max_kl",
        ),
        ("reward_model", not cfg.uses_reward_model, "no entry of rewards has kind: model"),
        ("rollout.verify_weights_every", cfg.rollout.engine != "vllm", "of the engine vllm only"),
        (f"{_of_training_only('reference')} {_KEPT}", cfg.needs_reference, "the reference is not trained"),
        (_of_training_only("reward_model"), cfg.uses_reward_model, "rl does not train the reward model"),
        ("critic.kernels", cfg.algo.needs_critic, "log-probs are of language models"),
        ("reward_model.kernels", cfg.uses_reward_model, "log-probs are of language models"),
    ]


def _of_generate(cfg: GenerateConfig) -> list[_Row]:
    return [
        ("rollout.temperature", cfg.greedy, "greedy = true takes the likeliest token"),
        ("rollout.logprob_gap rollout.verify_weights_every", True, "no step follows the first samples"),
        (f"{_of_training_only('actor')} actor.kernels", True, "nothing is trained"),
        ("rollout.sleep_level", cfg.rollout.engine == "vllm", "nobody else works on the device"),
    ]


def _of_evaluate(cfg: EvaluateConfig) -> list[_Row]:
    tasks = ", ".join(cfg.tasks())
    whole = [f"rollout.{name}" for name in type(cfg.rollout).model_fields]
    forwards = not cfg.generates or cfg.rollout.engine == "megatron" or cfg.uses_reward_model
    micro = "forward.micro_batch_samples forward.max_tokens_per_micro_batch forward.share_prompts"
    reads_responses = bool({"perplexity", "pairs"} & set(cfg.tasks()))
    rows: list[_Row] = [
        (" ".join(["greedy", *whole]), not cfg.generates, f"the tasks draw no responses: {tasks}"),
        ("rollout.temperature", cfg.generates and cfg.greedy, "greedy = true takes the likeliest token"),
        ("rollout.logprob_gap rollout.verify_weights_every", cfg.generates, "no step follows the first samples"),
        ("data.max_response_tokens data.over_long", not reads_responses, "of responses that are read"),
        ("eval.perplexity_of", "perplexity" not in cfg.tasks(), f"the tasks are {tasks}"),
        (micro, not (forwards or reads_responses), "of forwards of our own"),
    ]
    kernels = {"reward_model.kernels": True, "against.kernels": True, "actor.kernels": "perplexity" not in cfg.tasks()}
    for role in cfg.roles():
        rows.append((_of_training_only(role), True, "nothing is trained"))
        rows.append((f"{role}.kernels", kernels[f"{role}.kernels"], "no log-probs of it are made"))
    return rows


def _is_set(cfg: FrozenModel, key: str) -> bool:
    """Whether a key was set, to another value than its default: in a resolved file every key is set."""
    *sections, last = key.split(".")
    section: Any = cfg
    for name in sections:
        section = getattr(section, name)
        if section is None:
            return False
    return last in section.model_fields_set and getattr(section, last) != type(section).model_fields[last].default
