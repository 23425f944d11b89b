"""Building a role's model: architecture + mesh -> a stage of a Megatron-Core GPTModel with its weights.

The layer spec is chosen by capability: TransformerEngine's on a GPU machine that has it, otherwise our local one.
Weights are not initialised here; `load_weights` fills every parameter by a copy plan.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarlhf.architectures.adapters import LIVE
from megarlhf.architectures.architecture import Architecture
from megarlhf.architectures.megatron_layout import MegatronLayout, ModelRank
from megarlhf.architectures.placements import Experts, Head, Spec, padded_vocab_size
from megarlhf.config import KernelsConfig, ParallelConfig, RoleConfig
from megarlhf.kernels.arguments import require_device
from megarlhf.models.attention.packed_rotary import PackedRotary
from megarlhf.models.attention.rotary_frequencies import attention_factor, scaled_frequencies
from megarlhf.models.experts import use_exchange
from megarlhf.models.heads import LanguageHead, ScalarHead
from megarlhf.models.lora import attach_adapters, merged_parameters, scaled_parameters
from megarlhf.models.positions import PositionTable
from megarlhf.models.settings import transformer_config
from megarlhf.models.specs import block_spec, fuses_gate, gates_by_silu
from megarlhf.parallel.chunks import Model, as_model, chunks_of
from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.parallel.mesh import Mesh
from megarlhf.parallel.vocab import Vocabulary
from megarlhf.placement import RankPlacements
from megarlhf.runtime import has_transformer_engine

log = logging.getLogger(__name__)

SPECS: Mapping[Spec, str] = {
    "te": "transformer-engine",
    "local": "local (Megatron-Core parts, torch attention)",
}
EXPERTS: Mapping[Spec, Experts] = {"te": "grouped", "local": "each"}
"""Layer spec -> storage of a rank's experts: all in one grouped layer, or a module for each."""


@dataclass(frozen=True)
class ModelShard:
    """This rank's part of a role's model: its pipeline stage, or all its virtual stages. A rank outside the role's
    layout holds nothing."""

    module: Model
    """The stage's GPTModel, or a container of the rank's chunks. On a rank outside the layout it is an empty module,
    which is never run."""
    arch: Architecture
    mesh: Mesh
    head: Head
    parallel: ParallelConfig
    padded_vocab: int
    spec: Spec
    kernels: KernelsConfig
    dtype: torch.dtype
    """Dtype of the parameters."""
    adapter_path: Path | None = None
    """Directory with the adapter's weights. None: the adapter is new, or there is none."""

    @property
    def chunks(self) -> tuple[GPTModel, ...]:
        """The virtual stages of this rank, first to last; a single stage without virtual stages."""
        return chunks_of(self.module)

    def parameters(self) -> dict[str, Tensor]:
        """Megatron name -> live parameter. Names begin with `model{v}.` where the rank has several chunks. The `base`
        of a model with an adapter leaves the adapter's parameters out."""
        named = self.module.named_parameters()
        return {name: p for name, p in named if self.arch.adapter is not None or LIVE not in name}

    @property
    def base(self) -> ModelShard:
        """The model without its adapter, in the same modules."""
        return self if self.arch.adapter is None else replace(self, arch=self.arch.base)

    def merged(self) -> dict[str, Tensor]:
        """The parameters of `base` with the adapter added: new tensors where the adapter adds something, live
        parameters elsewhere."""
        return merged_parameters(self.module, self.parameters())

    def scaled(self) -> dict[str, Tensor]:
        """The live parameters, with a new tensor scale x B in place of each adapter's B."""
        return scaled_parameters(self.module, self.parameters())

    @property
    def megatron_layout(self) -> MegatronLayout:
        """The sharding of the model, as data."""
        return MegatronLayout(
            tp=self.mesh.layout.tp,
            pp=self.mesh.layout.pp,
            vpp=self.parallel.vpp,
            ep=self.mesh.layout.ep,
            layers_per_stage=self.parallel.layers_per_stage,
            padded_vocab=self.padded_vocab,
            spec=self.spec,
            experts=EXPERTS[self.spec],
        )

    def vocabulary(self) -> Vocabulary:
        """The vocabulary matrix and its options, from which log-probs and logits are computed."""
        assert self.head == "lm", "a scalar head has no vocabulary"
        weight_VH: Tensor | None = None
        if self.mesh.is_last_stage:
            last_chunk = self.chunks[-1]
            weight_VH = last_chunk.output_layer.weight
            if weight_VH is None:  # tied: the embedding's matrix, on the same stage
                weight_VH = last_chunk.shared_embedding_or_output_weight()
        return Vocabulary(
            weight_VH=weight_VH,
            true_vocab=self.arch.vocab_size,
            group=self.mesh.groups.tp if self.mesh.layout.tp > 1 else None,
            sequence_parallel=self.parallel.sequence_parallel,
            backend=self.kernels.logprobs,
            save_bytes=self.kernels.save_mib * 2**20,
        )


