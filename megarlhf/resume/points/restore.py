"""Loads the newest good resume point of a run into its roles and registered state.

Nothing is changed before every digest has been compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.collective_errors import from_first_rank
from megarlhf.config import translate
from megarlhf.config.rollout import DRAWS
from megarlhf.models.role import Role
from megarlhf.provenance import Weights
from megarlhf.resume.points import point, sharded_state
from megarlhf.resume.points.point import Point, Position
from megarlhf.resume.points.stateful import Stateful
from megarlhf.runtime import Runtime, set_random_state
from megarlhf.weights.checkpoint.dtype import NAMES

RANDOM, TABLE = "state/random.pt", "state/table.pt"
SLICES = "slices"
"""Name of the table of responses that are being drawn in slices."""

SPLITS = (("train", "mini_batch_samples"), ("train", "epochs_per_step"), ("train", "shuffle"), ("run", "seed"))
"""Keys that decide how the samples of a step of rl are split into mini-batches."""

Table = Mapping[str, Any]
MakeTable = Callable[[], Table]
"""Makes the saved state of a step in progress: tensors, numbers, texts, lists and mappings. Collective."""


_BEFORE_THE_KEY = {"rollout.slices": 1, "rollout.steps_ahead": 0, "algo.dynamic_sampling.surplus": 0}
"""Values by which runs drew responses when there was no such key."""
OPTIONAL = ("observers",)
"""State that a resume point may lack: it begins anew."""


@dataclass(frozen=True)
class Identity:
    """Everything that must agree between a run and a resume point, so that the run goes on exactly."""

    command: str
    data: str
    """Digest of the training samples."""
    frozen: Mapping[str, str]
    """Digest of the weights of each role that is not trained."""
    config: Mapping[str, Any]
    """The resolved configuration."""
    others: Mapping[str, str]
    """Digests of other inputs of the computation, by name."""
    sources: Mapping[str, str]
    """Digests of the user's source files. A change is reported and refuses nothing."""
    architectures: Mapping[str, Mapping[str, Any]]
    """Architecture of every role, frozen ones too: the weights alone do not say what a model computes."""
    base: Mapping[str, Weights]
    """Weights with which each trained role began. A resumed run has its own: `model.path` may hold other weights
    now."""
    changed: Callable[[Mapping[str, Any]], Sequence[str]]
    """Describes what another configuration computes differently."""
    allow_changes: bool = False
    """Go on although the configuration, the data or frozen weights have changed."""

    @property
    def reference(self) -> str | None:
        """Digest of the reference. A manifest has it apart from other inputs, and a change of it is explained."""
        return self.frozen.get("reference")

    def inputs(self) -> dict[str, str]:
        """Digests of other frozen weights and further inputs, by name."""
        weights = {f"weights of the {role.replace('_', ' ')}": digest for role, digest in self.frozen.items()}
        weights.pop("weights of the reference", None)
        return {**weights, **self.others}

    def stated(self) -> dict[str, Any]:
        """Content of a manifest that states this identity."""
        return {
            "command": self.command,
            "data": self.data,
            "reference": self.reference,
            "others": self.inputs(),
            "sources": dict(self.sources),
            "architectures": {role: dict(architecture) for role, architecture in self.architectures.items()},
            "base": {role: asdict(weights) for role, weights in self.base.items()},
            "config": dict(self.config),
        }

    def digests(self) -> dict[str, str]:
        """Digests of models, data and other inputs, by name."""
        models = {f"base/{role}": weights.digest for role, weights in self.base.items()}
        return {"data": self.data, "reference": self.reference or "", **models, **self.inputs()}

    def differences(self, manifest: Mapping[str, Any]) -> list[str]:
        """Describe what the run of a manifest computed differently."""
        problems = [f"configuration: {change}" for change in self.changed(manifest["config"])]
        if manifest["data"] != self.data:
            problems.append("data.train (or what makes samples of it) gives other samples")
        # One of the two runs may have none; whether the KL counts is part of the configuration.
        if None not in (manifest["reference"], self.reference) and manifest["reference"] != self.reference:
            problems.append("the reference has other weights, so the KL would be measured to another model")
        known = manifest["others"]
        problems += [
            f"{name}: changed since" for name, digest in self.inputs().items() if known.get(name, digest) != digest
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
        """Explain why a step in progress cannot be completed: its samples would be split into other mini-batches."""
        before, now = manifest["config"], self.config
        return [
            f"it is inside a step, and {section}.{key} {before[section][key]} -> {now[section][key]} splits the step "
            "into other mini-batches"
            for section, key in SPLITS
            if self.command == "rl" and before[section][key] != now[section][key]
        ]

    def draws_otherwise(self, manifest: Mapping[str, Any]) -> list[str]:
        """Explain why responses that were begun cannot be finished: the rest would be drawn in another way.
        `run.allow_changes` does not help."""
        if self.command != "rl":
            return []
        before, now, held = manifest["config"], self.config, table_file(SLICES) in manifest["files"]
        problems = []
        for key in DRAWS:
            is_rule = key in ("rollout.slices", "rollout.steps_ahead")
            old, new = _value(before, key), _value(now, key)
            if (held or is_rule) and old != new:
                problems.append(
                    f"{key} {old} -> {new} would draw the rest of responses otherwise than "
                    "they were begun; go on with the former value"
                )
        if held and manifest["data"] != self.data:
            problems.append(
                "data.train gives other samples, and responses to the former ones are being drawn: bring back the "
                "former, as run.allow_changes does not help here"
            )
        return problems

    def other_precision(self, manifest: Mapping[str, Any]) -> list[str]:
        """Explain why the state cannot be loaded at another dtype: with bf16 the optimizer keeps main parameters in
        fp32, otherwise it has none. `run.allow_changes` does not help."""
        stated = {role: Weights(**weights) for role, weights in manifest["base"].items()}
        return [
            f"{role} was trained in {stated[role].dtype} and is now built in {now.dtype}: give {role}.model.dtype="
            f"{NAMES[stated[role].dtype]}, or train its result further in a run with another run.dir"
            for role, now in self.base.items()
            if role in stated and stated[role].dtype != now.dtype
        ]

    def remarks(self, manifest: Mapping[str, Any]) -> list[str]:
        """Describe changes that the user has to judge."""
        changed = _changed(self.sources, manifest["sources"])
        new_sources = [f"{name} has another source than when the resume point was written" for name in changed]
        stated = {role: Weights(**weights) for role, weights in manifest["base"].items()}
        return new_sources + [
            f"{role}.model.path = {now.path} holds other weights than the run began with ({stated[role].path}, digest "
            f"{stated[role].digest}). They are not used: the run goes on with its own"
            for role, now in self.base.items()
            if stated.get(role, now).digest != now.digest
        ]


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Value of a dotted key of `DRAWS`; that of a run from before the key where it is missing."""
    *sections, name = key.split(".")
    for section in sections:
        config = config.get(section, {})
    return config.get(name, _BEFORE_THE_KEY.get(key))


def _changed(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    return [name for name, digest in now.items() if before.get(name, digest) != digest]


@dataclass(frozen=True)
class Restored:
    """Position and state from which a run continues."""

    position: Position
    num_steps: int
    """`train.num_steps` of the run that wrote the point."""
    table: Table | None
    """State of the step in progress; None for a point between two steps."""
    base: Mapping[str, Weights]
    """Weights with which the run began, by role."""
    notes: list[str] = field(default_factory=list)


def table_file(name: str) -> str:
    """File of a table in a point."""
    return f"state/{name}.pt"


def restore(
    runtime: Runtime,
    run_dir: Path,
    roles: Sequence[Role],
    states: Mapping[str, Stateful],
    identity: Identity,
    tables: Mapping[str, Stateful] = MappingProxyType({}),
) -> Restored | None:
    """Load the newest good point; None where there is no point. Collective.

    tables: objects whose state has tensors, by name. A point has no file of one whose state was empty

    Raises: ValueError when there are points and none of them is good and of this run.
    """
    points = from_first_rank(point.find_points(run_dir) if runtime.is_main else [])
    passed_over: list[str] = []
    for candidate in reversed(points):
        manifest, problems, notes = _examine(runtime, candidate, roles, states, identity)
        if not problems:
            table = _load(runtime, candidate, manifest, roles, states)
            for name in (name for name in tables if table_file(name) in manifest["files"]):
                tables[name].load_state_dict(torch.load(candidate.path / table_file(name), weights_only=True))
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
    """Manifest, reasons against the point, and notes if it is used; the same on every rank."""
    manifest: dict[str, Any] = {}
    problems: list[str] = []
    notes: list[str] = []
    if runtime.is_main:
        try:
            manifest = point.read_manifest(candidate)
            manifest["config"] = translate(manifest["config"])
            if manifest["command"] != identity.command:
                problems = [f"it is of `megarlhf {manifest['command']}`"]
            else:
                differences = identity.differences(manifest)
                problems, notes = ([], differences) if identity.allow_changes else (differences, [])
                needed = [role.name for role in roles if role.name not in manifest["roles"]]
                needed += [name for name in states if name not in manifest["state"] and name not in OPTIONAL]
                problems += [f"it has no state of {name}" for name in needed]
                if "reference" in manifest["roles"] and all(role.name != "reference" for role in roles):
                    problems.append(
                        "it holds a reference that has moved, and this configuration has no reference_update: the KL "
                        "would be measured to the model that the run began with. Give reference_update; with a large "
                        "`every` the reference stays where it is"
                    )
                problems += identity.other_precision(manifest)
                problems += identity.draws_otherwise(manifest)
                if candidate.position.update:
                    problems += identity.splits_otherwise(manifest)
        except (ValueError, KeyError) as error:
            problems = [str(error)]
    manifest, problems, notes = from_first_rank((manifest, problems, notes))
    if not problems:
        problems = gather_damaged_files(runtime, candidate, manifest)
    return manifest, problems, [f"going on with run.allow_changes: {note}" for note in notes]


def gather_damaged_files(runtime: Runtime, candidate: Point, manifest: Mapping[str, Any]) -> list[str]:
    """Describe missing and damaged files of a point; the ranks share the work. Collective."""
    by_rank: list[list[str]] = [[]] * runtime.world_size
    dist.all_gather_object(
        by_rank, point.damaged_files(candidate, manifest, part=runtime.rank, parts=runtime.world_size)
    )
    return [problem for problems in by_rank for problem in problems]


def _load(
    runtime: Runtime, good: Point, manifest: Mapping[str, Any], roles: Sequence[Role], states: Mapping[str, Stateful]
) -> Table | None:
    for role in roles:
        sharded_state.load_state(role, good.path / role.name)
        sharded_state.set_counters(role, manifest["roles"][role.name])
    for name, state in states.items():
        if name in manifest["state"]:  # state that older resume points lack begins here
            state.load_state_dict(manifest["state"][name])
    generators = torch.load(good.path / RANDOM, weights_only=True)
    if len(generators) == runtime.world_size:
        set_random_state(generators[runtime.rank], runtime.device)
    if TABLE not in manifest["files"]:
        return None
    table: Table = torch.load(good.path / TABLE, weights_only=True, map_location=runtime.device)
    return table


def layout_in_words(role: Role) -> str:
    """A role's layout for people, such as `tp 2 x pp 2 x dp 1`."""
    return role.section.parallel.describe(role.mesh.layout)


def _other_layouts(roles: Sequence[Role], manifest: Mapping[str, Any]) -> list[str]:
    return [
        f"{role.name}: saved at {before}, goes on at {now}: the same state, further steps agree up to rounding"
        for role in roles
        if (before := manifest["roles"][role.name]["layout"]) != (now := layout_in_words(role))
    ]
