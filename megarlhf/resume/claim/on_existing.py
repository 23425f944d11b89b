"""Starts in a run directory that holds an earlier run: the start resumes it, overwrites it, or is refused.

A refused start leaves every file as it was.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

from megarlhf.atomic_write import atomic_write
from megarlhf.config import DPOConfig, FrozenModel, RLConfig, RMConfig, RunConfig, SFTConfig, dump_config, load_config
from megarlhf.config.rollout import DRAWS
from megarlhf.data.sources.splits import is_pattern
from megarlhf.lease import restart_count
from megarlhf.observe.records.run_directory import (
    CONFIG_FILE,
    CONFIG_HEADER,
    FINISHED_FILE,
    files_of_a_run,
    inputs,
    places,
    require_room,
    written_by,
)
from megarlhf.resume.claim.config_changes import Change, TrainingConfig, compare
from megarlhf.resume.claim.lock import Lock
from megarlhf.resume.points.point import find_points

NO_STEPS_LEFT = "num_steps"
"""The reason of a run that has finished because all its steps are done; more steps let it go on."""


@dataclass(frozen=True)
class StartDecision:
    """Decision of a start about the contents of its run directory."""

    removed: list[Path]
    """An earlier run's files, which `overwrite` removes."""
    resumes: bool
    """Whether an earlier run continues."""
    notes: list[str]
    """Sentences on the run that continues, and on what has changed in its configuration."""


@dataclass(frozen=True)
class Finished:
    """Content of `FINISHED`."""

    step: int
    reason: str
    when: str


