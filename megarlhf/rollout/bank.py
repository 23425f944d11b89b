"""The rollout bank: finished responses of a rollout in progress, on disk, so that a killed run does not lose them.

    bank = RolloutBank(run_dir / "bank")
    with bank.open(step, fingerprint=..., sampling=sampling, prompts=prompts, seeds=seeds) as kept:
        rollouts = engine.generate(prompts, seeds, sampling, bank=kept)
    ...                           # train, write a resume point after the step
    bank.forget_before(step + 1)

`bank/step_000007/0001_rank_00000.jsonl` has the responses that rank 0 added after the bank was opened for the first
time when 7 steps were done. Files of earlier processes are never written to. A round of dynamic sampling has its own
folder, such as `bank/step_000007_refill_1`. Each line is a JSON object `record` with its `digest`. The first is the
header with the settings of all responses of the file. A response is used only if the header, its prompt and its seed
are those of the rollout that goes on. Each record has the versions of the weights that drew the response. Where
responses are drawn in slices, a folder has the slices that its step draws, also of later steps' samples: the prompt of
a row is then the prompt and the earlier slices. Of a conversation with an environment each turn is a record of its own
when it is answered, so that a conversation goes on behind its last answered turn, and one more when it is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megarlhf.atomic_write import sync
from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.rollout.bank_lines import (
    Record,
    digest_of_bytes,
    line_of,
    record_in,
    record_of_response,
    record_of_turn,
    response_of_record,
    turn_of_record,
)
from megarlhf.rollout.responses import (
    AnsweredTurn,
    FinishedResponses,
    Response,
    ResponsePart,
    Sampling,
    end_of,
    parts_of,
)

log = logging.getLogger(__name__)

FORMAT = 2
READABLE = (1, 2)
"""Formats that are read. Records of format 1 have no versions: one run, of the step's own version."""
FSYNC_SECONDS, FSYNC_SHARE = 1.0, 0.05
"""Minimum time between two fsyncs, and the largest share of the time that they may take."""
UNUSABLE = ".unusable"
"""Suffix for files that do not belong to the rollout that goes on."""
_FOLDER = re.compile(r"step_(\d+)(_refill_\d+)?")
_NAME = re.compile(rf"(\d+)_rank_\d+\.jsonl({re.escape(UNUSABLE)})?")


@dataclasses.dataclass(frozen=True)
class _Expected:
    """Header and rows that a usable file has."""

    header: Record
    rows: Sequence[Record]
    """Identity of each row's response: row, digest of the prompt, seed, and where a part ends."""
    parts: Sequence[ResponsePart]
    sampling: Sampling


