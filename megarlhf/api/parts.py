"""Single parts without a run: converter, copy plan, packing, advantages of tokens, rehearsal.

Legend: T tokens of all sequences end to end, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from megarlhf.layout import MeshLayout

if TYPE_CHECKING:
    from megarlhf.api.configuration import Config
    from megarlhf.rehearsal.result import Result
    from megarlhf.weights.plan.copy_plan import CopyPlan


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: Literal["huggingface", "megatron"],
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    ep: int = 1,
    layers_per_stage: Sequence[int] | None = None,
    format: Literal["torch_dist", "mp_rank"] = "torch_dist",
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    reference_hf: str | Path | None = None,
    force: bool = False,
    families: Sequence[str] = (),
) -> Path:
    """Convert a checkpoint between Hugging Face and Megatron, or to another layout; no GPU is needed.

        megarlhf.convert("llama", "llama-tp2", to="megatron", tp=2)
        megarlhf.convert("llama-tp2", "llama-again", to="huggingface")

    source:       a Hugging Face directory, or a Megatron checkpoint of either format
    tp, ..., format: layout and format of a Megatron checkpoint; `layers_per_stage` for uneven pipeline stages
    dtype:        default: that of the source
    reference_hf: Hugging Face directory that describes a Megatron checkpoint which does not say enough itself
    force:        replace a checkpoint at `out`, once the new one is whole
    families:     modules with model families of your own

    Returns: `out`, which appears whole or not at all
    Raises: ValueError where the layout does not fit the model, `out` exists, or the source is damaged; OSError for a
    full disk.
    """
    from megarlhf.architectures.own_families import register_families
    from megarlhf.weights.checkpoint import conversion
    from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint

    target: conversion.Target = conversion.HuggingFaceTarget()
    if to == "megatron":
        stages = None if layers_per_stage is None else tuple(layers_per_stage)
        target = conversion.MegatronTarget(tp=tp, pp=pp, vpp=vpp, ep=ep, layers_per_stage=stages, format=format)
    elif to != "huggingface":
        raise ValueError(f"to = {to!r}; the known ones are huggingface, megatron")
    elif (tp, pp, vpp, ep, layers_per_stage) != (1, 1, 1, 1, None):
        raise ValueError("a layout has no effect with to = 'huggingface', whose tensors are whole; leave it out")
    if dtype is not None and dtype not in conversion.DTYPES:
        raise ValueError(f"dtype = {dtype!r}; the known ones are {', '.join(conversion.DTYPES)}")
    register_families(families)
    checkpoint = open_checkpoint(source, hf=reference_hf)
    conversion.convert(checkpoint, out, target, dtype=conversion.DTYPES.get(dtype or ""), force=force)
    return Path(out)


def copy_plan(
    model: str | Path,
    source: MeshLayout,
    destination: MeshLayout | None = None,
    *,
    engine_tp: int | None = None,
    families: Sequence[str] = (),
) -> CopyPlan:
    """Plan which rank sends which part of a model to whom, from one layout to another, or into vLLM's engines.

        plan = megarlhf.copy_plan("llama", megarlhf.Layout(tp=2, pp=2), engine_tp=4)
        plan.elements_received(0)  # elements that rank 0 gets from others
        plan.sends(1)              # copies that rank 1 sends, by peer
        plan.traffic               # elements by (sender, receiver); (r, r) stays on rank r

    Reads config.json only: no weights, no GPU, no process group.

    model:       a Hugging Face directory
    destination: layout on the same ranks; or give `engine_tp`, the tensor-parallel size of each engine
    families:    modules with model families of your own

    Raises: ValueError where a layout does not fit the model or the ranks.
    """
    from megarlhf.architectures.hf_config import architecture_from_hf
    from megarlhf.architectures.megatron_layout import MegatronLayout
    from megarlhf.architectures.own_families import register_families
    from megarlhf.architectures.placements import padded_vocab_size, vllm_placements
    from megarlhf.weights.plan.copy_plan import make_plan

    if (destination is None) == (engine_tp is None):
        raise ValueError(f"got destination = {destination} and engine_tp = {engine_tp}; give one of the two")
    register_families(families)
    arch, ranks = architecture_from_hf(Path(model)), source.world_size

    def of_megatron(mesh: MeshLayout) -> MegatronLayout:
        return MegatronLayout(
            tp=mesh.tp, pp=mesh.pp, ep=mesh.ep, padded_vocab=padded_vocab_size(arch.vocab_size, mesh.tp)
        )

    sources = of_megatron(source).on_ranks(arch, source)
    if destination is not None:
        if destination.world_size != ranks:
            raise ValueError(
                f"the source {source} has {ranks} ranks and the destination {destination} has "
                f"{destination.world_size}; choose layouts of equally many"
            )
        return make_plan(sources, of_megatron(destination).on_ranks(arch, destination))
    assert engine_tp is not None
    if engine_tp < 1 or ranks % engine_tp:
        raise ValueError(f"{ranks} ranks do not divide into engines of engine_tp = {engine_tp} ranks")
    shards = [vllm_placements(arch, tp=engine_tp, tp_rank=n, rank=n) for n in range(engine_tp)]
    return make_plan(sources, [shards[rank % engine_tp].on_rank(rank) for rank in range(ranks)])


def pack(
    lengths: Sequence[int], *, max_tokens: int, num_ranks: int = 1, model: str | Path | None = None
) -> list[list[list[int]]]:
    """Pack sequences into rows of at most `max_tokens` tokens, balanced over data-parallel ranks.

        megarlhf.pack([3, 4, 4, 1], max_tokens=5, num_ranks=2)  # rows of each rank, with the sequences in each row

    lengths: tokens of each sequence
    model:   a Hugging Face directory, whose cost of long sequences is balanced; None: tokens are

    Returns: [rank][row]: indices into `lengths`, each once; every rank has the same number of rows
    Raises: ValueError for a sequence that does not fit.
    """
    from megarlhf.architectures.hf_config import architecture_from_hf
    from megarlhf.parallel.packing.partition import ForwardCost, forward_cost
    from megarlhf.parallel.packing.partition import pack as pack_groups

    by_tokens = ForwardCost(per_token=1.0, per_pair=0.0)
    cost = by_tokens if model is None else forward_cost(architecture_from_hf(Path(model)))
    return pack_groups([[length] for length in lengths], num_ranks=num_ranks, max_tokens=max_tokens, cost=cost)


def gae(
    rewards_T: Tensor, values_T: Tensor, cu_seqlens: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantages and returns of sequences that stand end to end.

        rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.5, 0.5])
        advantages, returns = megarlhf.gae(rewards, values, torch.tensor([0, 3]), lam=0.5)
        # [0.125, 0.25, 0.5], [0.625, 0.75, 1.0]

    Shapes:  rewards_T, values_T [T]; cu_seqlens [N + 1]: sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1]
    Maths:   d_t = r_t + gamma V_{t+1} - V_t,  A_t = d_t + gamma lam A_{t+1},  return_t = A_t + V_t
    Source:  Schulman et al. 2016, eq. 16
    Raises:  ValueError
    """
    from megarlhf.kernels import packed_gae

    scores_N = torch.zeros(len(cu_seqlens) - 1, dtype=values_T.dtype, device=values_T.device)
    return packed_gae(
        values_T, None, values_T, scores_N, cu_seqlens, gamma=gamma, lam=lam, kl_coef=0.0, token_rewards_T=rewards_T
    )


