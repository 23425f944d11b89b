"""Bytes and time of moving the actor's weights into the rollout engines: `megarlhf plan -c FILE`.

Reads the configuration and the actor's config.json; no weights, no GPU, no process group. The bytes that a rank must
receive are computed in three independent ways, which must agree: what the plan sends it (received), what it needs and
does not hold, counted from both layouts (least), and arithmetic on the sizes alone (formula).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import padded_vocab_size, vllm_placements
from megarlhf.config import RLConfig
from megarlhf.layout import MeshLayout, engine_order
from megarlhf.placement import RankPlacements
from megarlhf.planning.layout import check_role
from megarlhf.weights.checkpoint.dtype import resolve_dtype
from megarlhf.weights.plan.copy_plan import CopyPlan, make_plan
from megarlhf.weights.plan.tiers import TieredPlan, least_received_by_node, make_tiers, traffic_between_nodes
from megarlhf.weights.plan.traffic import Links, formula, least_receive, model_elements, received_by_node, wire_seconds

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
Order = Literal["engine", "rank"]
ORDERS: dict[Order, str] = {
    "engine": "permuted for the engines: more of the weights that a rank needs are in place",
    "rank": "by number, contiguous; a run with vLLM takes --order engine",
}
"""Orders of the ranks in the trainer's mesh (`--order`), with descriptions."""


@dataclass(frozen=True, kw_only=True)
class TransferSetup:
    """A transfer, and the cluster it runs on."""

    arch: Architecture
    mesh: MeshLayout
    order: Order
    """Rule by which `mesh.order` was made."""
    trainer: MegatronLayout
    trainer_source: str
    """Keys or options that set `trainer`, for messages."""
    engine_tp: int
    engine_source: str
    """Key or option that set `engine_tp`, for messages."""
    element_bytes: int
    ranks_per_node: int
    links: Links

    def node_of(self) -> list[int]:
        return [rank // self.ranks_per_node for rank in range(self.mesh.world_size)]

    def placements(self) -> tuple[list[RankPlacements], list[RankPlacements]]:
        """Placements that every rank holds, and placements that it needs.

        Raises: ValueError if the model does not fit one of the layouts; it names the side.
        """
        with _named_in_errors(self.engine_source):
            shards = [vllm_placements(self.arch, tp=self.engine_tp, tp_rank=v, rank=v) for v in range(self.engine_tp)]
        engine_parts = [shards[rank % self.engine_tp].on_rank(rank) for rank in range(self.mesh.world_size)]
        with _named_in_errors(self.trainer_source):
            return self.trainer.on_ranks(self.arch, self.mesh), engine_parts


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Bytes and time of one way to carry the weights."""

    name: str
    entering: list[int]
    """Bytes that enter each node from others."""
    inside: int
    """Bytes between ranks of a node, over all nodes."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """Bytes of a transfer, by rank unless a field says otherwise."""

    model: int
    need: list[int]
    received: list[int]
    sent: list[int]
    least: list[int]
    formula: list[int]
    """`least`, computed from the sizes alone."""
    all_gather: list[int]
    """Bytes received if peers gather the whole model, computed from the sizes alone."""
    least_entering: list[int]
    """Least bytes that enter each node."""
    tiers: list[Tier]
    plan_seconds: float
    """CPU time of making the placements of all ranks and the one-tier plan."""
    order: tuple[int, ...] | None


def transfer_setup(
    cfg: RLConfig,
    *,
    links: Links,
    order: Order,
    ranks_per_node: int,
    world_size: int | None = None,
    engine_tp: int | None = None,
    ep: int | None = None,
    vpp: int | None = None,
) -> TransferSetup:
    """The transfer that the configuration describes; other arguments override it.

    Raises: ValueError if model, layout and ranks do not fit.
    """
    arch, mesh = check_role("actor", cfg.actor, world_size or cfg.run.planned_ranks)
    parallel, model = cfg.actor.parallel, cfg.actor.model
    key = "rollout.parallel.tp" if cfg.rollout.parallel.tp else "actor.parallel.tp"
    key = "--engine-tp" if engine_tp else key
    engine_tp = engine_tp or cfg.rollout.tp(cfg.actor)
    dtype = cfg.rollout.dtype
    if dtype == "auto":
        dtype = resolve_dtype("actor", model, "lm").name
    engine_source = f"the engines ({key} = {engine_tp})"
    options = [f"--{name} = {value}" for name, value in (("vpp", vpp), ("ep", ep)) if value]
    with _named_in_errors(engine_source):
        best_order = engine_order(mesh, engine_tp, ranks_per_node)
    trainer = MegatronLayout(
        tp=mesh.tp,
        pp=mesh.pp,
        vpp=vpp or parallel.vpp,
        ep=ep or parallel.ep,
        layers_per_stage=parallel.layers_per_stage,
        padded_vocab=padded_vocab_size(arch.vocab_size, mesh.tp, model.vocab_multiple),
    )
    return TransferSetup(
        arch=arch,
        mesh=replace(mesh, order=best_order if order == "engine" else None),
        order=order,
        trainer=trainer,
        trainer_source=f"the trainer ({', '.join(['actor.parallel', *options])})",
        engine_tp=engine_tp,
        engine_source=engine_source,
        element_bytes=ELEMENT_BYTES[dtype],
        ranks_per_node=ranks_per_node,
        links=links,
    )


@contextlib.contextmanager
def _named_in_errors(side: str) -> Iterator[None]:
    """Scope in which a ValueError names its side, since both trainer and engines have a tp."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{side}: {error}") from None


