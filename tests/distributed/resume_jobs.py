"""What ranks do in the tests of resume points."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import Head
from megarlhf.commands import cli
from megarlhf.config import CheckpointConfig, RoleConfig
from megarlhf.models.role import Role, build_role
from megarlhf.observe.step_lines import StepLines
from megarlhf.parallel import step as training_step
from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.residency import Tensors
from megarlhf.resume import point, role_state, writer
from megarlhf.resume.checkpointer import Checkpointer
from megarlhf.resume.point import Position
from megarlhf.resume.restore import Identity
from megarlhf.resume.signals import StopRequest
from megarlhf.resume.writer import Content, Outcome, Writer
from megarlhf.runtime import Runtime
from megarlhf.trainers import rm
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.transport.storages import load_from_files
from tests.distributed.jobs import command_status
from tests.weights import megatron_shapes


def build(
    runtime: Runtime, model: str, parallel: dict[str, Any], dtype: str, head: Head, **offload: bool | str
) -> Role:
    parallel = dict(parallel)
    optim = {"distributed": parallel.pop("distributed", "auto")}
    model_section = {"path": model, "dtype": dtype, "fresh_head": head == "scalar"}
    tree = {"model": model_section, "parallel": parallel, "optim": optim, "offload": offload}
    section = RoleConfig.model_validate(tree)
    return build_role("actor", section, head, GroupCache(runtime), seed=0, num_optimizer_steps=50)


def train(role: Role, steps: int) -> None:
    """Optimizer steps with made-up gradients, the same wherever replicas of a parameter stand."""
    trainer, at = role.trainer, role.mesh.coordinates
    assert trainer is not None
    for step in range(steps):
        for chunk in trainer.chunks:
            chunk.zero_grad_buffer()
        for name, parameter in sorted(role.shard.module.named_parameters()):
            part = at.tp if getattr(parameter, "tensor_model_parallel", False) else 0
            seed = hashlib.sha256(f"{name}/{step}/{part}/{at.pp}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(seed[:6], "little"))
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        trainer.step(trainer.gradient_norm())


def write(writer: Writer, directory: Path, role: Role, **files: Any) -> Outcome:
    if writer._runtime.is_main:
        directory.mkdir(parents=True)
    dist.barrier()
    files |= {f"actor/{name}": content for name, content in role.companion_files().items()}
    content = Content({"actor": role_state.sharded_state(role)}, {"actor": role_state.common(role, 3)}, files)
    writer.start(directory, content, lambda files: None)
    outcome = writer.poll(wait=True)
    while outcome is None:
        outcome = writer.poll(wait=True)
    return outcome


def save_and_load(
    runtime: Runtime,
    model: str,
    parallel: dict[str, Any],
    dtype: str,
    head: Head,
    source: str | None,
    target: str,
) -> dict[str, Any]:
    """Start from `source` or train three steps, and write `target`; returns counters and the learning rate."""
    role = build(runtime, model, parallel, dtype, head)
    if source is None:
        train(role, 3)
    else:
        role_state.load_state(role, Path(source) / "actor")
        role_state.set_counters(role, {"optimizer_steps": 3, "scheduler_steps": 3})
    outcome = write(Writer(runtime), Path(target), role)
    assert outcome.error is None, outcome.error
    assert role.trainer is not None
    return {**role_state.counters(role), "rate": role.trainer.learning_rate, "bytes": outcome.bytes}


def save_and_load_streamed(runtime: Runtime, model: str, target: str) -> dict[str, Any]:
    """A trained role whose optimizer is streamed is written, and filled again from there: pieces of its state, and how
    many of them are on the device at a time, at each moment that any moves."""
    most = [0]

    def noting(come: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
        def noted(part: Tensors) -> None:
            come(part)
            most[0] = max(most[0], sum(piece.present for piece in pieces))

        return noted

    found: dict[str, Any] = {}
    with (
        mock.patch.object(training_step, "PIECE_BYTES", 2**14),
        mock.patch.object(Tensors, "come", noting(Tensors.come)),
    ):
        pieces: Sequence[Tensors] = ()
        role = build(runtime, model, {}, "bf16", "lm", parameters=True, optimizer="stream")
        train(role, 2)
        role.parts.residency.turn()
        pieces, most[0] = role.parts.optimizer, 0
        assert write(Writer(runtime), Path(target), role).error is None
        found |= {"pieces": len(pieces), "written": most[0]}
        before = role_state.sharded_state(role)
        fresh = build(runtime, model, {}, "bf16", "lm", parameters=True, optimizer="stream")
        fresh.parts.residency.turn()
        pieces, most[0] = fresh.parts.optimizer, 0
        role_state.load_state(fresh, Path(target) / "actor")
        found["filled"] = most[0]
        after = role_state.sharded_state(fresh)
    pairs = [(before[name].data, after[name].data) for name in before]
    tensors = [(one, other) for one, other in pairs if isinstance(one, torch.Tensor)]
    found["equal"] = all(torch.equal(one, other) and bool(one.any()) for one, other in tensors)
    return found | {"tensors": len(tensors)}


def save_and_export(runtime: Runtime, model: str, parallel: dict[str, Any], target: str, exported: str) -> None:
    """A role after three steps, as a resume point has it and as a Hugging Face directory."""
    role = build(runtime, model, parallel, "fp32", "lm")
    train(role, 3)
    assert write(Writer(runtime), Path(target), role).error is None
    role.export(Path(exported))


def save_without_model(runtime: Runtime, model: str, run: str) -> str:
    """A link in the model directory leads nowhere; then the directory is removed, after the start and before the first
    point. Returns why a start with that link is refused."""
    role, link = build(runtime, model, {}, "fp32", "lm"), Path(model) / "merges.txt"

    def start() -> Checkpointer:
        cfg = CheckpointConfig(every=1, every_minutes=0)
        identity = Identity("sft", "", None, {}, {}, {}, {}, {}, lambda config: [])
        return Checkpointer(runtime, Path(run), cfg, [role], {}, identity, StopRequest())

    if runtime.is_main:
        link.symlink_to("gone")
    try:
        start()
        refused = ""
    except ValueError as error:
        refused = str(error)
    if runtime.is_main:
        link.unlink()
    dist.barrier()
    checkpointer = start()
    if runtime.is_main:
        shutil.rmtree(model)
    dist.barrier()
    checkpointer.border(Position(1))
    checkpointer.finish(last_border=False)
    return refused


def load_with_megatron(runtime: Runtime, path: str, exported: str) -> dict[str, Any]:
    """Megatron-Core loads the checkpoint into a model full of NaN, which is then compared with the exported weights."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.safe_globals import register_safe_globals

    register_safe_globals()
    arch = architecture_from_hf(Path(exported))
    (part,) = MegatronLayout(padded_vocab=128, spec="local").parts(arch)
    wanted = {name: torch.zeros(shape) for name, shape in part.storages.items()}
    load_from_files(part, open_checkpoint(Path(exported), hf=None, head="lm").weights, wanted)
    with megatron_device(runtime.device):
        parallel_state.destroy_model_parallel()  # what our own meshes have left in this process
        parallel_state.initialize_model_parallel()
        try:
            model = megatron_shapes._model(arch, {"padded_vocab": 128}, True, True, None)
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)
            content = dist_checkpointing.load_content_metadata(path) or {}
            content = {**content, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
            state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=content)}, path)
            model.load_state_dict(state["model"], strict=True)
        finally:
            parallel_state.destroy_model_parallel()
    parameters = dict(model.named_parameters())
    return {
        # The rows that pad the vocabulary have been trained here, and are no part of the model.
        "wrong": [
            name
            for name, value in wanted.items()
            for rows in [arch.vocab_size if name.startswith(("embedding.word", "output_layer")) else None]
            if not torch.equal(parameters[name].detach()[:rows], value[:rows])
        ],
        "compared": len(wanted),
        "parameters": len(parameters),
        "iteration": state["iteration"],
    }


