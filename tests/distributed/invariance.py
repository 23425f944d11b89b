"""The invariance matrix: which algorithm is trained at which layout in which way, and how far it is from one process.

A cell of it is a whole run of `sft`, `rm` or `rl` with three optimizer steps in fp32 at a learning rate of 1e-3. What
it is compared with is the plain run (padded rows, everything resident, nothing computed again) of the same model in one
process. In `rl` every run trains on the responses which that one drew.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.distributed.invariance_jobs import train
from tests.distributed.invariance_routing import Choices, other_choices, union
from tests.distributed.logical import Arrays, gradients_of, weights_of
from tests.ranks import RankPool

BOUNDS = {"loss": 1e-5, "grad_norm": 1e-5, "gradients": 1e-5, "weights": 1e-4}
"""Largest deviations: of a loss, relative (absolute where it is small: `Variant.small_loss`); of the norm, relative; of
an element of the first update's gradient, over the largest of its tensor; of a weight after the last, absolute."""
OTHER_CHOICES, OTHER_CHOICES_BF16 = 0.0, 0.054
"""Largest share of the decisions of routers that are not those of one process in fp32."""
SMALL_LOSS_BF16 = 0.1
BANDS: dict[tuple[str, str], dict[str, float]] = {
    ("dense", "grpo"): {"loss": 0.095, "weights": 0.0068}, ("dense", "ppo"): {"loss": 0.28, "weights": 0.0067},
    ("dense", "rm"): {"loss": 0.015, "weights": 0.0063}, ("dense", "sft"): {"loss": 0.0025, "weights": 0.0056},
    ("experts", "grpo"): {"loss": 0.14, "weights": 0.0094}, ("experts", "ppo"): {"loss": 0.47, "weights": 0.012},
    ("experts", "rm"): {"loss": 0.041, "weights": 0.0077}, ("experts", "sft"): {"loss": 0.0058, "weights": 0.0071},
}  # fmt: skip
"""Largest deviations of bf16 from fp32, by model and algorithm: of a loss, relative (below 0.1 over 0.1); of all
weights of a model after the last update, relative, in the Euclidean norm. Twice what was measured."""
UPDATES = 3
LR = 1e-3

ALGORITHMS = ("sft", "rm", "ppo", "grpo")
RL = ("ppo", "grpo")


class Layout(NamedTuple):
    ranks: int
    parallel: Mapping[str, Any]
    model: str = "dense"

    @property
    def copies(self) -> int:
        """Ranks that hold the same weights: data- and context-parallel ones."""
        return self.ranks // (self.parallel.get("tp", 1) * self.parallel.get("pp", 1))


ONE, ONE_WITH_EXPERTS = "one process", "one process, experts"
LAYOUTS: dict[str, Layout] = {
    ONE: Layout(1, {}),
    "TP2": Layout(2, {"tp": 2, "sequence_parallel": False}),
    "TP4": Layout(4, {"tp": 4, "sequence_parallel": False}),
    "PP2": Layout(2, {"pp": 2}),
    "PP4": Layout(4, {"pp": 4}),
    "VPP2": Layout(2, {"pp": 2, "vpp": 2}),
    "CP2": Layout(2, {"cp": 2}),
    "DP2": Layout(2, {}),
    "DP4": Layout(4, {}),
    "SP": Layout(2, {"tp": 2, "sequence_parallel": True}),
    "TP2 x PP2": Layout(4, {"tp": 2, "pp": 2}),
    "TP2 x PP2, VPP2": Layout(4, {"tp": 2, "pp": 2, "vpp": 2}),
    "TP2 x CP2": Layout(4, {"tp": 2, "cp": 2}),
    "TP2 x DP2": Layout(4, {"tp": 2}),
    "PP2 x DP2": Layout(4, {"pp": 2}),
    ONE_WITH_EXPERTS: Layout(1, {}, "experts"),
    "EP2": Layout(2, {"ep": 2}, "experts"),
    "experts, TP2 with SP": Layout(2, {"tp": 2, "sequence_parallel": True}, "experts"),
    "EP2 x TP2": Layout(4, {"ep": 2, "tp": 2}, "experts"),
}
"""SP where it is not named is on with TP, as by default; the first two are without."""

AWAY = {"parameters": True, "gradients": True, "optimizer": True}
HERE = dict.fromkeys(AWAY, False)


