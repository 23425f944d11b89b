"""What ranks do in the tests of resume points."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.megatron_layout import MegatronLayout
from megarlhf.architectures.placements import Head
from megarlhf.config import CheckpointConfig, RoleConfig
from megarlhf.models.role import Role, build_role
from megarlhf.parallel import step as training_step
from megarlhf.parallel.device_memory import Tensors
from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.parallel.mesh import GroupCache
from megarlhf.resume.points import sharded_state
from megarlhf.resume.points.checkpointer import Checkpointer
from megarlhf.resume.points.point import Position
from megarlhf.resume.points.restore import Identity
from megarlhf.resume.points.writer import Content, PointWriter, WriteOutcome
from megarlhf.resume.signals import StopRequest
from megarlhf.runtime import Runtime
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.transport.storages import load_from_files
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


def write(writer: PointWriter, directory: Path, role: Role, **files: Any) -> WriteOutcome:
    if writer._runtime.is_main:
        directory.mkdir(parents=True)
    dist.barrier()
    files |= {f"actor/{name}": content for name, content in role.companion_folder().items()}
    content = Content({"actor": sharded_state.sharded_state(role)}, {"actor": sharded_state.common(role, 3)}, files)
    writer.start(directory, content, lambda files: None)
    outcome = writer.poll(wait=True)
    while outcome is None:
        outcome = writer.poll(wait=True)
    return outcome


def save_and_load(
    runtime: Runtime, model: str, parallel: dict[str, Any], dtype: str, head: Head, source: str | None, target: str
) -> dict[str, Any]:
    """Start from `source` or train three steps, and write `target`; returns counters and the learning rate."""
    role = build(runtime, model, parallel, dtype, head)
    if source is None:
        train(role, 3)
    else:
        sharded_state.load_state(role, Path(source) / "actor")
        sharded_state.set_counters(role, {"optimizer_steps": 3, "scheduler_steps": 3})
    outcome = write(PointWriter(runtime), Path(target), role)
    assert outcome.error is None, outcome.error
    assert role.trainer is not None
    return {**sharded_state.counters(role), "rate": role.trainer.learning_rate, "bytes": outcome.bytes}


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
        mock.patch.object(Tensors, "onload", noting(Tensors.onload)),
    ):
        pieces: Sequence[Tensors] = ()
        role = build(runtime, model, {}, "bf16", "lm", parameters=True, optimizer="stream")
        train(role, 2)
        role.parts.device_memory.keep_only()
        pieces, most[0] = role.parts.optimizer, 0
        assert write(PointWriter(runtime), Path(target), role).error is None
        found |= {"pieces": len(pieces), "written": most[0]}
        before = sharded_state.sharded_state(role)
        fresh = build(runtime, model, {}, "bf16", "lm", parameters=True, optimizer="stream")
        fresh.parts.device_memory.keep_only()
        pieces, most[0] = fresh.parts.optimizer, 0
        sharded_state.load_state(fresh, Path(target) / "actor")
        found["filled"] = most[0]
        after = sharded_state.sharded_state(fresh)
    pairs = [(before[name].data, after[name].data) for name in before]
    tensors = [(one, other) for one, other in pairs if isinstance(one, torch.Tensor)]
    found["equal"] = all(torch.equal(one, other) and bool(one.any()) for one, other in tensors)
    return found | {"tensors": len(tensors)}


def save_and_export(runtime: Runtime, model: str, parallel: dict[str, Any], target: str, exported: str) -> None:
    """A role after three steps, as a resume point has it and as a Hugging Face directory."""
    role = build(runtime, model, parallel, "fp32", "lm")
    train(role, 3)
    assert write(PointWriter(runtime), Path(target), role).error is None
    role.export(Path(exported))


def save_without_model(runtime: Runtime, model: str, run: str) -> str:
    """A link in the model directory leads nowhere; then the directory is removed, after the start and before the first
    point. Returns why a start with that link is refused."""
    role, link = build(runtime, model, {}, "fp32", "lm"), Path(model) / "merges.txt"

    def start() -> Checkpointer:
        cfg = CheckpointConfig(every=1, every_minutes=0)
        identity = Identity("sft", "", {}, {}, {}, {}, {}, {}, lambda config: [])
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
    checkpointer.boundary_reached(Position(1))
    checkpointer.finish(last_boundary=False)
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
