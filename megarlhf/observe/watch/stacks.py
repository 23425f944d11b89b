"""The state of a rank, read from its stacks, and one readable report of the states of all ranks."""

from __future__ import annotations

import json
import linecache
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import megarlhf
from megarlhf.atomic_write import atomic_write

MAX_STACKS = 8
"""Most ranks whose stacks are printed; the files have all."""
SHOWN_FRAMES = 12

_COLLECTIVES = ("distributed_c10d.py", "p2p_communication.py", "functional_collectives.py")
"""Files whose functions wait for other ranks."""


@dataclass(frozen=True)
class RankState:
    """The state of one rank when the watchdog looked."""

    rank: int
    host: str
    pid: int
    phase: str
    """Name of the open phase; empty if there is none."""
    seconds: float
    """Seconds since the phase began."""
    limit: float
    late: bool
    """Whether this rank has passed the limit itself. If not, another one has."""
    waits: bool
    """Whether the rank waits for others in a collective."""
    place: str
    """`file.py:12 in function: line`, in the user's code if possible."""
    stack: list[str]
    """Stack of the main thread, innermost call last."""
    threads: dict[str, list[str]]
    """Stacks of the other threads, by name."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


def waits_for_others(frame: FrameType | None) -> bool:
    """Whether the stack that ends in `frame` is in a collective, or where one rank's failure is sent to all."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_COLLECTIVES):
            return True
        if file.endswith("collective_errors.py") and frame.f_code.co_name == "__exit__":
            return True
        frame = frame.f_back
    # Waiting for an asynchronous collective happens in C++, without a frame of its own.
    line = "" if innermost is None else linecache.getline(innermost.f_code.co_filename, innermost.f_lineno)
    return ".wait()" in line or "barrier(" in line


def innermost_line(frame: FrameType | None) -> str:
    """The innermost line of the user's own code, or of ours if there is none."""
    frames = [e for e in reversed(traceback.extract_stack(frame)) if not e.filename.endswith("collective_errors.py")]
    libraries = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    package = str(Path(megarlhf.__file__).parent)
    own = [e for e in frames if e.filename.startswith(package) or not e.filename.startswith((*libraries, "<"))]
    # The user's code is called by ours, so a frame of ours is below it. A launcher's code calls ours.
    users = [
        entry
        for n, entry in enumerate(own)
        if not entry.filename.startswith(package) and any(other.filename.startswith(package) for other in own[n:])
    ]
    chosen = next(iter(users or own or frames), None)
    return "nowhere" if chosen is None else f"{chosen.filename}:{chosen.lineno} in {chosen.name}: {chosen.line}"


def stack_of(frame: FrameType | None) -> list[str]:
    """One line for each call, innermost last."""
    return [f"{e.filename}:{e.lineno} in {e.name}: {e.line}" for e in traceback.extract_stack(frame)]


def stacks_of_threads() -> tuple[FrameType | None, dict[str, list[str]]]:
    """The main thread's frame, and the stacks of all threads but that one and the calling one."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    others = {
        f"{names.get(ident, 'thread')} ({ident})": stack_of(frame)
        for ident, frame in frames.items()
        if ident not in (main, threading.get_ident())
    }
    return frames.get(main or 0), others


def write_state(state: RankState, folder: Path) -> None:
    """Write `rank_RRRRR.json`, completely or not at all. A rank's signal handler and thread may write at once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{state.rank:05d}.json"
    atomic_write(path, json.dumps(asdict(state), indent=1), synced=False, writer=threading.get_ident())


def read_states(folder: Path) -> list[RankState]:
    """Read the states of all ranks that have written theirs, by rank."""
    return [
        RankState(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("rank_*[0-9].json"))
    ]


def describe_states(states: Sequence[RankState], hosts: Sequence[str], folder: Path) -> str:
    """The report: the late phase, ranks that do not wait (first), ranks that wait, and ranks that wrote nothing.

    hosts: the host of every rank
    """
    late = max((state for state in states if state.late), key=lambda s: s.seconds - s.limit, default=states[0])
    key = f"watchdog.{late.phase.partition('/')[0]} = {late.limit:g} s"
    lines = [f"watchdog: phase {late.phase!r} has passed its limit: {late.seconds:.0f} s on {late.name}; {key}"]
    busy = [state for state in states if not state.waits]
    waiting: dict[str, list[RankState]] = {}
    for state in states:
        if state.waits:
            waiting.setdefault(state.place, []).append(state)
    for state in busy[:MAX_STACKS]:
        lines.append(f"  {state.name} (pid {state.pid}) does not wait for others. In {state.phase or 'no phase'!r}: ")
        lines[-1] += state.place
        lines += [f"      {line}" for line in state.stack[-SHOWN_FRAMES:]]
    if len(busy) > MAX_STACKS:
        lines.append(f"  so do {len(busy) - MAX_STACKS} more: rank {rank_ranges(s.rank for s in busy[MAX_STACKS:])}")
    # The smallest group first: if all wait, those ranks are not at the others' collective.
    for place, group in sorted(waiting.items(), key=lambda item: len(item[1])):
        ranks = rank_ranges(state.rank for state in group) + (f" on {group[0].host}" if len(group) == 1 else "")
        lines.append(f"  rank {ranks} waits in a collective, in {group[0].phase or 'no phase'!r}: {place}")
        if not busy:
            lines += [f"      {line}" for line in group[0].stack[-SHOWN_FRAMES:]]
    if not busy and len(waiting) > 1:
        lines.append("  All wait, and not in the same collective: some ranks have taken another way through the code")
    known = {state.rank for state in states}
    for rank, host in enumerate(hosts):
        if rank not in known:
            lines.append(
                f"  rank {rank} on {host} wrote nothing: it has died, cannot write to the run directory, or is in code "
                "that never releases Python's lock"
            )
    lines.append(f"  The stacks of all threads: {folder}")
    return "\n".join(lines)


def rank_ranges(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> `0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def state_from(frame: FrameType | None, threads: Mapping[str, list[str]], **known: Any) -> RankState:
    """The state of a rank from its main thread's `frame`, its other threads' stacks, and `known` fields."""
    return RankState(
        waits=waits_for_others(frame),
        place=innermost_line(frame),
        stack=stack_of(frame),
        threads=dict(threads),
        **known,
    )
