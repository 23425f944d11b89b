"""`megarlhf eval`: figures of a model with their intervals. They are perplexity, the ranking of pairs, the rewards of
its responses, and a comparison with another model's responses."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megarlhf.config import ROLES, EvaluateConfig, describe_sources
from megarlhf.data.samples.encoders import PairSample, SFTSample
from megarlhf.errors import RewardError, WatchdogTimeout
from megarlhf.models.role import Role, build_role
from megarlhf.observe.watch.phases import Phases
from megarlhf.observe.watch.watchdog import watched_phases
from megarlhf.parallel.device_memory import DeviceMemory
from megarlhf.parallel.mesh import GroupCache
from megarlhf.resume.claim.identity import digest_of_adapter, digest_of_samples, identity_of_weights
from megarlhf.resume.claim.on_existing import NO_STEPS_LEFT, finish
from megarlhf.rollout.environments.environment import Environment, environment_of
from megarlhf.rollout.factory import actor_order
from megarlhf.rollout.rewards.score import response_texts
from megarlhf.rollouts import Rollouts
from megarlhf.runtime import Runtime
from megarlhf.trainers.experience.prompts import repeat_prompts
from megarlhf.trainers.experience.rewards import Rewarder
from megarlhf.trainers.generation.figures import INTERVALS, REPORT, Figures, as_json, as_table, metrics_of
from megarlhf.trainers.generation.generate import all_rewards, lines_of, write_lines
from megarlhf.trainers.generation.responses import (
    Answers,
    Prompts,
    compare_answers,
    describe_sampling,
    draw_responses,
    figures_against,
    figures_of,
    read_prompts,
    sampling_for,
    sampling_settings,
    score_responses,
)
from megarlhf.trainers.generation.texts import perplexity, ranking, read_pairs, read_texts
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.run.open_session import open_session
from megarlhf.trainers.run.session import Session

RESPONSES = {"actor": "responses.jsonl", "against": "responses_of_against.jsonl"}
"""File in the run directory, by model."""


@dataclass
class EvaluationData:
    """Prompts, texts and pairs to evaluate on, as tokens."""

    prompts: Mapping[str, Prompts] = field(default_factory=dict)
    """Prompts by model."""
    texts: Sequence[SFTSample] = ()
    pairs: Sequence[PairSample] = ()
    notes: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Numbers and digests of the samples, for `eval.json`."""
        samples = {"texts": self.texts, "pairs": self.pairs}
        samples |= {f"prompts of {name}": data.prompts for name, data in self.prompts.items()}
        return {name: {"count": len(s), "digest": digest_of_samples(s)} for name, s in samples.items() if s}


def run(cfg: EvaluateConfig, runtime: Runtime, parts: RunFactories = RunFactories()) -> None:  # noqa: B008 -- frozen
    """Measure, print a table, and write `eval.json` and the responses."""
    with contextlib.ExitStack() as stack:
        phases = stack.enter_context(watched_phases(cfg.watchdog, cfg.run.dir, runtime))
        with phases("build"):
            data = _read(cfg)
            device_memory = DeviceMemory(runtime.device, parts.host(runtime.device), shared=True)
            roles = _build(cfg, runtime, device_memory, parts)
            models = {name: _identity(role) for name, role in roles.items()}
            rewarders = {
                name: stack.enter_context(
                    contextlib.closing(
                        Rewarder(
                            all_rewards(cfg),
                            roles.get("reward_model"),
                            prompts.tokenizer,
                            cfg.forward,
                            runtime.device,
                            phases,
                            may_drop=cfg.data.template_may_drop,
                            environment=environment_of(cfg, prompts.tokenizer, sampling_for(cfg, roles[name], prompts)),
                        )
                    )
                )
                for name, prompts in data.prompts.items()
            }
        session = stack.enter_context(open_session(cfg, cfg.run, runtime, "eval", 1, data.notes, phases=phases))
        figures, calibration = _measure_texts(cfg, roles, data, phases)
        rollouts = {
            name: draw_responses(cfg, roles[name], prompts, device_memory, phases, parts, rewarders[name].environment)
            for name, prompts in data.prompts.items()
        }
        answers = _score(cfg, runtime, rewarders, data, rollouts, phases)
        if runtime.is_main:
            labels = [reward.label for reward in all_rewards(cfg)]
            for name, own in answers.items():
                values = {label: output.values_N for label, output in zip(labels, own.outputs, strict=True)}
                environment = rewarders[name].environment
                _write_responses(cfg, RESPONSES[name], data.prompts[name], own.rollouts, values, environment)
        if "against" in answers:
            figures |= compare_answers(cfg, answers["actor"], answers["against"])
        if "actor" in answers:
            figures |= figures_of(cfg, answers["actor"])
        if "against" in answers:
            figures |= figures_against(cfg, answers["against"])
        _report(cfg, session, figures, models, data, calibration)
        if runtime.is_main:
            finish(cfg.run.dir, 1, NO_STEPS_LEFT)


