"""Writes the resume points of a run while training goes on.

A boundary is a moment between two optimizer updates. A point holds the state at a boundary. Roles are read when the
point is written, since only an update changes them; everything else is copied at the boundary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from megarlhf.collective_errors import from_first_rank, on_first_rank, raise_on_all_ranks
from megarlhf.config import CheckpointConfig
from megarlhf.models.role import Role
from megarlhf.provenance import FILE, Provenance
from megarlhf.resume.points import point, sharded_state
from megarlhf.resume.points.cadence import Cadence
from megarlhf.resume.points.file_digest import FileDigest
from megarlhf.resume.points.point import Position
from megarlhf.resume.points.restore import RANDOM, TABLE, Identity, MakeTable, layout_in_words, table_file
from megarlhf.resume.points.stateful import Stateful
from megarlhf.resume.points.writer import Content, PointWriter, WriteOutcome
from megarlhf.resume.signals import STOP_SIGNALS, StopRequest, StopRun, time_left
from megarlhf.runtime import Runtime, random_state

log = logging.getLogger(__name__)

_NOTHING, _WHEN_FREE, _NOW, _TIME_IS_UP = range(4)
"""Codes that ranks agree on at a boundary: the greatest one wins. Greater codes are signals that ask to stop."""


@dataclass(frozen=True)
class _Boundary:
    """State to be saved at a boundary beside the roles."""

    position: Position
    state: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]
    """States with tensors, by name; only those that are not empty."""
    random: Mapping[str, Any]
    """Random state of this rank."""
    table: MakeTable | None
    updates: int
    """Optimizer updates that this process had made."""


class Checkpointer:
    """Checkpointer of one run. Every public method is collective.

    `still_ours` is called on rank 0 before anything is written, and raises when the run directory has been taken over;
    `on_room` when there is room for a point: files that a full disk did not take can be written now.
    `on_saved` is called on rank 0 after a point has been written, with the position of the oldest of the newest
    `checkpoint.keep`: a start goes on from one of these, while those of `keep_every` are kept for people.
    `provenance` says where a role's weights come from at a position. `writer` makes what writes. `tables` are objects
    whose state has tensors; `states` are those whose state is JSON.
    """

    def __init__(
        self,
        runtime: Runtime,
        run_dir: Path,
        cfg: CheckpointConfig,
        roles: Sequence[Role],
        states: Mapping[str, Stateful],
        identity: Identity,
        stop: StopRequest,
        *,
        note: Callable[[str], None] = log.info,
        still_ours: Callable[[], object] = lambda: None,
        on_room: Callable[[], object] = lambda: None,
        on_saved: Callable[[Position], None] = lambda position: None,
        provenance: Callable[[str, Position], Provenance] | None = None,
        newest: Position | None = None,
        writer: Callable[[Runtime], PointWriter] = PointWriter,
        tables: Mapping[str, Stateful] = MappingProxyType({}),
    ) -> None:
        self._runtime, self._run_dir, self._cfg = runtime, run_dir, cfg
        self._roles, self._states, self._identity, self._stop = roles, states, identity, stop
        self._note, self._still_ours, self._on_room, self._on_saved = note, still_ours, on_room, on_saved
        self._provenance, self._tables = provenance, tables
        self._companions = _companion_files(runtime, roles)
        self._writer, self._cadence = writer(runtime), Cadence(cfg, _time_left_everywhere())
        self._boundary: _Boundary | None = None
        self._writing: Position | None = None
        """The point in work."""
        self._newest = newest
        """The newest point that this process has written or begun with."""
        self._announced = False
        self.seconds_standing = 0.0
        """Seconds for which training waited for points; the caller resets it."""
        if cfg.every_updates == 1:
            for role in roles:
                if role.trainer is not None:
                    role.trainer.before_update = self._complete_last

    def boundary_reached(
        self, position: Position, table: MakeTable | None = None, *, only_to_stop: bool = False
    ) -> None:
        """A boundary has been reached; a point of it is written when one is due, or `only_to_stop`.

        Raises: StopRun, when the run has been asked to stop or its time is nearly over, once the state is saved.
        """
        started = time.perf_counter()
        updates = self._updates_made()
        before = self._boundary.position if self._boundary else self._newest or Position(0)
        self._cadence.at_boundary(int(position != before and not only_to_stop))
        state = {name: stateful.state_dict() for name, stateful in self._states.items()}
        tables = {name: content for name, held in self._tables.items() if (content := held.state_dict())}
        self._boundary = _Boundary(position, state, tables, random_state(self._runtime.device), table, updates)
        self._poll()
        code = self._agree(position)
        if code >= _TIME_IS_UP:
            self._end(code)
        if code == _NOW and not only_to_stop:
            self._poll(wait=True)
        if code and not only_to_stop and not self._writer.busy and self._start() and not self._cfg.background:
            self._poll(wait=True)
        self.seconds_standing += time.perf_counter() - started

    def asked_to_stop(self) -> bool:
        """Tell whether this rank knows a reason to stop before the next boundary. Not collective."""
        return self._stop.requested() is not None or self._cadence.save_at_once()

    def stop_now(self, reason: Exception) -> NoReturn:
        """End the run between two boundaries, where nothing has been updated since the last one.

        Raises: StopRun, once the state is saved.
        """
        self._end(max(self._agree(None), _TIME_IS_UP), f"; {reason}")

    def stop_if_asked(self) -> None:
        """`stop_now` where any rank knows of a reason to stop."""
        reasons = torch.tensor(int(self.asked_to_stop()), device=self._runtime.device)
        dist.all_reduce(reasons, op=dist.ReduceOp.MAX)
        if int(reasons):
            self._end(max(self._agree(None), _TIME_IS_UP))

    def finish(self, *, last_boundary: bool) -> None:
        """Wait for what is being written; `last_boundary` keeps that too, if points are written by any cadence."""
        self._poll(wait=True)
        if last_boundary and self._cfg.by_cadence:
            self.save_last_boundary()

    def discard_boundary(self) -> None:
        """Forget the last boundary, because something else than an update has changed the weights."""
        self._boundary = None

    def abandon(self) -> None:
        """End what is being written and not complete; it is not a point. Not collective."""
        self._writer.abandon()

    def has_progress(self) -> bool:
        """Tell whether anything was done since the run began; its first boundary is not worth a point."""
        return self._boundary is None or self._boundary.position > Position(0)

    def save_last_boundary(self) -> str:
        """Write a point of the last boundary and wait for it; returns what has become of it, in a sentence."""
        boundary = self._boundary
        if boundary is None:
            if self._newest is None:
                return "there is nothing yet that could be saved; the same command begins again"
            return f"there is nothing new to save; the same command goes on from {self._name_of_newest()}"
        self._poll(wait=True)
        if self._updates_made() != boundary.updates:
            return f"an update was not complete, so the newest resume point is {self._name_of_newest()}"
        if self._newest != boundary.position and self._start():
            self._poll(wait=True)
        if self._newest != boundary.position:
            return f"{boundary.position} could not be saved, so the newest resume point is {self._name_of_newest()}"
        return f"saved {self._path(boundary.position)}; the same command goes on from there"

    def _agree(self, position: Position | None) -> int:
        asked = self._stop.requested()
        code = _NOTHING if asked is None else _TIME_IS_UP + 1 + STOP_SIGNALS.index(asked)
        if code == _NOTHING:
            if self._runtime.is_main and self._cadence.time_is_up():
                code = _TIME_IS_UP
            elif position is not None and self._cadence.due(position):  # which every rank knows
                code = _NOW
            elif self._runtime.is_main and position is not None and self._cadence.overdue():
                code = _WHEN_FREE
        codes = torch.tensor(code, device=self._runtime.device)
        dist.all_reduce(codes, op=dist.ReduceOp.MAX)
        return int(codes)

    def _end(self, code: int, more: str = "") -> NoReturn:
        number = STOP_SIGNALS[code - _TIME_IS_UP - 1] if code > _TIME_IS_UP else None
        why = number.name if number is not None else "the job's time is nearly over"
        raise StopRun(f"stopped ({why}): {self.save_last_boundary()}{more}", number)

    def _updates_made(self) -> int:
        return sum(role.trainer.updates for role in self._roles if role.trainer is not None)

    def _path(self, position: Position) -> Path:
        return point.resume_directory(self._run_dir) / position.name

    def _name_of_newest(self) -> str:
        return self._newest.name if self._newest else "none of this start"

    def _start(self) -> bool:
        """Begin to write the last boundary; training waits meanwhile. False, after a note, if that is not possible."""
        boundary = self._boundary
        assert boundary is not None
        self._cadence.saving()
        content, size = self._content(boundary)
        directory = point.partial_path(self._run_dir, boundary.position)
        on_first_rank(self._still_ours)
        reason: str | None = None
        if self._runtime.is_main:
            spare = point.superfluous(point.find_points(self._run_dir), keep=1, keep_every=self._cfg.keep_every)
            reason = self._writer.make_room(directory, size, [*point.passed_over(self._run_dir), *spare])
            if reason is None:
                self._on_room()
        reason = from_first_rank(reason)
        if reason is not None:
            self._say_failed(boundary.position, reason)
            return False
        roles = {role.name: {**sharded_state.counters(role), "layout": layout_in_words(role)} for role in self._roles}
        body = {
            **self._identity.stated(),
            "step": boundary.position.step,
            "update": boundary.position.update,
            "world_size": self._runtime.world_size,
            "roles": roles,
            "state": boundary.state,
        }
        self._writing = boundary.position
        self._writer.start(directory, content, partial(self._complete, boundary.position, body))
        return True

    def _content(self, boundary: _Boundary) -> tuple[Content, int]:
        """Content of a point, and on rank 0 the bytes that all ranks will write."""
        roles = {role.name: sharded_state.sharded_state(role) for role in self._roles}
        commons = {role.name: sharded_state.common(role, boundary.position.step) for role in self._roles}
        mine = (boundary.random, sum(sharded_state.bytes_to_write(state) for state in roles.values()))
        everyones = self._writer.to_first(mine)
        table = None if boundary.table is None else boundary.table()
        files: dict[str, Any] = dict(self._companions)
        size = sum(map(len, self._companions.values()))
        if everyones is not None:
            files[RANDOM] = [random for random, _ in everyones]
            if self._provenance is not None:
                files |= {f"{name}/{FILE}": self._provenance(name, boundary.position).to_json() for name in roles}
            size += sum(num_bytes for _, num_bytes in everyones)
            if table is not None:
                files[TABLE] = table
            for name, held in boundary.tables.items():
                files[table_file(name)] = held
                size += bytes_of(held)
        return Content(roles, commons, files), size + size // 50 + (1 << 20)

    def _poll(self, *, wait: bool = False) -> None:
        """Check the point that is being written; with `wait`, until it is complete or has failed."""
        while self._writer.busy:
            outcome = self._writer.poll(wait=wait)
            if outcome is not None:
                self._done(outcome)
            elif not wait:
                return

    def _complete_last(self) -> None:
        """Wait for the last point before the weights change again, where each update has a point. A kill then loses at
        most one update."""
        started = time.perf_counter()
        self._poll(wait=True)
        self.seconds_standing += time.perf_counter() - started

    def _complete(self, position: Position, body: Mapping[str, Any], files: Mapping[str, FileDigest]) -> None:
        """Make the directory a point, once all files are there. Called in the writing process of rank 0."""
        self._still_ours()
        directory = point.partial_path(self._run_dir, position)
        point.write_manifest(directory, body, files)
        point.commit(directory, self._path(position))

    def _done(self, outcome: WriteOutcome) -> None:
        assert self._writing is not None
        position, self._writing = self._writing, None
        self._cadence.saved(outcome.seconds)
        if outcome.error is not None:
            self._say_failed(position, outcome.error)
            return
        self._newest = position
        if not self._announced:  # there may be one at every update
            size = f"{outcome.bytes / 1e6:,.1f} MB"
            self._note(f"resume point {position.name}: {size}, complete after {outcome.seconds:.1f} s")
            self._announced = True
        if self._runtime.is_main:
            points = point.find_points(self._run_dir)
            may_go = point.superfluous(points, keep=self._cfg.keep, keep_every=self._cfg.keep_every)
            if len(points) >= self._cfg.keep:
                may_go += point.passed_over(self._run_dir)
            for old in may_go:
                point.remove(old)
            kept = [saved.position for saved in point.find_points(self._run_dir)[-self._cfg.keep :]]
            self._on_saved(min([*kept, position]))

    def _say_failed(self, position: Position, reason: str) -> None:
        self._announced = False
        self._note(
            f"WARNING: no resume point of {position}: {reason}. The run goes on; the newest resume point is "
            f"{self._name_of_newest()}, and the next one is tried when it is due"
        )


def bytes_of(tree: Any) -> int:
    """Bytes of the tensors of a tree."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _companion_files(runtime: Runtime, roles: Sequence[Role]) -> dict[str, bytes]:
    """Files of the folders `hf/` of all roles, by path in a point; on rank 0 only. Collective.

    They are read at the start, since a model's directory may be removed during the run.

    Raises: ValueError when a file cannot be read.
    """
    files: dict[str, bytes] = {}
    words = "config.json, tokenizer and the other small files of a model go into every resume point: "
    with raise_on_all_ranks(lambda reasons: ValueError(words + "; ".join(reasons))):
        if runtime.is_main:
            for role in roles:
                files |= {f"{role.name}/{name}": content for name, content in role.companion_folder().items()}
    return files


def _time_left_everywhere() -> Callable[[], float | None]:
    """Time left in the job as rank 0 knows it, for every rank: a rank that generates by itself needs it too.
    Collective."""
    left = from_first_rank(time_left() if dist.get_rank() == 0 else None)
    end = None if left is None else time.monotonic() + left
    return lambda: None if end is None else end - time.monotonic()
