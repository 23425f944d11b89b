"""A cache of directories by key. Each entry is made once, however many processes ask for it.

The first process takes a lease on the key (`megarlhf/lease.py`), makes the entry in a directory of its own and renames
it: an entry is whole or absent. Other processes wait. The lease of a killed process is taken over. If two processes
make the same entry nevertheless, as on a file system that shows files late, the first to finish wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarlhf.atomic_write import atomic_write
from megarlhf.data.samples.columns import MANIFEST
from megarlhf.lease import Holder, Lease

logger = logging.getLogger(__name__)
VARIABLE = "MEGARLHF_CACHE"
PRIVATE = "none"
POLL_SECONDS = 0.1
LOG_AFTER_SECONDS = 2.0
"""A process that has waited for so long logs for what."""
DEAD_SECONDS = 60.0
"""A lease may be taken over when its holder gave no sign of life for so long; at once where its process was one of this
machine and has ended. Measured by each process that waits, so that clocks need not agree."""
LEFT_OVER_SECONDS = 24 * 3600.0
"""Folders that a killed writer has left are removed when they are so old."""
_SHARED_BYTES = 64 << 20
"""A file of at least this size is read by one process for all."""
_SETTLED_SECONDS = 2.0
"""A file that has just been written may change again within one tick of its time: its digest is not kept."""


def cache_directory(configured: str | None, run_dir: Path | None) -> Path:
    """The configured directory, else that of the variable, else one in the home directory. Raises: ValueError."""
    if configured == PRIVATE:
        if run_dir is None:
            raise ValueError(f"data.cache = {PRIVATE} keeps tokenized data in the run directory, and there is none")
        return run_dir / "tokens"
    given = configured or os.environ.get(VARIABLE) or "~/.cache/megarlhf"
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ValueError(f"data.cache = {given}: {error}; write the whole path") from None


def require_cache(directory: Path) -> None:
    """Raises: ValueError where the nearest existing directory cannot be written."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "is a file" if not nearest.is_dir() else "may not be written"
        raise ValueError(_not_writable(directory, f"{nearest} {why}"))


def _not_writable(directory: Path, why: object) -> str:
    return (
        f"tokenized data cannot be kept in {directory} ({why}); set data.cache, or the variable {VARIABLE}, to a "
        f"directory with room, or data.cache={PRIVATE} to keep it in the run directory"
    )


def key_of(parts: Mapping[str, Any]) -> str:
    """A key that follows from `parts`, which are JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def digest_of_file(path: Path, cache: Path) -> str:
    """SHA-256 of a file's content. The cache keeps it as long as the file's size and times stay."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    place = cache / "files" / f"{name}.json"
    if (kept := _kept_digest(path, place)) is not None:
        return kept
    if path.stat().st_size < _SHARED_BYTES:
        return _digest(path, place)
    _make_directory(place.parent)
    with _lease(place.parent, name) as lease:  # so that one of a node's ranks reads the file
        kept = _kept_digest(path, place) if lease is None else None
        return kept or _digest(path, place)