def build_model(section: RoleConfig, mesh: Mesh, arch: Architecture, head: Head, dtype: torch.dtype) -> ModelShard:
    """Build this rank's stages of the model on its device in `dtype`. Their parameters are not set yet. A rank outside
    the mesh gets an empty module.

    Raises: ValueError for log-prob kernels that this device cannot run.
    """
    if head == "lm":
        require_device(section.kernels.logprobs, mesh.runtime.device.type)
    spec: Spec = "te" if has_transformer_engine() else "local"
    log.info("layer spec: %s", SPECS[spec])
    padded_vocab = padded_vocab_size(arch.vocab_size, section.parallel.tp, section.model.vocab_multiple)
    module = _stage(section, mesh, arch, head, dtype, spec, padded_vocab) if mesh.is_member else nn.Module()
    shard = ModelShard(
        module=module,
        arch=arch,
        mesh=mesh,
        head=head,
        parallel=section.parallel,
        padded_vocab=padded_vocab,
        spec=spec,
        kernels=section.kernels,
        dtype=dtype,
        adapter_path=None if section.lora is None else section.lora.path,
    )
    if mesh.is_member:
        if arch.adapter is not None:
            attach_adapters(
                module,
                placements_on(shard, mesh.runtime.rank),
                scale=arch.adapter.scale,
                tp_group=mesh.groups.tp if mesh.layout.tp > 1 else None,
                sequence_parallel=section.parallel.sequence_parallel,
                experts_are_shared=mesh.layout.ep > 1,
            )
        _mark_sharded(shard)
    return shard


def _stage(
    section: RoleConfig, mesh: Mesh, arch: Architecture, head: Head, dtype: torch.dtype, spec: Spec, padded_vocab: int
) -> Model:
    activation = {"activation_module": gates_by_silu(spec, arch), "fused_gate": fuses_gate(spec, arch)}
    config = transformer_config(dtype, section, mesh, arch, spec=spec, **activation)
    layers_by_chunk = section.parallel.chunks(arch.num_layers)[mesh.coordinates.pp]
    with megatron_device(mesh.runtime.device):
        module = as_model(
            [
                _build_chunk(config, mesh, arch, head, spec, padded_vocab, v, len(chunk_layers))
                for v, chunk_layers in enumerate(layers_by_chunk)
            ]
        )
    if spec == "te":
        fuse_weight_gradients(module)
    elif dtype == torch.bfloat16 and has_apex_sums():
        fuse_by_apex(module)
    return module


def _build_chunk(
    config: TransformerConfig,
    mesh: Mesh,
    arch: Architecture,
    head: Head,
    spec: Spec,
    padded_vocab: int,
    v: int,
    num_layers: int,
) -> GPTModel:
    """Build this rank's virtual stage `v` with `num_layers` layers. The first stage of the first rank has the
    embedding; the last stage of the last rank has the final norm and the head."""
    vpp = config.virtual_pipeline_model_parallel_size
    first = mesh.is_first_stage and v == 0
    last = mesh.is_last_stage and v == (vpp or 1) - 1
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(spec, arch, num_layers),
        vocab_size=padded_vocab,
        max_sequence_length=arch.max_positions + arch.position_offset,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied_embeddings and head == "lm",
        position_embedding_type="rope" if arch.positions == "rope" else "learned_absolute",
        rotary_base=arch.rope_theta,
        pg_collection=mesh.groups,
        vp_stage=None if vpp is None else v,
    )
    if arch.positions == "rope":
        chunk.rotary_pos_emb = _rotary(arch, config, mesh)
    if arch.positions == "learned" and first:
        chunk.embedding.position_embeddings = PositionTable(config, arch)
    if last:
        weight_VH = chunk.output_layer.weight
        chunk.output_layer = ScalarHead(config, mesh.groups) if head == "scalar" else LanguageHead(weight_VH)
    if arch.num_experts:
        use_exchange(chunk, mesh.groups)
    return chunk.to(mesh.runtime.device)