@dataclass(frozen=True)
class Claim:
    """A run directory that belongs to this process until `lock` is released. Nothing else has been changed in it."""

    lock: Lock
    resumes: bool
    """An earlier run that has not finished is there. Without a resume point it begins anew."""
    notes: list[str]
    _cfg: FrozenModel
    _run: RunConfig
    _command: str
    _removed: list[Path]

    def start(self) -> None:
        """Remove the overwritten run, or the resumed run's FINISHED mark, and write the resolved configuration.

        An earlier configuration of a resumed run is kept as `config.1.yaml`, `config.2.yaml`, ... Call this when the
        resume point has been checked and nothing can be refused any more.
        """
        directory, config = self._run.dir, self._run.dir / CONFIG_FILE
        text = CONFIG_HEADER.format(command=self._command) + dump_config(self._cfg)
        try:
            if not self.resumes:
                _remove(directory, self._removed)
                atomic_write(config, text)
                return
            if (before := config.read_text(encoding="utf-8")) != text:
                kept = _unused_config_path(directory)
                atomic_write(kept, before)
                try:
                    atomic_write(config, text)
                except OSError:
                    kept.unlink()
                    raise
            (directory / FINISHED_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(_not_writable(self._run, error)) from error


def claim(cfg: FrozenModel, run: RunConfig, command: str) -> Claim:
    """Take the run directory for this process; it and its parents are made where they are missing. For rank 0.

    Raises: ValueError as `require_usable`, or when the directory cannot be written.
    """
    _decide(cfg, run, command)  # a start that is refused does not even take the lock
    try:
        run.dir.mkdir(parents=True, exist_ok=True)
        lock = Lock.take(run.dir)
    except OSError as error:
        raise ValueError(_not_writable(run, error)) from error
    try:
        decision = _decide(cfg, run, command)  # nobody changes it now
    except BaseException:
        lock.release()
        raise
    notes = [*decision.notes, *([lock.note] if lock.note else [])]
    return Claim(lock, decision.resumes, notes, cfg, run, command, decision.removed)


def require_usable(cfg: FrozenModel, run: RunConfig, command: str) -> StartDecision:
    """Tell what a start of `command` would do in `run.dir`; nothing is touched. May watch an old lock for a while.

    Raises: ValueError when the directory belongs to a run that is running, when the earlier run there may not go on or
    be overwritten, or when something that no run wrote stands where this one saves.
    """
    if run.dir.is_dir():
        Lock(run.dir).require_free()
    return _decide(cfg, run, command)


def finish(run_dir: Path, step: int, reason: str) -> None:
    """Mark the run as finished after `step`, because of `reason`: `NO_STEPS_LEFT`, or the name of a rule that ended it.
    The file appears complete or not at all."""
    finished = Finished(step, reason, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    atomic_write(run_dir / FINISHED_FILE, json.dumps(vars(finished)) + "\n")


def finished(run_dir: Path) -> Finished | None:
    """The content of `FINISHED`; None for a run that has not finished.

    Raises: ValueError when it is damaged.
    """
    path = run_dir / FINISHED_FILE
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return Finished(int(tree["step"]), str(tree["reason"]), str(tree["when"]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not what a run writes when it has finished ({error}); remove it if the run is to go on"
        ) from error


def _decide(cfg: FrozenModel, run: RunConfig, command: str) -> StartDecision:
    """Do as `require_usable` does, without a look at the lock."""
    wanted = run.dir.absolute()
    nearest = next(path for path in (wanted, *wanted.parents) if path.exists())
    if not nearest.is_dir():
        which = "is a file" if nearest == wanted else f"is below {nearest}, which is a file"
        raise ValueError(f"run.dir = {run.dir} {which}; name a directory")
    decision = StartDecision([], False, [])
    if files := files_of_a_run(run.dir):
        shown = ", ".join(sorted({path.relative_to(run.dir).parts[0] for path in files}))
        if run.on_existing == "overwrite":
            _require_same_command(run, command, shown)
            _require_overwritable(cfg, run, files)
            decision = StartDecision(files, False, [])
        elif run.on_existing == "resume" and isinstance(cfg, SFTConfig | RMConfig | DPOConfig | RLConfig):
            _require_same_command(run, command, shown)
            decision = StartDecision([], True, _require_resumable(cfg, run, command))
        else:
            why = "" if run.on_existing == "refuse" else f"; {command} has nothing to go on with, and starts over only"
            raise ValueError(
                f"run.dir = {run.dir} holds an earlier run ({shown}), and the two would be mixed{why}; name another "
                "directory, or start over with run.on_existing=overwrite, which removes these files of that run and "
                "nothing else"
            )
    _require_own(run)
    _require_apart(cfg, run)
    best = cfg.checkpoint.best if isinstance(cfg, SFTConfig | RMConfig | DPOConfig | RLConfig) else None
    require_room(run.dir, best=best is not None)
    return decision


def _require_own(run: RunConfig) -> None:
    """Raises: ValueError for a directory with other uses (home, a repository), unless an earlier run is in it."""
    wanted = run.dir.resolve()
    which = {Path("/"): "the root directory", Path(os.path.expanduser("~")).resolve(): "the home directory"}
    which[Path.cwd()] = "the working directory"
    shared = "the root of a git repository" if (wanted / ".git").exists() else which.get(wanted)
    if shared and written_by(wanted / CONFIG_FILE) is None:
        raise ValueError(
            f"run.dir = {run.dir} is {shared}: {CONFIG_FILE}, metrics.jsonl, checkpoints and other files of the run "
            "would be mixed with other files, and run.on_existing=overwrite would replace files with such names; "
            "name a separate directory, such as run.dir=runs/1"
        )


def _require_apart(cfg: FrozenModel, run: RunConfig) -> None:
    """Raises: ValueError where the run would write between the files of a model, or into a folder of data, of which its
    own files would be some at the next start."""
    wanted = run.dir.resolve()
    for key, path in inputs(cfg.model_dump()):
        source = path.resolve()
        if not key.startswith("data."):
            mixed = wanted.is_relative_to(source) and _holds_a_model(source)
        elif is_pattern(path):
            mixed = wanted == source.parent and fnmatch("metrics.jsonl", path.name)
        else:
            mixed = wanted == source
        if mixed:
            raise ValueError(
                f"run.dir = {run.dir} {'is' if wanted == source else 'is in'} {key} = {path}, which this run "
                "reads; name a separate directory"
            )


def strangers_in(run: RunConfig) -> list[str]:
    """A sentence on files that are in the directory of a new run already, or none."""
    names = sorted(path.name for path in run.dir.iterdir()) if run.dir.is_dir() else []
    others = [name for name in names if name not in ("lock", "failures", "tokens")]
    if not others or files_of_a_run(run.dir):
        return []
    listed = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
    return [f"run.dir = {run.dir} holds no run; the files of this one will be beside {listed}"]


def require_writable(run: RunConfig) -> None:
    """Make and remove a folder where the run directory is or will be. Raises: ValueError when that fails."""
    nearest = next(path for path in (run.dir.absolute(), *run.dir.absolute().parents) if path.exists())
    try:
        Path(tempfile.mkdtemp(prefix=".megarlhf-", dir=nearest)).rmdir()
    except OSError as error:
        raise ValueError(_not_writable(run, error)) from error


def _require_same_command(run: RunConfig, command: str, shown: str) -> None:
    writer = written_by(run.dir / CONFIG_FILE)
    if writer == command:
        return
    whose = f"of `megarlhf {writer}`" if writer else f"that cannot be told: its {CONFIG_FILE} is none of megarlhf's"
    may = "is overwritten" if run.on_existing == "overwrite" else "goes on"
    raise ValueError(
        f"run.on_existing = {run.on_existing}: run.dir = {run.dir} holds {shown} of a run {whose}; only an earlier run "
        f"of `megarlhf {command}` {may}. Name another directory, or remove what is there yourself"
    )


def _require_resumable(cfg: TrainingConfig, run: RunConfig, command: str) -> list[str]:
    """Sentences on the earlier run that goes on. Raises: ValueError when it has finished, or would change."""
    ended = finished(run.dir)
    if ended is not None:
        _require_more_to_do(ended, cfg, run)
    notes = [f"run.dir = {run.dir} holds an earlier run of `megarlhf {command}`, which goes on"]
    ways_out = (
        "name another run.dir for a new run, or go on with the new configuration by run.allow_changes=true, or start "
        "over with run.on_existing=overwrite"
    )
    try:
        before = load_config(type(cfg), run.dir / CONFIG_FILE, of_a_run=True)
        if cfg.train.num_epochs is not None:  # counted when the records are, and compared again
            known = {"num_steps": before.train.num_steps, "num_epochs": None}
            cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update=known)})
        changes = compare(before, cfg)
    except ValueError as error:
        why = f"{error}, so it cannot be compared with that of the earlier run"
        if not run.allow_changes:
            raise ValueError(f"run.dir = {run.dir}: {why}; {ways_out}") from error
        return [*notes, f"run.allow_changes: {why}"]
    _require_same_draws(before, cfg, run, changes.mathematics)
    if changes.mathematics and not run.allow_changes:
        raise ValueError(
            f"run.dir = {run.dir} holds an earlier run, and the configuration has changed in what is computed: "
            f"{'; '.join(map(str, changes.mathematics))}. Give the earlier values to go on as before; {ways_out}"
        )
    notes += [f"changed since, in what is computed (run.allow_changes): {change}" for change in changes.mathematics]
    notes += [f"changed since; digests say whether the content is the same: {change}" for change in changes.places]
    notes += [f"changed since, in what is the best checkpoint, in no step: {change}" for change in changes.choices]
    return notes + [f"changed since, with the same numbers up to rounding: {change}" for change in changes.neutral]