def _read(cfg: EvaluateConfig) -> EvaluationData:
    """Read the data of all tasks. Raises: ValueError, before any model is built."""
    data, tasks = EvaluationData(), cfg.tasks()
    if "perplexity" in tasks:
        data.texts, note = read_texts(cfg)
        data.notes.append(note)
    if "pairs" in tasks:
        data.pairs, note = read_pairs(cfg)
        data.notes.append(note)
    if cfg.generates:
        data.prompts = read_prompts(cfg)
        data.notes += [f"{name}: {note}" for name, prompts in data.prompts.items() for note in prompts.notes]
    return data


def _build(cfg: EvaluateConfig, runtime: Runtime, device_memory: DeviceMemory, parts: RunFactories) -> dict[str, Role]:
    """Build every role. They share the device's memory, one at a time. Collective."""
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
    """Identity of the model and of its adapter. Collective."""
    lora, weights = role.section.lora, vars(identity_of_weights(role))
    if lora is None:
        return {**weights, "adapter": None}
    path = None if lora.path is None else str(lora.path.absolute())
    return {**weights, "adapter": {"path": path, "digest": digest_of_adapter(role)}}


def _measure_texts(
    cfg: EvaluateConfig, roles: Mapping[str, Role], data: EvaluationData, phases: Phases
) -> tuple[Figures, dict[str, Any]]:
    """Figures of perplexity and of pairs, and the calibration. Collective."""
    figures: Figures = {}
    calibration: dict[str, Any] = {}
    with phases("eval"):
        if data.texts:
            figures |= perplexity(cfg, roles["actor"], data.texts)
        if data.pairs:
            ranked, calibration = ranking(cfg, roles["reward_model"], data.pairs)
            if data.texts:
                ranked = {name.replace("eval_loss", "eval_pair_loss"): figure for name, figure in ranked.items()}
            figures |= ranked
    return figures, calibration


def _score(
    cfg: EvaluateConfig,
    runtime: Runtime,
    rewarders: Mapping[str, Rewarder],
    data: EvaluationData,
    rollouts: Mapping[str, Rollouts],
    phases: Phases,
) -> dict[str, Answers]:
    """Responses with rewards, by model. Raises: RewardError or WatchdogTimeout for a reward that fails; the actor's
    responses are then kept without rewards."""
    try:
        with phases("reward"):
            return {
                name: score_responses(cfg, rewarders[name], prompts.prompts, rollouts[name])
                for name, prompts in data.prompts.items()
            }
    except (RewardError, WatchdogTimeout):
        if runtime.is_main:
            file, environment = "responses_without_rewards.jsonl", rewarders["actor"].environment
            _write_responses(cfg, file, data.prompts["actor"], rollouts["actor"], {}, environment)
        raise


def _write_responses(
    cfg: EvaluateConfig,
    file: str,
    prompts: Prompts,
    rollouts: Rollouts,
    values: Mapping[str, Tensor],
    environment: Environment | None,
) -> None:
    """Write the responses of a model in the form of `generate`. `values`: see `lines_of`."""
    repeated = repeat_prompts(prompts.prompts, cfg.rollout.num_samples_per_prompt)
    texts = response_texts(rollouts, prompts.tokenizer)
    write_lines(cfg.run.dir / file, lines_of(repeated, texts, rollouts, values, environment))


def _report(
    cfg: EvaluateConfig,
    session: Session,
    figures: Figures,
    models: Mapping[str, Mapping[str, Any]],
    data: EvaluationData,
    calibration: Mapping[str, Any],
) -> None:
    session.log(1, metrics_of(figures))
    tree = {
        "tasks": list(cfg.tasks()),
        "figures": as_json(figures),
        "intervals": INTERVALS,
        "models": models,
        "data": {"source": describe_sources(cfg.data.train), "samples": data.summary()},
        "sampling": sampling_settings(cfg) if cfg.generates else None,
        "rewards": [reward.label for reward in cfg.rewards] if cfg.generates else None,
        "seed": cfg.run.seed,
    }
    session.write_report(REPORT, tree | ({"calibration": dict(calibration)} if calibration else {}))
    for name, model in models.items():
        adapter = model["adapter"]
        suffix = "" if adapter is None else f", with the adapter {adapter['path'] or 'none'} ({adapter['digest'][:16]})"
        session.note(f"{name}: {model['path']} (weights {model['digest'][:16]}, {model['dtype']}){suffix}")
    session.note(_title(cfg, figures))
    session.note(as_table(figures))
    session.note(f"wrote {cfg.run.dir / REPORT}")


def _title(cfg: EvaluateConfig, figures: Figures) -> str:
    if not cfg.generates:
        return f"{', '.join(cfg.tasks())} on {describe_sources(cfg.data.train)}; intervals of 95% over texts or pairs"
    responses, prompts = figures["num_samples"].value, figures["num_prompts"].value
    source, sampling = describe_sources(cfg.data.train), describe_sampling(cfg)
    return (
        f"means over {responses} responses to {prompts} prompts of {source}, {sampling}; intervals of 95% over prompts"
    )
