"""Roles: a model on a mesh, with an optimizer if it is trained."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.hf_config import architecture_from_hf, read_config, router_aux_loss_of_config
from megarlhf.architectures.placements import Head
from megarlhf.config import MicroBatchConfig, RoleConfig
from megarlhf.config.lora import ADAPTER_SUFFIX
from megarlhf.models.build import ModelShard, bf16_gradients, build_model
from megarlhf.models.experts import use_balance
from megarlhf.models.lora import without_adapters
from megarlhf.models.trainable import choose_trained
from megarlhf.models.weights import CHECKPOINTS, WeightSource, companion_folder, export_adapter, export_hugging_face
from megarlhf.parallel.batching import Batching
from megarlhf.parallel.device_memory import DeviceMemory, RoleParts, Tensors
from megarlhf.parallel.loss import Accumulated, Loss, StepResult
from megarlhf.parallel.mesh import GroupCache, Mesh, build_mesh
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.parallel.packing.partition import forward_cost
from megarlhf.parallel.router_balance import RouterBalance
from megarlhf.parallel.step import Trainer, forward_only
from megarlhf.weights.checkpoint.formats.huggingface.read import is_huggingface
from megarlhf.weights.checkpoint.peft import adapted

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Role:
    """Actor, critic, reference or reward model, as this rank sees it.

    A frozen role may live on a subset of the ranks (`mesh.is_member`). The other ranks hold an empty module and only
    join collectives of all ranks."""

    name: str
    section: RoleConfig
    shard: ModelShard
    trainer: Trainer | None
    """Optimizer and gradient buffers. None for a role that is not trained."""
    parts: RoleParts
    """Memory of the role that may be offloaded. Code that reads or writes weights first calls one of its `to_...`
    methods."""
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json in the role's exports. None removes a key."""
    companion_files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files of the role's exports that replace the model's own: tokenizer, chat template, end tokens."""
    adapter_is_off: bool = False
    """True for the base of another role, whose modules it shares."""

    @property
    def mesh(self) -> Mesh:
        return self.shard.mesh

    def batching(self, micro: MicroBatchConfig) -> Batching:
        """Planner of micro-batches for this role."""
        return Batching(mesh=self.mesh, cost=forward_cost(self.shard.arch), micro=micro, share=micro.share_prompts)

    def forward(self, batches: Sequence[MicroBatch], score: Callable[[Tensor, MicroBatch], Tensor]) -> list[Tensor]:
        """See `parallel.step.forward_only`. Returns an empty list on a rank outside the role's mesh."""
        self.parts.to_compute()
        if not self.mesh.is_member:
            return []
        with without_adapters(self.shard.module) if self.adapter_is_off else contextlib.nullcontext():
            return forward_only(self.shard.module, self.mesh, batches, score)

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> Accumulated:
        """See `parallel.step.Trainer.accumulate`."""
        assert self.trainer is not None, f"{self.name} is not trained"
        return self.trainer.accumulate(batches, loss)

    def optimizer_step(self, sums: dict[str, float], reason_to_skip: Callable[..., str]) -> StepResult:
        """Apply the accumulated gradients. `sums`: the result of `accumulate`.

        Nothing is changed when `reason_to_skip(sums, gradient norm)` returns a text. Both are the same on every rank.
        """
        assert self.trainer is not None, f"{self.name} is not trained"
        norm = self.trainer.gradient_norm()
        if not (reason := reason_to_skip(sums, norm)):
            self.trainer.step(norm)
        return StepResult(sums=sums, grad_norm=norm, skipped=reason)

    def export(self, directory: Path) -> None:
        """Write the live weights as a Hugging Face directory, with any adapter merged. Depending on `lora.export` the
        adapter is also, or only, written by itself, to a directory named `directory` + `_adapter`."""
        self.parts.to_compute()
        lora, hf_directory = self.section.lora, self.section.model.hf_directory()
        if lora is None or lora.export != "adapter":
            export_hugging_face(self.shard, hf_directory, directory, self.config_overrides, self.companion_files)
        if lora is not None and lora.export != "merged":
            path = self.section.model.path
            base = path if is_huggingface(path) else hf_directory
            export_adapter(self.shard, base.absolute(), directory.with_name(directory.name + ADAPTER_SUFFIX))

    @property
    def export_names(self) -> tuple[str, ...]:
        """Names of the directories that `export` writes when it is given the role's name."""
        lora = self.section.lora
        merged = () if lora is not None and lora.export == "adapter" else (self.name,)
        return merged if lora is None or lora.export == "merged" else (*merged, self.name + ADAPTER_SUFFIX)

    def without_adapter(self, name: str) -> Role:
        """The base model of this role's adapter as a frozen role, which takes no memory of its own."""
        assert self.shard.arch.adapter is not None, f"{self.name} has no adapter"
        section = self.section.model_copy(update={"lora": None})
        frozen: dict[str, Any] = {"trainer": None, "config_overrides": {}, "companion_files": {}}
        return replace(self, name=name, section=section, shard=self.shard.base, adapter_is_off=True, **frozen)

    def companion_folder(self) -> dict[str, bytes]:
        """See `models.weights.companion_folder`."""
        directory = self.section.model.hf_directory()
        return companion_folder(self.shard, directory, self.config_overrides, self.companion_files)