@dataclass(frozen=True, kw_only=True)
class Variant:
    packed: bool = False
    tied: bool = False
    role: Mapping[str, Any] | None = None
    """Keys of every role."""
    optim: Mapping[str, Any] | None = None
    exact: bool = False
    """The same bits as the plain run at the same layout."""
    entropy_coef: float = 0.1
    small_loss: float = 0.01
    """A loss below it may differ by as much as this one: by 1e-7, with the bound on relative deviations."""

    def how(self, layout: Layout) -> dict[str, Any]:
        """What `invariance_jobs.how` says of a run that is this one."""
        optim, several, sizes = self.optim or {}, layout.copies > 1, {"cp": 1, "pp": 1, "tp": 1, "ep": 1, "vpp": 1}
        sizes |= {"sequence_parallel": layout.parallel.get("tp", 1) > 1} | dict(layout.parallel)
        distributed = optim.get("distributed", several)
        overlap = several and optim.get("overlap_grad_reduce", True)
        return {
            "sizes": sizes | {"dp": layout.copies // sizes["cp"]}, "packed": {self.packed},
            "recomputed": "recompute" in (self.role or {}), "distributed": distributed,
            "overlap": (overlap, overlap and distributed), "several_buckets": overlap,
        }  # fmt: skip

    def applies(self, algorithm: str, layout: Layout) -> bool:
        """By itself the optimizer is distributed where several ranks hold the same weights, and not on one, where
        nothing is summed either."""
        if self.entropy_coef == 0 and algorithm not in RL:
            return False
        optim, alone = self.optim or {}, layout.copies == 1
        return optim.get("distributed", alone) == alone and not ("overlap_grad_reduce" in optim and alone)


PLAIN, NO_BONUS = "padded", "no entropy bonus"
REFERENCES = (PLAIN, "tied", NO_BONUS)
"""Variants that are trainings of their own."""
VARIANTS: dict[str, Variant] = {
    PLAIN: Variant(),
    "packed": Variant(packed=True),
    "tied": Variant(tied=True),
    "core_attention": Variant(role={"recompute": "core_attention"}, exact=True),
    "layers": Variant(role={"recompute": "layers", "recompute_layers": 1}, exact=True),
    "full": Variant(role={"recompute": "full"}, exact=True),
    NO_BONUS: Variant(entropy_coef=0.0, small_loss=0.1),
    "optimizer distributed": Variant(optim={"distributed": True}),
    "optimizer not distributed": Variant(optim={"distributed": False}),
    "no overlap": Variant(optim={"overlap_grad_reduce": False, "overlap_param_gather": False}),
    "offloaded": Variant(role={"offload": AWAY}, exact=True),
    "streamed": Variant(role={"offload": AWAY | {"optimizer": "stream"}}, exact=True),
    "all of it": Variant(packed=True, tied=True, role={"recompute": "full", "offload": AWAY | {"optimizer": "stream"}}),
}


class Cell(NamedTuple):
    algorithm: str
    layout: str
    variant: str = PLAIN
    dtype: str = "fp32"
    seed: int = 0

    def __str__(self) -> str:
        return " | ".join([self.algorithm, self.layout, self.variant, self.dtype, str(self.seed)])


def bf16_cells() -> Iterator[Cell]:
    """Of these a band is measured."""
    layouts = (
        ONE, "TP2", "PP2", "DP2", "SP", "CP2", "TP2 x PP2, VPP2", ONE_WITH_EXPERTS, "EP2", "experts, TP2 with SP",
    )  # fmt: skip
    for algorithm, layout, seed in itertools.product(ALGORITHMS, layouts, range(3)):
        yield Cell(algorithm, layout, dtype="bf16", seed=seed)


def reference(cell: Cell) -> Cell:
    """The plain run of the same model in one process."""
    layout = ONE if LAYOUTS[cell.layout].model == "dense" else ONE_WITH_EXPERTS
    variant = cell.variant if cell.variant in REFERENCES else "tied" if VARIANTS[cell.variant].tied else PLAIN
    return Cell(cell.algorithm, layout, variant, seed=cell.seed)


def cells() -> Iterator[Cell]:
    """All of the matrix but what the others are compared with."""
    for algorithm, (name, layout), variant in itertools.product(ALGORITHMS, LAYOUTS.items(), VARIANTS):
        cell = Cell(algorithm, name, variant)
        if cell != reference(cell) and VARIANTS[variant].applies(algorithm, layout):
            yield cell


@dataclass(frozen=True)
class Sources:
    """Where the models and the data stand."""

    models: Mapping[str, Path]
    data: Callable[[int], Mapping[str, Path]]
    """By seed."""


def config(cell: Cell, sources: Sources, run_dir: Path) -> dict[str, Any]:
    """The file of the cell's run."""
    layout, variant = LAYOUTS[cell.layout], VARIANTS[cell.variant]
    data, seed = sources.data(cell.seed), cell.seed
    # Adam's eps: ten times its default. A first step is lr x gradient / (|gradient| + eps), and of a few thousand
    # elements one has a gradient so near zero that its rounding, some 1e-9, counts beside 1e-8.
    optim = {"lr": LR, "eps": 1e-7, "weight_decay": 0.1} | dict(variant.optim or {})

    def role(name: str, dtype: str = cell.dtype) -> dict[str, Any]:
        model = {"path": str(sources.models[f"{layout.model} {name}"]), "dtype": dtype}
        common = {"model": model, "parallel": dict(layout.parallel), "optim": optim, "offload": HERE}
        return common | dict(variant.role or {})

    language_model = role("tied" if variant.tied else "untied")
    micro = {"max_tokens_per_micro_batch": 120} if variant.packed else {"micro_batch_samples": 2}
    common: dict[str, Any] = {"run": {"dir": str(run_dir), "seed": seed}, "checkpoint": {"every_minutes": 0}}
    if cell.algorithm in ("sft", "rm"):
        name, path = ("actor", data["sft"]) if cell.algorithm == "sft" else ("reward_model", data["pairs"])
        train = {"num_steps": UPDATES, "mini_batch_samples": 8, **micro}
        return common | {name: language_model, "data": {"train": str(path)}, "train": train}
    # A policy's loss is a sum of both signs: what is left of it is so small that its rounding counts. With an entropy
    # bonus it is not, and a row of the matrix is without.
    entropy = {"entropy_coef": variant.entropy_coef}
    kl = {"coef": 0.1} if cell.algorithm == "ppo" else {"coef": 0.05, "placement": "loss", "estimator": "k3"}
    advantage = {"advantage": "gae"} if cell.algorithm == "ppo" else {"advantage": "group_relative"}
    # Two responses to a prompt differ by the sign of an advantage, which a reward model in bf16 turns round where it
    # likes both nearly as much.
    return common | {
        "actor": language_model,
        "reference": role("other"),
        "reward_model": role("scorer", "fp32"),
        **({"critic": role("scorer")} if cell.algorithm == "ppo" else {}),
        "rewards": [{"kind": "model", "shift": 0.5}],
        "data": {"train": str(data["prompts"]), "max_prompt_tokens": 48},
        "train": {"num_steps": 1, "prompts_per_step": 6, "mini_batch_samples": 4, **micro},
        "rollout": {"engine": "megatron", "num_samples_per_prompt": 2, "max_response_tokens": 4},
        "algo": {"kl": kl, **advantage, **entropy},
    }


@dataclass(frozen=True)
class Trained:
    """What a run did, put together from its ranks."""

    losses: Mapping[str, list[float]]
    """By trained role, update by update."""
    norms: Mapping[str, list[float]]
    gradients: Mapping[str, Arrays]
    """Of the first update, as logical tensors."""
    weights: Mapping[str, Arrays]
    given: Any
    metrics: Mapping[str, Any]
    host_bytes: int
    how: Mapping[str, Mapping[str, Any]]
    """By trained role: see `invariance_jobs.how`."""
    router_gap: float
    """See `Routing.gap`."""
    choices: Choices
    """Of experts."""


class Matrix:
    """Runs each cell once."""

    def __init__(self, ranks: RankPool, sources: Sources, root: Path) -> None:
        self._ranks, self._sources, self._root = ranks, sources, root
        self._numbers = itertools.count()
        self._made: dict[Cell, Trained] = {}
        self.measured: dict[Cell, dict[str, float]] = {}
        self.choices: dict[Cell, tuple[int, int]] = {}
        """Of cells with experts: see `other_choices`."""

    def reference(self, cell: Cell) -> Trained:
        """What this cell is compared with."""
        return self.run(reference(cell))

    def share_of_other_choices(self, cell: Cell) -> float:
        """Of experts, compared with those of the reference."""
        wanted = self.reference(cell).choices
        assert bool(wanted) == (LAYOUTS[cell.layout].model == "experts")
        if not wanted:
            return 0.0
        others, of = self.choices[cell] = other_choices(self.run(cell).choices, wanted)
        return others / of

    def run(self, cell: Cell) -> Trained:
        if cell not in self._made:
            origin, command = reference(cell), "rl" if cell.algorithm in RL else cell.algorithm
            given = None if cell == origin else self.run(origin).given
            cfg = config(cell, self._sources, self._root / str(next(self._numbers)))
            self._made[cell] = self._train(command, cell, cfg, given)
        return self._made[cell]

    def _train(self, command: str, cell: Cell, cfg: dict[str, Any], given: Any) -> Trained:
        by_rank = self._ranks.run(LAYOUTS[cell.layout].ranks, train, command, cfg, given)
        roles = by_rank[0]["roles"]
        for rank in by_rank:
            for name, role in roles.items():
                assert (rank["roles"][name]["losses"], rank["roles"][name]["norms"]) == (role["losses"], role["norms"])
                assert len(role["losses"]) == len(role["norms"]) == UPDATES

        def by_role(what: str, rebuild: Callable[[list[Any]], Arrays]) -> dict[str, Arrays]:
            return {name: rebuild([rank["roles"][name][what] for rank in by_rank]) for name in roles}

        return Trained(
            losses={name: role["losses"] for name, role in roles.items()},
            norms={name: role["norms"] for name, role in roles.items()},
            gradients=by_role("gradients", gradients_of),
            weights=by_role("weights", weights_of),
            given=by_rank[0]["given"],
            metrics=by_rank[0]["metrics"],
            host_bytes=by_rank[0]["host_bytes"],
            how={name: role["how"] for name, role in roles.items()},
            router_gap=min(rank["router_gap"] for rank in by_rank),
            choices=union([rank["choices"] for rank in by_rank]),
        )


def deviations(actual: Trained, expected: Trained, small_loss: float) -> dict[str, float]:
    """The largest of each kind, over the trained roles: see `BOUNDS`."""
    found: dict[str, list[float]] = {kind: [] for kind in BOUNDS}
    for role in same_roles(actual, expected):
        pairs = zip(actual.losses[role], expected.losses[role], strict=True)
        found["loss"] += [abs(loss - wanted) / max(abs(wanted), small_loss) for loss, wanted in pairs]
        pairs = zip(actual.norms[role], expected.norms[role], strict=True)
        found["grad_norm"] += [abs(norm - wanted) / wanted for norm, wanted in pairs]
        idle = 0
        for name, wanted in expected.gradients[role].items():
            error, largest = _largest(actual.gradients[role][name] - wanted), _largest(wanted)
            assert largest > 0 or ".experts." in name, f"{role} {name} has no gradient: nothing is compared"
            idle += largest == 0  # an expert that no token has chosen
            found["gradients"].append(error / (largest or 1.0))
        assert idle <= 0.3 * len(expected.gradients[role]), f"{role}: {idle} tensors have no gradient"
        found["weights"] += [
            _largest(actual.weights[role][name] - wanted) for name, wanted in expected.weights[role].items()
        ]
    return {kind: max(values) for kind, values in found.items()}


def policy_loss_deviations(actual: Trained, expected: Trained) -> dict[str, float]:
    """The largest of the actor's loss, by itself and over the loss."""
    off = [(abs(a - b), abs(b)) for a, b in zip(actual.losses["actor"], expected.losses["actor"], strict=True)]
    return {"loss_absolute": max(error for error, _ in off), "loss_relative": max(error / loss for error, loss in off)}


def bf16_deviations(actual: Trained, expected: Trained) -> dict[str, float]:
    """Of a run in bf16 from one in fp32: see `BANDS`."""
    found: dict[str, list[float]] = {"loss": [], "weights": []}
    for role in same_roles(actual, expected):
        pairs = zip(actual.losses[role], expected.losses[role], strict=True)
        found["loss"] += [abs(loss - wanted) / max(abs(wanted), SMALL_LOSS_BF16) for loss, wanted in pairs]
        weights = expected.weights[role]
        off = sum(float(np.square(actual.weights[role][name] - wanted).sum()) for name, wanted in weights.items())
        found["weights"].append((off / sum(float(np.square(wanted).sum()) for wanted in weights.values())) ** 0.5)
    return {kind: max(values) for kind, values in found.items()}


def same_roles(actual: Trained, expected: Trained) -> list[str]:
    """The trained roles, of which both have the same logical tensors."""
    for role, gradients in expected.gradients.items():
        assert actual.gradients[role].keys() == gradients.keys() == expected.weights[role].keys()
        assert actual.weights[role].keys() == gradients.keys()
    assert actual.losses.keys() == expected.losses.keys() == expected.gradients.keys()
    return list(expected.losses)


def _largest(values: np.ndarray) -> float:
    return float(np.abs(values).max())


def assert_same_bits(actual: Trained, expected: Trained) -> None:
    """Losses, norms, first gradients and last weights."""
    assert (actual.losses, actual.norms) == (expected.losses, expected.norms)
    for kind in ("gradients", "weights"):
        for role, tensors in getattr(expected, kind).items():
            for name, wanted in tensors.items():
                np.testing.assert_array_equal(getattr(actual, kind)[role][name], wanted, err_msg=f"{role} {name}")
