"""Build a run of rl: its roles, engine and rewards, and what keeps state over steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megarlhf.collective_errors import from_first_rank, raise_on_all_ranks, require_same
from megarlhf.config import ROLES, RLConfig, trained_roles
from megarlhf.data.text.export_files import export_files
from megarlhf.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megarlhf.models.role import Role, build_role
from megarlhf.observe.watch.phases import Phases
from megarlhf.own_code.policy_terms import try_terms
from megarlhf.parallel.device_memory import DeviceMemory, OnDevice
from megarlhf.parallel.mesh import GroupCache
from megarlhf.planning.data.formatting import writing_of_training
from megarlhf.planning.own_code import own_sources, own_terms
from megarlhf.resume.claim.identity import (
    architecture_of,
    bases_of_adapters,
    digest_of_samples,
    digest_of_vocabulary,
    identity_of_weights,
)
from megarlhf.resume.points.file_digest import digest_of_directory
from megarlhf.resume.points.restore import SLICES
from megarlhf.resume.points.stateful import Stateful
from megarlhf.resume.signals import StopRequest
from megarlhf.rollout.bank import RolloutBank
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.rollout.environments.environment import Environment, environment_of
from megarlhf.rollout.factory import engine_dtype, mesh_orders, sampling_of
from megarlhf.rollout.in_flight import InFlight
from megarlhf.rollout.responses import Sampling
from megarlhf.rollout.slices import SliceRule
from megarlhf.runtime import Runtime
from megarlhf.trainers.experience.prompts import PromptData
from megarlhf.trainers.experience.rewards import Rewarder
from megarlhf.trainers.rl.dynamic_sampling import Signal, groups_with_signal
from megarlhf.trainers.rl.kl_controller import KLController
from megarlhf.trainers.rl.logprob_gap import MismatchGuard
from megarlhf.trainers.rl.moving_weights import MovingAverage, MovingReference
from megarlhf.trainers.rl.pretraining_mix import PretrainingMix, pretraining_mix
from megarlhf.trainers.run.best_checkpoint import Best
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.run.resumable import ResumableState
from megarlhf.trainers.run.skipped_steps import Failures, StepGuard


@dataclass(frozen=True)
class RLRun:
    """Everything that the stages of the loop share: configuration, data, roles, engine, and what keeps state."""

    cfg: RLConfig
    data: PromptData
    roles: Mapping[str, Role]
    """Roles by name, as in `config.ROLES`."""
    engine: RolloutEngine
    rewarder: Rewarder
    sampling: Sampling
    bank: RolloutBank
    environment: Environment | None
    """Answers the model's turns."""
    in_flight: InFlight
    """Samples of coming steps that are being drawn."""
    phases: Phases
    step_guards: Mapping[str, StepGuard]
    """Guards by trained role."""
    kl: KLController
    gap_guard: MismatchGuard
    groups_with_signal: Signal = groups_with_signal
    """Groups that dynamic sampling keeps."""
    greedy_in_flight: InFlight | None = None
    """Greedy responses of coming steps, where slices are drawn and the advantage compares with them."""
    ptx: PretrainingMix | None = None
    ema: MovingAverage | None = None
    moving_reference: MovingReference | None = None

    @property
    def actor(self) -> Role:
        return self.roles["actor"]

    @property
    def reference(self) -> Role | None:
        """Model to which the KL is measured."""
        return self.roles.get("reference")

    @property
    def critic(self) -> Role | None:
        return self.roles.get("critic")

    @property
    def trained(self) -> list[Role]:
        """Roles with an optimizer."""
        return [self.roles[name] for name in trained_roles(self.cfg)]

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
        """Parts of this that keep state over steps, by their names in resume points."""
        skipped = {f"bad_steps/{name}": guard for name, guard in self.step_guards.items()}
        mix = {} if self.ptx is None else {"ptx": self.ptx}
        return {"kl_controller": self.kl, "rewards": self.rewarder, **mix, **skipped, "logprob_gap": self.gap_guard}

    @property
    def tables(self) -> dict[str, Stateful]:
        """Parts with tensors, which are files of a resume point, by name."""
        greedy = {} if self.greedy_in_flight is None else {"greedy_slices": self.greedy_in_flight}
        return {SLICES: self.in_flight, **greedy}


