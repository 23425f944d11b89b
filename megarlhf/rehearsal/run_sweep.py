"""Rehearse the variants of a sweep, print and write them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from megarlhf.config import RLConfig, dump_config
from megarlhf.observe.report.html_page import check_replaceable, write_whole
from megarlhf.observe.terminal.progress import table
from megarlhf.planning.batch import dpo_batch_numbers, rl_batch_numbers, supervised_batch_numbers
from megarlhf.planning.layout import check_role
from megarlhf.rehearsal.processes import OnProgress, RankFailed
from megarlhf.rehearsal.rehearse import rehearse
from megarlhf.rehearsal.request import Request
from megarlhf.rehearsal.result import Result
from megarlhf.rehearsal.steady_round import round_seconds
from megarlhf.rehearsal.sweep import Axis, Sweep, Variant, best_first, least_bytes, trainer_of, variants
from megarlhf.rollout.engines import engine_of

GIB = 2**30
CLEARLY = 1.1
"""Ratio of the estimated seconds of two rollouts that lets a sweep leave out the slower one. Estimates of the same
engine differ by some percent between steps."""


def run_sweep(
    axes: Sequence[Axis],
    load: Callable[[Sequence[str]], Any],
    request_of: Callable[[Any], Request],
    show_progress: Callable[[], AbstractContextManager[OnProgress]],
) -> Sweep:
    """Every combination of values: refused, too large by its parameters alone, or rehearsed.

    Of combinations that differ in the engine alone, those with the fastest rollout are rehearsed first, and after one
    that runs those are left out whose rollout takes clearly longer.

    Raises: ValueError for an unknown key, and where no combination can run, before anything is rehearsed.
    """
    sweep, candidates = Sweep(), []
    for overrides, cfg in variants(axes, load, lambda cfg: _check(request_of(cfg))):
        if isinstance(cfg, str):
            sweep.illegal.append((overrides, cfg))
            continue
        request = request_of(cfg)
        least = least_bytes(cfg, request.world_size, gpu=request.hardware.kind == "gpu")
        if least > request.device_bytes:
            sweep.too_large.append((overrides, least))
        else:
            candidates.append((Variant(overrides, cfg), request))
    if not candidates and not sweep.too_large:
        overrides, why = sweep.illegal[0]
        raise ValueError(
            f"--sweep: none of {len(sweep.illegal)} combinations can run; the first, {' '.join(overrides)}: {why}"
        )
    if sweep.illegal:
        print(_such_as(sweep.illegal, "cannot run"), flush=True)
    done = []
    fastest: dict[str, float] = {}
    """Seconds of the rollout of the first variant that runs, by the trainer's part."""
    for number, (seconds, trainer, variant, request) in enumerate(_fastest_rollout_first(candidates, sweep), 1):
        if seconds > CLEARLY * fastest.get(trainer, math.inf):
            sweep.slower.append((variant.overrides, seconds))
            continue
        with show_progress() as on_progress:
            print(f"{number} of {len(candidates)}: {' '.join(variant.overrides)}", flush=True)
            try:
                done.append((variant, rehearse(request, on_progress)))
            except ValueError as error:
                sweep.illegal.append((variant.overrides, str(error)))
            except RankFailed as error:
                sweep.failed.append((variant.overrides, str(error)))
            else:
                if done[-1][1].runs and seconds:
                    fastest.setdefault(trainer, seconds)
    sweep.done = best_first(done)
    return sweep


def _fastest_rollout_first(
    candidates: Sequence[tuple[Variant, Request]], sweep: Sweep
) -> list[tuple[float, str, Variant, Request]]:
    """(seconds of the rollout, text of the trainer's part, variant, request), fastest first; 0 seconds and their own
    order where no engine is rehearsed. Engines that cannot start are put among the illegal."""
    estimated = []
    for variant, request in candidates:
        if not (isinstance(request.cfg, RLConfig) and engine_of(request.cfg.rollout).has_own_weights):
            estimated.append((0.0, "", variant, request))
            continue
        try:
            estimated.append((round_seconds(request), trainer_of(request.cfg), variant, request))
        except ValueError as error:
            sweep.illegal.append((variant.overrides, str(error)))
    return sorted(estimated, key=lambda each: each[0])


def _check(request: Request) -> None:
    """Refuse a layout that does not divide, without a rehearsal. Raises: ValueError."""
    cfg, world_size = request.cfg, request.world_size
    layouts = {name: check_role(name, section, world_size)[1] for name, section in cfg.roles().items()}
    if request.command == "rl":
        rl_batch_numbers(cfg, world_size)
        engine = cfg.rollout.tp(cfg.actor)
        if engine_of(cfg.rollout).has_own_weights and world_size % engine:
            raise ValueError(f"rollout.parallel.tp = {engine} does not divide {world_size} ranks")
    elif request.command == "dpo":
        dpo_batch_numbers(cfg, world_size)
    else:
        (role,) = layouts
        supervised_batch_numbers(cfg.train, layouts[role].dp, role, "sequences")


