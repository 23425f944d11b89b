"""One comparison of `make bench-trl`: the fastest of each side is found, both compute the same, then they take turns.

Each side is a child. First both train on the same samples: of GRPO on responses that our engine has drawn. From there
loss and gradient norm have to agree, and each way of a side (micro-batches, layout of rows) is tried twice more, warm;
the faster try counts. The fastest goes on, or one that is as fast within 2% and has smaller micro-batches, which take
less memory. Then whole steps in turn, of GRPO with rollouts of their own, to and fro: both sides have trained by then,
so that every round counts. Memory is looked at last, in processes of their own that give back to the system what they
free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.interleaved import asking, in_turn, norm_of, require_same, require_whole, spread, summary
from benchmarks.packing_children import Child, Message, environment
from benchmarks.packing_workload import Kind, make_workload
from benchmarks.prompts_work import HELD_APART
from benchmarks.trl_data import Command, Data

OURS: Mapping[Command, str] = {
    "grpo": "benchmarks.trl_ours",
    "sft": "benchmarks.prompts_pairs",
    "rm": "benchmarks.prompts_pairs",
}
THEIRS: Mapping[Command, str] = {
    "grpo": "benchmarks.trl_theirs",
    "sft": "benchmarks.trl_theirs_supervised",
    "rm": "benchmarks.trl_theirs_supervised",
}
BETA, LEARNING_RATE = 0.04, 1e-6
LOSSES_AGREE = 1e-3
"""Difference of the losses of first rounds up to which two sides computed the same, relative where they exceed 1."""
TOKENS_BEFORE_PEAK = 8
"""Of each response in the round that has the optimizer make its moments, before that whose peak counts."""
AS_FAST = 1.02
"""Times the seconds of the fastest way."""
TRIES = 2
"""Of each way, after the round that warms up."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way to configure TRL's trainer."""

    micro: int
    """Samples of a micro-batch, pairs for the reward model."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    word: str = "padded"

    @property
    def name(self) -> str:
        return f"trl {self.word} {self.micro}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Who runs what; the likeliest way of each side first, of equal ones that with smaller micro-batches."""

    command: Command
    workload: Kind
    budgets: tuple[int, ...]
    """Of ours: tokens of a micro-batch."""
    peers: tuple[Peer, ...]

    @property
    def measure(self) -> str:
        return "step_seconds" if self.command == "grpo" else "phase_seconds"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all comparisons run on."""

    data: Data
    threads: int
    rounds: int
    trl: Mapping[str, str] | None
    """Environment of TRL's children; None: it is left out."""
    engine: str = "vllm"
    budget: int | None = None
    """In place of a comparison's own, in a rehearsal, where TRL's micro-batches are of `micro` samples."""
    micro: int | None = None
    together: bool = False
    """Memory is asked of the processes that are timed: not for figures."""
    most_tries: int | None = None
    """Of each side's ways, the first so many."""

    def budgets(self, comparison: Comparison) -> tuple[int, ...]:
        return (self.budget,) if self.budget is not None else comparison.budgets[: self.most_tries]

    def peers(self, comparison: Comparison) -> tuple[Peer, ...]:
        if self.trl is None:
            return ()
        if self.micro is None:
            return comparison.peers[: self.most_tries]
        small = (dataclasses.replace(peer, micro=self.micro) for peer in comparison.peers)
        return tuple({peer.name: peer for peer in small}.values())


def options_of(comparison: Comparison, setting: Setting) -> Message:
    """What both children of a comparison are told."""
    common = {"threads": setting.threads, "lr": LEARNING_RATE, "memory": setting.together, "seed": 0}
    data = setting.data
    if comparison.command != "grpo":
        return common | {
            "command": comparison.command,
            "model": str(data.model if comparison.command == "sft" else data.reward_model),
            "sizes": dataclasses.asdict(data.supervised[comparison.command]),
            "workload": comparison.workload,
        }
    step = data.steps[comparison.workload]
    return common | {
        "model": str(data.model),
        "prompts": str(step.prompts),
        "test": str(step.test),
        "rule": step.rule,
        "prompts_per_step": step.num_prompts,
        "per_prompt": step.per_prompt,
        "max_prompt": step.max_prompt,
        "max_response": step.max_response,
        "whole": comparison.workload == "equal",
        "beta": BETA,
    }