def rehearse(
    command: Literal["sft", "rm", "dpo", "rl"],
    config: Config,
    *,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    ranks_per_node: int = 8,
    hardware: str | Path | None = None,
    gpu_memory_gib: float | None = None,
    steps: int | None = None,
) -> Result:
    """Rehearse a job without its GPUs: memory by phase, bytes on the wire, an estimate of the time.

        result = megarlhf.rehearse("rl", "rl.yaml", world_size=16)
        result.runs         # whether the job fits
        result.free         # bytes left on the tightest rank
        result.times[-1].seconds

    world_size:     ranks of the job; default: that of the configuration
    hardware:       a hardware file; default: configs/hardware/h100.yaml of a clone
    gpu_memory_gib: memory of a device; default: the hardware file's
    steps:          steps to rehearse; default: 2, if the job has them

    Raises: ValueError for what the job would refuse; RuntimeError where a rehearsed rank fails.
    """
    from megarlhf.api.configuration import config_of_command
    from megarlhf.api.process import borrowed_process
    from megarlhf.api.rehearsed import in_own_process
    from megarlhf.commands.rehearse import CONFIGS, HARDWARE
    from megarlhf.rehearsal.cost_model.hardware import load_hardware
    from megarlhf.rehearsal.request import DEFAULT_STEPS, Request, check_request

    if command not in CONFIGS:
        raise ValueError(f"{command!r} cannot be rehearsed; {', '.join(CONFIGS)} can")
    if hardware is None and not HARDWARE.is_file():
        raise ValueError("give hardware=FILE: megarlhf is installed without its folder configs/hardware")
    ranks = [] if world_size is None else [f"run.world_size={world_size}"]
    cfg = config_of_command(command, config, [*overrides, *ranks], None)
    described = load_hardware(hardware or HARDWARE)
    request = Request(
        command=command,
        cfg=cfg,
        world_size=cfg.run.planned_ranks,
        steps=steps or max(1, min(DEFAULT_STEPS, cfg.train.num_steps)),
        hardware=described,
        ranks_per_node=ranks_per_node,
        device_bytes=int(gpu_memory_gib * 2**30) if gpu_memory_gib else int(described.memory.value),
        layers="te" if described.kind == "gpu" else "local",
    )
    check_request(request)
    with borrowed_process("rehearse", cfg):
        return in_own_process(request)
