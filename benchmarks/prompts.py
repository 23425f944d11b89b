"""Prompts computed once against prompts computed for each response, and against TRL's GRPO, on the CPU.

16 prompts with 8 responses each, in the order of groups (`train.shuffle: groups`), prompt to response 1:1 (64 tokens
each), 4:1 (256 to 64) and 1:4; all lengths equal, or responses lognormal with the same mean. Comparisons:

  equal_*, long_tail_*   one GRPO training phase: old and reference log-probs, forward, backward, optimizer
  step_*                 whole steps with generation, equal lengths: ours by vLLM, TRL's by transformers
  pair_rm_*, pair_dpo_*  an optimizer step on 64 pairs: of a reward model, of DPO
  one_update_1_1         no seconds: one update on the same responses, whose gradient norm has to be TRL's

`shared` and `unshared` are the same configuration but for `train.share_prompts`; model, workloads' other figures,
settings, threads and the way to measure are those of `make bench-packing`: in turn, to and fro, the first round not
counted, ratios of medians. Shared and unshared phases take turns in one process, since two processes differ by up to 5%
in the same work; TRL, engines, and what operations and memory are looked at have processes of their own. What a
comparison has found is kept in build/bench-prompts/: a run of the same commit goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.interleaved import Ask, asking, fastest, in_turn, norm_of, require_same, require_whole, spread, summary
from benchmarks.kept import Kept
from benchmarks.machine import ROOT, machine
from benchmarks.packing_children import Child, Message, environment, trl_environment
from benchmarks.packing_workload import REHEARSAL, Kind, Sizes, Workload, make_workload, write_model
from benchmarks.peers import UnavailableError
from benchmarks.prompts_figures import goals, in_words, ratios
from benchmarks.prompts_work import HELD_APART, by_formula
from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.parallel.packing.partition import forward_cost

RESULT = ROOT / "benchmarks" / "results" / "prompts.json"
KEPT = ROOT / "build" / "bench-prompts"
BETA = 0.04
OURS, PAIRS, TRL = "benchmarks.packing_ours", "benchmarks.prompts_pairs", "benchmarks.peers_trl"
SIDES = {"shared": True, "unshared": False}
BUDGET = 4096
"""`train.max_tokens_per_micro_batch`, of either side: of shared prompts at 1:1 and 4:1 a mini-batch is one row."""
DIRECTIONS = (
    "X_over_Y is X divided by Y, of seconds: above 1, Y is the faster; so are pair_rm and pair_dpo, unshared over "
    "shared. shared_memory_over_unshared is of bytes: at most 1, sharing takes no more. flop_ratio is operations "
    "unshared over shared, share_of_flop_ratio the measured unshared over shared divided by it."
)
MIXES = {"1_1": (1, 1), "4_1": (4, 1), "1_4": (1, 4)}
"""Prompt and response in parts of `Sizes.mean_response`."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Who runs what."""

    mix: str
    workload: Kind = "equal"
    inject: bool = True
    """False: whole steps, with generation."""
    budgets: tuple[int, ...] = (BUDGET,)
    """Of which the fastest of each side is compared."""
    rounds: int | None = None
    """At most so many that count."""
    trl: tuple[int, ...] = ()
    """Micro-batch sizes that it is tried with, in samples."""
    trl_rounds: int = 3
    """At most so many that count."""
    command: Literal["rl", "rm", "dpo"] = "rl"
    one_update: bool = False

    @property
    def measure(self) -> str:
        return "phase_seconds" if self.inject else "step_seconds"

    @property
    def looks(self) -> bool:
        """Floating-point operations and memory are looked at."""
        return self.inject and not self.one_update