def start_ours(comparison: Comparison, setting: Setting, **options: Any) -> Child:
    """`memory` among the options: for a look at it."""
    ways = {f"ours {budget}": {"max_tokens_per_micro_batch": budget} for budget in setting.budgets(comparison)}
    told = {**options_of(comparison, setting), "engine": setting.engine, "ways": ways, **options}
    env = environment(setting.threads) | (HELD_APART if told["memory"] else {})
    return Child(OURS[comparison.command], told, env)


def start_theirs(comparison: Comparison, setting: Setting, peer: Peer, **options: Any) -> Child:
    assert setting.trl is not None
    told = {**options_of(comparison, setting), "attention": "sdpa", **options}
    told |= {"micro_batch_samples": peer.micro, "settings": dict(peer.settings)}
    env = dict(setting.trl) | (HELD_APART if told["memory"] else {})
    return Child(THEIRS[comparison.command], told, env)


@dataclass
class Side:
    """The fastest way of a side, running."""

    name: str
    child: Child
    arguments: Message
    tries: dict[str, float]
    """Seconds of a training phase by way."""
    firsts: dict[str, Message]
    """By way that began with the weights of the model: what it said of its first round."""
    peer: Peer | None = None


def fastest_of_ours(child: Child, given: Message) -> Side:
    """Every way, after a round that warms up."""
    ways = list(child.facts["ways"])
    firsts = {ways[0]: child.ask("round", way=ways[0], **given)}
    tries = {way: tried(child, way=way, **given) for way in ways}
    name = chosen(tries)
    return Side(name, child, {"way": name}, tries, firsts)


def tried(child: Child, **arguments: Any) -> float:
    """Seconds of a training phase, of the fastest of some."""
    return min(float(child.ask("round", **arguments)["phase_seconds"]) for _ in range(TRIES))


def chosen(tries: Mapping[str, float]) -> str:
    """Of the ways that are as fast as the fastest the one with the smallest micro-batches, the last word of a name."""
    fast = [way for way, seconds in tries.items() if seconds <= AS_FAST * min(tries.values())]
    return min(fast, key=lambda way: int(way.split()[-1]))


def fastest_of_theirs(
    peers: Sequence[Peer], start: Callable[[Peer], Child], given: Message, stack: contextlib.ExitStack
) -> Side | None:
    """Every way in a process of its own, after a round that warms up; then the chosen one anew, warm."""
    tries: dict[str, float] = {}
    firsts: dict[str, Message] = {}
    for peer in peers:
        child = start(peer)
        try:
            firsts[peer.name] = child.ask("round", **given)
            tries[peer.name] = tried(child, **given)
        finally:
            child.stop()
    if not tries:
        return None
    best = next(peer for peer in peers if peer.name == chosen(tries))
    child = start(best)
    stack.callback(child.stop)
    child.ask("round", **given)
    return Side(best.name, child, {}, tries, firsts, best)


def compare(comparison: Comparison, setting: Setting) -> Message:
    """Agreement, tries, rounds in turn, memory."""
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        child = start_ours(comparison, setting)
        stack.callback(child.stop)
        given = child.ask("draw") if comparison.command == "grpo" else {}
        ours = fastest_of_ours(child, given)
        theirs = fastest_of_theirs(
            setting.peers(comparison), lambda peer: start_theirs(comparison, setting, peer), given, stack
        )
        sides = [side for side in (ours, theirs) if side is not None]
        agreement = agreement_of({name: first for side in sides for name, first in side.firsts.items()})
        asks = {side.name: asking(side.child, **side.arguments) for side in sides}
        rounds = in_turn(asks, setting.rounds, warm_up=0)
        facts = {side.name: side.child.facts for side in sides}
        memory = {side.name.split()[0]: side.child.ask("memory") for side in sides} if setting.together else {}
    if not memory:
        memory = memory_of(comparison, setting, given, ours, theirs)
    if comparison.command == "grpo" and comparison.workload == "equal":
        step = setting.data.steps["equal"]
        require_whole(rounds, step.samples * step.max_response)
    ways = {
        name: summary(comparison.measure, many, tokens_of(comparison, setting, many)) for name, many in rounds.items()
    }
    return {
        "measure": comparison.measure,
        "agreement": agreement,
        "tried": {name: seconds for side in sides for name, seconds in side.tries.items()},
        "ways": {name: way | {"about": facts[name]} for name, way in ways.items()},
        "fastest": {side.name.split()[0]: side.name for side in sides},
        "ours_over_trl_of_rounds": ratios_of_rounds(comparison.measure, list(rounds.values())),
        "memory": memory,
        "workload": workload_facts(comparison, setting, given),
        "took_seconds": time.perf_counter() - began,
    }


