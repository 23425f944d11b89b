"""From the rows of a source to columns of samples, in this process and, where that takes long, in others beside it.

The result does not depend on how many there are: chunks of rows are encoded anywhere and appended in their order. A
worker is `python -m megarlhf.data.tokenize.workers`; it is told a job with its tokenizer, and then chunks, by pickles
through a pipe from its parent, and ends when the pipe does. The parent encodes what its workers have no room for, so
that of two processes one is started.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

from megarlhf.config import SourceConfig
from megarlhf.data.sample_types import Changed, Encoder, Unusable
from megarlhf.data.samples.columns import ColumnWriter, Packed, kinds_of, pack
from megarlhf.data.sources.fields import LEFT_OUT, Fields, LeftOut, Reader
from megarlhf.data.sources.read import Chunk
from megarlhf.data.sources.unread_columns import counted, unread_columns
from megarlhf.data.tokenizers.files import without_torch
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer

ALONE_SECONDS = 0.5
"""So long this process encodes by itself, and then until the first worker is ready: for small data none is started."""
MOST_WORKERS = 32
"""Processes, this one included."""
_AHEAD = 2
"""Chunks that each worker has been given, one of which it encodes."""
_END_SECONDS = 10.0
"""In which a process whose pipe has ended ends itself."""
_UNKNOWN = "with text that the tokenizer does not know, which became its unknown token"


@dataclass(frozen=True)
class EncodingJob:
    """How the rows of one source become samples."""

    source: SourceConfig
    encoder: Encoder[Any]
    sample_type: type[Any]
    fields: Fields


class Opened:
    """A job with its tokenizer and adapter loaded."""

    def __init__(self, job: EncodingJob, load: Callable[[], Any]) -> None:
        """load: that of the job's encoder, or what gives the same here as it gave in another process"""
        self._reader = Reader(job.source, job.fields)
        self.loaded = load()
        self._encode = job.encoder.by(self.loaded)
        self._sample_type, self._kinds = job.sample_type, kinds_of(job.sample_type)
        self._token_fields = [name for name in self._kinds if name == "tokens" or name.endswith("_tokens")]
        known = isinstance(self.loaded, HuggingFaceTokenizer | SentencePieceTokenizer)
        self._unk_id = self.loaded.unk_id if known else None
        self._left_out = f"{LEFT_OUT} {job.source.adapter}"

    def __call__(self, chunk: Chunk, first_record: int) -> Packed:
        """Raises: ValueError, with the row's place, for the first one that is refused."""
        samples: list[Any] = []
        records: list[int] = []
        skipped: Counter[str] = Counter()
        changed: Counter[str] = Counter()
        unread: Counter[str] = Counter()
        for number, (where, row) in enumerate(chunk.located(), first_record):
            try:
                record = self._reader.record(row, where)
            except LeftOut:
                skipped[self._left_out] += 1
                continue
            try:
                made = self._encode(number, record)
            except Unusable as reason:
                skipped[str(reason)] += 1
                continue
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if isinstance(made, Changed):
                changed.update(made.how)
                made = made.sample
            changed.update(counted(self._sample_type, record))
            unread.update(unread_columns(self._sample_type, record))
            several = made if isinstance(made, list) else [made]
            if self._unk_id is not None and any(map(self._has_unknown, several)):
                changed[_UNKNOWN] += 1
            samples += several
            records += [number] * len(several)
        try:
            packed = pack(samples, records, self._kinds)
        except ValueError as error:
            raise ValueError(
                f"{chunk.name}, {chunk.unit} {chunk.numbers[0]} to {chunk.numbers[-1]}: {error}"
            ) from error
        return replace(packed, num_records=len(chunk.rows), skipped=skipped, changed=changed, unread=unread)

    def _has_unknown(self, sample: Any) -> bool:
        return any(self._unk_id in getattr(sample, name) for name in self._token_fields)


def encode_all(job: EncodingJob, chunks: Iterator[Chunk], writer: ColumnWriter, workers: int | None) -> None:
    """Append the samples of all chunks. Raises: ValueError as `Opened`."""
    encode, first_record = Opened(job, job.encoder.load), 0
    others = min(workers or len(os.sched_getaffinity(0)), MOST_WORKERS) - 1
    alone_until = time.monotonic() + ALONE_SECONDS
    with contextlib.ExitStack() as stack:
        pool: _Pool | None = None
        parts: deque[_Part] = deque()
        errors: list[ValueError] = []
        for chunk in _readable(chunks, errors):
            if pool is None and others and time.monotonic() > alone_until:
                pool = stack.enter_context(_Pool(job, encode.loaded, others))
            part = _Part(chunk, first_record)
            first_record += len(chunk.rows)
            if pool is not None and pool.is_ready and sum(map(_Part.is_waited_for, parts)) < _AHEAD * others:
                part.give(pool)
            else:
                part.encode(encode)
            parts.append(part)
            while parts and (len(parts) > 2 * _AHEAD * (others + 1) or not parts[0].is_waited_for()):
                writer.append(parts.popleft().packed())
        for part in reversed(parts):
            part.take_back(encode)
        while parts:
            writer.append(parts.popleft().packed())
        if errors:
            raise errors[0]