COMPARISONS = {
    "equal_1_1": Comparison(mix="1_1", budgets=(2048, BUDGET), trl=(32,)),
    "equal_4_1": Comparison(mix="4_1", trl=(16,)),
    "pair_rm_1_1": Comparison(mix="1_1", command="rm"),
    "pair_dpo_1_1": Comparison(mix="1_1", command="dpo"),
    "equal_1_4": Comparison(mix="1_4"),
    "long_tail_1_1": Comparison(mix="1_1", workload="long_tailed", trl=(4,), trl_rounds=1),
    "long_tail_4_1": Comparison(mix="4_1", workload="long_tailed", trl=(4,), trl_rounds=1),
    "step_1_1": Comparison(mix="1_1", inject=False, trl=(32,), rounds=2),
    "step_4_1": Comparison(mix="4_1", inject=False, trl=(16,), rounds=2),
    "one_update_1_1": Comparison(mix="1_1", trl=(32,), one_update=True),
}
QUICK = ("equal_1_1", "equal_4_1", "pair_rm_1_1", "equal_1_4")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all comparisons run on."""

    model: Path
    sizes: Sizes
    threads: int
    rounds: int
    trl: dict[str, str] | None
    """Environment of TRL's children; None: it is left out."""
    budget: int | None = None
    """In place of a comparison's own."""
    together: bool = False
    """Both sides in one process, without TRL: not for figures."""

    def sizes_of(self, comparison: Comparison) -> Sizes:
        prompt, response = (part * self.sizes.mean_response for part in MIXES[comparison.mix])
        changed: dict[str, Any] = {"prompt_tokens": (prompt, prompt), "mean_response": response}
        if comparison.command != "rl":
            pairs = self.sizes.samples // 2
            changed |= {"prompts": pairs, "per_prompt": 2, "mini_batches": 1}
        if comparison.one_update:
            changed |= {"mini_batches": 1}
        return dataclasses.replace(self.sizes, **changed)

    def train_of(self, comparison: Comparison, side: str) -> dict[str, dict[str, Any]]:
        """By way what stands in its configuration's section `train`."""
        budgets = comparison.budgets if self.budget is None else (self.budget,)
        order = {"shuffle": "groups"} if comparison.command == "rl" else {}
        return {
            f"{side} {budget}": {"max_tokens_per_micro_batch": budget, "share_prompts": SIDES[side], **order}
            for budget in budgets
        }


def longest(sizes: Sizes) -> Sizes:
    """With as many positions as any comparison needs."""
    prompt = max(prompt for prompt, _ in MIXES.values()) * sizes.mean_response
    return dataclasses.replace(sizes, prompt_tokens=(prompt, prompt))


Maker = Callable[[], Child]


def makers(comparison: Comparison, setting: Setting) -> dict[str, Maker]:
    """How to start each child: of either side one for its seconds and one for what is looked at, and TRL's."""
    common = {
        "model": str(setting.model),
        "sizes": dataclasses.asdict(setting.sizes_of(comparison)),
        "workload": comparison.workload,
        "beta": BETA,
        "lr": 1e-6,
    }

    def maker(module: str, env: dict[str, str], threads: int = setting.threads, **options: Any) -> Maker:
        return lambda: Child(module, {**common, "threads": threads, **options}, env)

    module, ours = PAIRS, {"command": comparison.command}
    if comparison.command == "rl":
        module, ours = OURS, {"algo": "grpo", "engine": "megatron" if comparison.inject else "vllm"}
    ways = {side: setting.train_of(comparison, side) for side in SIDES}
    here, found = environment(setting.threads), {}
    if setting.together:
        return {"seconds and look": maker(module, here, ways=ways["shared"] | ways["unshared"], **ours)}
    if comparison.inject:
        found["seconds"] = maker(module, here, ways=ways["shared"] | ways["unshared"], **ours)
    for side in SIDES:
        if not comparison.inject:
            found[f"seconds {side}"] = maker(module, here, ways=ways[side], **ours)
        if comparison.looks:
            found[f"look {side}"] = maker(module, environment(1) | HELD_APART, threads=1, ways=ways[side], **ours)
    for size in comparison.trl if setting.trl is not None else ():
        peer = {"attention": "sdpa", "compile": False, "continuous_batching": False, "micro_batch_samples": size}
        found[f"trl {size}"] = maker(TRL, setting.trl or {}, **peer)
    return found


