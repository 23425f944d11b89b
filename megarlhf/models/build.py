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
"""How a spec keeps the experts of a rank."""


@dataclass(frozen=True)
class ModelShard:
    """What this rank holds of a role's model: its pipeline stage, or all its virtual stages, and where it stands;
    nothing, on a rank outside the role's layout."""

    module: Model
    """With all parameters of the rank: the stage's GPTModel, or a container of its chunks. Of a rank outside the
    layout: a module without parameters, which is never run."""
    arch: Architecture
    mesh: Mesh
    head: Head
    parallel: ParallelConfig
    padded_vocab: int
    spec: Spec
    kernels: KernelsConfig
    dtype: torch.dtype
    """Of the parameters."""
    adapter_path: Path | None = None
    """Where the adapter's weights are; None: a new one, or none."""

    @property
    def chunks(self) -> tuple[GPTModel, ...]:
        """The virtual stages of this rank, first to last; without virtual stages the one stage."""
        return chunks_of(self.module)

    def parameters(self) -> dict[str, Tensor]:
        """Megatron name -> live parameter; `model{v}.` stands before it where the rank has several chunks. Of the base
        of a model with an adapter: without the adapter's."""
        found = dict(self.module.named_parameters())
        return found if self.arch.adapter is not None else {name: p for name, p in found.items() if LIVE not in name}

    @property
    def base(self) -> ModelShard:
        """The same modules, as the model without its adapter."""
        return self if self.arch.adapter is None else replace(self, arch=self.arch.base)

    def merged(self) -> dict[str, Tensor]:
        """The parameters of `base` with the adapter added: of a model without one its live parameters, otherwise new
        tensors where it adds."""
        return merged_parameters(self.module, self.parameters())

    def scaled(self) -> dict[str, Tensor]:
        """The live parameters with scale x B, new tensors, in the place of each B of an adapter."""
        return scaled_parameters(self.module, self.parameters())

    @property
    def megatron_layout(self) -> MegatronLayout:
        """How the model is cut, as data."""
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
        """What log-probs and logits of a language model are made with, beside the module's output."""
        assert self.head == "lm", "a scalar head has no vocabulary"
        weight_VH: Tensor | None = None
        if self.mesh.is_last_stage:
            last = self.chunks[-1]
            own_VH = last.output_layer.weight
            # A tied matrix on the stage of its embedding is the embedding's.
            weight_VH = last.shared_embedding_or_output_weight() if own_VH is None else own_VH
        return Vocabulary(
            weight_VH=weight_VH,
            true_vocab=self.arch.vocab_size,
            group=self.mesh.groups.tp if self.mesh.layout.tp > 1 else None,
            sequence_parallel=self.parallel.sequence_parallel,
            backend=self.kernels.logprobs,
            save_bytes=self.kernels.save_mib * 2**20,
        )


def build_model(section: RoleConfig, mesh: Mesh, arch: Architecture, head: Head, dtype: torch.dtype) -> ModelShard:
    """This rank's stages of the model on its device, their parameters still unset, in `dtype`; nothing of it on a rank
    that is not in the mesh.

    Raises: ValueError for log-prob kernels that this device does not run.
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
    """This rank's stages."""
    parallel = section.parallel
    activation = {"activation_module": gates_by_silu(spec, arch), "fused_gate": fuses_gate(spec, arch)}
    config = transformer_config(dtype, section, mesh, arch, spec=spec, **activation)
    with megatron_device(mesh.runtime.device):
        module = as_model(
            [
                _build_chunk(config, mesh, arch, head, spec, padded_vocab, v, len(own))
                for v, own in enumerate(parallel.chunks(arch.num_layers)[mesh.coordinates.pp])
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
    """The rank's virtual stage number `v`, of so many layers: the embedding is in the first of the first rank, final
    norm and head in the last of the last rank."""
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
    inside the product. Otherwise the product is rounded to bf16 before it is added.

    Megatron's switch for it, `gradient_accumulation_fusion`, also reaches the vocabulary's layer, which is Megatron's
    own and refuses it without apex; TransformerEngine reads its attribute in every forward. The vocabulary's matrix has
    log-prob kernels that add to `main_grad` by themselves. Norms, biases, embeddings and the router go on being rounded
    once a micro-batch, as in Megatron-LM.

    Raises: RuntimeError when no layer has the attribute.
    """
    found = [layer for layer in module.modules() if hasattr(layer, FUSED)]
    if not found:
        raise RuntimeError(
            f"no layer of the model has TransformerEngine's attribute {FUSED}; install the transformer-engine of "
            "requirements/gpu.txt"
        )
    for layer in found:
        setattr(layer, FUSED, True)


FUSED = "fuse_wgrad_accumulation"


def fuse_by_apex(module: nn.Module) -> None:
    """The same of Megatron-Core's own linear layers, by apex's kernel: in bf16, where it is installed. Experts are left
    out: one of them may have no token, and nobody says what the kernel does with none."""
    for layer in module.modules():
        if isinstance(layer, layers.ColumnParallelLinear | layers.RowParallelLinear) and not layer.is_expert:
            layer.gradient_accumulation_fusion = True


def has_apex_sums() -> bool:
    """Whether apex's kernel that adds a product to fp32 is installed, which runs on a GPU only."""
    return bool(layers._grad_accum_fusion_available)


def bf16_gradients(spec: Spec) -> str:
    """How gradients of a model in bf16 come about, for the log."""
    summed = "sums over micro-batches and ranks are fp32"
    if spec == "te":
        return f"{summed}; the products of linear layers add to them without a rounding"
    if has_apex_sums():
        return f"{summed}; the products of linear layers, but those of experts, add to them without a rounding"
    return f"{summed}; each micro-batch's gradient of a linear layer's weight is rounded to bf16 once before"


def _rotary(arch: Architecture, config: TransformerConfig, mesh: Mesh) -> PackedRotary:
    """What a GPTModel makes for itself, but for packed rows too and with every scaling."""
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
    """What global rank `rank` (or its neighbour `tp_rank` of the tensor-parallel group) holds of the model; nothing,
    where the layout does not have it."""
    layout = shard.mesh.layout
    if rank not in layout.ranks:
        return RankPlacements(rank, {}, (), {})
    at, experts = layout.coordinates(rank), layout.expert_layout.coordinates(rank)
    here = ModelRank(pp=at.pp, ep=experts.cp, tp=at.tp if tp_rank is None else tp_rank)
    return shard.megatron_layout.part(shard.arch, shard.head, here, rank)


def _mark_sharded(shard: ModelShard) -> None:
    """Tell Megatron which parameters differ between tensor-parallel ranks, from our own table.

    Megatron sets these marks only while it initialises weights, which it does not do here; without them the
    gradient norm would count one shard of each sharded parameter instead of all.
    """
    if shard.mesh.layout.tp == 1:
        return
    rank = shard.mesh.runtime.rank
    first, second = (set(placements_on(shard, rank, tp_rank=tp_rank).placements) for tp_rank in (0, 1))
    sharded = {placement.storage for placement in first ^ second}
    for name, parameter in shard.parameters().items():
        parameter.tensor_model_parallel = name in sharded  # type: ignore[attr-defined]