def _readable(chunks: Iterator[Chunk], errors: list[ValueError]) -> Iterator[Chunk]:
    """The chunks up to an error, which is kept: one in the rows before it comes first."""
    try:
        yield from chunks
    except ValueError as error:
        errors.append(error)


class _Part:
    """A chunk on its way to samples, which are there or are being made by a worker."""

    def __init__(self, chunk: Chunk, first_record: int) -> None:
        self._chunk, self._first_record = chunk, first_record
        self._made: Future[Packed] = Future()

    def give(self, pool: _Pool) -> None:
        """To a worker."""
        self._made = pool.submit(self._chunk, self._first_record)

    def encode(self, encode: Opened) -> None:
        """In this process. What is refused is said when the samples are asked for, in the order of the chunks."""
        self._made = Future()
        try:
            self._made.set_result(encode(self._chunk, self._first_record))
        except ValueError as error:
            self._made.set_exception(error)

    def take_back(self, encode: Opened) -> None:
        """To encode it in this process, if no worker has begun."""
        if self._made.cancel():
            self.encode(encode)

    def is_waited_for(self) -> bool:
        return not self._made.done()

    def packed(self) -> Packed:
        """The samples, when they are there. Raises: ValueError as `Opened`."""
        return self._made.result()


class _Pool:
    """Worker processes, each with a thread of this one that talks to it."""

    def __init__(self, job: EncodingJob, loaded: Any, count: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        }
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._has_begun = False
        told = pickle.dumps(job) + pickle.dumps(loaded)
        self._workers = [_Worker(environment, told) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count)
        for worker in self._workers:
            threading.Thread(target=self._begin, args=(worker,), daemon=True).start()

    def _begin(self, worker: _Worker) -> None:
        worker.wait_until_ready()  # or ended: who gives it work is told
        self._idle.put(worker)

    @property
    def is_ready(self) -> bool:
        """Whether a worker has begun to wait for chunks; one that works counts."""
        self._has_begun = self._has_begun or not self._idle.empty()
        return self._has_begun

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def submit(self, chunk: Chunk, first_record: int) -> Future[Packed]:
        return self._threads.submit(self._run, chunk, first_record)

    def _run(self, chunk: Chunk, first_record: int) -> Packed:
        worker = self._idle.get()
        try:
            return worker.encode(chunk, first_record)
        finally:
            self._idle.put(worker)


class _Worker:
    """A process that encodes one chunk at a time."""

    def __init__(self, environment: dict[str, str], told: bytes) -> None:
        # A group of its own: Ctrl-C is for the run, which ends its workers.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarlhf.data.tokenize.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        self._to, self._answers = cast(Any, self._process.stdin), cast(Any, self._process.stdout)
        self._failure: RuntimeError | None = None
        """With which it has ended: whoever gives it work later is told the same."""
        self._told = told

    def wait_until_ready(self) -> None:
        """Tell it the job, and wait until it has loaded what it needs, or has ended."""
        with contextlib.suppress(EOFError, ValueError, OSError):
            self._to.write(self._told)
            self._to.flush()
            pickle.load(self._answers)

    def encode(self, chunk: Chunk, first_record: int) -> Packed:
        """Raises: ValueError as `Opened`; RuntimeError where the process has ended."""
        if self._failure is not None:
            raise self._failure
        try:
            pickle.dump((chunk, first_record), self._to)
            self._to.flush()
            answer = pickle.load(self._answers)
        except (BrokenPipeError, EOFError) as error:
            status = self._process.wait(_END_SECONDS)
            self._failure = RuntimeError(
                f"a process that tokenizes has ended (status {status}), at {chunk.name}, {chunk.unit} "
                f"{chunk.numbers[0]} to {chunk.numbers[-1]}; its error stands above, or it was killed, as the system "
                "does when memory runs out: set data.workers to fewer then"
            )
            raise self._failure from error
        if isinstance(answer, str):
            raise ValueError(answer)
        assert isinstance(answer, Packed)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._to.close()
        self._answers.close()


class _Ended(Exception):
    """The pipe has, also in the middle of what is written: its writer was killed."""


def _told(source: BinaryIO) -> Any:
    """What the parent writes next. Raises: _Ended."""
    try:
        return pickle.load(source)
    except EOFError:
        raise _Ended from None
    except pickle.UnpicklingError as error:
        if "truncated" in str(error):
            raise _Ended from None
        raise


def _received(source: BinaryIO) -> Any:
    """What the parent has loaded; some tokenizers are loaded again."""
    with without_torch():
        return _told(source)


def _serve(source: BinaryIO, out: BinaryIO) -> None:
    """Raises: _Ended."""
    encode = Opened(_told(source), lambda: _received(source))
    pickle.dump("ready", out)
    out.flush()
    while True:
        chunk, first_record = _told(source)
        try:
            answer: Packed | str = encode(chunk, first_record)
        except ValueError as error:
            answer = str(error)
        pickle.dump(answer, out)
        out.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library or an adapter prints is no answer
    with contextlib.suppress(_Ended, BrokenPipeError):  # who has started it has done, or was killed
        _serve(sys.stdin.buffer, answers)
    os._exit(0)  # nothing is left to be written, least of all to the pipe