class Killed(Exception):
    """Stands for a process that ends in the middle, wherever it is."""


@contextlib.contextmanager
def at_call(calls: int, owner: str, name: str, action: Callable[[], None]) -> Iterator[list[int]]:
    """`action` happens at the call numbered `calls` of a method (`module:Class`) or function (`module`), before it does
    anything. Yields a list with one item for each call so far."""
    module, _, kind = owner.partition(":")
    place: Any = importlib.import_module(module)
    place = getattr(place, kind) if kind else place
    real, made = getattr(place, name), list[int]()

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(1)
        if len(made) == calls:
            action()
        return real(*arguments, **options)

    with mock.patch.object(place, name, counted):
        yield made


def _kill() -> None:
    raise Killed


def command_until(runtime: Runtime, calls: int, owner: str, method: str, *argv: str) -> tuple[str, str]:
    """A command that is cut off at the call numbered `calls` of a method (`module:Class`), before it does anything.

    Returns: `killed`, or `ended` where there were fewer calls; and what this rank wrote.
    """
    main, killed = cli.main, -1

    def main_until(*arguments: Any) -> int:
        try:
            return main(*arguments)
        except Killed:
            return killed

    with at_call(calls, owner, method, _kill), mock.patch.object(cli, "main", main_until):
        status, written = command_status(runtime, *argv)
    assert status in (0, killed), written
    return ("killed" if status == killed else "ended"), written


