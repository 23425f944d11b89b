"""The log-prob kernels against published ones and against the device's limits: one GPU. `make bench-gpu-logprob`.

First the two ceilings: a device-to-device copy and a bf16 matrix product. Then, for each shape, every candidate that
imports here, in one process: each has to agree with fp64 (values of all rows, gradients of some) or is listed with the
reason and not timed; those that do are timed in rounds, one call after the other, every second round in reverse.

floor      logits: bytes / copied bytes per second; forward reads once, forward and backward two reads and one write.
           linear: 2THV a product / flops per second; one product forward, with the backward three where logits are
           kept and four where they are made again
memory     the most that a call held beside its inputs and its results
/8         one rank's shard of eight; the collective between ranks is left out for everyone

The result is written after each shape, so that a run that is killed leaves what it has measured. A candidate that
leaves the device unusable is left out and the run starts again behind it.

    python -m benchmarks.gpu_logprob                    # everything, within --limit seconds
    python -m benchmarks.gpu_logprob --check --sweep    # correctness on this device; block sizes of our kernels
    python -m benchmarks.gpu_logprob --rehearse         # the same code on a CPU with tiny shapes
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import run_checks
from benchmarks.gpu_shape import DeviceLostError, Run, run_shape
from benchmarks.gpu_sweep import sweep
from benchmarks.gpu_table import goals, markdown
from benchmarks.gpu_timing import Ceilings, Clock, Deadline, measure_ceilings
from benchmarks.gpu_truth import Shape
from benchmarks.machine import ROOT, machine
from benchmarks.peers_logprob import versions

RESULTS = ROOT / "benchmarks" / "results"
REHEARSED = ROOT / "build" / "gpu_logprob_rehearsal.json"


def shapes_of(arguments: argparse.Namespace) -> list[Shape]:
    """Logits first, then linear; whole vocabularies before shards."""
    tokens, vocabs, parts = arguments.tokens, arguments.vocab, (1, 8)
    logits = [Shape("logits", tokens, vocab, part) for part in parts for vocab in vocabs]
    linear = [
        Shape("linear", tokens, vocab, part, hidden)
        for part in parts
        for hidden in arguments.hidden
        for vocab in vocabs
    ]
    return [shape for shape in logits + linear if shape.kind in arguments.kinds]


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU with tiny shapes; marked so in the result")
    parser.add_argument("--quick", action="store_true", help="one vocabulary, one hidden size, three rounds")
    parser.add_argument("--check", action="store_true", help="correctness of our kernels on this device")
    parser.add_argument("--sweep", action="store_true", help="block sizes and warps of our Triton kernels")
    parser.add_argument("--bench", action="store_true", help="the benchmark too, beside --check or --sweep")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--hidden", type=int, nargs="+")
    parser.add_argument("--vocab", type=int, nargs="+")
    parser.add_argument("--kinds", nargs="+", default=["logits", "linear"], choices=["logits", "linear"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for the whole run")
    parser.add_argument("--candidate-seconds", type=float, default=60.0, help="of one peer, over all shapes")
    parser.add_argument("--first-call-seconds", type=float, default=90.0, help="of one call that may compile")
    parser.add_argument("--exclude", action="append", default=[], help="a part of names of packages or candidates")
    parser.add_argument("--plant", action="store_true", help="add two wrong candidates, to see them refused")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", type=Path, help="also the table, as a page for docs/benchmarks/")
    parser.add_argument("--resume", action="store_true", help="keep the shapes that --out already has")
    arguments = parser.parse_args(argv)
    few = arguments.rehearse or arguments.quick
    sizes = (64, [32, 64], [1024, 1216]) if arguments.rehearse else (8192, [4096, 8192], [128256, 151936])
    arguments.tokens = arguments.tokens or sizes[0]
    arguments.hidden = arguments.hidden or (sizes[1][:1] if arguments.quick else sizes[1])
    arguments.vocab = arguments.vocab or (sizes[2][:1] if arguments.quick else sizes[2])
    arguments.rounds = arguments.rounds or (3 if few else 7)
    arguments.bench = arguments.bench or not (arguments.check or arguments.sweep)
    part = "" if arguments.bench else "_check" if arguments.check else "_sweep"
    arguments.out = arguments.out or (REHEARSED if arguments.rehearse else RESULTS / f"gpu_logprob{part}.json")
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; use --rehearse to try the same code on a CPU")
    return arguments


def write(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """All of it at once, or what was there before stays."""
    for path, text in ((arguments.out, json.dumps(result, indent=2) + "\n"), (arguments.markdown, None)):
        if path is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        partial_path = path.with_name(path.name + ".partial")
        partial_path.write_text(markdown(result) if text is None else text)
        partial_path.replace(path)


def start_result(arguments: argparse.Namespace, argv: Sequence[str], ceilings: Ceilings, device: Any) -> dict[str, Any]:
    """An empty one, or the one to go on with."""
    command = shlex.join(["python", "-m", "benchmarks.gpu_logprob", *argv])
    result: dict[str, Any] = {
        "rehearsal": arguments.rehearse,
        "finished": False,
        "machine": machine(command, device, arguments.commit),
        "packages": versions(),
        "ceilings": asdict(ceilings),
        "missing": {},
        "lost": [],
        "shapes": [],
        "goals": [],
    }
    if arguments.resume and arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        # The ceilings of the first start stay: shares of one result are shares of one measurement.
        result |= {
            key: before[key] for key in ("machine", "ceilings", "lost", "shapes", "checks", "sweep") if key in before
        }
    return result


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parsed(argv)
    deadline = Deadline(arguments.limit)
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    if device.type == "cuda":
        torch.cuda.set_device(0)
    clock = Clock(device)
    result = start_result(arguments, argv, measure_ceilings(clock, 3 if arguments.rehearse else 20), device)
    print({name: f"{value:.4g}" for name, value in result["ceilings"].items()}, flush=True)
    if arguments.check and "checks" not in result:
        result["checks"] = run_checks(device, deadline)
        write(result, arguments)
    if arguments.sweep and "sweep" not in result:
        # At most half of the time, where there is more to do.
        share = Deadline(deadline.left() / 2 if arguments.bench else deadline.left())
        widths = tuple(vocab // part for vocab in arguments.vocab for part in (1, 8))
        result["sweep"] = sweep(clock, arguments.tokens, widths, 3 if arguments.rehearse else 10, share)
        write(result, arguments)
    if arguments.bench:
        limits = (arguments.rounds, arguments.candidate_seconds, arguments.first_call_seconds)
        run = Run(clock, Ceilings(**result["ceilings"]), deadline, *limits, arguments.exclude, arguments.plant)
        bench(run, arguments, argv, result)
    result["finished"] = True
    write(result, arguments)
    if not all(check["passed"] is not False for check in result.get("checks", [])):
        sys.exit("some checks failed")


def bench(run: Run, arguments: argparse.Namespace, argv: Sequence[str], result: dict[str, Any]) -> None:
    """Shape after shape, each written when it is done."""
    done = {(shape["kind"], shape["name"]) for shape in result["shapes"]}
    for shape in shapes_of(arguments):
        if (shape.kind, shape.name) in done:
            continue
        try:
            measured = run_shape(run, shape)
        except DeviceLostError as lost:
            result["lost"].append({"candidate": str(lost), "shape": shape.name, "kind": shape.kind})
            write(result, arguments)
            again = [*argv, "--resume", "--exclude", f"={lost}", "--limit", str(run.deadline.left())]
            os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu_logprob", *again])
        result["shapes"].append(measured)
        result["missing"] = run.missing
        # They were set for a GPU.
        result["goals"] = [] if arguments.rehearse else goals(result["shapes"])
        write(result, arguments)
        print(f"{shape.kind} {shape.name}: {run.deadline.left():.0f} s left", flush=True)
        for mode, best in measured["best_peer"].items():
            for name, rival in best.items():
                row = measured["modes"][mode][name]
                print(
                    f"  {mode}: {name} {row['ms']['median']:.3f} ms, {row['share_of_floor']:.0%} of the floor, "
                    f"{rival['peer_over_ours']:.2f}x {rival['peer']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
