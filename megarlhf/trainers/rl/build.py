"""What a run of rl is made of: roles, engine, rewards, and whatever keeps state over steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megarlhf.architectures.placements import Head
from megarlhf.collective_errors import from_first_rank, raise_on_all_ranks
from megarlhf.config import RLConfig
from megarlhf.data.text.export_files import export_files
from megarlhf.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megarlhf.models.role import Role, build_role
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel.device_memory import DeviceMemory, OnDevice
from megarlhf.parallel.mesh import GroupCache
from megarlhf.planning.data.formatting import writing_of_training
from megarlhf.resume.claim.identity import (
    architecture_of,
    bases_of_adapters,
    digest_of_samples,
    digest_of_vocabulary,
    digest_of_weights,
    identity_of_weights,
)
from megarlhf.resume.points.file_digest import digest_of_directory
from megarlhf.resume.points.stateful import Stateful
from megarlhf.resume.signals import StopRequest
from megarlhf.rollout.engine import RolloutEngine, Sampling
from megarlhf.rollout.factory import mesh_orders, sampling_of
from megarlhf.rollout.response_cache import RolloutCache
from megarlhf.rollout.rewards.rules import sources_of_rules
from megarlhf.runtime import Runtime
from megarlhf.trainers.experience.prompts import PromptData
from megarlhf.trainers.experience.rewards import Rewarder
from megarlhf.trainers.rl.kl_controller import KLController
from megarlhf.trainers.rl.moving_weights import MovingAverage, MovingReference
from megarlhf.trainers.rl.pretraining_mix import PretrainingMix, pretraining_mix
from megarlhf.trainers.run.best_checkpoint import Best
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.run.resumable import ResumableState
from megarlhf.trainers.run.skipped_steps import Failures, StepGuard


@dataclass(frozen=True)
class Components:
    """The roles, the engine and what belongs to them."""

    actor: Role
    reference: Role | None
    """Where the KL is measured."""
    critic: Role | None
    engine: RolloutEngine
    rewarder: Rewarder
    sampling: Sampling
    phases: Phases
    bad_steps: Mapping[str, StepGuard]
    """By trained role."""
    kl: KLController
    ptx: PretrainingMix | None = None
    ema: MovingAverage | None = None
    moving_reference: MovingReference | None = None

    @property
    def trained(self) -> list[Role]:
        return [role for role in (self.actor, self.critic) if role is not None]

    @property
    def exported(self) -> list[Role]:
        """Roles whose weights are the result of the run."""
        return self.trained + ([] if self.ema is None else [self.ema.role])

    @property
    def saved(self) -> list[Role]:
        """Roles whose weights change."""
        return self.exported + ([] if self.moving_reference is None else [self.moving_reference.role])

    @property
    def states(self) -> dict[str, Stateful]:
        """Whatever of this keeps state over steps, by name."""
        skipped = {f"bad_steps/{name}": bad_steps for name, bad_steps in self.bad_steps.items()}
        mix = {} if self.ptx is None else {"ptx": self.ptx}
        return {"kl_controller": self.kl, "rewards": self.rewarder, **mix, **skipped}


def build(
    cfg: RLConfig,
    runtime: Runtime,
    tokenizer: Tokenizer,
    phases: Phases,
    parts: RunFactories = RunFactories(),  # noqa: B008 -- frozen
) -> Components:
    """The roles that this configuration needs, and the engine."""
    cache, sections, seed = GroupCache(runtime), cfg.roles(), cfg.run.seed
    device_memory = DeviceMemory(runtime.device, parts.host(runtime.device), shared=True)
    orders = mesh_orders(cfg.rollout, sections, runtime)

    sampling = sampling_of(cfg.rollout, cfg.actor, tokenizer, data=cfg.data)
    learnt = sampling.end_ids if cfg.data.template_mode == "chat" else ()

    def role(name: str, head: Head, *, trained: bool = False) -> Role:
        steps = cfg.optimizer_steps(name) if trained else None
        files = export_files(sections[name].model, cfg.data, learnt) if trained else {}
        return build_role(
            name,
            sections[name],
            head,
            cache,
            seed=seed,
            num_optimizer_steps=steps,
            order=orders[name],
            files=files,
            weights=parts.weights,
            device_memory=device_memory,
        )

    actor = role("actor", "lm", trained=True)
    reference = None
    if "reference" in sections:
        reference = actor.without_adapter("reference") if cfg.reference_is_base else role("reference", "lm")
    critic = role("critic", "scalar", trained=True) if "critic" in sections else None
    reward_model = role("reward_model", "scalar") if "reward_model" in sections else None
    rows = cfg.train.rows(cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens)
    device_memory.keep_only()  # vLLM measures what is free
    engine = parts.engine(cfg.rollout, actor, cfg.data.max_prompt_tokens, rows)
    rewarder = Rewarder(
        cfg.rewards,
        reward_model,
        tokenizer,
        cfg.train,
        runtime.device,
        phases,
        unrewarded=cfg.algo.unrewarded,
        may_drop=cfg.data.template_may_drop,
    )
    for phase in ("rollout", "eval"):
        phases.before[phase] = OnDevice(device_memory, partial(engine.needs, to_generate=True))
    for phase in ("reshard", "certificate"):
        phases.before[phase] = OnDevice(device_memory, partial(engine.needs, to_generate=False))
    for built in (actor, reference, critic, reward_model):
        if built is not None:
            phases.before |= built.parts.turns(built.name)
    failures = Failures.of(cfg, "rl")
    bad_steps = {each.name: StepGuard(cfg.train, failures, phases) for each in (actor, critic) if each}
    ema, moving = None, None
    if cfg.ema is not None:
        fp32 = sections["actor"].model.model_copy(update={"dtype": "fp32"})
        averaged = sections["actor"].model_copy(update={"model": fp32})
        average = build_role(
            "actor_ema",
            averaged,
            "lm",
            cache,
            seed=seed,
            order=orders["actor"],
            files=actor.files,
            weights=parts.weights,
            device_memory=device_memory,
        )
        ema = MovingAverage(average, actor, cfg.ema.decay)
    if cfg.reference_update is not None:
        assert reference is not None, "checked with the configuration"
        moving = MovingReference(reference, actor, cfg.reference_update.every, cfg.reference_update.mixup)
    return Components(
        actor,
        reference,
        critic,
        engine,
        rewarder,
        sampling,
        phases,
        bad_steps,
        kl=KLController(cfg.algo.kl),
        ptx=pretraining_mix(cfg),
        ema=ema,
        moving_reference=moving,
    )


def training_of(
    cfg: RLConfig,
    components: Components,
    data: PromptData,
    states: Mapping[str, Stateful],
    best: Best,
    bank: RolloutCache,
    stop: StopRequest,
    parts: RunFactories,
) -> ResumableState:
    """What is saved of the run, and what it is recognised by. Collective."""
    others = {
        "tokens that end a response": str(sorted(components.sampling.end_ids)),
        "texts that end a response": str(sorted(cfg.rollout.stop)),
        "the actor's tokenizer": digest_of_vocabulary(data.tokenizer),
    }
    built = [components.actor, components.reference, components.critic, components.rewarder.reward_model]
    if (scorer := components.rewarder.reward_model) is not None:
        others["weights of the reward model"] = digest_of_weights(scorer)
        if cfg.retokenizes:
            tokenizer = load_tokenizer(scorer.section.model.tokenizer_place())
            others["the reward model's tokenizer"] = digest_of_vocabulary(tokenizer)
    for label, reward in zip(components.rewarder.labels, cfg.rewards, strict=True):
        if reward.path is not None:
            others[f"files of the classifier {label}"] = _digest_by_first_rank(reward.path, components.actor)
    if components.ptx is not None:
        others["ptx.data"] = components.ptx.digest()
    if cfg.train.stop.patience is not None:
        others["data.validation (decides when the run ends)"] = digest_of_samples(data.validation)
    return ResumableState(
        cfg.checkpoint,
        components.saved,
        stop,
        data=digest_of_samples(data.train),
        states={**states, **components.states},
        base={role.name: identity_of_weights(role) for role in components.saved},
        writing=writing_of_training(cfg, "actor"),
        adapter_bases=bases_of_adapters(components.saved),
        reference=None if components.reference is None else identity_of_weights(components.reference),
        architectures={role.name: architecture_of(role) for role in built if role is not None},
        others=others,
        sources=sources_of_rules(cfg.rewards),
        best=best,
        on_saved=lambda oldest: bank.forget_before(oldest.step),
        writer=parts.writer,
    )


def _digest_by_first_rank(directory: Path, role: Role) -> str:
    """Of the files in a directory. Collective. Raises: ValueError, on every rank, where they cannot be read."""
    digest = ""
    with raise_on_all_ranks(lambda reasons: ValueError(f"{directory} cannot be read: {reasons[0]}")):
        if role.mesh.runtime.is_main:
            digest = digest_of_directory(directory)
    return from_first_rank(digest)
