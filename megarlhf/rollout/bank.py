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
a row is then the prompt and the earlier slices.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megarlhf.atomic_write import sync
from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.rollout.engine import FinishedResponses, Response, ResponsePart, Sampling, parts_of

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

Record = Mapping[str, Any]


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
                "prompt": _digest(prompt.cpu().numpy().astype("<i8").tobytes()),
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
                opening, records = _read(folder, expected)
                shares = [(opening, len(records), records[rank :: len(shares)]) for rank in range(len(shares))]
        share: list[Any] = [None]
        dist.scatter_object_list(share, shares)
        opening, num_taken_over, records = share[0]
        path = folder / f"{opening:04d}_rank_{dist.get_rank():05d}.jsonl"
        return StepBank(
            self, path, expected, {record["row"]: _response(record, step) for record in records}, num_taken_over
        )

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
        record = {
            **self._expected.rows[row],
            "finished": response.finished,
            "tokens": _encode(np.array(response.tokens, dtype="<i4")),
            "logprobs": _encode(np.array(response.logprobs, dtype="<f4")),
            "versions": response.versions,
        }
        if not self._gave_up:
            try:
                if self._file is None:
                    self._file = _create(self._path)
                    _write(self._file, _line(self._expected.header))
                _write(self._file, _line(record))
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


# --- lines ----------------------------------------------------------------------------------------


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _decode(text: str, dtype: str) -> list[Any]:
    return list(np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype).tolist())


def _text(record: Record) -> str:
    return json.dumps(record, sort_keys=True)


def _line(record: Record) -> bytes:
    return (json.dumps({"digest": _digest(_text(record).encode()), "record": record}) + "\n").encode()


def _record(line: bytes) -> Record | None:
    """Record of a line; None if the line is incomplete or corrupt."""
    try:
        content = json.loads(line)
        record, digest = content["record"], content["digest"]
    except (ValueError, KeyError, TypeError):
        return None
    return record if isinstance(record, dict) and digest == _digest(_text(record).encode()) else None


def _response(record: Record, step: int) -> Response:
    tokens = _decode(record["tokens"], "<i4")
    versions = tuple((version, count) for version, count in record.get("versions", [[step, len(tokens)]]))
    return Response(tokens, _decode(record["logprobs"], "<f4"), record["finished"], versions)


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


def _read(folder: Path, expected: _Expected) -> tuple[int, list[Record]]:
    """Number of this opening, and usable records by row. Others are logged, and unusable files are renamed."""
    named = [(path, _NAME.fullmatch(path.name)) for path in sorted(folder.glob("*_rank_*"))]
    opening = 1 + max((int(name[1]) for _, name in named if name), default=0)
    records: dict[int, Record] = {}
    dropped: Counter[str] = Counter()
    for path in (path for path, name in named if name and not name[2]):
        fault = _read_file(path, expected, records, dropped)
        if fault:
            log.warning("rollout bank: %s is not used and renamed to *%s: %s", path, UNUSABLE, fault)
            with contextlib.suppress(OSError):
                path.rename(path.with_name(path.name + UNUSABLE))
    if records or dropped:
        log.info("rollout bank: %d responses of an earlier process are used again", len(records))
    if dropped:
        faults = ", ".join(f"{count} {fault}" for fault, count in dropped.items())
        log.warning("rollout bank: dropped in %s: %s", folder, faults)
    return opening, [records[row] for row in sorted(records)]


def _read_file(path: Path, expected: _Expected, records: dict[int, Record], dropped: Counter[str]) -> str:
    """Add the usable records, the first of each row; returns the reason if the whole file cannot be used, else ""."""
    try:
        first, *lines = path.read_bytes().splitlines() or [b""]
    except OSError as error:
        return str(error)
    header = _record(first)
    if header is None:
        return "its first line is torn or corrupt"
    if header.get("format") in READABLE:
        header = {**header, "format": FORMAT}
    different = [key for key in {**expected.header, **header} if header.get(key) != expected.header.get(key)]
    if different:
        return "; ".join(f"{key} = {header.get(key)}, now {expected.header.get(key)}" for key in sorted(different))
    for line in lines:
        record = _record(line)
        fault = "torn or corrupt lines" if record is None else _fault(record, expected)
        if fault:
            dropped[fault] += 1
        elif record is not None:
            if record["row"] in records:
                dropped["doubled rows"] += 1
            records.setdefault(record["row"], record)
    return ""


def _fault(record: Record, expected: _Expected) -> str:
    """Reason why a response cannot be used; empty if it can."""
    row = record.get("row")
    if not isinstance(row, int) or not 0 <= row < len(expected.rows):
        return "unknown rows"
    if any(record.get(key) != value for key, value in expected.rows[row].items()):
        return "rows of another prompt, seed or slice"
    try:
        response = _response(record, expected.header["step"])
    except (ValueError, KeyError, TypeError):
        return "rows that are no response"
    part = expected.parts[row]
    ended = part.ends(expected.sampling, response.tokens)
    complete = ended or len(response.tokens) == part.max_tokens
    lengths = {len(response.tokens), len(response.logprobs), sum(count for _, count in response.versions)}
    if not complete or ended != response.finished or len(lengths) > 1:
        return "rows that are no finished response"
    return ""
