"""Messages of one training step by arithmetic: what published sources say, and what this program adds and leaves out.

Sources, by the kind of parallelism:

tensor        Shoeybi et al. 2019 (arXiv:1909.08053), section 3: of each layer two sums of [tokens, hidden] in the
              forward and two in the backward; one behind the embedding, one before the head; three sums of a number for
              each token in the cross entropy (Megatron-Core's tensor_parallel/cross_entropy.py)
sequence      Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2: each sum becomes a gather and a reduce-scatter,
              and inputs are gathered once more in the backward; gradients of norms are summed over the ranks
pipeline      Narayanan et al. 2021 (arXiv:2104.04473), section 2.2: [tokens, hidden] to the next stage, its gradient
              back, for each micro-batch, and with interleaved stages vpp times as often
data          one sum of all gradients; with a distributed optimizer a reduce-scatter of them and a gather of the
              parameters (Rajbhandari et al. 2020, arXiv:1910.02054, section 7.1)
context       keys and values gathered in each layer, gathered again in the backward, gradients reduce-scattered:
              Llama Team 2024 (arXiv:2407.21783), section 3.3.2, as in TransformerEngine's AttnFuncWithCPAndKVAllGather
experts       tokens to the ranks of their experts and back, in the forward and in the backward: tokens x top-k x hidden
              each (Lepikhin et al. 2020, arXiv:2006.16668); the weights of the experts once each way; how many tokens
              each expert gets (Megatron-Core's MoEAlltoAllTokenDispatcher)

Bytes are those of the whole tensor that an operation is about: what all have after a gather, before a reduce-scatter.
Everything is of one rank. Groups of one rank are left out, in which nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megarlhf.layout import MeshLayout

Ranks = tuple[int, ...]
"""Of a group; of a message from one to another (own rank, other rank)."""
NUMBER = 4
"""Bytes of an element: everything is fp32."""
ALIGNMENT = 64
"""Elements to whose multiple Megatron-Core pads a parameter in the buffers of its distributed optimizer."""
BUCKET_ALIGNMENT = 128
"""The same of a bucket, besides the number of ranks."""

DIFFERENCES = {
    "gradient of the head's input": "only the rows of response tokens have a gradient (ours counts them, the formula "
    "all tokens)",
    "head gathers once": "the gathered rows are kept until the backward, within `kernels.save_mib`",
    "cross entropy": "one gather of four numbers for each response token and rank (maximum, sum, label, entropy) in "
    "place of three sums over all tokens",
    "keys and values": "one message for both, and none in the backward: the gathered ones are kept",
    "log-probs of whole rows": "a loss sees whole sequences: 4 bytes for each token",
    "rows of experts over tp": "ranks have different numbers of rows, which gloo does not gather: all_to_all of "
    "the same bytes",
    "loss": "8 bytes to all ranks, where the formula tells those of the last stage only: every rank decides alike "
    "whether a step is skipped",
    "gradient is finite": "8 bytes: all ranks agree on a norm, so that one rank's fault skips the step on all",
    "stop and resume point": "8 bytes at each of two borders of a step: all ranks save or stop at the same one",
    "memory in metrics": "8 bytes: the largest over ranks",
}
"""Where ours is not the formula: why."""


@dataclass(frozen=True)
class Term:
    """Messages of one kind of one rank, and what the sources have in their place."""

    name: str
    operation: str
    ranks: Ranks
    ours: int
    """Messages."""
    ours_bytes: int
    """Of all together."""
    known: int
    known_bytes: int

    @property
    def differs(self) -> bool:
        return (self.ours, self.ours_bytes) != (self.known, self.known_bytes)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model, and the step of one data-parallel rank."""

    hidden: int
    layers: int
    heads: int
    groups: int
    """Of keys and values."""
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    experts: int
    """0: a dense model."""
    topk: int
    qk_norms: bool
    tokens: int
    """Of a micro-batch."""
    responses: int
    """Response tokens of a micro-batch."""
    micro_batches: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of the trained role."""

    mesh: MeshLayout
    vpp: int = 1
    sequence_parallel: bool = False
    distributed: bool = True
    """The optimizer, over data- and context-parallel ranks."""

    def group(self, rank: int, *axes: str) -> Ranks:
        return next(ranks for ranks in self.mesh.groups(axes) if rank in ranks)

    def expert_group(self, rank: int, *axes: str) -> Ranks:
        return next(ranks for ranks in self.mesh.expert_layout.groups(axes) if rank in ranks)


def terms(work: Work, layout: Layout, rank: int) -> list[Term]:
    """Of one rank, without groups of one."""
    parts = [_tensor, _pipeline, _data, _context, _experts, _scalars]
    found = [term for part in parts for term in part(work, layout, rank)]
    return [term for term in found if len(term.ranks) > 1 and term.ours + term.known > 0]


def _same(name: str, operation: str, ranks: Ranks, count: int, each: int) -> Term:
    return Term(name, operation, ranks, count, count * each, count, count * each)


def _ours(name: str, operation: str, ranks: Ranks, count: int, each: int) -> Term:
    return Term(name, operation, ranks, count, count * each, 0, 0)


def _known(name: str, operation: str, ranks: Ranks, count: int, each: int) -> Term:
    return Term(name, operation, ranks, 0, 0, count, count * each)


def _stage(work: Work, layout: Layout, rank: int) -> tuple[int, bool, bool]:
    """Layers of the rank's stage, whether it is the first one, and the last one."""
    stage, stages = layout.mesh.coordinates(rank).pp, layout.mesh.pp
    return work.layers // stages, stage == 0, stage == stages - 1


