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
import gc
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check import run_checks
from benchmarks.gpu_sweep import sweep
from benchmarks.gpu_table import markdown
from benchmarks.gpu_timing import (
    ROOT,
    Ceilings,
    Clock,
    Deadline,
    linear_floor_ms,
    logits_floor_ms,
    machine,
    measure_ceilings,
    peak_extra_bytes,
    spread,
)
from benchmarks.gpu_truth import Inputs, Shape, Truth, judge_gradients, judge_values, make_inputs, make_truth
from benchmarks.peers_logprob import MODES, OURS, Candidate, candidates, planted, versions

RESULTS = ROOT / "benchmarks" / "results"
REHEARSED = ROOT / "build" / "gpu_logprob_rehearsal.json"
_ROUND_MS, _MOST_CALLS = 20.0, 10

Row = dict[str, Any]


class DeviceLostError(RuntimeError):
    """The device answers nothing any more; carries the candidate's name."""


@dataclass
class Run:
    """One run's means and limits."""

    clock: Clock
    ceilings: Ceilings
    deadline: Deadline
    rounds: int
    candidate_seconds: float
    first_call_seconds: float
    exclude: Sequence[str] = ()
    plant: bool = False
    missing: dict[str, str] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)

    def may_go_on(self, name: str) -> str | None:
        """None, or why this candidate has to stop."""
        if any(part in name for part in self.exclude):
            return "excluded by --exclude"
        if self.deadline.left() < 5.0:
            return "no time left in the run"
        if OURS not in name and self.spent.get(name, 0.0) > self.candidate_seconds:
            return f"its {self.candidate_seconds:g} seconds are spent"
        return None

    @contextmanager
    def charged(self, name: str) -> Iterator[None]:
        """Seconds of a candidate count against its own budget."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - start


def call_of(candidate: Candidate, inputs: Inputs, mode: str) -> tuple[Callable[[], Any], Callable[[], object] | None]:
    """What is timed, and what has to be done before each time."""
    tensors = inputs.tensors
    prepare = None
    if candidate.overwrites and mode != "forward":
        tensors = tuple(tensor.clone() for tensor in tensors)
        prepare = partial(_restore, tensors, inputs.tensors)
    if mode == "forward":
        return partial(_forward, candidate, tensors, inputs.labels_T), prepare
    upstream = inputs.upstream(candidate.gives, candidate.sign)
    return partial(_both, candidate, tensors, inputs.labels_T, upstream), prepare


def _restore(tensors: Sequence[Tensor], clean: Sequence[Tensor]) -> None:
    for tensor, source in zip(tensors, clean, strict=True):
        tensor.copy_(source)


def _forward(candidate: Candidate, tensors: Sequence[Tensor], labels_T: Tensor) -> tuple[tuple[Tensor, ...], None]:
    with torch.no_grad():
        return candidate.call(*tensors, labels_T), None


def _both(
    candidate: Candidate, tensors: Sequence[Tensor], labels_T: Tensor, upstream: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    outputs = candidate.call(*leaves, labels_T)
    gradients = torch.autograd.grad(
        outputs, leaves, [up.to(one.dtype) for up, one in zip(upstream, outputs, strict=True)]
    )
    return tuple(one.detach() for one in outputs), gradients


def gate(run: Run, candidate: Candidate, inputs: Inputs, truth: Truth, mode: str) -> Row:
    """One call, judged; its memory. `status` is "passed" or says why the candidate is not timed."""
    row: Row = {"gives": candidate.gives, "note": candidate.note, "status": "passed", "reason": None, "errors": {}}
    if reason := run.may_go_on(candidate.name):
        return row | {"status": "skipped", "reason": reason}
    start = time.monotonic()
    try:
        with run.charged(candidate.name), _alarm(run.first_call_seconds):
            call, _ = call_of(candidate, inputs, mode)
            outputs, gradients = call()
            verdicts = [judge_values(truth, candidate.gives, candidate.sign, outputs)]
            if gradients is not None:
                verdicts.append(judge_gradients(truth, candidate.gives, gradients))
            del outputs, gradients
            row["peak_extra_bytes"] = peak_extra_bytes(call, (*inputs.tensors, inputs.labels_T), run.clock.device)
    except Exception as error:  # noqa: BLE001 -- a peer may raise anything; the reason is listed
        row |= {"status": "raised", "reason": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
    else:
        row["errors"] = {name: error for verdict in verdicts for name, error in verdict.errors.items()}
        if reasons := [verdict.reason for verdict in verdicts if verdict.reason]:
            row |= {"status": "refused", "reason": "; ".join(reasons)}
    _tidy(run.clock.device, candidate.name, failed=row["status"] == "raised")
    return row | {"first_call_s": time.monotonic() - start}


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """A TimeoutError in whatever takes longer, as soon as Python has a say in it."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"the first call took more than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _tidy(device: torch.device, name: str, *, failed: bool) -> None:
    if failed:
        # What a failed call still holds hangs in a cycle with its exception.
        gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLostError(name) from error
        torch.cuda.empty_cache()