def command_with_signal(runtime: Runtime, calls: int, owner: str, method: str, *argv: str) -> tuple[int, str]:
    """A command that receives SIGTERM at the call numbered `calls` of a method; its status and what it wrote."""
    return command_with(runtime, signal.SIGTERM, 0, calls, owner, method, *argv)


def command_with(
    runtime: Runtime, number: int, rank: int, calls: int, owner: str, method: str, *argv: str
) -> tuple[int, str]:
    """The same of any signal, that one rank receives."""

    def receive() -> None:
        if runtime.rank == rank:
            os.kill(os.getpid(), number)
            time.sleep(0.1)  # until it is noted, in a thread

    with at_call(calls, owner, method, receive) as made:
        result = command_status(runtime, *argv)
    assert len(made) >= calls, f"{owner}.{method} was called {len(made)} times only"
    return result


def command_that_is_late(runtime: Runtime, kind: str, calls: int, *argv: str) -> tuple[int, str]:
    """A command whose rule reward, at a call of rank 0, hangs, or takes longer than its limit where nothing can
    interrupt it."""
    from tests.distributed.faulty_rules import as_in_a_collective

    def wait() -> None:
        if runtime.is_main:
            time.sleep(1000) if kind == "hangs" else as_in_a_collective(lambda: time.sleep(3))

    with at_call(calls, "megarlhf.rollout.rewards.score", "outcomes_here", wait) as made:
        result = command_status(runtime, *argv)
    assert len(made) >= calls
    return result


def command_that_hangs(runtime: Runtime, calls: int, owner: str, method: str, *argv: str) -> tuple[int, str]:
    """A command in which a call of a method does not come to its end by itself; its status and what it wrote."""
    with at_call(calls, owner, method, lambda: time.sleep(1000)) as made:
        result = command_status(runtime, *argv)
    assert len(made) >= calls
    return result


def stopped_rollout(runtime: Runtime, run: str, *argv: str) -> tuple[int, str, list[tuple[list[str], bool, bool]]]:
    """SIGTERM to rank 1 when the second rollout begins; status, words, and how things stand when the engine is closed:
    the resume points, whether the run is locked, whether the ranks can still talk."""
    from megarlhf.resume.point import find_points

    engine, seen = "megarlhf.rollout.megatron_engine:MegatronEngine", []

    def look() -> None:
        points = [point.path.name for point in find_points(Path(run))]
        seen.append((points, (Path(run) / "lock").exists(), dist.is_initialized()))

    with at_call(1, engine, "close", look):
        return *command_with(runtime, signal.SIGTERM, 1, 2, engine, "generate", *argv), seen


def command_that_skips(runtime: Runtime, calls: int, *argv: str) -> tuple[int | str, str]:
    """A command in which every step counts as a spike once three gradient norms are known; cut off at a call of
    `Trainer.accumulate`, or not (0)."""
    from megarlhf.trainers import bad_steps

    trainer = "megarlhf.parallel.step:Trainer"
    with mock.patch.object(bad_steps, "MIN_NORMS", 3), mock.patch.object(bad_steps, "median", return_value=0.0):
        if calls:
            return command_until(runtime, calls, trainer, "accumulate", *argv)
        return command_status(runtime, *argv)


