"""`megarlhf eval`: figures of a model with their intervals: perplexity, ranking of pairs, rewards of its responses, and
how often they are better than another model's."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarlhf.config import ROLES, EvaluateConfig, describe_sources
from megarlhf.data.samples.encoders import PairSample, SFTSample
from megarlhf.errors import RewardError, WatchdogTimeout
from megarlhf.experience import Rollouts
from megarlhf.models.role import Role, build_role
from megarlhf.observe.watch.phases import Phases
from megarlhf.observe.watch.watchdog import watched_phases
from megarlhf.parallel.device_memory import DeviceMemory
from megarlhf.parallel.mesh import GroupCache
from megarlhf.resume.claim.identity import digest_of_adapter, digest_of_samples, identity_of_weights
from megarlhf.resume.claim.on_existing import NO_STEPS_LEFT, finish
from megarlhf.rollout.factory import actor_order
from megarlhf.rollout.rewards.score import response_texts
from megarlhf.runtime import Runtime
from megarlhf.trainers.experience.rewards import Rewarder
from megarlhf.trainers.generation.figures import INTERVALS, REPORT, Figures, as_json, as_table, metrics_of
from megarlhf.trainers.generation.generate import lines_of, write_lines
from megarlhf.trainers.generation.responses import (
    Answers,
    Prompts,
    compared,
    drawn,
    drawn_in_words,
    figures_against,
    figures_of,
    read_prompts,
    responses,
    scored,
    scored_by,
)
from megarlhf.trainers.generation.texts import perplexity, ranking, read_pairs, read_texts
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.run.session import Session, open_session

RESPONSES = {"actor": "responses.jsonl", "against": "responses_of_against.jsonl"}
"""In the run directory, by model."""


@dataclass
class Read:
    """Prompts, texts and pairs to evaluate on, as tokens."""

    prompts: Mapping[str, Prompts] = field(default_factory=dict)
    """By model."""
    texts: Sequence[SFTSample] = ()
    pairs: Sequence[PairSample] = ()
    notes: list[str] = field(default_factory=list)

    def described(self) -> dict[str, Any]:
        """Numbers and digests of what was read, for `eval.json`."""
        samples = {"texts": self.texts, "pairs": self.pairs}
        samples |= {f"prompts of {name}": data.prompts for name, data in self.prompts.items()}
        return {name: {"count": len(s), "digest": digest_of_samples(s)} for name, s in samples.items() if s}


def run(cfg: EvaluateConfig, runtime: Runtime, parts: RunFactories = RunFactories()) -> None:  # noqa: B008 -- frozen
    """Measure, print a table, and write `eval.json` and the responses."""
    with contextlib.ExitStack() as stack:
        phases = stack.enter_context(watched_phases(cfg.watchdog, cfg.run.dir, runtime))
        with phases("build"):
            read = _read(cfg)
            device_memory = DeviceMemory(runtime.device, parts.host(runtime.device), shared=True)
            roles = _build(cfg, runtime, device_memory, parts)
            models = {name: _identity(role) for name, role in roles.items()}
            rewarders = {
                name: stack.enter_context(
                    contextlib.closing(
                        Rewarder(
                            scored_by(cfg),
                            roles.get("reward_model"),
                            data.tokenizer,
                            cfg.forward,
                            runtime.device,
                            phases,
                            may_drop=cfg.data.template_may_drop,
                        )
                    )
                )
                for name, data in read.prompts.items()
            }
        session = stack.enter_context(open_session(cfg, cfg.run, runtime, "eval", 1, read.notes, phases=phases))
        figures, calibration = _of_texts(cfg, roles, read, phases)
        rollouts = {n: responses(cfg, roles[n], d, device_memory, phases, parts) for n, d in read.prompts.items()}
        answers = _scored(cfg, runtime, rewarders, read, rollouts, phases)
        if runtime.is_main:
            _write_responses(cfg, read, answers)
        if "against" in answers:
            figures |= compared(cfg, answers["actor"], answers["against"])
        if "actor" in answers:
            figures |= figures_of(cfg, answers["actor"])
        if "against" in answers:
            figures |= figures_against(cfg, answers["against"])
        _report(cfg, session, figures, models, read, calibration)
        if runtime.is_main:
            finish(cfg.run.dir, 1, NO_STEPS_LEFT)


def _read(cfg: EvaluateConfig) -> Read:
    """All that the tasks read. Raises: ValueError, before any model is built."""
    read, tasks = Read(), cfg.tasks()
    if "perplexity" in tasks:
        read.texts, note = read_texts(cfg)
        read.notes.append(note)
    if "pairs" in tasks:
        read.pairs, note = read_pairs(cfg)
        read.notes.append(note)
    if cfg.generates:
        read.prompts = read_prompts(cfg)
        read.notes += [f"{name}: {note}" for name, data in read.prompts.items() for note in data.notes]
    return read


def _build(cfg: EvaluateConfig, runtime: Runtime, device_memory: DeviceMemory, parts: RunFactories) -> dict[str, Role]:
    """Every role; they work in turns. Collective."""
    cache, roles = GroupCache(runtime), {}
    for name, section in cfg.roles().items():
        order = actor_order(cfg.rollout, section, runtime) if cfg.generates and name != "reward_model" else None
        roles[name] = build_role(
            name,
            section,
            ROLES[name].head,
            cache,
            seed=cfg.run.seed,
            order=order,
            weights=parts.weights,
            device_memory=device_memory,
        )
    return roles


def _identity(role: Role) -> dict[str, Any]:
    """Identity of the model and of the adapter that is on it. Collective."""
    lora, known = role.section.lora, vars(identity_of_weights(role))
    if lora is None:
        return {**known, "adapter": None}
    path = None if lora.path is None else str(lora.path.absolute())
    return {**known, "adapter": {"path": path, "digest": digest_of_adapter(role)}}


def _of_texts(
    cfg: EvaluateConfig, roles: Mapping[str, Role], read: Read, phases: Phases
) -> tuple[Figures, dict[str, Any]]:
    """Figures of perplexity and of pairs, and the calibration. Collective."""
    figures: Figures = {}
    calibration: dict[str, Any] = {}
    with phases("eval"):
        if read.texts:
            figures |= perplexity(cfg, roles["actor"], read.texts)
        if read.pairs:
            of_pairs, calibration = ranking(cfg, roles["reward_model"], read.pairs)
            if read.texts:
                of_pairs = {name.replace("eval_loss", "eval_pair_loss"): each for name, each in of_pairs.items()}
            figures |= of_pairs
    return figures, calibration


def _scored(
    cfg: EvaluateConfig,
    runtime: Runtime,
    rewarders: Mapping[str, Rewarder],
    read: Read,
    drawn: Mapping[str, Rollouts],
    phases: Phases,
) -> dict[str, Answers]:
    """By model, its responses with rewards. Raises: RewardError or WatchdogTimeout for a reward that fails; the actor's
    responses are kept without rewards then."""
    try:
        with phases("reward"):
            return {n: scored(cfg, rewarders[n], data.prompts, drawn[n]) for n, data in read.prompts.items()}
    except (RewardError, WatchdogTimeout):
        if runtime.is_main:
            data, rollouts = read.prompts["actor"], drawn["actor"]
            prompts = [p for p in data.prompts for _ in range(cfg.rollout.num_samples_per_prompt)]
            texts = response_texts(rollouts, data.tokenizer)
            write_lines(cfg.run.dir / "responses_without_rewards.jsonl", lines_of(prompts, texts, rollouts, {}))
        raise


def _write_responses(cfg: EvaluateConfig, read: Read, answers: Mapping[str, Answers]) -> None:
    """Write the responses of each model with their rewards, in the form of `generate`."""
    for name, each in answers.items():
        prompts = [prompt for prompt in each.prompts for _ in range(cfg.rollout.num_samples_per_prompt)]
        texts = response_texts(each.rollouts, read.prompts[name].tokenizer)
        values = {reward.label: said.values_N for reward, said in zip(scored_by(cfg), each.said, strict=True)}
        write_lines(cfg.run.dir / RESPONSES[name], lines_of(prompts, texts, each.rollouts, values))


def _report(
    cfg: EvaluateConfig,
    session: Session,
    figures: Figures,
    models: Mapping[str, Mapping[str, Any]],
    read: Read,
    calibration: Mapping[str, Any],
) -> None:
    session.log(1, metrics_of(figures))
    tree = {
        "tasks": list(cfg.tasks()),
        "figures": as_json(figures),
        "intervals": INTERVALS,
        "models": models,
        "data": {"source": describe_sources(cfg.data.train), "samples": read.described()},
        "sampling": drawn(cfg) if cfg.generates else None,
        "rewards": [reward.label for reward in cfg.rewards] if cfg.generates else None,
        "seed": cfg.run.seed,
    }
    session.write_report(REPORT, tree | ({"calibration": dict(calibration)} if calibration else {}))
    for name, model in models.items():
        adapter = model["adapter"]
        beside = "" if adapter is None else f", with the adapter {adapter['path'] or 'none'} ({adapter['digest'][:16]})"
        session.note(f"{name}: {model['path']} (weights {model['digest'][:16]}, {model['dtype']}){beside}")
    session.note(_in_words(cfg, figures))
    session.note(as_table(figures))
    session.note(f"wrote {cfg.run.dir / REPORT}")


def _in_words(cfg: EvaluateConfig, figures: Figures) -> str:
    """Title of the table."""
    if not cfg.generates:
        return f"{', '.join(cfg.tasks())} on {describe_sources(cfg.data.train)}; intervals of 95% over texts or pairs"
    responses, prompts = figures["num_samples"].value, figures["num_prompts"].value
    how = drawn_in_words(cfg)
    of = f"{responses} responses to {prompts} prompts of {describe_sources(cfg.data.train)}, {how}"
    return f"means over {of}; intervals of 95% over prompts"