def compare(comparison: Comparison, setting: Setting) -> Message:
    """Looks, runs the rounds; summary of every way, all rounds included."""
    began = time.perf_counter()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as two:

        def started(item: tuple[str, Maker]) -> tuple[str, Child]:
            child = item[1]()
            stack.callback(child.stop)
            return item[0], child

        children = dict(two.map(started, makers(comparison, setting).items()))
        looking = [child for name, child in children.items() if "look" in name and comparison.looks]
        looks = {way: looked for each in two.map(look, looking) for way, looked in each.items()}
        for name in [name for name in children if name.startswith("look ")]:
            children.pop(name).stop()
        asks, facts = asks_of(comparison, children)
        fewer = {name: comparison.trl_rounds for name in asks if "trl" in name}
        most = 0 if comparison.one_update else min(setting.rounds, comparison.rounds or setting.rounds)
        rounds = in_turn(asks, most, fewer)
    sizes = setting.sizes_of(comparison)
    workload = make_workload(comparison.workload, sizes)
    differ = check(comparison, rounds, workload)
    found: Message = {"measure": comparison.measure, "updates": sizes.mini_batches, "grad_norms_differ_by": differ}
    if not comparison.one_update:
        ways = {name: summary(comparison.measure, many[1:], workload.tokens()) for name, many in rounds.items()}
        found |= {
            "ways": {name: way | {"about": facts[name]} | looks.get(name, {}) for name, way in ways.items()},
            "fastest": {kind: fastest(ways, kind) for kind in (*SIDES, "trl")},
            "of_rounds": of_rounds(comparison, rounds, ways),
        }
    if looks:
        found["formula"] = formula(comparison, setting, workload)
    return found | {"workload": workload.facts(), "took_seconds": time.perf_counter() - began}


def look(child: Child) -> dict[str, Message]:
    """By way that it has."""
    return {way: child.ask("look", way=way) for way in child.facts["ways"]}


def asks_of(comparison: Comparison, children: Mapping[str, Child]) -> tuple[dict[str, Ask], dict[str, Message]]:
    """By way, how to have it run a round, and what it says of itself."""
    asks: dict[str, Ask] = {}
    facts: dict[str, Message] = {}
    inject = {"inject": comparison.inject} if comparison.command == "rl" else {}
    for name, child in children.items():
        if name.startswith("trl"):
            asks[name], facts[name] = asking(child, inject=comparison.inject), child.facts
            continue
        for way, train in child.facts["ways"].items():
            asks[way], facts[way] = asking(child, way=way, **inject), child.facts | {"ways": {way: train}}
    return asks, facts


def check(comparison: Comparison, rounds: Mapping[str, list[Message]], workload: Workload) -> float | None:
    """As `packing.check`: ours have to agree, and TRL where there is one update."""
    if not comparison.inject:
        require_whole(rounds, workload.response_tokens)
        return None
    names = [name for name in rounds if comparison.one_update or not name.startswith("trl")]
    return require_same({name: norm_of(rounds[name][0]) for name in names})


def of_rounds(
    comparison: Comparison, rounds: Mapping[str, list[Message]], ways: dict[str, Message]
) -> dict[str, dict[str, float]]:
    """Ratios of seconds within a round, of the fastest ways: the spread of what the medians are compared by."""
    found = {}
    for above, below in (("unshared", "shared"), ("trl", "shared")):
        names = [fastest(ways, kind) for kind in (above, below)]
        if None not in names:
            seconds = ([each[comparison.measure] for each in rounds[str(name)][1:]] for name in names)
            found[f"{above}_over_{below}"] = spread([slow / fast for slow, fast in zip(*seconds, strict=False)])
    return found


