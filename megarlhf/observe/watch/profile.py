"""Traces and memory of single steps, recorded by torch's profiler and written to `run.dir/profile`.

The phases of a run are the ranges of its traces. https://ui.perfetto.dev reads their format (Chrome's).
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function, supported_activities

from megarlhf.atomic_write import atomic_path
from megarlhf.config.profile import ProfileConfig
from megarlhf.config.watchdog import WatchdogConfig
from megarlhf.observe.watch.phases import Observer, OpenPhase, PhaseExchange, Phases
from megarlhf.observe.watch.watchdog import watched_phases
from megarlhf.runtime import Runtime, record_allocations, synchronize, write_allocations

FOLDER = "profile"
CURVE = "bytes that the step has allocated and not freed"

log = logging.getLogger(__name__)


@contextlib.contextmanager
def recorded_phases(watchdog: WatchdogConfig, cfg: ProfileConfig, run_dir: Path, runtime: Runtime) -> Iterator[Phases]:
    """The watched phases of a run, recorded in the steps that `cfg` names. Collective."""
    with watched_phases(watchdog, run_dir, runtime) as phases:
        if not cfg.records_on(runtime.rank):
            yield phases
            return
        recorder = ProfileRecorder(cfg, phases, run_dir / FOLDER, runtime)
        phases.observer, phases.sharing = recorder, recorder
        try:
            yield phases
        finally:
            recorder.close()


class ProfileRecorder:
    """Records steps of one rank, from a step's first phase to `Phases.end_step`.

    It takes the place of the phases' observer and exchange, and calls those.
    """

    def __init__(self, cfg: ProfileConfig, phases: Phases, folder: Path, runtime: Runtime) -> None:
        self._cfg, self._phases, self._folder, self._runtime = cfg, phases, folder, runtime
        self._observer: Observer | None = phases.observer
        self._sharing: PhaseExchange | None = phases.sharing
        self._missing = set(cfg.recorded)
        """Steps that are not recorded yet."""
        self._recording: _Recording | None = None

    def entered(self, phase: OpenPhase) -> None:
        if self._observer is not None:
            self._observer.entered(phase)
        if self._recording is None and self._phases.step in self._missing:
            self._recording = _Recording(self._cfg, self._phases.step, self._runtime)
        if self._recording is not None:
            self._recording.enter(phase)

    def left(self, phase: OpenPhase, failure: BaseException | None) -> None:
        if self._recording is not None:
            self._recording.leave(phase)
        if self._observer is not None:
            self._observer.left(phase, failure)

    def end_step(self, step: int, local_seconds: Mapping[str, float]) -> Exception | None:
        """Stop and write the recording; see `PhaseExchange`."""
        recording, self._recording = self._recording, None  # torch's profiler may not be stopped twice
        if recording is not None:
            self._missing.discard(step)  # the next phase is not recorded
            recording.stop()
            with self._phases("checkpoint"):
                recording.write(self._folder)
        return None if self._sharing is None else self._sharing.end_step(step, local_seconds)

    def close(self) -> None:
        """End without writing an incomplete step.

        On a GPU the recording ends with the process. Stopping it would wait for all kernels, and after a failure one
        of them may wait for another rank for ever.
        """
        recording, self._recording = self._recording, None
        if recording is not None and self._runtime.device.type == "cpu":
            recording.stop()
        if self._missing and self._runtime.is_main:
            log.warning(
                "profile: step %s was not recorded, because this start has not run it from begin to end",
                ", ".join(map(str, sorted(self._missing))),
            )
        self._missing.clear()


class _Recording:
    """One step of one rank. Recording begins when the object is made."""

    def __init__(self, cfg: ProfileConfig, step: int, runtime: Runtime) -> None:
        self._device, on_cpu = runtime.device, runtime.device.type == "cpu"
        self._name = f"step_{step:06d}_rank_{runtime.rank:05d}"
        self._traced, self._memory = step in cfg.steps, step == cfg.memory_snapshot
        self._curve, self._history = self._memory and on_cpu, self._memory and not on_cpu
        self._ranges: list[tuple[int, record_function]] = []
        """Ranges of the open phases, with their serials, outermost first."""
        synchronize(self._device)  # earlier launches do not belong to this step
        if self._history:
            record_allocations(self._device)
        self._profiler: profile | None = None
        if self._traced or self._curve:
            self._profiler = profile(activities=supported_activities(), profile_memory=self._curve)
            self._profiler.start()

    def enter(self, phase: OpenPhase) -> None:
        self._ranges.append((phase.serial, record_function(phase.name)))
        self._ranges[-1][1].__enter__()

    def leave(self, phase: OpenPhase) -> None:
        if self._ranges and self._ranges[-1][0] == phase.serial:  # else it was open before the recording began
            self._ranges.pop()[1].__exit__(None, None, None)

    def stop(self) -> None:
        while self._ranges:
            self._ranges.pop()[1].__exit__(None, None, None)
        synchronize(self._device)
        if self._profiler is not None:
            self._profiler.stop()

    def write(self, folder: Path) -> None:
        """Write files, each completely or not at all. A failure is logged and does not end the run."""
        try:
            folder.mkdir(exist_ok=True)
            if self._history:
                with atomic_path(folder / f"{self._name}.memory.pickle", synced=False) as partial:
                    write_allocations(self._device, partial)
            if self._profiler is not None:
                self._write_trace(self._profiler, folder)
        except OSError as error:
            log.warning("profile: %s could not be written: %s", folder / self._name, error)

    def _write_trace(self, profiler: profile, folder: Path) -> None:
        with atomic_path(folder / f"{self._name}.trace.json", synced=False) as partial:
            profiler.export_chrome_trace(str(partial))
            if self._curve:
                with atomic_path(folder / f"{self._name}.memory.json", synced=False) as curve:
                    trace = json.loads(partial.read_text(encoding="utf-8"))
                    curve.write_text(json.dumps(memory_curve(trace)), encoding="utf-8")
            if not self._traced:
                partial.unlink()


def memory_curve(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The phases of a trace with memory, and a counter of bytes that were allocated in it and not freed.

    Both are in Chrome's trace format. Frees of memory that was allocated before the trace do not count.
    """
    kept, held = [], 0
    for event in sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0.0)):
        if event.get("name") == "[memory]":
            held += event["args"]["Bytes"]
            origin = {key: event[key] for key in ("ts", "pid", "tid")}
            kept.append({"ph": "C", "name": CURVE, **origin, "args": {"bytes": held}})
        elif event.get("cat") == "user_annotation" or event.get("ph") == "M":
            kept.append(event)
    return {**trace, "traceEvents": kept}