COLUMNS = (
    "variant",
    "fits",
    "need GiB",
    "free GiB",
    "tightest",
    "s a step",
    "rollout s",
    "tokens/s",
    "MFU",
    "GB a step between nodes",
)
DIGITS = {"need GiB": 1, "free GiB": 1, "s a step": 2, "rollout s": 2, "tokens/s": 0, "MFU": 3}
"""Digits in the printed table. `sweep.json` has all."""


def print_sweep(sweep: Sweep, console: Console) -> None:
    """Print a table, best first, and what was left out."""
    rows = [_rounded(_row(variant, result)) for variant, result in sweep.done]
    console.print(table("Sweep, best first (times are estimates)", rows, COLUMNS))
    if sweep.too_large:
        console.print(
            f"{len(sweep.too_large)} left out, whose parameters alone are larger than the device, such as "
            f"{' '.join(sweep.too_large[0][0])} with {sweep.too_large[0][1] / GIB:.1f} GiB",
            highlight=False,
            markup=False,
        )
    if sweep.slower:
        overrides, seconds = sweep.slower[0]
        console.print(
            f"{len(sweep.slower)} left out, which differ in the engine alone from one that runs, and whose rollout is "
            f"estimated to take over {CLEARLY:g} times as long, such as {' '.join(overrides)} with {seconds:.1f} s",
            highlight=False,
            markup=False,
        )
    for left_out, outcome in ((sweep.illegal, "cannot run"), (sweep.failed, "failed")):
        if left_out:
            console.print(_such_as(left_out, outcome), highlight=False, markup=False)


def _such_as(left_out: Sequence[tuple[tuple[str, ...], str]], outcome: str) -> str:
    """Number of combinations that are left out, and why the first one is."""
    overrides, why = left_out[0]
    return f"{len(left_out)} {outcome}, such as {' '.join(overrides)}: {why}"


def _row(variant: Variant, result: Result) -> tuple[object, ...]:
    tightest = result.tightest_rank
    last = result.times[-1] if result.times else None
    step, phase = tightest.peak_at
    return (
        " ".join(variant.overrides),
        "yes" if result.fits else "no",
        tightest.need / GIB,
        result.free / GIB,
        f"rank {tightest.rank}, step {step}, {phase}",
        None if last is None else last.seconds,
        None if not result.rollouts else result.rollouts[-1].slowest,
        None if last is None else last.tokens_per_second,
        None if last is None else last.utilisation,
        sum(row.nbytes for row in tightest.messages if row.between_nodes and row.step == result.steps) / 1e9,
    )


def _rounded(row: tuple[object, ...]) -> tuple[object, ...]:
    pairs = zip(COLUMNS, row, strict=True)
    return tuple(round(value, DIGITS.get(name, 1)) if isinstance(value, float) else value for name, value in pairs)


_OWN = '"too_large": '
"""A key that no other file has."""


def check_sweep_out(out: Path) -> None:
    """Refuse, before a sweep begins, to replace files that are not ours.

    Raises: ValueError where `out` holds such a file under a name that `write_sweep` would use.
    """
    check_replaceable(out / "sweep.json", _OWN, "sweep of megarlhf rehearse")
    best = out / "best.yaml"
    if best.exists() and not (out / "sweep.json").exists():
        raise ValueError(f"{best} exists without a sweep.json; nothing is replaced: name another folder (--out DIR)")


def write_sweep(sweep: Sweep, out: Path) -> list[Path]:
    """Write `sweep.json`, and `best.yaml` where a variant fits. Returns their paths."""
    record = {
        "done": [
            {
                "overrides": list(variant.overrides),
                **dict(zip(COLUMNS[1:], _row(variant, result)[1:], strict=True)),
                "refusals": result.refusals,
                "faults": result.faults,
            }
            for variant, result in sweep.done
        ],
        "too_large": [{"overrides": list(overrides), "bytes": nbytes} for overrides, nbytes in sweep.too_large],
        "slower": [{"overrides": list(overrides), "rollout s": seconds} for overrides, seconds in sweep.slower],
        "illegal": [{"overrides": list(overrides), "why": why} for overrides, why in sweep.illegal],
        "failed": [{"overrides": list(overrides), "why": why} for overrides, why in sweep.failed],
    }
    write_whole(out / "sweep.json", json.dumps(record, indent=1) + "\n")
    written = [out / "sweep.json"]
    best = out / "best.yaml"
    if sweep.best is None:
        best.unlink(missing_ok=True)  # of an earlier sweep
    else:
        write_whole(best, dump_config(sweep.best.cfg))
        written.append(best)
    return written
