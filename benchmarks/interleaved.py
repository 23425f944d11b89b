"""Ways to do the same that are measured in turn, to and fro: what benchmarks that compare them have in common.

A way is asked for a round and answers with seconds, of the whole and of its parts (`packing_children.py`).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.packing_children import Child, Message

Ask = Callable[[], Message]
AGREE = 2e-3
"""Relative difference of gradient norms in the first round up to which two sides computed the same."""


def asking(child: Child, **arguments: Any) -> Ask:
    """Has the child run a round."""
    return lambda: child.ask("round", **arguments)


def in_turn(
    asks: Mapping[str, Ask], rounds: int, fewer: Mapping[str, int] | None = None, warm_up: int = 1
) -> dict[str, list[Message]]:
    """By way the answers of `rounds` rounds, after `warm_up` others; of some ways there may be fewer."""
    answers: dict[str, list[Message]] = {name: [] for name in asks}
    for number in range(rounds + warm_up):
        for name in asks if number % 2 == 0 else reversed(asks):
            if number < (fewer or {}).get(name, rounds) + warm_up:
                answers[name].append(asks[name]() | {"load": os.getloadavg()[0]})
    return answers


def norm_of(answer: Message) -> float:
    """Mean gradient norm of a round's optimizer steps."""
    norms = answer.get("grad_norms") or [answer["metrics"]["actor_grad_norm"]]
    return statistics.mean(norms)


def require_same(first: Mapping[str, float]) -> float | None:
    """The largest relative difference of the gradient norms of first rounds; None where there is one.

    Raises: AssertionError where it is too large for the same computation."""
    if len(first) < 2:
        return None
    differ = max(first.values()) / min(first.values()) - 1
    assert differ < AGREE, f"not the same computation: gradient norms of the first round are {dict(first)}"
    return differ


def require_whole(rounds: Mapping[str, Sequence[Message]], tokens: int) -> None:
    """Raises: AssertionError where a response that was generated has ended early."""
    for name, many in rounds.items():
        short = {answer["generated_tokens"] for answer in many} - {tokens}
        assert not short, f"{name} generated {sorted(short)} tokens, not {tokens}: a response ended early"


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, and between what the rounds lie."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(measure: str, answers: Sequence[Message], tokens: int) -> Message:
    """Of one way: spread, speed, the share of each part, and every round."""
    seconds = spread([float(answer[measure]) for answer in answers])
    parts = {
        name: statistics.median(float(answer["parts"].get(name, 0.0)) for answer in answers)
        for name in {name: None for answer in answers for name in answer["parts"]}
    }
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds["median"],
        "part_seconds": parts,
        "share": {name: part / seconds["median"] for name, part in parts.items()},
        "floor": floor(parts),
        "rounds": [{name: answer[name] for name in answer if name != "metrics"} for answer in answers],
    }


def floor(parts: dict[str, float]) -> dict[str, float]:
    """Seconds of generation alone, and of the trained models' forwards and backwards alone."""
    seconds = {"forward_backward": sum(s for name, s in parts.items() if name.endswith(("forward", "backward")))}
    return seconds | ({"generation": parts["generate"]} if "generate" in parts else {})


def fastest(ways: dict[str, Message], kind: str) -> str | None:
    """Of the ways whose name begins with this word."""
    names = [name for name in ways if name.split()[0] == kind]
    return min(names, key=lambda name: float(ways[name]["seconds"]["median"]), default=None)


def ratio(comparison: Message | None, slow: str, fast: str) -> float | None:
    """Median seconds of the fastest `slow` over those of the fastest `fast`; None where one was left out."""
    if comparison is None or None in (names := [comparison["fastest"].get(kind) for kind in (slow, fast)]):
        return None
    above, below = (comparison["ways"][name]["seconds"]["median"] for name in names)
    return float(above / below)
