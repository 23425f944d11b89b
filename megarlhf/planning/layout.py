"""Does this architecture fit this layout? Decided from config.json alone."""

from __future__ import annotations

from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.hf_config import architecture_from_hf, read_config, router_aux_loss_of_config
from megarlhf.architectures.trained import trained_tensors
from megarlhf.config import ParallelConfig, RoleConfig
from megarlhf.layout import MeshLayout
from megarlhf.planning.machine.capabilities import head_of
from megarlhf.weights.checkpoint.peft import adapted


def check_role(role: str, section: RoleConfig, world_size: int) -> tuple[Architecture, MeshLayout]:
    """The role's architecture, with its adapter, and its layout.

    Raises: ValueError naming the numbers when tp does not divide heads or the MLP, or fits neither way with the KV
    heads, when the layers do not divide by pp, when the world does not divide by tp x cp x pp, or when Megatron-Core
    cannot compute the architecture.
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
    """With the role's adapter, if it has one. Raises: ValueError for targets or patterns that name nothing."""
    arch = adapted(arch, section.lora, role)
    try:
        trained_tensors(arch, head_of(role), freeze=section.freeze, train_only=section.train_only)
    except ValueError as error:
        raise ValueError(f"{role}.{error}") from None
    return arch


def _check_architecture(arch: Architecture, where: str) -> None:
    """What Megatron-Core cannot train."""
    if arch.num_experts and arch.experts_per_token == 1 and arch.renormalize_experts:
        raise ValueError(
            f"{where}: config.json sends each token to one expert and scales its weight to 1, so that the router gets "
            "no gradient, and Megatron-Core refuses it; use a model with two experts per token or more"
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
    """The first thing that tp does not divide, in words, or nothing. Several ranks may share a KV head."""
    shared = tp > arch.num_kv_heads and tp % arch.num_kv_heads == 0
    parts = {
        "attention heads": arch.num_heads,
        # Shared, a head's rows are themselves cut.
        "rows of QKV" if shared else "KV heads": (
            (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim if shared else arch.num_kv_heads
        ),
        "MLP width": arch.expert_ffn_size if arch.num_experts else arch.ffn_size,
    }
    return next((f"{count} {what}" for what, count in parts.items() if count % tp), "")


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
