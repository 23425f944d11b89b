"""One shape of `benchmarks.gpu_logprob`: every candidate judged, those that are right timed in rounds."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import Ceilings, Clock, Deadline, linear_floor_ms, logits_floor_ms, peak_extra_bytes, spread
from benchmarks.gpu_truth import Inputs, Shape, Truth, judge_gradients, judge_values, make_inputs, make_truth
from benchmarks.peers_logprob import MODES, OURS, Candidate, candidates, excluded, planted

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
        if excluded(name, self.exclude):
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


@dataclass(frozen=True)
class Call:
    """What is timed, what it works on, and what has to be done before each time."""

    run: Callable[[], Any]
    tensors: tuple[Tensor, ...]
    prepare: Callable[[], object] | None = None


def call_of(candidate: Candidate, inputs: Inputs, mode: str) -> Call:
    """A candidate that overwrites its inputs gets some of its own, filled again before each call."""
    if mode == "forward":
        return Call(partial(_forward, candidate, inputs.tensors, inputs.labels_T), inputs.tensors)
    upstream = inputs.upstream(candidate.gives, candidate.sign)
    tensors, prepare = inputs.tensors, None
    if candidate.overwrites:
        tensors = tuple(tensor.clone() for tensor in tensors)
        prepare = partial(_restore, tensors, inputs.tensors)
    return Call(partial(_both, candidate, tensors, inputs.labels_T, upstream), tensors, prepare)


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
        outputs, leaves, [up.to(output.dtype) for up, output in zip(upstream, outputs, strict=True)]
    )
    return tuple(output.detach() for output in outputs), gradients


def gate(run: Run, candidate: Candidate, inputs: Inputs, truth: Truth, mode: str) -> Row:
    """One call, judged; its memory. `status` is "passed" or says why the candidate is not timed."""
    row: Row = {"gives": candidate.gives, "note": candidate.note, "status": "passed", "reason": None, "errors": {}}
    if reason := run.may_go_on(candidate.name):
        return row | {"status": "skipped", "reason": reason}
    start = time.monotonic()
    try:
        with run.charged(candidate.name), _alarm(run.first_call_seconds):
            call = call_of(candidate, inputs, mode)
            outputs, gradients = call.run()
            row["results_in"] = str(outputs[0].dtype).removeprefix("torch.")
            verdicts = [judge_values(truth, candidate.gives, candidate.sign, outputs)]
            if gradients is not None:
                verdicts.append(judge_gradients(truth, candidate.gives, gradients))
            del outputs, gradients
            row["peak_extra_bytes"] = peak_extra_bytes(call.run, call.tensors, run.clock.device)
    except Exception as error:  # noqa: BLE001 -- a peer may raise anything; the reason is listed
        row |= raised(error)
    else:
        row["errors"] = {name: error for verdict in verdicts for name, error in verdict.errors.items()}
        if reasons := [verdict.reason for verdict in verdicts if verdict.reason]:
            row |= {"status": "refused", "reason": "; ".join(reasons)}
    _tidy(run.clock.device, candidate.name, failed=row["status"] == "raised")
    return row | {"gate_s": time.monotonic() - start}


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


def raised(error: Exception) -> Row:
    """What a row says then."""
    return {"status": "raised", "reason": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}


def time_all(run: Run, passed: dict[str, Candidate], rows: dict[str, Row], inputs: Inputs, mode: str) -> None:
    """Rounds over all that passed, to and fro; the figures go into their rows."""
    calls = {name: call_of(candidate, inputs, mode) for name, candidate in passed.items()}
    once: dict[str, float] = {}
    medians: dict[str, list[float]] = {name: [] for name in calls}
    # Round 0 warms up and says how long a call takes.
    for number in range(run.rounds + 1):
        for name in list(calls) if number % 2 == 0 else list(reversed(calls)):
            if reason := run.may_go_on(name):
                rows[name]["stopped"] = reason
                continue
            several = max(1, min(_MOST_CALLS, int(_ROUND_MS / max(once.get(name, _ROUND_MS), 1e-3))))
            call = calls[name]
            try:
                with run.charged(name):
                    median = spread(run.clock(call.run, call.prepare) for _ in range(several))["median"]
            except Exception as error:  # noqa: BLE001 -- out of memory beside the others' caches, say: listed
                rows[name] |= raised(error)
                del calls[name], medians[name]
                _tidy(run.clock.device, name, failed=True)
                continue
            medians[name].append(median)
            once.setdefault(name, median)
    for name, values in medians.items():
        if len(values) < 2:
            rows[name] |= {"status": "skipped", "reason": rows[name]["stopped"]}
            continue
        ms = spread(values[1:])
        share = rows[name]["floor_ms"] / ms["median"]
        rows[name] |= {"status": "timed", "ms": ms, "rounds": values[1:], "share_of_floor": share}


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
    here, missing = candidates(shape, run.clock.device, run.exclude)
    run.missing |= missing
    if run.plant:
        here += planted(shape, run.clock.device)
    modes: dict[str, dict[str, Row]] = {}
    for mode in MODES:
        able = {candidate.name: candidate for candidate in here if mode in candidate.modes}
        rows = {name: gate(run, candidate, inputs, truth, mode) for name, candidate in able.items()}
        for name, row in rows.items():
            row["floor_ms"] = floor_ms(shape, able[name], mode, run.ceilings)
        passed = {name: able[name] for name, row in rows.items() if row["status"] == "passed"}
        time_all(run, passed, rows, inputs, mode)
        modes[mode] = rows
    bare = None
    if shape.kind == "linear":
        hidden_TH, weight_VH = inputs.tensors
        bare = run.clock.median(partial(torch.mm, hidden_TH, weight_VH.t()), run.rounds)
    about = asdict(shape) | {
        "name": shape.name,
        "columns": shape.columns,
        "collective": "left out",
        "bare_product_ms": bare,
    }
    best = {mode: best_peers(rows) for mode, rows in modes.items()}
    return about | {"value_tolerance": truth.value_tolerance, "best_peer": best, "modes": modes}


def best_peers(rows: dict[str, Row]) -> dict[str, dict[str, Any]]:
    """For each of our rows the fastest peer that gives as much, and its time over ours."""
    timed = {name: row for name, row in rows.items() if row["status"] == "timed"}
    fastest = {}
    for name, row in timed.items():
        gives = (row["gives"],) if row["gives"] == "logprob+entropy" else ("logprob+entropy", "logprob", "mean loss")
        peers = {n: r["ms"]["median"] for n, r in timed.items() if OURS not in n and r["gives"] in gives}
        if OURS in name and peers:
            best = min(peers, key=lambda peer: peers[peer])
            fastest[name] = {"peer": best, "peer_over_ours": peers[best] / row["ms"]["median"]}
    return fastest
