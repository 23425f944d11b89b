"""Commands from Python: in this process, or on ranks that are started for them."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megarlhf.api.configuration import Command, Config, config_of_command
from megarlhf.api.current import require_current
from megarlhf.api.process import borrowed_process
from megarlhf.api.result import RunResult
from megarlhf.config import dump_config
from megarlhf.config.roles import with_hub_models
from megarlhf.resume.signals import INTERRUPTED, StopRun
from megarlhf.runtime import RankInfo, Runtime

_MISTAKE = 2
"""Exit status of ranks that have reported the user's mistake."""


class RunFailed(RuntimeError):
    """Ranks of a run have failed. The text has the ranks' own messages; a traceback of a rank is on stderr.

    status: exit status, as that of the command line
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def run(command: Command, config: Config, *, overrides: Sequence[str] = (), nproc: int | None = None) -> RunResult:
    """Run a command, as `megarlhf COMMAND -c FILE` does, and return its results.

        result = megarlhf.run("sft", "sft.yaml", overrides=["train.num_steps=10"])
        result.column("loss")

    With one rank it runs in this process, also in a notebook. With more, ranks of this machine are started; they find
    the modules that this process finds. All checks are made before anything starts.

    command:   sft, rm, dpo, rl, generate or eval
    config:    a mapping of sections, the path of a YAML file, or a result of `load_config`
    overrides: `section.key=value` texts
    nproc:     number of ranks; default: `run.nproc`

    Raises: ValueError for a mistake, with the sentence of the command line; RunFailed where started ranks have failed;
    StopRun where the run was asked to stop and has saved: the same call goes on.
    """
    cfg = with_hub_models(config_of_command(command, config, overrides, nproc))
    ranks = cfg.run.nproc
    with borrowed_process("run", cfg):
        require_current(cfg)
        from megarlhf.commands.checked import checked_run

        described = checked_run(
            command, cfg, ranks, starts=ranks, launched=False, local_ranks=ranks, overrides=overrides
        )
        for note in described.notes:
            print(note)
        if ranks == 1:
            _in_this_process(command, cfg)
        else:
            _on_started_ranks(command, cfg)
    return RunResult.of(cfg.run.dir)


def _in_this_process(command: str, cfg: Any) -> None:
    from megarlhf.commands.launch import as_rank

    with engines_closed() as factories:
        as_rank(RankInfo(), cfg, partial(_call, command, factories))


def _call(command: str, factories: Any, cfg: Any, runtime: Runtime) -> None:
    from megarlhf.trainers.entries import import_entry

    import_entry(command)(cfg, runtime, factories)


@contextlib.contextmanager
def engines_closed() -> Iterator[Any]:
    """Factories of a run whose rollout engines are closed after a failure too, since the process lives on."""
    from megarlhf.trainers.run.factories import RunFactories

    engines: list[Any] = []

    def make(*arguments: Any) -> Any:
        engines.append(RunFactories().engine(*arguments))
        return engines[-1]

    try:
        yield RunFactories(engine=make)
    except StopRun:
        raise  # closed in order
    except BaseException:
        for engine in engines:
            engine.close()
        raise


def _on_started_ranks(command: str, cfg: Any) -> None:
    from megarlhf.commands.launch import run_local_ranks

    path = [entry or os.getcwd() for entry in sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    with tempfile.TemporaryDirectory(prefix="megarlhf-") as folder:
        file = Path(folder) / f"{command}.yaml"
        file.write_text(dump_config(cfg), encoding="utf-8")
        end = run_local_ranks(cfg.run.nproc, [command, "-c", str(file)])
    if end.status:
        _raise("\n".join(f"{label.strip(' ()')}: {text}" if label else text for label, text in end.messages), end)


def _raise(message: str, end: Any) -> NoReturn:
    from signal import SIGINT

    from megarlhf.commands.launch import SAVED

    if end.at_once and end.status == INTERRUPTED:
        raise KeyboardInterrupt
    if end.status in SAVED and not end.at_once:
        raise StopRun(message, SIGINT if end.status == INTERRUPTED else None)
    if end.status == _MISTAKE:
        raise ValueError(message)
    raise RunFailed(message, end.status)