def _grid(work: Work, layout: Layout) -> int:
    """Bytes of the hidden states of a micro-batch, on all ranks of a tensor-parallel group."""
    return work.tokens // layout.mesh.cp * work.hidden * NUMBER


def _tensor(work: Work, layout: Layout, rank: int) -> Iterator[Term]:
    """Sums of layers, embedding, head and cross entropy."""
    tp, group, m = layout.mesh.tp, layout.group(rank, "tp"), work.micro_batches
    layers, first, last = _stage(work, layout, rank)
    grid = _grid(work, layout)
    blocks = m * layers * (1 if work.experts else 2)  # of attention and of a dense MLP
    if layout.sequence_parallel:
        yield _same("layers", "all_gather", group, 3 * blocks, grid)
        yield _same("layers", "reduce_scatter", group, 2 * blocks, grid)
        yield _same("embedding", "reduce_scatter", group, m * first, grid)
        yield _same("embedding", "all_gather", group, m * first, grid)
        yield _same("head", "all_gather", group, m * last, grid)
        yield _known("head gathers once", "all_gather", group, m * last, grid)
        yield _same("head", "reduce_scatter", group, m * last, grid)
        whole = layers * (2 * work.hidden + 2 * work.head_dim * work.qk_norms + work.experts * work.hidden)
        yield _same("norm gradients", "all_reduce", group, 1, (whole + work.hidden * last) * NUMBER)
    else:
        yield _same("layers", "all_reduce", group, 2 * blocks, grid)
        yield _same("embedding", "all_reduce", group, m * first, grid)
        ours, known = m * last * work.responses * work.hidden * NUMBER, m * last * grid
        yield Term("gradient of the head's input", "all_reduce", group, m * last, ours, m * last, known)
    yield _known("cross entropy", "all_reduce", group, 3 * m * last, work.tokens * NUMBER)
    yield _ours("cross entropy", "all_gather", group, m * last, tp * work.responses * 4 * NUMBER)


def _pipeline(work: Work, layout: Layout, rank: int) -> Iterator[Term]:
    """Between stages; and the two copies of a tied embedding."""
    if layout.mesh.pp == 1:
        return
    _, first, last = _stage(work, layout, rank)
    line = layout.group(rank, "pp")
    place = line.index(rank)
    each = _grid(work, layout) // (layout.mesh.tp if layout.sequence_parallel else 1)
    # Once for each chunk: what the first one receives and the last one sends is no message.
    sides = ((line[(place + 1) % len(line)], layout.vpp - last), (line[place - 1], layout.vpp - first))
    for peer, chunks in sides:
        for operation in ("send", "receive"):  # forward one, its gradient the other way
            yield _same("stages", operation, (rank, peer), work.micro_batches * chunks, each)
    if work.tied and (first or last):
        embedding = work.vocab // layout.mesh.tp * work.hidden * NUMBER
        yield _same("tied embedding", "all_reduce", (line[0], line[-1]), 1, embedding)


