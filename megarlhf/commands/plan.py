"""`megarlhf plan`: bytes and time of carrying the actor's weights into the rollout engines, from a configuration."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from megarlhf.commands.arguments import Once, gigabits, positive
from megarlhf.config import RLConfig, load_config
from megarlhf.observe.progress import make_console, table
from megarlhf.planning.weight_traffic import (
    ORDERS,
    TransferReport,
    TransferSetup,
    as_json,
    plan_transfer,
    transfer_setup,
)
from megarlhf.weights.plan.traffic import Links


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(
        prog="megarlhf plan",
        description="Bytes and time of carrying the actor's weights into the rollout engines.",
    )
    root.add_argument("-c", "--config", required=True, action=Once, metavar="FILE", help="configuration of an rl run")
    root.add_argument("overrides", nargs="*", metavar="section.key=value", help="override configured values")
    root.add_argument("--world-size", type=positive, metavar="N", help="ranks (default: run.world_size or run.nproc)")
    root.add_argument("--engine-tp", type=positive, metavar="N", help="plan as if rollout.parallel.tp were N")
    root.add_argument("--ep", type=positive, metavar="N", help="plan as if actor.parallel.ep were N")
    root.add_argument("--vpp", type=positive, metavar="N", help="plan as if actor.parallel.vpp were N")
    words = (
        "how ranks stand in the trainer's mesh: permuted inside nodes as suits the engines, as a run with vLLM does "
        "(engine, the default), or by number (rank)"
    )
    root.add_argument("--order", choices=tuple(ORDERS), default="engine", help=words)
    root.add_argument("--ranks-per-node", type=positive, default=8, metavar="N", help="default: %(default)s")
    words = "gigabits per second and direction between a rank and the others of its node (default: %(default)g)"
    root.add_argument("--rank-gbps", type=gigabits, default=3600.0, metavar="X", help=words)
    words = "gigabits per second and direction between a whole node and the others (default: %(default)g)"
    root.add_argument("--node-gbps", type=gigabits, default=3200.0, metavar="X", help=words)
    root.add_argument("--per-rank", action="store_true", help="a line for each rank")
    root.add_argument("--json", action="store_true", help="everything as one JSON object, in bytes and seconds")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. 2: the user's mistake, said without a traceback."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        setup = transfer_setup(
            load_config(RLConfig, arguments.config, arguments.overrides),
            world_size=arguments.world_size,
            engine_tp=arguments.engine_tp,
            ep=arguments.ep,
            vpp=arguments.vpp,
            order=arguments.order,
            ranks_per_node=arguments.ranks_per_node,
            links=Links(rank_gbps=arguments.rank_gbps, node_gbps=arguments.node_gbps),
        )
        report = plan_transfer(setup)
    except ValueError as error:
        print(f"{parser().prog}: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(as_json(setup, report)))
    else:
        _print(setup, report, per_rank=arguments.per_rank)
    return 0


def _print(setup: TransferSetup, report: TransferReport, *, per_rank: bool) -> None:
    console, mesh, trainer = make_console(), setup.mesh, setup.trainer
    ways = f"{replace(mesh, ep=1)} (vpp {trainer.vpp}, ep {trainer.ep})"
    ranks = "by number" if mesh.order is None else " ".join(map(str, mesh.order))
    if mesh.order is not None and len(mesh.order) < mesh.world_size:
        ranks += ", and so on"
    facts = [
        ("model", f"{setup.arch.model_type}, {_gigabytes(report.model)} GB"),
        ("trainer", f"{ways} = {mesh.world_size} ranks"),
        ("engines", f"{mesh.world_size // setup.engine_tp} of tp {setup.engine_tp}"),
        ("order of the ranks", f"--order {setup.order}: {ORDERS[setup.order]}"),
        ("ranks at the trainer's positions", ranks),
        ("seconds for placements and the one-tier plan, one core", f"{report.plan_seconds:.1f}"),
    ]
    console.print(table("Weights from trainer to rollout", facts, ("what", "value")))
    figures = {
        "needed": report.need,
        "received": report.received,
        "sent": report.sent,
        "least: needed and not held": report.least,
        "least by the formula": report.formula,
        "all-gather by the formula": report.all_gather,
    }
    lines = [(name, *_min_mean_max(by_rank)) for name, by_rank in figures.items()]
    console.print(table(f"GB a rank (--order {setup.order})", lines, ("", "min", "mean", "max")))
    speeds = f"{setup.links.rank_gbps:g} Gb/s a rank inside, {setup.links.node_gbps:g} Gb/s a node outside"
    tiers = [
        (t.name, *_min_mean_max(t.entering), _gigabytes(t.inside / len(t.entering)), f"{t.seconds:.3f}")
        for t in report.tiers
    ] + [("least", *_min_mean_max(report.least_entering), "", "")]
    title = f"GB into a node of {setup.ranks_per_node} ranks, and wire time at {speeds} (estimated)"
    console.print(table(title, tiers, ("", "min", "mean", "max", "inside, mean", "seconds")))
    if per_rank:
        rows = [(rank, *map(_gigabytes, of_rank)) for rank, of_rank in enumerate(zip(*figures.values(), strict=True))]
        names = ("rank", "needed", "received", "sent", "least", "formula", "all-gather")
        console.print(table("GB of each rank", rows, names))


def _min_mean_max(figures: Sequence[int]) -> tuple[str, str, str]:
    return _gigabytes(min(figures)), _gigabytes(fmean(figures)), _gigabytes(max(figures))


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f}"