def time_all(run: Run, passed: dict[str, Candidate], rows: dict[str, Row], inputs: Inputs, mode: str) -> None:
    """Rounds over all that passed, to and fro; the figures go into their rows."""
    calls = {name: call_of(candidate, inputs, mode) for name, candidate in passed.items()}
    once = {name: run.clock(*call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(run.rounds):
        for name in list(calls) if number % 2 == 0 else list(reversed(calls)):
            if reason := run.may_go_on(name):
                rows[name]["stopped"] = reason
                continue
            several = max(1, min(_MOST_CALLS, int(_ROUND_MS / max(once[name], 1e-3))))
            with run.charged(name):
                found[name].append(spread(run.clock(*calls[name]) for _ in range(several))["median"])
    for name, values in found.items():
        if not values:
            rows[name] |= {"status": "skipped", "reason": rows[name]["stopped"]}
            continue
        floor = floor_ms(inputs.shape, passed[name], mode, run.ceilings)
        share = floor / spread(values)["median"]
        rows[name] |= {"status": "timed", "ms": spread(values), "rounds": values, "share_of_floor": share}


def floor_ms(shape: Shape, candidate: Candidate, mode: str, ceilings: Ceilings) -> float:
    """The least time for what this candidate does."""
    if shape.kind == "logits":
        return logits_floor_ms(shape.tokens, shape.columns, mode, ceilings)
    products = 1 if mode == "forward" else candidate.products
    return linear_floor_ms(shape.tokens, shape.hidden, shape.columns, products, ceilings)


def run_shape(run: Run, shape: Shape) -> dict[str, Any]:
    """Gate and time everybody, forward, then forward and backward."""
    if "torch._dynamo" in sys.modules:
        # Otherwise the compiled candidates run into the limit on recompilations of one function.
        torch._dynamo.reset()
    inputs = make_inputs(shape, run.clock.device)
    truth = make_truth(inputs)
    here, missing = candidates(shape, run.clock.device)
    run.missing |= missing
    if run.plant:
        here += planted(shape, run.clock.device)
    modes: dict[str, dict[str, Row]] = {}
    for mode in MODES:
        able = {one.name: one for one in here if mode in one.modes}
        rows = {name: gate(run, one, inputs, truth, mode) for name, one in able.items()}
        for name, row in rows.items():
            row["floor_ms"] = floor_ms(shape, able[name], mode, run.ceilings)
        time_all(run, {n: one for n, one in able.items() if rows[n]["status"] == "passed"}, rows, inputs, mode)
        modes[mode] = rows
    about = asdict(shape) | {"name": shape.name, "columns": shape.columns, "collective": "left out"}
    best = {mode: best_peers(rows) for mode, rows in modes.items()}
    return about | {"value_tolerance": truth.value_tolerance, "best_peer": best, "modes": modes}


def best_peers(rows: dict[str, Row]) -> dict[str, dict[str, Any]]:
    """For each of our rows the fastest peer that gives as much, and its time over ours."""
    timed = {name: row for name, row in rows.items() if row["status"] == "timed"}
    found = {}
    for name, row in timed.items():
        gives = (row["gives"],) if row["gives"] == "logprob+entropy" else ("logprob+entropy", "logprob", "mean loss")
        peers = {n: r["ms"]["median"] for n, r in timed.items() if OURS not in n and r["gives"] in gives}
        if OURS in name and peers:
            best = min(peers, key=lambda peer: peers[peer])
            found[name] = {"peer": best, "peer_over_ours": peers[best] / row["ms"]["median"]}
    return found


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
    parser.add_argument("--exclude", action="append", default=[], help="a part of candidates' names")
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
        "machine": machine(device, command, arguments.commit),
        "packages": versions(),
        "ceilings": asdict(ceilings),
        "missing": {},
        "lost": [],
        "shapes": [],
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
    if not all(one["passed"] is not False for one in result.get("checks", [])):
        sys.exit("some checks failed")


def bench(run: Run, arguments: argparse.Namespace, argv: Sequence[str], result: dict[str, Any]) -> None:
    """Shape after shape, each written when it is done."""
    done = {(shape["kind"], shape["name"]) for shape in result["shapes"]}
    for shape in shapes_of(arguments):
        if (shape.kind, shape.name) in done:
            continue
        try:
            found = run_shape(run, shape)
        except DeviceLostError as lost:
            result["lost"].append({"candidate": str(lost), "shape": shape.name, "kind": shape.kind})
            write(result, arguments)
            again = [*argv, "--resume", "--exclude", str(lost), "--limit", str(run.deadline.left())]
            os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu_logprob", *again])
        result["shapes"].append(found)
        result["missing"] = run.missing
        write(result, arguments)
        print(f"{shape.kind} {shape.name}: {run.deadline.left():.0f} s left", flush=True)
        for mode, best in found["best_peer"].items():
            for name, one in best.items():
                row = found["modes"][mode][name]
                print(
                    f"  {mode}: {name} {row['ms']['median']:.3f} ms, {row['share_of_floor']:.0%} of the floor, "
                    f"{one['peer_over_ours']:.2f}x {one['peer']}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