class RolloutBank:
    """Responses of the steps since the last resume point. All ranks make one, with the same directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._not_kept = False
        """Whether a warning was logged that responses cannot be written."""

    def open(
        self,
        step: int,
        *,
        fingerprint: str,
        sampling: Sampling,
        prompts: Sequence[Tensor],
        seeds: Sequence[int],
        parts: Sequence[ResponsePart] | None = None,
        refill: int = 0,
    ) -> StepBank:
        """Open the bank of a step, with all its usable responses spread over the ranks. Collective.

        `fingerprint` identifies the weights and the mathematics with which the samples are drawn. Layout and number of
        engines may differ from those that drew the responses.
        """
        given = parts_of(parts, len(prompts), sampling)
        rows = [
            {
                "row": row,
                "prompt": digest_of_bytes(prompt.cpu().numpy().astype("<i8").tobytes()),
                "seed": seed,
                **({} if part.until == sampling.max_tokens else {"until": part.until}),
            }
            for row, (prompt, seed, part) in enumerate(zip(prompts, seeds, given, strict=True))
        ]
        header = {
            "format": FORMAT,
            "step": step,
            "fingerprint": fingerprint,
            "sampling": sampling.identity(),
            "num_samples": len(rows),
        }
        expected = _Expected(header, rows, given, sampling)
        folder = self._directory / (f"step_{step:06d}" + (f"_refill_{refill}" if refill else ""))
        shares: list[Any] = [None] * dist.get_world_size()
        with raise_on_all_ranks(lambda reasons: RuntimeError(f"rollout bank {folder}: {'; '.join(reasons)}")):
            if dist.get_rank() == 0:
                opening, kept = _read(folder, expected)
                responses, turns = sorted(kept.responses.items()), sorted(kept.turns.items())
                shares = [
                    (opening, len(responses), dict(responses[rank :: len(shares)]), dict(turns[rank :: len(shares)]))
                    for rank in range(len(shares))
                ]
        share: list[Any] = [None]
        dist.scatter_object_list(share, shares)
        opening, num_taken_over, held, unfinished = share[0]
        path = folder / f"{opening:04d}_rank_{dist.get_rank():05d}.jsonl"
        bank = StepBank(self, path, expected, held, num_taken_over)
        bank.turns |= unfinished
        return bank

    def forget_before(self, step: int) -> None:
        """Remove the responses of earlier steps, which a resume point covers. Only rank 0 does it."""
        if dist.get_rank() != 0:
            return
        for folder in self._directory.glob("step_*"):
            name = _FOLDER.fullmatch(folder.name)
            if name and int(name[1]) < step:
                try:
                    shutil.rmtree(folder)
                except OSError as error:
                    log.warning("the rollout bank's %s is no longer needed and cannot be removed: %s", folder, error)

    def give_up(self, error: OSError, path: Path) -> None:
        """Log, the first time, that responses are not kept."""
        if not self._not_kept:
            log.warning("the rollout bank is not kept, a kill would lose the responses since then: %s: %s", path, error)
        self._not_kept = True


class StepBank(FinishedResponses):
    """Bank of one step. Added responses are given to the operating system at once."""

    def __init__(
        self, bank: RolloutBank, path: Path, expected: _Expected, held: Mapping[int, Response], num_taken_over: int
    ) -> None:
        super().__init__(held)
        self.num_taken_over = num_taken_over
        """Responses of earlier processes, on all ranks."""
        self._bank, self._path, self._expected = bank, path, expected
        self._file: int | None = None
        self._gave_up = False
        self._next_fsync = 0.0

    def add(self, row: int, response: Response) -> None:
        super().add(row, response)
        if response.dialogue is not None and response.dialogue.ended_by == "failure":
            return  # another process draws it anew
        self._keep(row, record_of_response(response))

    def add_turn(self, row: int, turn: AnsweredTurn, *, first: bool = False) -> None:
        super().add_turn(row, turn, first=first)
        self._keep(row, {"turn": len(self.turns[row]) - 1, **record_of_turn(turn)})

    def _keep(self, row: int, content: Record) -> None:
        """Write a record about a row."""
        record = {**self._expected.rows[row], **content}
        if not self._gave_up:
            try:
                if self._file is None:
                    self._file = _create(self._path)
                    _write(self._file, line_of(self._expected.header))
                _write(self._file, line_of(record))
                self._fsync()
            except OSError as error:
                self._bank.give_up(error, self._path)
                self._gave_up = True

    def _fsync(self) -> None:
        start = time.monotonic()
        if self._file is not None and start >= self._next_fsync:
            os.fsync(self._file)
            now = time.monotonic()
            self._next_fsync = now + max(FSYNC_SECONDS, (now - start) / FSYNC_SHARE)

    def close(self) -> None:
        """Wait until all responses are on the disk."""
        if self._file is not None:
            self._next_fsync = 0.0
            try:
                if not self._gave_up:
                    self._fsync()
                os.close(self._file)
            except OSError as error:
                self._bank.give_up(error, self._path)
            self._file = None

    def __enter__(self) -> StepBank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- files ----------------------------------------------------------------------------------------


def _create(path: Path) -> int:
    """Create a file whose name is on the disk even after a crash of the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    for folder in (path.parent, path.parent.parent):
        sync(folder)
    return file


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


