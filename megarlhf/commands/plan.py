"""`megarlhf plan`: bytes and time of carrying the actor's weights into the rollout engines, from a configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from megarlhf.architectures.own_families import register_families_of
from megarlhf.commands.plan_arguments import parser
from megarlhf.config import RLConfig, load_config
from megarlhf.observe.terminal.progress import make_console, table
from megarlhf.planning.weight_traffic import (
    ORDERS,
    TransferReport,
    TransferSetup,
    plan_transfer,
    transfer_json,
    transfer_setup,
)
from megarlhf.weights.plan.traffic import Links


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. 2: the user's mistake, printed without a traceback."""
    arguments = parser().parse_intermixed_args(argv)
    try:
        cfg = load_config(RLConfig, arguments.config, arguments.overrides)
        register_families_of(cfg.roles())
        setup = transfer_setup(
            cfg,
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
        print(json.dumps(transfer_json(setup, report)))
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