def formula(comparison: Comparison, setting: Setting, workload: Workload) -> dict[str, dict[str, float]]:
    """Floating-point operations by side and kind."""
    sizes, cost = setting.sizes, forward_cost(architecture_from_hf(setting.model))
    how = {
        "rl": {"forwards": 2, "head": 2 * sizes.hidden * sizes.vocab},
        "dpo": {"forwards": 1, "head": 2 * sizes.hidden * sizes.vocab},
        "rm": {"forwards": 0, "head": 2 * sizes.hidden, "head_rows": "tokens"},
    }[comparison.command]
    return {side: by_formula(cost, workload, shared=shared, **how) for side, shared in SIDES.items()}


def parameters(sizes: Sizes) -> int:
    head = sizes.hidden // sizes.heads
    layer = sizes.hidden * head * 2 * (sizes.heads + sizes.kv_heads) + 3 * sizes.hidden * sizes.intermediate
    return sizes.layers * (layer + 2 * sizes.hidden) + sizes.hidden + 2 * sizes.vocab * sizes.hidden


def run(arguments: argparse.Namespace) -> Message:
    """All comparisons, or those that were named."""
    left_out: dict[str, str] = {}
    trl = None
    try:
        if arguments.no_trl or arguments.rehearse:
            raise UnavailableError("--no-trl" if arguments.no_trl else "--rehearse")
        trl = trl_environment(arguments.threads)
    except UnavailableError as reason:
        left_out["trl"] = str(reason)
    if trl is None:
        left_out["one_update_1_1"] = "there is no TRL to compare with"
    if importlib.util.find_spec("vllm") is None or arguments.no_vllm:
        why = "--no-vllm" if arguments.no_vllm else "vllm is not installed"
        left_out |= {name: why for name, each in COMPARISONS.items() if not each.inject}
    for what, why in left_out.items():
        print(f"left out: {what}: {why}", flush=True)
    sizes = REHEARSAL if arguments.rehearse else Sizes()
    about = machine("make bench-prompts")
    names = arguments.only or (QUICK if arguments.quick else tuple(COMPARISONS))
    comparisons: dict[str, Message] = {}
    with tempfile.TemporaryDirectory() as directory:
        setting = Setting(
            model=write_model(Path(directory) / "model", longest(sizes)),
            sizes=sizes,
            threads=arguments.threads,
            rounds=arguments.rounds,
            trl=trl,
            budget=96 if arguments.rehearse else None,
            together=arguments.rehearse,
        )
        kept = kept_of(about, setting) if not arguments.rehearse else None
        for name in [name for name in names if name not in left_out]:
            found = kept.found(name) if kept else None
            if found is None:
                found = compare(COMPARISONS[name], setting)
                if kept:
                    kept.keep(name, found)
            comparisons[name] = found
            print(in_words(name, found), flush=True)
    found = ratios(comparisons)
    return {
        **found,
        "goals": goals(found),
        "directions": DIRECTIONS,
        "rehearsal": arguments.rehearse,
        "left_out": left_out,
        "comparisons": comparisons,
        "sizes": dataclasses.asdict(sizes),
        "parameters": parameters(sizes),
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "machine": about,
    }


def kept_of(about: Message, setting: Setting) -> Kept:
    """What comparisons have found, in build/: for a run of the same commit and settings."""
    key = {
        "machine": about,
        "sizes": dataclasses.asdict(setting.sizes),
        "budget": setting.budget,
        "threads": setting.threads,
        "rounds": setting.rounds,
        "trl": setting.trl is not None,
    }
    return Kept(KEPT, key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=None, help="that count; default: 9, of --quick 1")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side's one process")
    parser.add_argument("--only", nargs="+", choices=COMPARISONS, help="default: all")
    parser.add_argument("--quick", action="store_true", help=f"without TRL, and only {', '.join(QUICK)}")
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--no-vllm", action="store_true")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: whether it runs, not how fast")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.out == RESULT and (arguments.rehearse or arguments.only or arguments.quick):
        parser.error("a rehearsal, or a part, is no result: give --out")
    arguments.no_trl |= arguments.quick
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 9)
    result = run(arguments)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    for goal in (goal for goal in result["goals"] if goal["met"] is not None):
        print(goal["in_words"])


if __name__ == "__main__":
    main()
