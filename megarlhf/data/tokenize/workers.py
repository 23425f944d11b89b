"""Tokenization of a source's rows to columns, in this process and, if it takes long, in worker processes.

The result does not depend on the number of workers: chunks of rows are encoded anywhere and appended in order. A worker
is `python -m megarlhf.data.tokenize.workers`. Its parent sends a job with its tokenizer, and then chunks, by pickles
through a pipe. The worker ends with the pipe. The parent encodes chunks that its workers have no room for, so with two
processes one worker is started.

`datasets.map(batched=True)` is as fast (docs/benchmarks), but here an error names file and line, and the files are the
same to the byte with any number of workers.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

from megarlhf.config import SourceConfig
from megarlhf.data.sample_types import Changed, Encoder, Unusable
from megarlhf.data.samples.columns import ColumnWriter, Packed, kinds_of, pack
from megarlhf.data.sources.fields import LEFT_OUT, LeftOut, Reader
from megarlhf.data.sources.read import Chunk
from megarlhf.data.sources.unread_columns import counted, unread_columns
from megarlhf.data.tokenizers.files import without_torch
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer

ALONE_SECONDS = 0.5
"""Time for which this process encodes alone, so that small data needs no worker. It goes on until one is ready."""
MOST_WORKERS = 32
"""Most processes, including this one."""
_AHEAD = 2
"""Chunks given to each worker, including the one that it encodes."""
_END_SECONDS = 10.0
"""Time in which a process ends after its pipe has ended."""
_UNKNOWN = "with text that the tokenizer does not know, which became its unknown token"


@dataclass(frozen=True)
class EncodingJob:
    """A source and the options for making samples from its rows."""

    source: SourceConfig
    encoder: Encoder[Any]
    sample_type: type[Any]
    fields: Sequence[str]


class Opened:
    """A job with its tokenizer and adapter loaded."""

    def __init__(self, job: EncodingJob, load: Callable[[], Any]) -> None:
        """load: the encoder's `load`, or a function that returns the parent's result"""
        self._reader = Reader(job.source, job.fields)
        self.loaded = load()
        self._encode = job.encoder.by(self.loaded)
        self._sample_type, self._kinds = job.sample_type, kinds_of(job.sample_type)
        self._token_fields = [name for name in self._kinds if name == "tokens" or name.endswith("_tokens")]
        known = isinstance(self.loaded, HuggingFaceTokenizer | SentencePieceTokenizer)
        self._unk_id = self.loaded.unk_id if known else None
        self._left_out = f"{LEFT_OUT} {job.source.adapter}"

    def __call__(self, chunk: Chunk, first_record: int) -> Packed:
        """Encode a chunk. Raises: ValueError for the first refused row, with its location."""
        samples: list[Any] = []
        records: list[int] = []
        skipped: Counter[str] = Counter()
        changed: Counter[str] = Counter()
        unread: Counter[str] = Counter()
        for index, (where, row) in enumerate(chunk.located(), first_record):
            try:
                record = self._reader.record(row, where)
            except LeftOut:
                skipped[self._left_out] += 1
                continue
            try:
                encoded = self._encode(index, record)
            except Unusable as reason:
                skipped[str(reason)] += 1
                continue
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if isinstance(encoded, Changed):
                changed.update(encoded.how)
                encoded = encoded.sample
            changed.update(counted(self._sample_type, record))
            unread.update(unread_columns(self._sample_type, record))
            several = encoded if isinstance(encoded, list) else [encoded]
            if self._unk_id is not None and any(map(self._has_unknown, several)):
                changed[_UNKNOWN] += 1
            samples += several
            records += [index] * len(several)
        try:
            packed = pack(samples, records, self._kinds)
        except ValueError as error:
            raise ValueError(
                f"{chunk.name}, {chunk.unit} {chunk.numbers[0]} to {chunk.numbers[-1]}: {error}"
            ) from error
        return replace(packed, num_records=len(chunk.rows), skipped=skipped, changed=changed, unread=unread)

    def _has_unknown(self, sample: Any) -> bool:
        return any(self._unk_id in getattr(sample, name) for name in self._token_fields)


@dataclass
class _Part:
    """A chunk and its samples, which are made or are being made by a worker."""

    chunk: Chunk
    first_record: int
    packed: Future[Packed]


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
            num_pending = sum(not part.packed.done() for part in parts)
            if pool is not None and pool.is_ready and num_pending < _AHEAD * others:
                packed = pool.submit(chunk, first_record)
            else:
                packed = _encode_here(encode, chunk, first_record)
            parts.append(_Part(chunk, first_record, packed))
            first_record += len(chunk.rows)
            while parts and (len(parts) > 2 * _AHEAD * (others + 1) or parts[0].packed.done()):
                writer.append(parts.popleft().packed.result())
        for part in reversed(parts):
            if part.packed.cancel():  # no worker has begun
                part.packed = _encode_here(encode, part.chunk, part.first_record)
        while parts:
            writer.append(parts.popleft().packed.result())
        if errors:
            raise errors[0]


def _encode_here(encode: Opened, chunk: Chunk, first_record: int) -> Future[Packed]:
    """Encode in this process. An error is raised by the future, in the order of the chunks."""
    packed: Future[Packed] = Future()
    try:
        packed.set_result(encode(chunk, first_record))
    except ValueError as error:
        packed.set_exception(error)
    return packed


def _readable(chunks: Iterator[Chunk], errors: list[ValueError]) -> Iterator[Chunk]:
    """The chunks up to an error, which is kept: errors in earlier rows are raised first."""
    try:
        yield from chunks
    except ValueError as error:
        errors.append(error)


class _Pool:
    """Worker processes, each with a thread of this process that talks to it."""

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
        job_and_tokenizer = pickle.dumps(job) + pickle.dumps(loaded)
        self._workers = [_Worker(environment, job_and_tokenizer) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count)
        for worker in self._workers:
            threading.Thread(target=self._begin, args=(worker,), daemon=True).start()

    def _begin(self, worker: _Worker) -> None:
        worker.wait_until_ready()  # or until it has ended: `encode` reports that
        self._idle.put(worker)

    @property
    def is_ready(self) -> bool:
        """True once a worker has begun to wait for chunks."""
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

    def __init__(self, environment: dict[str, str], job_and_tokenizer: bytes) -> None:
        # In a process group of its own: Ctrl-C is for the run, which ends its workers.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megarlhf.data.tokenize.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        self._to, self._answers = cast(Any, self._process.stdin), cast(Any, self._process.stdout)
        self._failure: RuntimeError | None = None
        """Failure with which the process has ended. It is raised again for later chunks."""
        self._job_and_tokenizer = job_and_tokenizer

    def wait_until_ready(self) -> None:
        """Send the job, and wait until the process is ready or has ended."""
        with contextlib.suppress(EOFError, ValueError, OSError):
            self._to.write(self._job_and_tokenizer)
            self._to.flush()
            pickle.load(self._answers)

    def encode(self, chunk: Chunk, first_record: int) -> Packed:
        """Encode a chunk in the process. Raises: ValueError as `Opened`; RuntimeError where the process has ended."""
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
                f"{chunk.numbers[0]} to {chunk.numbers[-1]}; its error is printed above, or it was killed, as the "
                "system does when memory runs out: set data.workers to fewer then"
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
    """The pipe has ended, perhaps in the middle of a message: its writer was killed."""


def _receive(source: BinaryIO) -> Any:
    """The parent's next message. Raises: _Ended."""
    try:
        return pickle.load(source)
    except EOFError:
        raise _Ended from None
    except pickle.UnpicklingError as error:
        if "truncated" in str(error):
            raise _Ended from None
        raise


def _receive_loaded(source: BinaryIO) -> Any:
    """The parent's tokenizer. Some kinds are loaded again."""
    with without_torch():
        return _receive(source)


def _serve(source: BinaryIO, out: BinaryIO) -> None:
    """Raises: _Ended."""
    encode = Opened(_receive(source), lambda: _receive_loaded(source))
    pickle.dump("ready", out)
    out.flush()
    while True:
        chunk, first_record = _receive(source)
        try:
            answer: Packed | str = encode(chunk, first_record)
        except ValueError as error:
            answer = str(error)
        pickle.dump(answer, out)
        out.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a library or an adapter is no answer
    with contextlib.suppress(_Ended, BrokenPipeError):  # the parent has finished, or was killed
        _serve(sys.stdin.buffer, answers)
    os._exit(0)  # without flushing anything to the pipe