def _require_same_draws(before: TrainingConfig, cfg: TrainingConfig, run: RunConfig, changes: Sequence[Change]) -> None:
    """Raises: ValueError where responses that an earlier start has begun in slices would be finished otherwise. A
    resume point tells the same later, also of other data."""
    if not isinstance(before, RLConfig) or not isinstance(cfg, RLConfig) or not find_points(run.dir):
        return
    if not (before.rollout.is_stale or cfg.rollout.is_stale):
        return
    changed = [str(change) for change in changes if change.key in DRAWS]
    if changed:
        raise ValueError(
            f"run.dir = {run.dir} holds a run with slices of responses, and {'; '.join(changed)} would draw the rest "
            "of responses otherwise than they were begun. Give the earlier values (run.allow_changes does not "
            "help), name another run.dir for a new run, or start over with run.on_existing=overwrite"
        )


def _require_more_to_do(ended: Finished, cfg: TrainingConfig, run: RunConfig) -> None:
    """Raises: ValueError unless a run that has finished is to do more now, and has a resume point to go on from. To
    begin it again would cost its results."""
    holds = f"run.dir = {run.dir} holds a run that has finished (step {ended.step}, {ended.reason}, {ended.when})"
    over = "start over with run.on_existing=overwrite, which removes that run's files"
    if not find_points(run.dir):
        raise ValueError(
            f"{holds}, and no resume point of it: there is nothing to go on from. To train its result further, name it "
            f"as model.path in a run with another run.dir; or {over}"
        )
    if missing := _missing_to_go_on(ended, cfg, run):
        raise ValueError(
            f"{holds}; to go on, {' and '.join(missing)}; or name another directory for a new run, or {over}"
        )


