"""A cache directory with entries by key. An entry is made once, however many processes want it.

The first process takes a lease on the key and makes the entry in a directory of its own, which is then renamed in one
step: an entry is complete or absent. The others wait for it. A lease whose owner was killed is taken over. If two
processes make the same entry all the same, as on a file system that shows files late, the first to finish wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarlhf.data.samples.columns import MANIFEST

logger = logging.getLogger(__name__)
VARIABLE = "MEGARLHF_CACHE"
PRIVATE = "none"
POLL_SECONDS = 0.1
SAID_SECONDS = 2.0
"""After which who waits says for what."""
BEAT_SECONDS = 5.0
"""Between two signs of life of who makes an entry."""
DEAD_SECONDS = 60.0
"""Without a sign after which a lease may be taken over; at once where its process was one of this machine and has gone.
Measured by each who waits, so that clocks need not agree."""
LEFT_OVER_SECONDS = 24 * 3600.0
"""Age at which the files of a killed writer are removed."""
_SHARED_BYTES = 64 << 20
"""Size from which on one process digests a file for all."""
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
    """Size, times and inode of a file, which change with its content. The inode's time is needed too: tools that copy
    set the content's time, which may then be that of another content of the same size."""
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
    """Its name, if the lease is ours; None where it was another's, which has ended. Raises: ValueError with which
    another has failed, who was waited for."""
    path = cache / f"{key}.lease"
    identity = uuid.uuid4().hex
    text = json.dumps({"id": identity, "host": socket.gethostname(), "pid": os.getpid()})
    if not _create(path, text):
        if (dead := _wait(path, cache / f"{key}.failed")) is not None:
            shutil.rmtree(_partial(cache, key, dead), ignore_errors=True)
        yield None
        return
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, stop), daemon=True)
    beat.start()
    try:
        yield identity
    except ValueError as error:
        _replace(cache / f"{key}.failed", json.dumps({"id": identity, "message": str(error)}))
        raise
    else:
        (cache / f"{key}.failed").unlink(missing_ok=True)
    finally:
        stop.set()
        beat.join()
        if _owner(path).get("id") == identity:
            path.unlink(missing_ok=True)


def _create(path: Path, text: str) -> bool:
    """Only where there is none; with its text, also for who is killed in between."""
    if path.exists():
        return False
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    partial.write_text(text, encoding="utf-8")
    try:
        os.link(partial, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        return _create_in_place(path, text)
    finally:
        partial.unlink(missing_ok=True)
    return True


def _create_in_place(path: Path, text: str) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return False
    return True


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):  # where even this cannot be written, those who wait find out themselves
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def _beat(path: Path, stop: threading.Event) -> None:
    while not stop.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)


def _owner(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        owner: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return owner
    return {}


def _wait(path: Path, failed: Path) -> str | None:
    """Until the lease at `path` has ended, or its owner is taken for dead: it is then removed.

    Returns: the name of a lease whose process has gone. Raises: ValueError with which its owner has failed.
    """
    owner: dict[str, Any] = {}
    sign, since = None, time.monotonic()
    say_at = since + SAID_SECONDS
    while True:
        now = _owner(path)
        owner = owner or now
        if not path.exists() or now.get("id") != owner.get("id"):
            report = _owner(failed)
            if owner and report.get("id") == owner["id"]:
                raise ValueError(report["message"])
            return None
        with contextlib.suppress(OSError):
            if (latest := path.stat().st_mtime_ns) != sign:
                sign, since = latest, time.monotonic()
        gone = _has_gone(owner)
        if gone or time.monotonic() - since > DEAD_SECONDS:
            with contextlib.suppress(OSError):
                if _owner(path).get("id") == owner.get("id"):
                    path.unlink()
            return str(owner["id"]) if gone else None
        if time.monotonic() > say_at:
            say_at = float("inf")
            logger.info("%s", _waiting_in_words(path, owner))
        time.sleep(POLL_SECONDS)


def _waiting_in_words(path: Path, owner: Mapping[str, Any]) -> str:
    who = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "a process that it does not name"
    return (
        f"waiting for {path.with_suffix('')}, which {who} makes, as {path.name} says; it is taken over when it gives "
        f"no sign of life for {DEAD_SECONDS:g} s"
    )


def _has_gone(owner: Mapping[str, Any]) -> bool:
    """Whether the process was one of this machine, and is there no more."""
    if owner.get("host") != socket.gethostname():
        return False
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, KeyError, ValueError):
        return False
    return False