def _data(work: Work, layout: Layout, rank: int) -> Iterator[Term]:
    """Gradients and parameters."""
    for name, group, sizes in (
        ("gradients", layout.group(rank, "cp", "dp"), _dense(work, layout, rank)),
        ("gradients of experts", layout.expert_group(rank, "dp"), _of_experts(work, layout, rank)),
    ):
        if layout.distributed:
            to = math.lcm(len(group), BUCKET_ALIGNMENT)
            padded = _up(sum(_up(size, ALIGNMENT) for size in sizes), to) * NUMBER
            yield _same(name, "reduce_scatter", group, bool(sizes), padded)
            yield _same(name.replace("gradients", "parameters"), "all_gather", group, bool(sizes), padded)
        else:
            yield _same(name, "all_reduce", group, bool(sizes), sum(sizes) * NUMBER)


def _dense(work: Work, layout: Layout, rank: int) -> list[int]:
    """Elements of the rank's parameters but experts."""
    tp, hidden = layout.mesh.tp, work.hidden
    layers, first, last = _stage(work, layout, rank)
    queries, keys = work.heads * work.head_dim, work.groups * work.head_dim
    layer = [hidden * (queries + 2 * keys) // tp, queries * hidden // tp, hidden, hidden]
    layer += [work.head_dim] * (2 * work.qk_norms)
    layer += [work.experts * hidden] if work.experts else [2 * hidden * work.intermediate // tp]
    layer += [] if work.experts else [hidden * work.intermediate // tp]
    embedding = work.vocab // tp * hidden
    ends = [embedding] * first + [hidden] * last
    return layer * layers + ends + [embedding] * (last and not (work.tied and first))


def _of_experts(work: Work, layout: Layout, rank: int) -> list[int]:
    layers, _, _ = _stage(work, layout, rank)
    here = work.experts // layout.mesh.ep
    one = work.hidden * work.intermediate // layout.mesh.tp
    return [2 * one, one] * (here * layers)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _context(work: Work, layout: Layout, rank: int) -> Iterator[Term]:
    """Keys and values; log-probs."""
    group, m = layout.group(rank, "cp"), work.micro_batches
    layers, _, last = _stage(work, layout, rank)
    one = work.tokens * work.groups * work.head_dim // layout.mesh.tp * NUMBER  # keys, or values
    yield _ours("keys and values", "all_gather", group, m * layers, 2 * one)
    yield _known("keys and values", "all_gather", group, 4 * m * layers, one)
    yield _ours("keys and values", "reduce_scatter", group, m * layers, 2 * one)
    yield _known("keys and values", "reduce_scatter", group, 2 * m * layers, one)
    yield _ours("log-probs of whole rows", "all_gather", group, m * last, work.tokens * NUMBER)


def _experts(work: Work, layout: Layout, rank: int) -> Iterator[Term]:
    """Tokens to their experts and back; they are shared out evenly."""
    if not work.experts:
        return
    tp, ep = layout.mesh.tp, layout.mesh.ep
    times = work.micro_batches * _stage(work, layout, rank)[0]
    rows = work.tokens // layout.mesh.cp // tp * work.topk
    row, both = work.hidden * NUMBER, layout.expert_group(rank, "tp", "cp")
    yield _same("how many tokens", "all_gather", both, times, tp * ep * work.experts * 8)
    yield _same("tokens to experts", "all_to_all", layout.expert_group(rank, "cp"), 4 * times, rows * row)
    yield _same("weights of experts", "all_to_all", layout.expert_group(rank, "cp"), 2 * times, rows * NUMBER)
    group, name = layout.group(rank, "tp"), "rows of experts over tp"
    yield _ours(name, "all_to_all", group, 4 * times, tp * rows * row)
    yield _ours(name, "all_to_all", group, 2 * times, tp * rows * NUMBER)
    for operation in ("all_gather", "reduce_scatter"):
        yield _known(name, operation, group, 2 * times, tp * rows * row)
        yield _known(name, operation, group, times, tp * rows * NUMBER)


def _scalars(work: Work, layout: Layout, rank: int) -> Iterator[Term]:
    """What is said once a step."""
    world, last = tuple(layout.mesh.ranks), _stage(work, layout, rank)[2]
    over = world if layout.distributed else layout.group(rank, "tp", "pp")
    yield _same("gradient norm", "all_reduce", over, 1, NUMBER)
    yield _ours("loss", "all_reduce", world, 1, 8)
    yield _known("loss", "all_reduce", layout.group(rank, "cp", "dp"), int(last), 8)
    yield _ours("gradient is finite", "all_reduce", world, 1, 8)
    yield _ours("stop and resume point", "all_reduce", world, 2, 8)
    yield _ours("memory in metrics", "all_reduce", world, 1, 8)