def plan_transfer(setup: TransferSetup) -> TransferReport:
    """Make the plan, in one tier and in two, and count bytes."""
    size, node_of = setup.element_bytes, setup.node_of()
    ranks, nodes = range(len(node_of)), node_of[-1] + 1
    start = time.process_time()
    sources, destinations = setup.placements()
    plan = make_plan(sources, destinations, only_rank=0)
    seconds = time.process_time() - start
    tiered = make_tiers(sources, destinations, node_of, only_rank=0)
    least, least_in = least_receive(sources, destinations), least_received_by_node(sources, destinations, node_of)
    by_sizes = formula(setup.arch, setup.mesh, setup.trainer, setup.engine_tp)
    return TransferReport(
        model=size * model_elements(setup.arch),
        need=[size * sum(placement.box.numel for placement in part.placements) for part in destinations],
        received=[size * plan.elements_received(rank) for rank in ranks],
        sent=[size * plan.elements_sent(rank) for rank in ranks],
        least=[size * least[rank] for rank in ranks],
        formula=[size * numel for numel in by_sizes.least],
        all_gather=[size * numel for numel in by_sizes.all_gather],
        least_entering=[size * least_in[node] for node in range(nodes)],
        tiers=_tiers(setup, plan, tiered, nodes),
        plan_seconds=seconds,
        order=setup.mesh.order,
    )


def _tiers(setup: TransferSetup, plan: CopyPlan, tiered: TieredPlan, nodes: int) -> list[Tier]:
    node_of, size = setup.node_of(), setup.element_bytes

    def tier(name: str, *plans: CopyPlan) -> Tier:
        by_plan = [received_by_node(traffic_between_nodes(p, node_of), nodes) for p in plans]
        into_nodes = [sum(by_node) for by_node in zip(*by_plan, strict=True)]
        moved = sum(numel for p in plans for (src, dst), numel in p.traffic.items() if src != dst)
        return Tier(
            name=name,
            entering=[size * numel for numel in into_nodes],
            inside=size * (moved - sum(into_nodes)),
            seconds=sum(wire_seconds(p, node_of, setup.links, size) for p in plans),
        )

    return [tier("one tier", plan), tier("two tiers", tiered.arrive, tiered.fan_out)]


def transfer_json(setup: TransferSetup, report: TransferReport) -> dict[str, Any]:
    """The setup and the report in plain types, and averages of the formula's figures over ranks."""
    layout = {key: getattr(setup.trainer, key) for key in ("tp", "pp", "vpp", "ep")}
    layout |= {"cp": setup.mesh.cp, "dp": setup.mesh.dp}
    return {
        "model_type": setup.arch.model_type,
        "layout": layout,
        "engine_tp": setup.engine_tp,
        "element_bytes": setup.element_bytes,
        "ranks_per_node": setup.ranks_per_node,
        "links": asdict(setup.links),
        "order_rule": setup.order,
        **asdict(report),
        "formula_least": fmean(report.formula),
        "formula_all_gather": fmean(report.all_gather),
    }
