"""Opening of a user's own loop: the roles, the engine and the session of `rl`, without data and rewards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megarlhf.api.current import require_current
from megarlhf.api.process import borrowed_process
from megarlhf.api.run import engines_closed
from megarlhf.architectures.own_families import register_families_of
from megarlhf.commands.launch import join, leave_together
from megarlhf.commands.process_tree import end_with_parent
from megarlhf.config.loop import LoopConfig
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.own_code.digest import digest_of_script
from megarlhf.own_code.guarded import plain_state
from megarlhf.planning.models import check_heads, check_vocabularies
from megarlhf.planning.preflight import check_layouts, check_positions
from megarlhf.resume.claim.on_existing import require_usable, require_writable
from megarlhf.resume.signals import StopRequest, StopRun
from megarlhf.runtime import RankInfo, Runtime, detect_rank
from megarlhf.trainers.experience.prompts import PromptData
from megarlhf.trainers.rl.build import RLRun, build, training_of
from megarlhf.trainers.rl.loop import closed_at_the_end, update_weights
from megarlhf.trainers.run.best_checkpoint import Best
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.run.open_session import open_session
from megarlhf.trainers.run.session import Session


@dataclass
class UserState:
    """Values of the user's loop, which resume points hold."""

    values: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Raises: ValueError for a value that JSON would not give back."""
        return plain_state(self.values, "loop.state")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values.update(state)


@dataclass(frozen=True)
class OpenLoop:
    """A loop whose run directory, models and engine are open."""

    run: RLRun
    session: Session


@contextlib.contextmanager
def opened(cfg: LoopConfig, state: UserState) -> Iterator[OpenLoop]:
    """Scope of an open loop, in this process alone or as one rank of a launcher. Collective.

    Raises: ValueError for mistakes, before anything is written; StopRun when it was asked to stop and has saved.
    """
    info = detect_rank(os.environ)
    register_families_of(cfg.roles())
    if info is None and cfg.run.nproc > 1:
        raise ValueError(
            f"run.nproc = {cfg.run.nproc}: a Loop starts no ranks, as each of them runs your script; start it with "
            f"torchrun --nproc-per-node {cfg.run.nproc} SCRIPT, or srun, and leave run.nproc out"
        )
    with borrowed_process("Loop", cfg, as_rank=True):
        require_current(cfg)
        if info is not None:
            end_with_parent()
        info = info or RankInfo()
        runtime = join(info, cfg, partial(_check, cfg, info.world_size))
        try:
            with _factories(alone=info.world_size == 1) as parts, _open(cfg, runtime, state, parts) as loop:
                yield loop
        except StopRun:  # all ranks have saved
            leave_together()
            raise
        leave_together()


def _factories(*, alone: bool) -> contextlib.AbstractContextManager[RunFactories]:
    """Only an engine of a process alone is closed after a failure: other ranks may be stuck."""
    return engines_closed() if alone else contextlib.nullcontext(RunFactories())


def _check(cfg: LoopConfig, world_size: int) -> None:
    """Raises: ValueError that names the mistake and the remedy."""
    checked = check_layouts(cfg, world_size)
    for name, section in cfg.roles().items():
        check_positions(cfg, name, section, checked[name][0])
    check_vocabularies(cfg.roles())
    check_heads(cfg.roles(), trains_reward_model=False)
    require_usable(cfg, cfg.run, "loop")
    require_writable(cfg.run)


@contextlib.contextmanager
def _open(cfg: LoopConfig, runtime: Runtime, state: UserState, parts: RunFactories) -> Iterator[OpenLoop]:
    with (
        StopRequest(device=runtime.device, announces=runtime.is_main) as stop_request,
        parts.phases(cfg.watchdog, cfg.profile, cfg.run.dir, runtime) as phases,
    ):
        with phases("build"):
            nothing: Any = ()  # of training data
            data = PromptData(nothing, nothing, load_tokenizer(cfg.actor.model.tokenizer_place()), [])
            run = build(cfg, runtime, data, phases, parts)
            training = training_of(run, {"loop": state}, Best(None, "rl"), stop_request, parts)
            training = replace(training, sources={**training.sources, **digest_of_script()})
        num_steps = cfg.train.num_steps
        with (
            contextlib.closing(run.rewarder),
            closed_at_the_end(run.engine),
            open_session(cfg, cfg.run, runtime, "loop", num_steps, (), training, phases=phases) as session,
        ):
            update_weights(run, session.step, verify=True)
            if not session.resumed:
                session.log_start({})
            yield OpenLoop(run, session)
            if session.step == num_steps:
                session.finish(None)
            else:
                session.save_boundary()
                session.note(f"the loop was left after {session.step} of {num_steps} steps; opened again, it goes on")