def _missing_to_go_on(ended: Finished, cfg: TrainingConfig, run: RunConfig) -> list[str]:
    """Advice for a run that has finished and has nothing more to do; empty where it has."""
    missing = []
    if cfg.train.num_steps <= ended.step:
        missing.append(f"raise train.num_steps above {ended.step} (it is {cfg.train.num_steps}), or train.num_epochs")
    if ended.reason != NO_STEPS_LEFT:
        try:
            before = load_config(type(cfg), run.dir / CONFIG_FILE, of_a_run=True)
        except ValueError as error:
            return [*missing, f"bring back the earlier configuration ({error})"]
        if before.train.stop == cfg.train.stop:
            missing.append("change train.stop, a rule of which has ended it")
        if not run.allow_changes:
            missing.append("give run.allow_changes=true")
    return missing


def _require_overwritable(cfg: FrozenModel, run: RunConfig, files: list[Path]) -> None:
    """Raises ValueError unless the earlier run's `files` may be removed without harm.

    A restart by Slurm finds what its first attempt wrote. Of a command that cannot go on and has not finished, that is
    nothing of worth: it writes its results at the end.
    """
    resumes = isinstance(cfg, SFTConfig | RMConfig | DPOConfig | RLConfig)
    if restart_count() > 0 and (resumes or finished(run.dir) is not None):
        goes_on = "; run.on_existing=resume goes on with it" if resumes else ""
        raise ValueError(
            f"run.on_existing = overwrite: Slurm has queued this job again (SLURM_RESTART_COUNT = {restart_count()}), "
            f"and run.dir = {run.dir} holds a run that the first attempt may have written; it is not removed{goes_on}. "
            "To start over, submit a new job"
        )
    removed = [place for path in files for place in places(path)]
    for key, path in inputs(cfg.model_dump()):
        source = path.resolve()
        if any(source.is_relative_to(gone) for gone in removed):
            raise ValueError(
                f"run.on_existing = overwrite would remove {key} = {path}, which this run reads; name another run.dir"
            )
        lost = [str(gone) for gone in removed if gone.is_relative_to(source)]
        if lost and source.is_dir() and (key.startswith("data.") or _holds_weights(source)):
            raise ValueError(
                f"run.on_existing = overwrite would remove {', '.join(lost[:5])} from {key} = {path}, which this run "
                "reads; name another run.dir"
            )


def _holds_weights(directory: Path) -> bool:
    return any(path.suffix in (".safetensors", ".bin") for path in directory.iterdir())


def _holds_a_model(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    named = ("config.json", "latest_checkpointed_iteration.txt", "metadata.json")
    return any((directory / name).exists() for name in named) or _holds_weights(directory)


def _remove(directory: Path, files: list[Path]) -> None:
    """The files and folders, and the folders below `directory` that they leave empty."""
    for path in files:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for folder in sorted({parent for path in files for parent in path.relative_to(directory).parents}, reverse=True):
        place = directory / folder
        if folder.parts and not place.is_symlink() and not any(place.iterdir()):
            place.rmdir()


def _unused_config_path(directory: Path) -> Path:
    paths = (directory / f"config.{number}.yaml" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


def _not_writable(run: RunConfig, error: OSError) -> str:
    return f"run.dir = {run.dir} cannot be written ({error}); name a directory you may write"
