"""What a rank is doing, read from its stacks; and one readable report made of what all ranks have written."""

from __future__ import annotations

import json
import linecache
import sys
import sysconfig
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import megarlhf
from megarlhf.atomic_write import atomic_write

MAX_STACKS = 8
"""Ranks whose stacks are printed; the files have all."""
SHOWN_FRAMES = 12

_COLLECTIVES = ("distributed_c10d.py", "p2p_communication.py", "functional_collectives.py")
"""Files whose functions wait for other ranks."""


@dataclass(frozen=True)
class RankState:
    """What one rank was doing when the watchdog looked."""

    rank: int
    host: str
    pid: int
    phase: str
    """Empty: in none."""
    seconds: float
    """In the phase."""
    limit: float
    late: bool
    """Whether this rank has passed a limit itself; another rank may have."""
    waits: bool
    """Whether it waits for other ranks in a collective."""
    place: str
    """`file.py:12 in function: line`, of the user's code where there is any."""
    stack: list[str]
    """Of the main thread, innermost last."""
    threads: dict[str, list[str]]
    """Of the other threads."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


def waits_for_others(frame: FrameType | None) -> bool:
    """Whether the stack that ends in `frame` stands in a collective, or where one rank's failure is told to all."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_COLLECTIVES):
            return True
        if file.endswith("collective_errors.py") and frame.f_code.co_name == "__exit__":
            return True
        frame = frame.f_back
    # A handle of an asynchronous collective is waited for in C++, without a frame of its own.
    line = "" if innermost is None else linecache.getline(innermost.f_code.co_filename, innermost.f_lineno)
    return ".wait()" in line or "barrier(" in line


def place_of(frame: FrameType | None) -> str:
    """The innermost line of the user's own code; of ours where there is none."""
    frames = [e for e in reversed(traceback.extract_stack(frame)) if not e.filename.endswith("collective_errors.py")]
    libraries = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    package = str(Path(megarlhf.__file__).parent)
    own = [e for e in frames if e.filename.startswith(package) or not e.filename.startswith((*libraries, "<"))]
    users = [entry for entry in own if not entry.filename.startswith(package)]
    # The user's code is what we call: below it stands a frame of ours. What calls us is a launcher.
    called = [entry for entry in users if any(other.filename.startswith(package) for other in own[own.index(entry) :])]
    chosen = next(iter(called or own or frames), None)
    return "nowhere" if chosen is None else f"{chosen.filename}:{chosen.lineno} in {chosen.name}: {chosen.line}"


def stack_of(frame: FrameType | None) -> list[str]:
    """A line for each call, innermost last."""
    return [f"{e.filename}:{e.lineno} in {e.name}: {e.line}" for e in traceback.extract_stack(frame)]


def stacks_of_threads() -> tuple[FrameType | None, dict[str, list[str]]]:
    """The main thread's frame, and the stacks of all others but this one."""
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
    """As `rank_RRRRR.json`, complete or not at all; a signal handler and a thread of one rank may write at once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{state.rank:05d}.json"
    atomic_write(path, json.dumps(asdict(state), indent=1), synced=False, writer=threading.get_ident())


def read_states(folder: Path) -> list[RankState]:
    """Of all ranks that have written, by rank."""
    return [
        RankState(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("rank_*[0-9].json"))
    ]


def describe(states: Sequence[RankState], hosts: Sequence[str], folder: Path) -> str:
    """The report: which phase of which rank, who does something else than wait (first), who wrote nothing.

    hosts: of every rank of the run
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
        lines.append(f"  so do {len(busy) - MAX_STACKS} more: rank {_ranks(busy[MAX_STACKS:])}")
    # The odd one out first: where all wait, those that wait elsewhere are not at the others' collective.
    for place, group in sorted(waiting.items(), key=lambda item: len(item[1])):
        on = f" on {group[0].host}" if len(group) == 1 else ""
        lines.append(f"  rank {_ranks(group)}{on} waits in a collective, in {group[0].phase or 'no phase'!r}: {place}")
        if not busy:
            lines += [f"      {line}" for line in group[0].stack[-SHOWN_FRAMES:]]
    if not busy and len(waiting) > 1:
        lines.append("  All wait, and not in the same collective: some ranks have taken another way through the code")
    there = {state.rank for state in states}
    for rank, host in enumerate(hosts):
        if rank not in there:
            lines.append(
                f"  rank {rank} on {host} wrote nothing: it has died, it cannot write to the run directory, or it is "
                "in code that never gives Python's lock back"
            )
    lines.append(f"  The stacks of all threads: {folder}")
    return "\n".join(lines)


def _ranks(states: Sequence[RankState]) -> str:
    """`0, 2-5`."""
    runs: list[list[int]] = []
    for rank in sorted(state.rank for state in states):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def state_from(frame: FrameType | None, threads: Mapping[str, list[str]], **known: Any) -> RankState:
    """Of the main thread's `frame` and the other threads' stacks, and what else is known of the rank."""
    return RankState(
        waits=waits_for_others(frame), place=place_of(frame), stack=stack_of(frame), threads=dict(threads), **known
    )