def build(
    cfg: RLConfig,
    runtime: Runtime,
    data: PromptData,
    phases: Phases,
    parts: RunFactories = RunFactories(),  # noqa: B008 -- frozen
) -> RLRun:
    """Build the roles that this configuration needs, the engine, and what belongs to them."""
    tokenizer = data.tokenizer
    require_same(try_terms(own_terms(cfg)), "it must not depend on the rank, on time or on chance")
    device_memory = DeviceMemory(runtime.device, parts.host(runtime.device), shared=True)
    sampling = sampling_of(cfg.rollout, cfg.actor, tokenizer, data=cfg.data)
    end_ids = sampling.end_ids if cfg.data.template_mode == "chat" else ()
    build_one = role_builder(cfg, runtime, device_memory, parts, end_ids)

    actor = build_one("actor")
    roles = {"actor": actor}
    for name in cfg.roles():
        if name != "actor":
            roles[name] = actor.without_adapter(name) if ROLES[name].is_actors_base(cfg) else build_one(name)
    rows = cfg.train.rows(cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens)
    device_memory.keep_only()  # vLLM measures what is free
    engine = parts.engine(cfg.rollout, actor, cfg.data.max_prompt_tokens, rows)
    for phases_with_engine, to_generate in ((("rollout", "eval"), True), (("reshard", "certificate"), False)):
        for phase in phases_with_engine:
            phases.before[phase] = OnDevice(device_memory, partial(engine.needs, to_generate=to_generate))
    for role in roles.values():
        phases.before |= role.parts.before_phases(role.name)
    failures = Failures.of(cfg, "rl")
    dtypes = actor.shard.dtype, engine_dtype(cfg.rollout, actor)
    ema = None if cfg.ema is None else MovingAverage(build_one("actor_ema"), actor, cfg.ema.decay)
    draws_greedy_slices = cfg.rollout.is_stale and "greedy_rewards" in cfg.algo.traits.reads
    environment = environment_of(cfg, tokenizer, sampling)
    moving = None
    if cfg.reference_update is not None:
        moving = MovingReference(roles["reference"], actor, cfg.reference_update.every, cfg.reference_update.mixup)
    return RLRun(
        cfg=cfg,
        data=data,
        roles=roles,
        engine=engine,
        rewarder=build_rewarder(cfg, roles.get("reward_model"), tokenizer, runtime, phases, environment),
        sampling=sampling,
        bank=RolloutBank(cfg.run.dir / "bank"),
        environment=environment,
        in_flight=InFlight(SliceRule.of(cfg.rollout), conversations=environment is not None),
        greedy_in_flight=InFlight(SliceRule.of(cfg.rollout)) if draws_greedy_slices else None,
        phases=phases,
        step_guards={name: StepGuard(cfg.train, failures, phases) for name in trained_roles(cfg)},
        kl=KLController(cfg.algo.kl),
        groups_with_signal=parts.groups_with_signal or groups_with_signal,
        gap_guard=MismatchGuard(cfg.rollout.logprob_gap, min(dtypes, key=lambda dtype: dtype.itemsize)),
        ptx=pretraining_mix(cfg),
        ema=ema,
        moving_reference=moving,
    )


def role_builder(
    cfg: RLConfig, runtime: Runtime, device_memory: DeviceMemory, parts: RunFactories, end_ids: Sequence[int]
) -> Callable[..., Role]:
    """A function that builds a role by its name; all its roles share process groups and device memory.

    end_ids: tokens with which exported models are told to end a response
    """
    cache, sections = GroupCache(runtime), cfg.roles()
    orders = mesh_orders(cfg.rollout, sections, runtime)

    def build_one(name: str) -> Role:
        is_average, trained = name == "actor_ema", name in trained_roles(cfg)
        like = "actor" if is_average else name
        section = sections[like]
        if is_average:
            section = section.model_copy(update={"model": section.model.model_copy(update={"dtype": "fp32"})})
        return build_role(
            name,
            section,
            ROLES[like].head,
            cache,
            seed=cfg.run.seed,
            num_optimizer_steps=cfg.optimizer_steps(name) if trained else None,
            order=orders[like],
            companion_files=export_files(section.model, cfg.data, end_ids) if trained or is_average else {},
            weights=parts.weights,
            device_memory=device_memory,
        )

    return build_one


def build_rewarder(
    cfg: RLConfig,
    reward_model: Role | None,
    tokenizer: Tokenizer,
    runtime: Runtime,
    phases: Phases,
    environment: Environment | None = None,
) -> Rewarder:
    """The configured rewards."""
    return Rewarder(
        cfg.rewards,
        reward_model,
        tokenizer,
        cfg.train,
        runtime.device,
        phases,
        unrewarded=cfg.algo.unrewarded,
        may_drop=cfg.data.template_may_drop,
        environment=environment,
    )


def training_of(
    run: RLRun, states: Mapping[str, Stateful], best: Best, stop: StopRequest, parts: RunFactories
) -> ResumableState:
    """State that is saved of the run, and digests by which a resume recognises it. Collective."""
    cfg, data = run.cfg, run.data
    others = {
        "tokens that end a response": str(sorted(run.sampling.end_ids)),
        "texts that end a response": str(sorted(cfg.rollout.stop)),
        "the actor's tokenizer": digest_of_vocabulary(data.tokenizer),
    }
    frozen = {name: role for name, role in run.roles.items() if name not in run.step_guards}
    for name, role in frozen.items():
        if cfg.retokenizes and ROLES[name].may_retokenize:
            tokenizer = load_tokenizer(role.section.model.tokenizer_place())
            others[f"the {name.replace('_', ' ')}'s tokenizer"] = digest_of_vocabulary(tokenizer)
    for label, reward in zip(run.rewarder.labels, cfg.rewards, strict=True):
        if reward.path is not None:
            others[f"files of the classifier {label}"] = _digest_by_first_rank(reward.path, run.actor)
    if run.ptx is not None:
        others["ptx.data"] = run.ptx.digest()
    if cfg.train.stop.patience is not None:
        others["data.validation (decides when the run ends)"] = digest_of_samples(data.validation)
    return ResumableState(
        cfg.checkpoint,
        run.saved,
        stop,
        data=digest_of_samples(data.train),
        states={**states, **run.states},
        tables=run.tables,
        base={role.name: identity_of_weights(role) for role in run.saved},
        writing=writing_of_training(cfg, "actor"),
        adapter_bases=bases_of_adapters(run.saved),
        frozen={name: identity_of_weights(role) for name, role in frozen.items()},
        architectures={name: architecture_of(role) for name, role in run.roles.items()},
        others=others,
        sources=own_sources(cfg),
        best=best,
        on_saved=lambda oldest: run.bank.forget_before(oldest.step),
        writer=parts.writer,
    )


def _digest_by_first_rank(directory: Path, role: Role) -> str:
    """Digest of the files in a directory. Collective. Raises: ValueError, on every rank, where they cannot be read."""
    digest = ""
    with raise_on_all_ranks(lambda reasons: ValueError(f"{directory} cannot be read: {reasons[0]}")):
        if role.mesh.runtime.is_main:
            digest = digest_of_directory(directory)
    return from_first_rank(digest)