def fuse_weight_gradients(module: nn.Module) -> None:
    """Make TransformerEngine's linear layers add each micro-batch's weight gradient to Megatron's fp32 `main_grad`
    inside the matrix product. Otherwise the product is rounded to bf16 before it is added.

    Megatron's own switch, `gradient_accumulation_fusion`, is not used: it also reaches the vocabulary layer, which is
    Megatron's and refuses the switch without apex. TransformerEngine reads its attribute in every forward. The
    vocabulary matrix needs neither: our log-prob kernels add to `main_grad` themselves. Gradients of norms, biases,
    embeddings and the router are still rounded once per micro-batch, as in Megatron-LM.

    Raises: RuntimeError when no layer has the attribute.
    """
    fusable = [layer for layer in module.modules() if hasattr(layer, FUSED)]
    if not fusable:
        raise RuntimeError(
            f"no layer of the model has TransformerEngine's attribute {FUSED}; install the transformer-engine of "
            "requirements/transformer-engine.txt"
        )
    for layer in fusable:
        setattr(layer, FUSED, True)


FUSED = "fuse_wgrad_accumulation"


def fuse_by_apex(module: nn.Module) -> None:
    """Let apex's kernel add weight gradients of Megatron-Core's own linear layers to fp32 `main_grad` (bf16 models,
    apex installed). Experts are left out: an expert may get no token, and the kernel's result for none is
    undocumented."""
    for layer in module.modules():
        if isinstance(layer, layers.ColumnParallelLinear | layers.RowParallelLinear) and not layer.is_expert:
            layer.gradient_accumulation_fusion = True


def has_apex_sums() -> bool:
    """Return whether apex's kernel that adds a product to fp32 is installed. It runs on a GPU only."""
    return bool(layers._grad_accum_fusion_available)


def bf16_gradients(spec: Spec) -> str:
    """Describe for the log how gradients of a bf16 model are summed and rounded."""
    summed = "sums over micro-batches and ranks are fp32"
    if spec == "te":
        return f"{summed}; the products of linear layers add to them without a rounding"
    if has_apex_sums():
        return f"{summed}; the products of linear layers, but those of experts, add to them without a rounding"
    return f"{summed}; each micro-batch's gradient of a linear layer's weight is rounded to bf16 once before"


def _rotary(arch: Architecture, config: TransformerConfig, mesh: Mesh) -> PackedRotary:
    """Rotary positions in place of the GPTModel's own: they also serve packed rows and know every scaling."""
    rotary = PackedRotary(
        dtype=config.params_dtype,
        attention_factor=attention_factor(arch.rope_scaling),
        kv_channels=arch.rotary_dim,
        rotary_percent=1.0,
        rotary_base=arch.rope_theta,
        use_cpu_initialization=config.use_cpu_initialization,
        cp_group=mesh.groups.cp,
    )
    if arch.rope_scaling is not None:
        # Megatron-Core's own scaling takes the factor only and assumes Llama 3.1's other three numbers.
        rotary.inv_freq = scaled_frequencies(rotary.inv_freq, arch.rope_theta, arch.rope_scaling)
    return rotary


def placements_on(shard: ModelShard, rank: int, *, tp_rank: int | None = None) -> RankPlacements:
    """Tensors of the model on global rank `rank`, or on rank `tp_rank` of its tensor-parallel group. Empty for a rank
    outside the layout."""
    layout = shard.mesh.layout
    if rank not in layout.ranks:
        return RankPlacements(rank, {}, (), {})
    coordinates, ep_rank = layout.coordinates(rank), layout.expert_layout.coordinates(rank).cp
    model_rank = ModelRank(pp=coordinates.pp, ep=ep_rank, tp=coordinates.tp if tp_rank is None else tp_rank)
    return shard.megatron_layout.part(shard.arch, shard.head, model_rank, rank)


def _mark_sharded(shard: ModelShard) -> None:
    """Mark the parameters that differ between tensor-parallel ranks, from our own table.

    Megatron sets these marks only while it initialises weights, which it does not do here. Without them the gradient
    norm would count one shard of each sharded parameter instead of all.
    """
    if shard.mesh.layout.tp == 1:
        return
    rank = shard.mesh.runtime.rank
    on_rank_0, on_rank_1 = (set(placements_on(shard, rank, tp_rank=tp_rank).placements) for tp_rank in (0, 1))
    sharded = {placement.storage for placement in on_rank_0 ^ on_rank_1}
    for name, parameter in shard.parameters().items():
        parameter.tensor_model_parallel = name in sharded  # type: ignore[attr-defined]
