"""Packed rows on one GPU against padding, loops and published functions. `make bench-gpu-packed`.

First what a device-to-device copy moves in a second. Then GAE (KL in the reward, score, returns), whitening, moving
rows out of padding and back, and causal attention; each candidate has to agree with fp64 or is listed with the reason
and not timed; those that do are timed in rounds, one call after the other, every second round in reverse.

floor      bytes of the packed arrays, each read or written once, over copied bytes per second. GAE: three columns
           read, two written; whitening: read, read, written. Attention has none here
goal       GAE of 1024 sequences of 8192 tokens within twice its floor

    python -m benchmarks.gpu_packed                     # everything, within --limit seconds
    python -m benchmarks.gpu_packed --check --sweep     # correctness on this device; block sizes of GAE
    python -m benchmarks.gpu_packed --rehearse          # the same code on a CPU with tiny shapes

Of this project it imports megarlhf.kernels alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_packed_check import run_checks
from benchmarks.gpu_packed_work import (
    GAMMA,
    KL_COEF,
    LAM,
    OURS,
    Candidate,
    Rows,
    Work,
    attention_works,
    first_line,
    gae_work,
    lengths_of,
    packing_works,
    whiten_work,
)
from benchmarks.gpu_timing import Ceilings, Clock, Deadline, measure_ceilings, spread
from benchmarks.machine import ROOT, machine

RESULTS = ROOT / "benchmarks" / "results"
REHEARSED = ROOT / "build" / "gpu_packed_rehearsal.json"
GOAL = 2.0


def works(arguments: argparse.Namespace, device: torch.device) -> Iterator[Callable[[], list[Work]]]:
    """Each made when it is its turn: inputs of several at once would not fit."""
    many, few, longest = arguments.sequences, arguments.few, arguments.longest
    shapes = [("equal", many, longest), ("equal", few, longest), ("ragged", many, longest)]
    for name, number, tokens in shapes:
        rows, about = Rows(lengths_of(name, number, tokens), device), f"{number} x {tokens} {name}"
        yield lambda rows=rows, about=about: [gae_work(about, rows)]
        if number == many:
            yield lambda rows=rows, about=about: [whiten_work(about, rows)]
    ragged = Rows(lengths_of("ragged", many, longest), device)
    yield lambda: list(packing_works(f"{many} x {longest} ragged", ragged))
    number, tokens, heads, size = arguments.attention
    tail = Rows(lengths_of("ragged", number, tokens), device)
    yield lambda: list(attention_works(f"{number} x {tokens} ragged, {heads} heads of {size}", tail, heads, size))


def timed(work: Work, clock: Clock, ceilings: Ceilings, rounds: int, deadline: Deadline) -> dict[str, Any]:
    """One row a candidate, and whether the goal was met is another's question."""
    rows: dict[str, dict[str, Any]] = {}
    alive: list[Candidate] = []
    for candidate in work.candidates:
        rows[candidate.name] = {"status": "no time left", "note": candidate.note}
        if deadline.left() < 10.0:
            continue
        try:
            reason = candidate.wrong(candidate.call())
        except Exception as error:  # noqa: BLE001 -- a candidate may raise anything; the reason is listed
            rows[candidate.name] |= {"status": "failed", "reason": first_line(error)}
            continue
        if reason is not None:
            rows[candidate.name] |= {"status": "refused", "reason": reason}
            continue
        alive.append(candidate)
    taken: dict[str, list[float]] = {candidate.name: [] for candidate in alive}
    for number in range(rounds):
        for candidate in alive if number % 2 == 0 else reversed(alive):
            if deadline.left() > 2.0 or not taken[candidate.name]:
                taken[candidate.name].append(clock(candidate.call))
    floor_ms = 1e3 * work.num_bytes / ceilings.copy_bytes_per_s
    for name, times in taken.items():
        rows[name] |= {"status": "timed", "ms": spread(times), "rounds": times}
        if work.num_bytes:
            rows[name]["over_floor"] = rows[name]["ms"]["median"] / floor_ms
    about = {"kind": work.kind, "name": work.name, "tokens": work.tokens, "padded_tokens": work.padded_tokens}
    return {**about, "floor_ms": floor_ms or None, "missing": work.missing, "rows": rows}