def _kept_digest(path: Path, place: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        kept = json.loads(place.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp(path):
            return str(kept["digest"])
    return None


def _digest(path: Path, place: Path) -> str:
    """Digest the file and keep the result."""
    seen = stamp(path)
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if stamp(path) == seen and time.time() - path.stat().st_mtime > _SETTLED_SECONDS:
        _make_directory(place.parent)
        _replace(place, json.dumps({"path": str(path.resolve()), "stamp": seen, "digest": digest}))
    return digest


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(_not_writable(directory, error)) from error


def stamp(path: Path) -> list[int]:
    """Numbers that differ when a file's content does. The inode's time of change is among them, because tools that copy
    set the time of the content, even to that of another content of the same size."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def entry(cache: Path, key: str, make: Callable[[Path], None]) -> tuple[Path, bool]:
    """The directory of an entry, and whether this call has made it. `make` fills an empty directory; its ValueError is
    raised in the waiting processes too.

    Raises: ValueError, also where the cache cannot be written.
    """
    place = cache / key
    try:
        if (place / MANIFEST).exists():
            return place, False
        cache.mkdir(parents=True, exist_ok=True)
        made = False
        while not (place / MANIFEST).exists():
            with _lease(cache, key) as lease:
                if lease is not None and not (place / MANIFEST).exists():
                    made = _make(cache, key, lease, make)
        return place, made
    except OSError as error:
        raise ValueError(_not_writable(cache, error)) from error


def _partial(cache: Path, key: str, lease: str) -> Path:
    """The directory in which the owner of a lease writes."""
    return cache / f".{key}.{lease}"


def _make(cache: Path, key: str, lease: str, make: Callable[[Path], None]) -> bool:
    """Make an entry. False where another process was faster."""
    _remove_left_over(cache, key)
    _remove_broken(cache, key, lease)
    partial = _partial(cache, key, lease)
    partial.mkdir()
    try:
        make(partial)
        try:
            partial.rename(cache / key)
        except OSError:
            if not (cache / key / MANIFEST).exists():
                raise
            return False
        return True
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_left_over(cache: Path, key: str) -> None:
    for path in cache.glob(f".{key}.*"):
        with contextlib.suppress(OSError):
            if path.is_dir() and time.time() - path.stat().st_mtime > LEFT_OVER_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _remove_broken(cache: Path, key: str, lease: str) -> None:
    """Remove a directory with the entry's name but without a manifest, such as a partial copy."""
    place, aside = cache / key, cache / f".{key}.{lease}.broken"
    if not place.is_dir() or (place / MANIFEST).exists():
        return
    logger.warning("%s has no %s: it is not whole, and is made again", place, MANIFEST)
    place.rename(aside)
    if (aside / MANIFEST).exists():  # another process was faster, whose lease was taken over although it lives
        with contextlib.suppress(OSError):
            aside.rename(place)
    shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _lease(cache: Path, key: str) -> Iterator[str | None]:
    """The lease's token, if it is ours; None where it was another's, which has ended.

    Raises: ValueError with which another process has failed, which was waited for.
    """
    lease, failed = Lease(cache / f"{key}.lease", silent_seconds=DEAD_SECONDS, token_key="id"), cache / f"{key}.failed"
    if not _take_or_wait(lease, cache, key, failed):
        yield None
        return
    with lease:
        try:
            yield lease.holder.token
        except ValueError as error:
            _replace(failed, json.dumps({"id": lease.holder.token, "message": str(error)}))
            raise
        failed.unlink(missing_ok=True)


def _take_or_wait(lease: Lease, cache: Path, key: str, failed: Path) -> bool:
    """Take a lease that nobody holds, or whose holder is dead; False once a holder that was waited for is through."""
    awaited: Holder | None = None
    log_at = time.monotonic() + LOG_AFTER_SECONDS
    while True:
        look = lease.look()
        holder = look.chain[-1] if look.chain else None
        if awaited is not None and (holder is None or holder.token != awaited.token):
            _raise_failure(awaited.token, failed)
            return False
        if look.may_be_taken:
            if holder is not None and look.verdict == "ended":
                shutil.rmtree(_partial(cache, key, holder.token), ignore_errors=True)
            if lease.try_take(look):
                return True
            continue
        awaited = holder
        if time.monotonic() > log_at:
            log_at = float("inf")
            assert holder is not None
            logger.info(
                "waiting for %s, which %s makes, as %s says; it is taken over when it gives no sign of life for %g s",
                lease.path.with_suffix(""),
                f"process {holder.pid} on {holder.host}" if holder.is_known else "a process that it does not name",
                lease.path.name,
                DEAD_SECONDS,
            )
        time.sleep(POLL_SECONDS)


def _raise_failure(token: str, failed: Path) -> None:
    try:
        report = json.loads(failed.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # it has not failed
    if report.get("id") == token:
        raise ValueError(report["message"])


def _replace(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):  # where even this cannot be written, those who wait find out themselves
        atomic_write(path, text, synced=False, writer=uuid.uuid4().hex)
