"""What carrying the actor's weights into the rollout engine will cost: `python -m megarlhf.weights.plan -c FILE`.

Reads the configuration and the actor's config.json; no weights, no GPU, no process group. Three numbers for what a
rank must receive are made apart from each other and shall be equal: what the plan sends it (received), what it wants
and does not hold, counted from both layouts (least), and arithmetic on the sizes alone (formula).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from megarlhf.config import RLConfig, load_config
from megarlhf.layout import Layout, engine_order
from megarlhf.observe.progress import make_console, table
from megarlhf.planning.legality import check_role
from megarlhf.weights.architecture import Architecture
from megarlhf.weights.megatron_layout import MegatronLayout
from megarlhf.weights.placement import RankPlacements
from megarlhf.weights.plan import CopyPlan, make_plan
from megarlhf.weights.plan.tiers import TieredPlan, crossing, make_tiers, node_needs
from megarlhf.weights.plan.traffic import Links, entering, formula, least_receive, model_elements, wire_seconds
from megarlhf.weights.tensor_map import padded_vocab_size, vllm_placements

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
Order = Literal["engine", "rank"]
ORDERS: dict[Order, str] = {
    "engine": "as suits the engines: more of what a rank needs is in place",
    "rank": "by number, contiguous, whatever suits the engines; a run with vLLM takes --order engine",
}
"""How the ranks stand in the trainer's mesh (`--order`), in words."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A transfer, and the cluster it runs on."""

    arch: Architecture
    mesh: Layout
    order: Order
    """The rule by which `mesh.order` was made."""
    trainer: MegatronLayout
    trainer_said: str
    """Where `trainer` stands in the configuration or on the command line, for messages."""
    engine_tp: int
    engine_said: str
    """The same of `engine_tp`."""
    element_bytes: int
    ranks_per_node: int
    links: Links

    def node_of(self) -> list[int]:
        return [rank // self.ranks_per_node for rank in range(self.mesh.world_size)]

    def placements(self) -> tuple[list[RankPlacements], list[RankPlacements]]:
        """What every rank holds and what it wants.

        Raises: ValueError when the model does not fit either layout; it names the side.
        """
        with _said(self.engine_said):
            shards = [vllm_placements(self.arch, tp=self.engine_tp, tp_rank=v, rank=v) for v in range(self.engine_tp)]
        wanted = [shards[rank % self.engine_tp].on_rank(rank) for rank in range(self.mesh.world_size)]
        with _said(self.trainer_said):
            return self.trainer.on_ranks(self.arch, self.mesh), wanted


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Bytes and time of one way to carry the weights."""

    name: str
    entering: list[int]
    """Bytes that come into each node from others."""
    inside: int
    """Bytes between ranks of a node, over all nodes."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Bytes by rank, but where another is said."""

    model: int
    need: list[int]
    received: list[int]
    sent: list[int]
    least: list[int]
    formula: list[int]
    """The least by the sizes alone."""
    all_gather: list[int]
    """Received where peers gather the whole model, by the sizes alone."""
    least_entering: list[int]
    """By node."""
    tiers: list[Tier]
    plan_seconds: float
    """CPU time of making the placements of all ranks and the one-tier plan; two tiers and counting are not in it."""
    order: tuple[int, ...] | None


def ask(cfg: RLConfig, arguments: argparse.Namespace) -> Question:
    """The question that the configuration and the command's options put.

    Raises: ValueError when model, layout and ranks do not fit.
    """
    world_size = arguments.world_size or cfg.run.nproc
    arch, mesh = check_role("actor", cfg.actor, world_size)
    parallel, model = cfg.actor.parallel, cfg.actor.model
    engine_tp = arguments.engine_tp or cfg.rollout.tp(cfg.actor)
    key = "rollout.parallel.tp" if cfg.rollout.parallel.tp else "actor.parallel.tp"
    engine_said = f"the engines ({'--engine-tp' if arguments.engine_tp else key} = {engine_tp})"
    options = [f"--{name} = {value}" for name in ("vpp", "ep") if (value := getattr(arguments, name))]
    with _said(engine_said):
        order = engine_order(mesh, engine_tp, arguments.ranks_per_node)
    trainer = MegatronLayout(
        tp=mesh.tp,
        pp=mesh.pp,
        vpp=arguments.vpp or parallel.vpp,
        ep=arguments.ep or parallel.ep,
        layers_per_stage=parallel.layers_per_stage,
        padded_vocab=padded_vocab_size(arch.vocab_size, mesh.tp, model.vocab_multiple),
    )
    return Question(
        arch=arch,
        mesh=replace(mesh, order=order if arguments.order == "engine" else None),
        order=arguments.order,
        trainer=trainer,
        trainer_said=f"the trainer ({', '.join(['actor.parallel', *options])})",
        engine_tp=engine_tp,
        engine_said=engine_said,
        element_bytes=ELEMENT_BYTES[model.dtype],
        ranks_per_node=arguments.ranks_per_node,
        links=Links(rank_gbps=arguments.rank_gbps, node_gbps=arguments.node_gbps),
    )


@contextlib.contextmanager
def _said(where: str) -> Iterator[None]:
    """A ValueError says which of the two sides does not fit, and what set it: both have a tp."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def answer(question: Question) -> Answer:
    """Makes the plan, in one tier and in two, and counts."""
    size, node_of = question.element_bytes, question.node_of()
    ranks, nodes = range(len(node_of)), node_of[-1] + 1
    start = time.process_time()
    sources, destinations = question.placements()
    plan = make_plan(sources, destinations, only_rank=0)
    seconds = time.process_time() - start
    tiered = make_tiers(sources, destinations, node_of, only_rank=0)
    least, least_in = least_receive(sources, destinations), node_needs(sources, destinations, node_of)
    by_sizes = formula(question.arch, question.mesh, question.trainer, question.engine_tp)
    return Answer(
        model=size * model_elements(question.arch),
        need=[size * sum(placement.box.numel for placement in part.placements) for part in destinations],
        received=[size * plan.elements_received(rank) for rank in ranks],
        sent=[size * plan.elements_sent(rank) for rank in ranks],
        least=[size * least[rank] for rank in ranks],
        formula=[size * numel for numel in by_sizes.least],
        all_gather=[size * numel for numel in by_sizes.all_gather],
        least_entering=[size * least_in[node] for node in range(nodes)],
        tiers=_tiers(question, plan, tiered, nodes),
        plan_seconds=seconds,
        order=question.mesh.order,
    )


def _tiers(question: Question, plan: CopyPlan, tiered: TieredPlan, nodes: int) -> list[Tier]:
    node_of, size = question.node_of(), question.element_bytes

    def tier(name: str, *plans: CopyPlan) -> Tier:
        came_in = [sum(into) for into in zip(*(entering(crossing(p, node_of), nodes) for p in plans), strict=True)]
        moved = sum(numel for p in plans for (src, dst), numel in p.traffic.items() if src != dst)
        return Tier(
            name=name,
            entering=[size * numel for numel in came_in],
            inside=size * (moved - sum(came_in)),
            seconds=sum(wire_seconds(p, node_of, question.links, size) for p in plans),
        )

    return [tier("one tier", plan), tier("two tiers", tiered.arrive, tiered.fan_out)]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(
        prog="python -m megarlhf.weights.plan",
        description="Bytes and time of carrying the actor's weights into the rollout engines.",
    )
    root.add_argument("-c", "--config", required=True, metavar="FILE", help="YAML configuration of an rl run")
    root.add_argument("overrides", nargs="*", metavar="section.key=value", help="override configured values")
    root.add_argument("--world-size", type=_positive, metavar="N", help="ranks of the run (default: run.nproc)")
    root.add_argument("--engine-tp", type=_positive, metavar="N", help="plan as if rollout.parallel.tp were N")
    root.add_argument("--ep", type=_positive, metavar="N", help="plan as if actor.parallel.ep were N")
    root.add_argument("--vpp", type=_positive, metavar="N", help="plan as if actor.parallel.vpp were N")
    words = (
        "how ranks stand in the trainer's mesh: permuted inside nodes as suits the engines, as a run with vLLM does "
        "(engine, the default), or by number (rank)"
    )
    root.add_argument("--order", choices=tuple(ORDERS), default="engine", help=words)
    root.add_argument("--ranks-per-node", type=_positive, default=8, metavar="N", help="default: %(default)s")
    words = "gigabits per second and direction between a rank and the others of its node (default: %(default)g)"
    root.add_argument("--rank-gbps", type=_speed, default=3600.0, metavar="X", help=words)
    words = "gigabits per second and direction between a whole node and the others (default: %(default)g)"
    root.add_argument("--node-gbps", type=_speed, default=3200.0, metavar="X", help=words)
    root.add_argument("--per-rank", action="store_true", help="a line for each rank")
    root.add_argument("--json", action="store_true", help="everything as one JSON object, in bytes and seconds")
    return root


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def _speed(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive, finite number of gigabits per second")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. 2: the user's mistake, said without a traceback."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        question = ask(load_config(RLConfig, arguments.config, arguments.overrides), arguments)
        found = answer(question)
    except ValueError as error:
        print(f"{parser().prog}: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(as_json(question, found)))
    else:
        _print(question, found, per_rank=arguments.per_rank)
    return 0


def as_json(question: Question, found: Answer) -> dict[str, Any]:
    """The answer with what was asked, in plain types; the formula's figures also as averages over ranks."""
    layout = {key: getattr(question.trainer, key) for key in ("tp", "pp", "vpp", "ep")} | {"dp": question.mesh.dp}
    return {
        "model_type": question.arch.model_type,
        "layout": layout,
        "engine_tp": question.engine_tp,
        "element_bytes": question.element_bytes,
        "ranks_per_node": question.ranks_per_node,
        "links": asdict(question.links),
        "order_rule": question.order,
        **asdict(found),
        "formula_least": fmean(found.formula),
        "formula_all_gather": fmean(found.all_gather),
    }


def _print(question: Question, found: Answer, *, per_rank: bool) -> None:
    console, mesh, trainer = make_console(), question.mesh, question.trainer
    ways = f"tp {mesh.tp} x pp {mesh.pp} x dp {mesh.dp} (vpp {trainer.vpp}, ep {trainer.ep})"
    ranks = "0 1 2 (by number)" if mesh.order is None else " ".join(map(str, mesh.order))
    facts = [
        ("model", f"{question.arch.model_type}, {_gb(found.model)} GB"),
        ("trainer", f"{ways} = {mesh.world_size} ranks"),
        ("engines", f"{mesh.world_size // question.engine_tp} of tp {question.engine_tp}"),
        ("order of the ranks", f"--order {question.order}: {ORDERS[question.order]}"),
        ("ranks at the trainer's positions", f"{ranks}, and so on"),
        ("seconds for placements and the one-tier plan, one core", f"{found.plan_seconds:.1f}"),
    ]
    console.print(table("Weights from trainer to rollout", facts, ("what", "value")))
    figures = {
        "needed": found.need,
        "received": found.received,
        "sent": found.sent,
        "least: needed and not held": found.least,
        "least by the formula": found.formula,
        "all-gather by the formula": found.all_gather,
    }
    lines = [(name, *_spread(by_rank)) for name, by_rank in figures.items()]
    console.print(table(f"GB a rank (--order {question.order})", lines, ("", "min", "mean", "max")))
    speeds = f"{question.links.rank_gbps:g} Gb/s a rank inside, {question.links.node_gbps:g} Gb/s a node outside"
    tiers = [
        (t.name, *_spread(t.entering), _gb(t.inside / len(t.entering)), f"{t.seconds:.3f}") for t in found.tiers
    ] + [("least", *_spread(found.least_entering), "", "")]
    title = f"GB into a node of {question.ranks_per_node} ranks, and wire time at {speeds} (estimated)"
    console.print(table(title, tiers, ("", "min", "mean", "max", "inside, mean", "seconds")))
    if per_rank:
        rows = [(rank, *map(_gb, each)) for rank, each in enumerate(zip(*figures.values(), strict=True))]
        names = ("rank", "needed", "received", "sent", "least", "formula", "all-gather")
        console.print(table("GB of each rank", rows, names))


def _spread(figures: Sequence[int]) -> tuple[str, str, str]:
    return _gb(min(figures)), _gb(fmean(figures)), _gb(max(figures))


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f}"