@dataclasses.dataclass
class _Kept:
    """Usable records of an earlier process, by row."""

    responses: dict[int, Response] = dataclasses.field(default_factory=dict)
    turns: dict[int, list[AnsweredTurn]] = dataclasses.field(default_factory=dict)
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, record: Record, expected: _Expected) -> None:
        """Add a record, or count why it is dropped."""
        row = record.get("row")
        if not isinstance(row, int) or not 0 <= row < len(expected.rows):
            self.dropped["unknown rows"] += 1
        elif any(record.get(key) != value for key, value in expected.rows[row].items()):
            self.dropped["rows of another prompt, seed or slice"] += 1
        elif "turn" in record:
            self._add_turn(row, record)
        elif fault := _fault(record, expected):
            self.dropped[fault] += 1
        elif row in self.responses:
            self.dropped["doubled rows"] += 1
        else:
            self.responses[row] = response_of_record(record, expected.header["step"])

    def _add_turn(self, row: int, record: Record) -> None:
        """Add a turn if it follows the ones that are there, or begins anew."""
        try:
            turn, number = turn_of_record(record), int(record["turn"])
        except (ValueError, KeyError, TypeError):
            self.dropped["turns that are no turn"] += 1
            return
        before = self.turns.get(row, [])
        if number and (number != len(before) or turn.before != end_of(before)):
            self.dropped["turns of which the ones before are missing"] += 1
            return
        self.turns[row] = [*before[:number], turn]


def _read(folder: Path, expected: _Expected) -> tuple[int, _Kept]:
    """Number of this opening, and usable records. Others are logged, and unusable files are renamed."""
    named = [(path, _NAME.fullmatch(path.name)) for path in sorted(folder.glob("*_rank_*"))]
    opening = 1 + max((int(name[1]) for _, name in named if name), default=0)
    kept = _Kept()
    for path in (path for path, name in named if name and not name[2]):
        fault = _read_file(path, expected, kept)
        if fault:
            log.warning("rollout bank: %s is not used and renamed to *%s: %s", path, UNUSABLE, fault)
            with contextlib.suppress(OSError):
                path.rename(path.with_name(path.name + UNUSABLE))
    for row in kept.responses:
        kept.turns.pop(row, None)
    if kept.responses or kept.dropped:
        log.info("rollout bank: %d responses of an earlier process are used again", len(kept.responses))
    if kept.turns:
        log.info("rollout bank: %d conversations go on behind their last answered turn", len(kept.turns))
    if kept.dropped:
        faults = ", ".join(f"{count} {fault}" for fault, count in kept.dropped.items())
        log.warning("rollout bank: dropped in %s: %s", folder, faults)
    return opening, kept


def _read_file(path: Path, expected: _Expected, kept: _Kept) -> str:
    """Add the usable records, the first of each row; returns the reason if the whole file cannot be used, else ""."""
    try:
        first, *lines = path.read_bytes().splitlines() or [b""]
    except OSError as error:
        return str(error)
    header = record_in(first)
    if header is None:
        return "its first line is torn or corrupt"
    if header.get("format") in READABLE:
        header = {**header, "format": FORMAT}
    different = [key for key in {**expected.header, **header} if header.get(key) != expected.header.get(key)]
    if different:
        return "; ".join(f"{key} = {header.get(key)}, now {expected.header.get(key)}" for key in sorted(different))
    for line in lines:
        record = record_in(line)
        if record is None:
            kept.dropped["torn or corrupt lines"] += 1
        else:
            kept.add(record, expected)
    return ""


def _fault(record: Record, expected: _Expected) -> str:
    """Reason why a response cannot be used; empty if it can."""
    row = record["row"]
    try:
        response = response_of_record(record, expected.header["step"])
    except (ValueError, KeyError, TypeError):
        return "rows that are no response"
    part, dialogue = expected.parts[row], response.dialogue
    lengths = {len(response.tokens), len(response.logprobs), sum(count for _, count in response.versions)}
    if dialogue is None:
        ended = part.ends(expected.sampling, response.tokens)
        complete = (ended or len(response.tokens) == part.max_tokens) and ended == response.finished
    else:
        lengths.add(sum(response.stretches[::2]))
        complete = sum(response.stretches[1::2]) == len(response.observed)
        complete &= dialogue.is_over or dialogue.added + len(response.written) >= part.until
    return "rows that are no finished response" if not complete or len(lengths) > 1 else ""