def build_role(
    name: str,
    section: RoleConfig,
    head: Head,
    cache: GroupCache,
    *,
    seed: int,
    num_optimizer_steps: int | None = None,
    order: tuple[int, ...] | None = None,
    new_head: bool = False,
    config_overrides: Mapping[str, Any] = MappingProxyType({}),
    companion_files: Mapping[str, bytes] = MappingProxyType({}),
    weights: WeightSource = CHECKPOINTS,
    device_memory: DeviceMemory | None = None,
) -> Role:
    """Build the model, load its weights, and, given a number of optimizer steps, wrap it for training.

    Collective: every rank builds the same roles in the same order, also roles that it has no part of.

    order: positions of the ranks in the mesh (`layout.engine_order`); None: in the order of their numbers
    new_head: a scalar role may start from a language model, with a random head
    config_overrides, companion_files: see `Role`
    device_memory: shared by all roles on the device; None: this role is alone
    """
    runtime = cache.runtime
    device_memory = device_memory or DeviceMemory(runtime.device)
    device_memory.keep_only()
    arch = adapted(architecture_from_hf(section.model.hf_directory()), section.lora, name)
    layout = replace(section.parallel.layout(runtime.world_size, name), order=order)
    mesh = build_mesh(layout, runtime, cache)
    shard = build_model(section, mesh, arch, head, weights.dtype(name, section.model, head))
    weights.load(shard, section.model, seed=seed, new_head=new_head)
    trainer = None
    if num_optimizer_steps is None:
        shard.module.requires_grad_(False)
        parts = RoleParts(device_memory, Tensors(shard.module.parameters, device_memory.host, constant=True))
        device_memory.share(parts, section.offload)
    else:
        choose_trained(shard, section)
        balance = _balance(name, section, arch, head, mesh)
        if balance is not None:
            use_balance(shard.module, balance)
        trainer = Trainer(
            shard.module, mesh, section.optim, num_optimizer_steps, section.offload, device_memory, balance
        )
        parts = trainer.parts
        if shard.dtype == torch.bfloat16:
            log.info("%s: %s", name, bf16_gradients(shard.spec))
    return Role(name, section, shard, trainer, parts, config_overrides, companion_files)


def _balance(name: str, section: RoleConfig, arch: Architecture, head: Head, mesh: Mesh) -> RouterBalance | None:
    if not arch.num_experts:
        return None
    coefficient, why = router_aux_loss(section, head)
    log.info("%s: load-balancing loss of the experts: coefficient %g (%s)", name, coefficient, why)
    return RouterBalance(coefficient, arch, mesh) if coefficient else None


def router_aux_loss(section: RoleConfig, head: Head) -> tuple[float, str]:
    """Coefficient of the load-balancing loss of a model with experts, and the reason for it."""
    if section.router_aux_loss_coef != "auto":
        return section.router_aux_loss_coef, "router_aux_loss_coef"
    if head == "scalar":
        return 0.0, "transformers adds none to a model with a scalar head"
    directory = section.model.hf_directory()
    return router_aux_loss_of_config(read_config(directory), directory)