def command_on_a_full_disk(runtime: Runtime, rank: int, first: int, last: int, *argv: str) -> str:
    """A command during whose updates `first` to `last` a rank can write no file beyond 300 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = "megarlhf.parallel.step:Trainer"

    def fill() -> None:
        if runtime.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))

    def free() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    try:
        with at_call(first, trainer, "step", fill), at_call(last + 1, trainer, "step", free):
            status, written = command_status(runtime, *argv)
    finally:
        free()
    assert status == 0, written
    return written


def command_on_a_tight_disk(runtime: Runtime, run: Path, *argv: str) -> str:
    """A command that has room for a point only where none that was passed over takes it."""

    def disk_usage(path: Path) -> Any:
        return SimpleNamespace(free=0 if list((run / "resume").glob("*.passed_over")) else 1 << 40)

    patched = SimpleNamespace(**{**vars(shutil), "disk_usage": disk_usage})
    with mock.patch.object(point, "shutil", patched), mock.patch.object(point, "allocated_bytes", return_value=1 << 40):
        status, written = command_status(runtime, *argv)
    assert status == 0, written
    return written


def command_whose_line_waits(runtime: Runtime, line: int, calls: int, *argv: str) -> tuple[str, str]:
    """A command that finds no room for a line of metrics.jsonl, and is cut off at a call of `Trainer.step`."""
    real, made = StepLines.flush, list[int]()

    def write(self: StepLines) -> None:
        made.extend([1] if self._pending else [])
        if len(made) != line:
            real(self)

    with mock.patch.object(StepLines, "flush", write):
        return command_until(runtime, calls, "megarlhf.parallel.step:Trainer", "step", *argv)


def command_whose_directory_moves(runtime: Runtime, run: Path, *argv: str) -> tuple[int, str]:
    """A command whose run directory gets another name when the third update begins."""
    with at_call(3, "megarlhf.parallel.step:Trainer", "step", lambda: run.rename(f"{run}-moved") and None):
        return command_status(runtime, *argv)


def points_at_updates(runtime: Runtime, run: Path, *argv: str) -> list[list[str]]:
    """The resume points that are there whenever weights are about to change, where writing one takes a second longer
    than anything else."""
    real, real_clip = writer._write_files, training_step.clip_grad_by_total_norm_fp32
    seen: list[list[str]] = []

    def write(*arguments: Any) -> Any:
        time.sleep(1)
        return real(*arguments)

    def clip(*arguments: Any) -> None:
        seen.append([each.position.name for each in point.find_points(run)])
        real_clip(*arguments)

    with (
        mock.patch.object(writer, "_write_files", write),
        mock.patch.object(training_step, "clip_grad_by_total_norm_fp32", clip),
    ):
        status, written = command_status(runtime, *argv)
    assert status == 0, written
    return seen


def command_stopped_while_it_scales(runtime: Runtime, when: str, *argv: str) -> tuple[int, str]:
    """SIGTERM when the scores are `measured` that a reward model is scaled by, or when its head `changes`."""
    real = rm.validation_sums

    def measure(objective: Any, role: Any, samples: Any, should_stop: Any = None) -> Any:
        sums = real(objective, role, samples, should_stop)
        if when == "measured" and should_stop is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return sums

    with mock.patch.object(rm, "validation_sums", measure):
        if when == "measured":
            return command_status(runtime, *argv)
        return command_with_signal(runtime, 1, "megarlhf.trainers.rm", "divide_head", *argv)


def command_on_a_read_only_disk(runtime: Runtime, patched: bool, *argv: str) -> tuple[int, str, int]:
    """Status, words, and how many roles were built; `patched`: no file can be written."""

    def refuse(path: Path, *arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    refused = mock.patch.object(Path, "write_text", refuse) if patched else contextlib.nullcontext()
    with refused, at_call(0, "megarlhf.trainers.supervised", "build_role", _kill) as made:
        return *command_status(runtime, *argv), len(made)