def goals(timings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """GAE of the first shape, many long sequences, within GOAL times its floor."""
    first = next((timing for timing in timings if timing["kind"] == "GAE"), None)
    if first is None or first["rows"][OURS]["status"] != "timed":
        return []
    got = first["rows"][OURS]["over_floor"]
    return [{"goal": f"GAE {first['name']} over its floor", "wanted": GOAL, "got": got, "met": got <= GOAL}]


def sweep(clock: Clock, rows: Rows, calls: int) -> list[dict[str, Any]]:
    """GAE in other blocks; on a CPU there are none."""
    if clock.device.type != "cuda":
        return []
    from megarlhf.kernels import packed_triton
    from megarlhf.kernels.packed_inputs import CuSeqlens, GAEInputs

    tokens, cu_seqlens = int(rows.lengths_N.sum()), rows.cu_seqlens
    where = CuSeqlens(cu_seqlens, tokens, int(rows.lengths_N.max()))
    columns = (*torch.randn(3, tokens, device=clock.device).unbind(), torch.randn(len(rows.lengths_N)).to(clock.device))
    inputs, timings = GAEInputs(*columns, GAMMA, LAM, KL_COEF, "k1"), []
    for block, warps in ((256, 1), (256, 2), (512, 1), (512, 2), (512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 8)):
        for programs in (1, 512, 1024, 2048, 4096):
            launch = packed_triton.LaunchConfig(tokens=block, warps=warps, programs=programs)
            parts = launch.parts(where.num_sequences, tokens)
            if programs > 1 and parts == 1:
                continue  # not cut: timed already
            ms = clock.median(partial(packed_triton.gae, inputs, where, launch), calls)
            timings.append({"tokens": block, "warps": warps, "parts": parts, "ms": ms})
    return sorted(timings, key=lambda timing: timing["ms"])


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU with tiny shapes; marked so in the result")
    parser.add_argument("--check", action="store_true", help="correctness of our kernels on this device")
    parser.add_argument("--sweep", action="store_true", help="blocks, warps and parts of the GAE kernel")
    parser.add_argument("--bench", action="store_true", help="the benchmark too, beside --check or --sweep")
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--few", type=int, help="sequences that are too few for a program each")
    parser.add_argument("--longest", type=int)
    parser.add_argument("--attention", type=int, nargs=4, metavar=("N", "LONGEST", "HEADS", "SIZE"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for the whole run")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    sizes = (12, 3, 300, [4, 96, 2, 16], 2) if arguments.rehearse else (1024, 16, 8192, [64, 4096, 16, 128], 7)
    for name, size in zip(("sequences", "few", "longest", "attention", "rounds"), sizes, strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, size)
    arguments.bench = arguments.bench or not (arguments.check or arguments.sweep)
    part = "" if arguments.bench else "_check" if arguments.check else "_sweep"
    arguments.out = arguments.out or (REHEARSED if arguments.rehearse else RESULTS / f"gpu_packed{part}.json")
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; use --rehearse to try the same code on a CPU")
    return arguments


def write(result: dict[str, Any], path: Path) -> None:
    """All of it at once, or what was there before stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(path.name + ".partial")
    partial_path.write_text(json.dumps(result, indent=2) + "\n")
    partial_path.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parsed(argv)
    deadline = Deadline(arguments.limit)
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    clock = Clock(device)
    ceilings = measure_ceilings(clock, 3 if arguments.rehearse else 20)
    result: dict[str, Any] = {
        "rehearsal": arguments.rehearse,
        "finished": False,
        "machine": machine(shlex.join(["python", "-m", "benchmarks.gpu_packed", *argv]), device, arguments.commit),
        "ceilings": asdict(ceilings),
        "works": [],
        "goals": [],
    }
    print({name: f"{value:.4g}" for name, value in result["ceilings"].items()}, flush=True)
    if arguments.check:
        result["checks"] = run_checks(device, deadline)
        write(result, arguments.out)
    if arguments.sweep:
        shapes = [(arguments.sequences, "many"), (arguments.few, "few")]
        calls = 3 if arguments.rehearse else 10
        result["sweep"] = {
            name: sweep(clock, Rows(lengths_of("equal", number, arguments.longest), device), calls)
            for number, name in shapes
        }
        write(result, arguments.out)
    if arguments.bench:
        for make in works(arguments, device):
            for work in make():
                result["works"].append(timed(work, clock, ceilings, arguments.rounds, deadline))
                say(result["works"][-1])
            # The goal was set for a GPU.
            result["goals"] = [] if arguments.rehearse else goals(result["works"])
            write(result, arguments.out)
    result["finished"] = True
    write(result, arguments.out)
    for goal in result["goals"]:
        met = "met" if goal["met"] else "NOT met"
        print(f"goal: {goal['goal']}: {goal['got']:.2f}, wanted {goal['wanted']:g}: {met}", flush=True)
    if any(check["passed"] is False for check in result.get("checks", [])):
        sys.exit("some checks failed")


def say(work: dict[str, Any]) -> None:
    floor = f", floor {work['floor_ms']:.4f} ms" if work["floor_ms"] else ""
    print(f"{work['kind']} {work['name']}: {work['tokens']} of {work['padded_tokens']} tokens{floor}", flush=True)
    for name, row in work["rows"].items():
        over = f", {row['over_floor']:.2f} x the floor" if "over_floor" in row else ""
        line = f"{row['ms']['median']:.4f} ms{over}" if "ms" in row else f"{row['status']}: {row.get('reason', '')}"
        print(f"  {name}: {line}", flush=True)
    for name, reason in work["missing"].items():
        print(f"  {name}: not here: {reason}", flush=True)


if __name__ == "__main__":
    main()
