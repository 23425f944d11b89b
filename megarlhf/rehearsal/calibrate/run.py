"""Measurement of the machine at hand, written as a hardware file: `megarlhf calibrate -o FILE`."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import yaml

from megarlhf.atomic_write import atomic_write
from megarlhf.memory import available_bytes
from megarlhf.observe.terminal.progress import Progress
from megarlhf.rehearsal.calibrate.host import host_seconds
from megarlhf.rehearsal.calibrate.messages import make_groups, measure_collectives, median_over_ranks, num_collectives
from megarlhf.rehearsal.calibrate.work import (
    CPU,
    DTYPES,
    GPU,
    QUICK,
    bandwidth_of,
    measure_attention,
    measure_memory,
    measure_products,
    num_figures,
    peak_of,
)
from megarlhf.rehearsal.cost_model.hardware import CollectiveTime, Hardware
from megarlhf.rehearsal.cost_model.pricing import Pricing
from megarlhf.runtime import Runtime, capabilities, gpu_in_use

NOTHING = 1e-12
"""Seconds of a launch, before it is measured."""
SEE = "megarlhf calibrate, see measured.source"
HEAD = """# Written by `megarlhf calibrate`. Keys: docs/rehearsal-gpu.md, Hardware files. Units: bytes and seconds.
# Rows of the tables: products [dtype, batch, m, k, n, seconds], memory [kind, dtype, bytes, seconds],
# attention [dtype, direction, heads, length, head_dim, seconds],
# collectives [operation, ranks, nodes, place, bytes, seconds].
"""


def calibrate(runtime: Runtime, *, quick: bool) -> Hardware | None:
    """Measure this rank's device and the links to the others. Collective.

    All ranks measure at the same time, as they compute at the same time in a run. A figure is the median over ranks.

    Returns: the hardware on the first rank, None on the others.
    """
    kind: Literal["cpu", "gpu"] = "cpu" if runtime.device.type == "cpu" else "gpu"
    sizes = QUICK if quick else (CPU if kind == "cpu" else GPU)
    groups = make_groups(runtime)
    total = num_figures(sizes) + num_collectives(groups) + 1
    with Progress("calibrate", total, enabled=runtime.is_main, headline=()) as progress:
        note = _ProgressNotes(progress)
        products = median_over_ranks(measure_products(runtime.device, sizes, note))
        memory = median_over_ranks(measure_memory(runtime.device, sizes, note))
        attention = median_over_ranks(measure_attention(runtime.device, sizes, note))
        collectives = measure_collectives(runtime, groups, sizes, note)
        if kind == "cpu":  # where device and host are the same
            collectives += [row._replace(place="host") for row in collectives]
        measured = {"products": products, "memory": memory, "attention": attention, "collectives": collectives}
        tree = _tree(runtime, kind, measured, NOTHING)
        note("host")
        price = Pricing(Hardware.model_validate(tree), runtime.local_world_size)
        launch = host_seconds(runtime, price if kind == "cpu" else _Free(), repeats=3 * sizes.samples)
    launches: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(launches, launch)
    tree = _tree(runtime, kind, measured, sorted(launches)[len(launches) // 2])
    return Hardware.model_validate(tree) if runtime.is_main else None


class _Free:
    """Prices of a device that takes no time."""

    def operation_seconds(self, *args: object, **kwargs: object) -> float:
        return 0.0


class _ProgressNotes:
    """Progress bar; called with the name of the next measurement."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._done, self._last = progress, 0, ""

    def __call__(self, what: str) -> None:
        if what != self._last:
            self._last = what
            self._progress.note(what)
        self._done += 1
        self._progress.step(self._done, {})


def _tree(
    runtime: Runtime, kind: Literal["cpu", "gpu"], measured: Mapping[str, Sequence[Any]], launch: float
) -> dict[str, Any]:
    today, cores = datetime.date.today().isoformat(), len(os.sched_getaffinity(0))
    name = capabilities().device_name
    source = (
        f"measured by megarlhf calibrate on {name}, {runtime.world_size} ranks, {runtime.local_world_size} a node, "
        f"{torch.get_num_threads()} threads a rank on {cores} cores, torch {torch.__version__}, "
        f"{platform.platform(terse=True)}, {today}"
    )
    figure = _figure_of(SEE)
    whole = {"value": 1.0, "source": "the peak is what was reached"}
    products, memory = measured["products"], measured["memory"]
    peaks = {dtype: figure(peak_of(products, dtype)) for dtype in DTYPES}
    attention = max(
        2.0 * row.heads * row.length**2 * row.head_dim / row.seconds
        for row in measured["attention"]
        if row.direction == "forward" and row.dtype == "float32"
    )
    share = min(1.0, attention / peaks["float32"]["value"])
    collectives: Sequence[CollectiveTime] = measured["collectives"]
    inside = _link([c for c in collectives if c.nodes == 1 and c.place == "device"])
    between = _link([c for c in collectives if c.nodes > 1 and c.place == "device"])
    host = _link([c for c in collectives if c.place == "host"])
    return {
        "name": name,
        "kind": kind,
        "memory": figure(available_bytes() if (gpu := gpu_in_use(runtime)) is None else gpu[2]),
        "peaks": peaks,
        "memory_bandwidth": figure(bandwidth_of(memory)),
        "launch": figure(launch),
        "efficiency": {
            "products": {"points": [{"flops": 1.0, "value": 1.0}], "source": whole["source"]},
            "attention": {"value": share, "source": SEE},
            "memory": whole,
        },
        "inside": inside,
        "between": between,
        "host": host,
        "engine_step": {"value": 3e-3, "source": "assumed: vLLM is not measured"},
        "measured": {"source": source} | {key: [list(row) for row in rows] for key, rows in measured.items()},
    }


def _figure_of(source: str) -> Callable[[float], dict[str, Any]]:
    return lambda value: {"value": float(value), "source": source}


def _link(rows: Sequence[CollectiveTime]) -> dict[str, Any]:
    """Figures of a link from sends, or from broadcasts where no two ranks were alone. Without any they are assumed."""
    messages = [row for row in rows if row.operation == "send"] or [row for row in rows if row.operation == "broadcast"]
    if not messages:
        why = "assumed: no other rank was there to be measured"
        return {"bandwidth": {"value": 1e9, "source": why}, "latency": {"value": 1e-4, "source": why}}
    first, last = min(messages, key=lambda row: row.nbytes), max(messages, key=lambda row: row.nbytes)
    seconds = max(last.seconds - first.seconds, 1e-9)
    return {
        "bandwidth": {"value": max(1, last.nbytes - first.nbytes) / seconds, "source": SEE},
        "latency": {"value": first.seconds, "source": SEE},
    }


def require_writable(path: Path) -> None:
    """Refuse a path that cannot be written, before anything is measured. Raises: ValueError."""
    if path.is_dir():
        raise ValueError(f"-o {path} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"-o {path}: there is no directory {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"-o {path} cannot be written; check its permissions")


def write_hardware(hardware: Hardware, path: Path) -> None:
    """Write the file whole or not at all. A file that exists stays until the new one is complete.

    Raises: ValueError where it cannot be written.
    """
    tree = hardware.model_dump(mode="json", exclude_none=True)
    text = HEAD + yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=160, allow_unicode=True)
    try:
        atomic_write(path, text, writer=os.getpid())
    except OSError as error:
        raise ValueError(f"-o {path} cannot be written: {error}") from error