def agreement_of(firsts: Mapping[str, Message]) -> Message:
    """Losses and gradient norms of each way's first round.

    Raises: AssertionError where they differ too much for the same computation."""
    losses = {name: float(first["loss"]) for name, first in firsts.items()}
    apart = max(losses.values()) - min(losses.values())
    largest = max(1.0, *(abs(loss) for loss in losses.values()))
    assert apart <= LOSSES_AGREE * largest, f"not the same computation: losses of the first round are {losses}"
    norms = {name: norm_of(first) for name, first in firsts.items()}
    return {"losses": losses, "losses_differ_by": apart, "grad_norms": norms, "norms_differ_by": require_same(norms)}


def ratios_of_rounds(measure: str, rounds: Sequence[Sequence[Message]]) -> dict[str, float] | None:
    """Ours over theirs within a round: median and range."""
    if len(rounds) < 2:
        return None
    return spread([ours[measure] / theirs[measure] for ours, theirs in zip(*rounds, strict=True)])


def tokens_of(comparison: Comparison, setting: Setting, answers: Sequence[Message]) -> int:
    """Of a step: of GRPO those that were generated, else all."""
    if comparison.command == "grpo":
        return round(statistics.median(answer["generated_tokens"] for answer in answers))
    return make_workload(comparison.workload, setting.data.supervised[comparison.command]).tokens()


def workload_facts(comparison: Comparison, setting: Setting, given: Message) -> Message:
    """Lengths in tokens; of GRPO those of the responses that both sides were given."""
    if comparison.command != "grpo":
        return make_workload(comparison.workload, setting.data.supervised[comparison.command]).facts()
    prompts, responses = [list(map(len, given[name])) for name in ("prompts", "responses")]
    return {
        "samples": len(responses),
        "prompt_length": spread(prompts) | {"mean": statistics.mean(prompts)},
        "response_length": spread(responses) | {"mean": statistics.mean(responses)},
        "response_tokens": sum(responses),
    }


def memory_of(comparison: Comparison, setting: Setting, given: Message, ours: Side, theirs: Side | None) -> Message:
    """Of each side's training on the same samples in a process of its own, and once of ours with its engine."""
    options = {"memory": True, "ways": {ours.name: ours.child.facts["ways"][ours.name]}}
    short = given and given | {"responses": [row[:TOKENS_BEFORE_PEAK] for row in given["responses"]]}
    way = ours.arguments
    found = {"ours": peak_of(start_ours(comparison, setting, **options, engine="megatron"), way | short, way | given)}
    if comparison.command == "grpo" and comparison.workload == "long_tailed" and setting.engine != "megatron":
        found["ours with its engine"] = peak_of(start_ours(comparison, setting, **options), way | short, way)
    if theirs is not None and theirs.peer is not None:
        found["trl"] = peak_of(start_theirs(comparison, setting, theirs.peer, memory=True), short, given)
    return found


def peak_of(child: Child, *rounds: Message) -> Message:
    """After these rounds: the optimizer makes its moments in the first. Stops the child."""
    try:
        for arguments in rounds:
            child.ask("round", **arguments)
        return child.ask("memory")
    finally:
        child.stop()
