"""Checks that an architecture fits a layout, from config.json alone."""

from __future__ import annotations

from megarlhf.architectures.architecture import ACTIVATIONS, Architecture
from megarlhf.architectures.hf_config import architecture_from_hf, read_config, router_aux_loss_of_config
from megarlhf.architectures.trained import trained_tensors
from megarlhf.config import ROLES, ParallelConfig, RoleConfig
from megarlhf.layout import MeshLayout
from megarlhf.weights.checkpoint.peft import adapted


def check_role(role: str, section: RoleConfig, world_size: int) -> tuple[Architecture, MeshLayout]:
    """The role's architecture, with its adapter, and its layout.

    Raises: ValueError, with the numbers, if tp does not divide heads or the MLP or does not fit the KV heads, if pp
    does not divide the layers, if tp x cp x pp does not divide the world, or if Megatron-Core cannot compute the
    architecture.
    """
    arch = architecture_from_hf(section.model.hf_directory())
    layout = section.parallel.layout(world_size, role)
    _check_architecture(arch, f"{role}: {section.model.path}")
    _check_tensor_parallel(arch, role, section)
    _check_experts(arch, role, section.parallel)
    _check_balance(arch, role, section)
    try:
        section.parallel.chunks(arch.num_layers)
    except ValueError as error:
        raise ValueError(f"{role}.parallel: {error}") from None
    return _with_trained(arch, role, section), layout


def _with_trained(arch: Architecture, role: str, section: RoleConfig) -> Architecture:
    """The architecture with the role's adapter, if any. Raises: ValueError for targets or patterns without a match."""
    arch = adapted(arch, section.lora, role)
    try:
        trained_tensors(arch, ROLES[role].head, freeze=section.freeze, train_only=section.train_only)
    except ValueError as error:
        raise ValueError(f"{role}.{error}") from None
    return arch


def _check_architecture(arch: Architecture, where: str) -> None:
    """Raises: ValueError for an architecture that Megatron-Core cannot train."""
    if arch.activation not in ACTIVATIONS:  # a family of the user may read any
        raise ValueError(
            f"{where}: model_type {arch.model_type} has the activation {arch.activation!r}, which is not implemented; "
            f"use a model with one of {', '.join(ACTIVATIONS)}"
        )
    if arch.num_experts and arch.experts_per_token == 1 and arch.renormalize_experts:
        raise ValueError(
            f"{where}: config.json sends each token to one expert and scales its weight to 1, so that the router gets "
            "no gradient. Megatron-Core refuses it; use a model with two experts per token or more"
        )


def _check_tensor_parallel(arch: Architecture, role: str, section: RoleConfig) -> None:
    tp = section.parallel.tp
    misfit = _misfit(arch, tp)
    if misfit:
        choices = ", ".join(str(n) for n in range(1, 65) if not _misfit(arch, n))
        raise ValueError(
            f"{role}.parallel.tp = {tp} does not divide the {misfit} of {section.model.path}; choose one of {choices}"
        )


def _misfit(arch: Architecture, tp: int) -> str:
    """The first size that tp does not divide, such as `12 attention heads`, or an empty text."""
    sizes = {"attention heads": arch.num_heads}
    if tp > arch.num_kv_heads and tp % arch.num_kv_heads == 0:  # several ranks share a KV head, whose rows are cut
        sizes["rows of QKV"] = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
    else:
        sizes["KV heads"] = arch.num_kv_heads
    sizes["MLP width"] = arch.expert_ffn_size if arch.num_experts else arch.ffn_size
    return next((f"{size} {name}" for name, size in sizes.items() if size % tp), "")


def _check_experts(arch: Architecture, role: str, parallel: ParallelConfig) -> None:
    if parallel.ep > 1 and not arch.num_experts:
        raise ValueError(
            f"{role}.parallel.ep = {parallel.ep}, but the model has no experts (model_type {arch.model_type}); leave "
            "ep at 1"
        )
    if arch.num_experts % parallel.ep:
        choices = ", ".join(str(n) for n in range(1, arch.num_experts + 1) if arch.num_experts % n == 0)
        raise ValueError(
            f"{role}.parallel.ep = {parallel.ep} does not divide the {arch.num_experts} experts; choose one of "
            f"{choices}"
        )
    if arch.num_experts and parallel.tp > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"{role}.parallel: a mixture of experts at tp = {parallel.tp} needs sequence_parallel: true; without it "
            "each tensor-parallel rank would send the same tokens to the experts, and Megatron-Core refuses to train so"
        )


def _check_balance(arch: Architecture, role: str, section: RoleConfig) -> None:
    if not arch.num_experts and section.router_aux_loss_coef not in ("auto", 0):
        raise ValueError(
            f"{role}.router_aux_loss_coef = {section.router_aux_loss_coef:g}, but the model has no experts to balance "
            f"(model_type {arch.model_type}); leave it out"
        )
    if arch.num_experts:
        directory = section.model.hf_directory()
        router_aux_loss_of_config(read_config(directory), directory)
