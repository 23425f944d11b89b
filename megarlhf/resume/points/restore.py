"""Going on: the newest good resume point of this very run is found, and loaded into roles and registered state.

Nothing is touched before every digest has been compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.config import convert_old_shuffle
from megarlhf.models.role import Role
from megarlhf.provenance import Weights
from megarlhf.resume.points import point, sharded_state
from megarlhf.resume.points.point import Point, Position
from megarlhf.resume.points.stateful import Stateful
from megarlhf.runtime import Runtime, set_random_state
from megarlhf.weights.checkpoint.dtype import NAMES

RANDOM, TABLE = "state/random.pt", "state/table.pt"

SPLITS = (("train", "mini_batch_samples"), ("train", "epochs_per_step"), ("train", "shuffle"), ("run", "seed"))
"""What decides into which mini-batches the samples of a step of rl are split."""

Table = Mapping[str, Any]
MakeTable = Callable[[], Table]
"""Makes what is saved of a step in progress when it is written. Collective."""
"""What a step in progress has found so far: tensors, numbers, texts, lists and mappings."""


@dataclass(frozen=True)
class Identity:
    """What a run must have in common with a resume point to go on from it exactly."""

    command: str
    data: str
    """Digest of the training samples."""
    reference: str | None
    """Digest of the reference's weights, to which the KL is measured."""
    config: Mapping[str, Any]
    """The resolved configuration."""
    others: Mapping[str, str]
    """Digests of what else takes part in what is computed, by its name."""
    sources: Mapping[str, str]
    """Digests of sources of the user's; another one is said and refuses nothing."""
    architectures: Mapping[str, Mapping[str, Any]]
    """Of every role that is built, the frozen ones too: the weights alone do not say what a model computes."""
    base: Mapping[str, Weights]
    """What each trained role began with. Of a run that goes on, its own: `model.path` may hold other weights now."""
    changed: Callable[[Mapping[str, Any]], Sequence[str]]
    """What another configuration computes otherwise, in words."""
    allow_changes: bool = False
    """Whether a run may go on although that, the data or the reference have changed."""

    def stated(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {
            "command": self.command,
            "data": self.data,
            "reference": self.reference,
            "others": dict(self.others),
            "sources": dict(self.sources),
            "architectures": {role: dict(architecture) for role, architecture in self.architectures.items()},
            "base": {role: asdict(weights) for role, weights in self.base.items()},
            "config": dict(self.config),
        }

    def digests(self) -> dict[str, str]:
        """Of what the run began with and is computed from, by name."""
        models = {f"base/{role}": weights.digest for role, weights in self.base.items()}
        return {"data": self.data, "reference": self.reference or "", **models, **self.others}

    def differences(self, manifest: Mapping[str, Any]) -> list[str]:
        """What the run of a manifest computed otherwise, in words."""
        problems = [f"configuration: {change}" for change in self.changed(manifest["config"])]
        if manifest["data"] != self.data:
            problems.append("data.train (or what makes samples of it) gives other samples")
        # One of the two runs may have none; whether the KL counts is part of the configuration.
        if None not in (manifest["reference"], self.reference) and manifest["reference"] != self.reference:
            problems.append("the reference has other weights, so the KL would be measured to another model")
        known = manifest["others"]
        problems += [
            f"{name}: changed since" for name, digest in self.others.items() if known.get(name, digest) != digest
        ]
        for role, now in self.architectures.items():
            before = manifest["architectures"].get(role, now)
            problems += [
                f"the config.json of {role}.model.path: {key} {before.get(key)} -> {now.get(key)}"
                for key in dict.fromkeys([*before, *now])
                if before.get(key) != now.get(key)
            ]
        return problems

    def splits_otherwise(self, manifest: Mapping[str, Any]) -> list[str]:
        """Why a step in progress cannot be completed: its samples would be split into other mini-batches."""
        before, now = manifest["config"], self.config
        return [
            f"it lies inside a step, and {section}.{key} {before[section][key]} -> {now[section][key]} splits the step "
            "into other mini-batches"
            for section, key in SPLITS
            if self.command == "rl" and before[section][key] != now[section][key]
        ]

    def other_precision(self, manifest: Mapping[str, Any]) -> list[str]:
        """Why its state cannot be loaded: with bf16 the optimizer keeps main parameters in fp32, otherwise it has none.
        `run.allow_changes` does not help."""
        stated = {role: Weights(**weights) for role, weights in manifest["base"].items()}
        return [
            f"{role} was trained in {stated[role].dtype} and is now built in {now.dtype}: give {role}.model.dtype="
            f"{NAMES[stated[role].dtype]}, or train its result further in a run with another run.dir"
            for role, now in self.base.items()
            if role in stated and stated[role].dtype != now.dtype
        ]

    def remarks(self, manifest: Mapping[str, Any]) -> list[str]:
        """What has changed and is the user's to judge, in words."""
        changed = _changed(self.sources, manifest["sources"])
        said = [f"{name} has another source than when the resume point was written" for name in changed]
        stated = {role: Weights(**weights) for role, weights in manifest["base"].items()}
        return said + [
            f"{role}.model.path = {now.path} holds other weights than the run began with ({stated[role].path}, digest "
            f"{stated[role].digest}). They are not used: the run goes on with its own"
            for role, now in self.base.items()
            if stated.get(role, now).digest != now.digest
        ]


def _changed(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    return [name for name, digest in now.items() if before.get(name, digest) != digest]


@dataclass(frozen=True)
class Restored:
    """Where a run goes on."""

    position: Position
    num_steps: int
    """`train.num_steps` of the run that wrote the point."""
    table: Table | None
    """Of the step in which the point lies, where it lies in one."""
    base: Mapping[str, Weights]
    """What the run began with."""
    notes: list[str] = field(default_factory=list)


def restore(
    runtime: Runtime, run_dir: Path, roles: Sequence[Role], states: Mapping[str, Stateful], identity: Identity
) -> Restored | None:
    """Load the newest good point; None where there is no point. Collective.

    Raises: ValueError when there are points and none of them is good and of this run.
    """
    points: list[Any] = [point.find_points(run_dir) if runtime.is_main else None]
    dist.broadcast_object_list(points, src=0)
    passed_over: list[str] = []
    for candidate in reversed(points[0]):
        manifest, problems, notes = _examine(runtime, candidate, roles, states, identity)
        if not problems:
            table = _load(runtime, candidate, manifest, roles, states)
            notes += passed_over + identity.remarks(manifest) + _other_layouts(roles, manifest)
            base = {role: Weights(**weights) for role, weights in manifest["base"].items()}
            return Restored(candidate.position, manifest["config"]["train"]["num_steps"], table, base, notes)
        passed_over.append(f"resume point {candidate.path.name} is passed over: {'; '.join(problems[:5])}")
    if passed_over:
        raise ValueError(
            "\n  ".join([f"no resume point in {point.resume_directory(run_dir)} can be used:", *passed_over])
            + "\nBring back what has changed, "
            + ("" if identity.allow_changes else "or go on with it by run.allow_changes=true, ")
            + "or begin again: run.on_existing=overwrite, or another run.dir"
        )
    return None


def _examine(
    runtime: Runtime, candidate: Point, roles: Sequence[Role], states: Mapping[str, Stateful], identity: Identity
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Manifest, why the point cannot be used, and what to say of it if it can; the same on every rank."""
    first: list[Any] = [{}, [], []]
    if runtime.is_main:
        try:
            manifest = first[0] = point.read_manifest(candidate)
            manifest["config"] = convert_old_shuffle(manifest["config"])
            if manifest["command"] != identity.command:
                first[1] = [f"it is of `megarlhf {manifest['command']}`"]
            else:
                differences = identity.differences(manifest)
                first[2 if identity.allow_changes else 1] = differences
                needed = [role.name for role in roles if role.name not in manifest["roles"]]
                needed += [name for name in states if name not in manifest["state"]]
                first[1] += [f"it has no state of {name}" for name in needed]
                if "reference" in manifest["roles"] and all(role.name != "reference" for role in roles):
                    first[1].append(
                        "it holds a reference that has moved, and this configuration has no reference_update: the KL "
                        "would be measured to the model that the run began with. Give reference_update; with a large "
                        "`every` the reference stays where it is"
                    )
                first[1] += identity.other_precision(manifest)
                if candidate.position.update:
                    first[1] += identity.splits_otherwise(manifest)
        except (ValueError, KeyError) as error:
            first[1] = [str(error)]
    dist.broadcast_object_list(first, src=0)
    manifest, problems, notes = first
    if not problems:
        mine = point.damaged_files(candidate, manifest, part=runtime.rank, parts=runtime.world_size)
        everyones: list[list[str]] = [[]] * runtime.world_size
        dist.all_gather_object(everyones, mine)
        problems = [problem for problems_of_rank in everyones for problem in problems_of_rank]
    return manifest, problems, [f"going on with run.allow_changes: {note}" for note in notes]


def _load(
    runtime: Runtime, good: Point, manifest: Mapping[str, Any], roles: Sequence[Role], states: Mapping[str, Stateful]
) -> Table | None:
    for role in roles:
        sharded_state.load_state(role, good.path / role.name)
        sharded_state.set_counters(role, manifest["roles"][role.name])
    for name, state in states.items():
        if name in manifest["state"]:  # what is asked for only since begins here
            state.load_state_dict(manifest["state"][name])
    generators = torch.load(good.path / RANDOM, weights_only=True)
    if len(generators) == runtime.world_size:
        set_random_state(generators[runtime.rank], runtime.device)
    if TABLE not in manifest["files"]:
        return None
    table: Table = torch.load(good.path / TABLE, weights_only=True, map_location=runtime.device)
    return table


def layout_in_words(role: Role) -> str:
    """Such as `tp 2 x pp 2 x dp 1`."""
    return role.section.parallel.describe(role.mesh.layout)


def _other_layouts(roles: Sequence[Role], manifest: Mapping[str, Any]) -> list[str]:
    return [
        f"{role.name}: saved at {before}, goes on at {now}: the same state, further steps agree up to rounding"
        for role in roles
        if (before := manifest["roles"][role.name]["layout"]) != (now := layout_in_words(role))
    ]
