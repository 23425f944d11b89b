"""Cost of waiting for slow environments: python -m benchmarks.environments (`make bench-environments`).

One engine of vLLM, with at most `at_once` sequences in its batch, draws conversations of a few turns of equal length
with the demo's model. The environment's `step` is an async function that waits; rollouts with and without a wait are
measured in turn. A conversation that waits leaves its place in the batch to another.

Reported is by how much the wait makes the rollout longer, over the least that is possible. The least is the larger of
two bounds. With a wait of d and k turns, and W seconds of drawing: the last turn that is drawn is followed by a wait,
so it takes W + d at least. And the conversation whose first turn is drawn last begins to wait after W / k at the
earliest; then follow k waits and k - 1 turns, each as long as a turn that is drawn alone. W is the rollout without a
wait, and a turn alone is measured too. Neither bound knows of idle engines between, so 1 may be out of reach.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.machine import ROOT, machine
from benchmarks.two_engines import on_ranks
from megarlhf.runtime import Runtime

RESULT = ROOT / "benchmarks" / "results" / "environments.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """Conversations of a rollout."""

    conversations: int = 256
    turns: int = 3
    turn_tokens: int = 10
    observed: str = "1+2="
    at_once: int = 64
    """Sequences in a batch of vLLM's."""
    seconds: float = 2.0
    """Wait of a step."""


SMALL = Load(conversations=6, at_once=3, turn_tokens=4, seconds=0.2)


class Waits:
    """Environment that waits, and then answers with the same text."""

    def __init__(self, seconds: float, observed: str) -> None:
        self.seconds, self.observed = seconds, observed

    def reset(self, fields: Any, seed: int) -> None:
        """Return no message."""

    async def step(self, turn: Any) -> Any:
        from megarlhf import Answer

        if self.seconds:
            await asyncio.sleep(self.seconds)
        return Answer(self.observed)


class Conversing:
    """An engine, and an environment for each wait."""

    def __init__(self, runtime: Runtime, model: Path, load: Load) -> None:
        from megarlhf.config import ConversationConfig, RoleConfig, RolloutConfig
        from megarlhf.config.environment import EnvironmentConfig
        from megarlhf.data.tokenizers.tokenizer import load_tokenizer
        from megarlhf.models.role import build_role
        from megarlhf.parallel.mesh import GroupCache
        from megarlhf.rollout.environments.environment import Environment
        from megarlhf.rollout.vllm.engine import VllmEngine

        self.load, self.tokenizer = load, load_tokenizer(model)
        section = RoleConfig.model_validate({"model": {"path": str(model), "random_init": True}})
        actor = build_role("actor", section, "lm", GroupCache(runtime), seed=0)
        self.longest = load.turns * (load.turn_tokens + len(load.observed))
        options = {"max_response_tokens": self.longest, "vllm": {"args": {"max_num_seqs": load.at_once}}}
        self.engine = VllmEngine(RolloutConfig.model_validate(options), actor, torch.float32, 16)
        self.engine.update_weights(actor.shard, 0)
        self.environments = {
            seconds: Environment(
                EnvironmentConfig(
                    function="benchmarks.environments:Waits",
                    args={"seconds": seconds, "observed": load.observed},
                    max_turns=load.turns,
                    max_turn_tokens=load.turn_tokens,
                ),
                ConversationConfig(),
                self.tokenizer,
                end_ids=(),
                max_tokens=self.longest,
            )
            for seconds in (0.0, load.seconds)
        }

    def seconds(self, wait: float, count: int) -> float:
        """Seconds of a rollout of `count` conversations."""
        from megarlhf.data.sample_types import PromptSample
        from megarlhf.rollout.conversations import draw_samples
        from megarlhf.rollout.in_flight import Requests
        from megarlhf.rollout.responses import Sampling
        from megarlhf.rollout.vllm import generate_loop

        texts = [f"{n % 90 + 10}+{n % 70 + 20}=" for n in range(count)]
        prompts = [PromptSample(self.tokenizer.encode(text), text, {}, n) for n, text in enumerate(texts)]
        rows = [torch.tensor(prompt.tokens) for prompt in prompts]
        requests = Requests.whole(rows, list(range(count)), self.longest)
        sampling = Sampling(max_tokens=self.longest, end_ids=())

        def whole_turn(output: Any, sampling: Sampling, version: int, part: Any) -> Any:
            return generate_loop.response_so_far(output, version, finished=True)

        assert self.engine._llm.reset_prefix_cache()
        with mock.patch.object(generate_loop, "response_of", whole_turn):
            began = time.perf_counter()
            drawn = draw_samples(self.engine, self.environments[wait], prompts, requests, sampling)
            seconds = time.perf_counter() - began
        assert drawn.responses.lengths_N.tolist() == [self.load.turns * self.load.turn_tokens] * count
        assert {dialogue.ended_by for dialogue in drawn.dialogues} == {"max_turns"}
        return seconds

    def close(self) -> None:
        for environment in self.environments.values():
            environment.close()
        self.engine.close()


Found = dict[str, list[float]]
"""Seconds of each round: without a wait, with it, and of one conversation alone without it."""


def measure_rank(runtime: Runtime, model: Path, load: Load, rounds: int) -> Found:
    """All rounds, and one before them that warms up. Collective."""
    conversing = Conversing(runtime, model, load)
    ways = {"none": (0.0, load.conversations), "waits": (load.seconds, load.conversations), "alone": (0.0, 1)}
    for wait, _ in ways.values():
        conversing.seconds(wait, load.conversations)
    found: Found = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 else reversed(ways):
            found[name].append(conversing.seconds(*ways[name]))
    conversing.close()
    return found


def summary(found: Found, load: Load) -> dict[str, Any]:
    """The cost of each round, and of the medians."""

    def cost(none: float, waits: float, alone: float) -> tuple[float, float]:
        turn = alone / load.turns
        first_turns = none / load.turns + load.turns * load.seconds + (load.turns - 1) * turn
        least = max(none + load.seconds, first_turns)
        return (waits - none) / (least - none), least

    rounds = [cost(*seconds) for seconds in zip(found["none"], found["waits"], found["alone"], strict=True)]
    whole, least = cost(*(statistics.median(found[name]) for name in ("none", "waits", "alone")))
    ratios = [ratio for ratio, _ in rounds]
    return {
        "cost_of_waiting": whole,
        "lowest": min(ratios),
        "highest": max(ratios),
        "seconds_least": least,
        "seconds_waits": statistics.median(found["waits"]),
        "seconds_none": statistics.median(found["none"]),
    }


def main() -> None:
    from tools.demo.make_data import Recipe, write_all

    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="few conversations: to see whether this runs")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    load = SMALL if arguments.small else Load()
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        recipe = Recipe(validation=4, test=4, sft_train=1, pairs_train=1, prompts_train=1)
        write_all(Path(folder), recipe, seed=0)
        found = on_ranks(1, measure_rank, Path(folder) / "base", load, arguments.rounds)
    result = {**machine("make bench-environments"), "load": dataclasses.asdict(load), **summary(found, load)}
    result["seconds"] = found
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
