"""Configuration of a role: its model, parallel layout and training. The same in every command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megarlhf.config.frozen import Fraction as Fraction
from megarlhf.config.frozen import FrozenModel, NonNegative, Positive
from megarlhf.config.lora import LoraConfig
from megarlhf.layout import MeshLayout, split_chunks
from megarlhf.model_directory import from_hub, require_hf_directory

ConfigT = TypeVar("ConfigT", bound=FrozenModel)


class ModelConfig(FrozenModel):
    path: Path
    """A Hugging Face directory; a model of the Hugging Face hub, `org/name` or `org/name@revision`, which is downloaded
    (HF_HOME, HF_TOKEN and HF_HUB_OFFLINE count); or a Megatron checkpoint of any layout. With `random_init` only
    config.json and tokenizer are read."""
    hf: Path | None = None
    """A directory with config.json and tokenizer, for a Megatron checkpoint without them."""
    tokenizer: Path | None = None
    """A directory with the tokenizer (`tokenizer.json`, `tokenizer.model`, or `vocab.json` with `merges.txt`), or a
    SentencePiece file, if the model's directory has none or another. It is written into exports."""
    random_init: bool = False
    """Start from random weights of the architecture in config.json (the same at every layout)."""
    fresh_head: bool = False
    """Start the scalar head, and so all values, at zero; the rest is read from `path`. For the critic of `rl` only.
    Needed if `path` is a language model, which has no such head; useful if it is a reward model, whose scores of
    unfinished responses are no estimate of a return. `rm` draws its head at random by itself."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of parameters and activations. `auto`: that of the tensors stored at `path`; with `random_init` that of
    config.json, or fp32 without one. A checkpoint in fp16 or in several dtypes needs a dtype here. The table that a
    start prints shows the dtype. Sums of gradients, the optimizer's copy of the weights and its moments are always
    fp32."""
    vocab_multiple: PositiveInt = 128
    """Pad the vocabulary to a multiple of this x tp, like Megatron; padding is masked."""
    families: tuple[str, ...] = ()
    """Modules of yours with model families (`[mine.family]`), for a `model_type` that megarlhf does not know; each has
    `FAMILY`, or several in `FAMILIES`. All roles of the run know them.
    [How to write one](new-architecture.md#a-family-of-your-own-without-a-fork)."""

    def hf_directory(self) -> Path:
        """The directory with the model's config.json and tokenizer. Raises: ValueError if there is none."""
        return require_hf_directory(self.path, self.hf)

    def tokenizer_place(self) -> Path:
        """The directory or SentencePiece file with the model's tokenizer.

        Raises: ValueError if the path does not exist; it is not checked whether it holds a tokenizer.
        """
        if self.tokenizer is None:
            return self.hf_directory()
        if not self.tokenizer.exists():
            raise ValueError(
                f"model.tokenizer = {self.tokenizer} does not exist (working directory: {Path.cwd()}); correct the path"
            )
        return self.tokenizer


class ParallelConfig(FrozenModel):
    tp: PositiveInt = 1
    """Tensor-parallel size; divides attention heads and KV groups."""
    pp: PositiveInt = 1
    """Pipeline-parallel size; divides the layers unless `layers_per_stage` says otherwise."""
    layers_per_stage: tuple[PositiveInt, ...] | None = None
    """Number of layers of each pipeline stage, first to last, for uneven stages. With virtual stages the list has all
    pp x vpp stages, in the order of the model."""
    sequence_parallel: bool = False
    """Shard the sequence between tensor-parallel regions: less memory for the same communication. Needs tp > 1.
    Default: on if tp > 1."""
    vpp: PositiveInt = 1
    """Virtual pipeline stages per rank (Megatron-Core's interleaved schedule). The layers are cut into pp x vpp stages;
    rank p holds stages p, p + pp, and so on. The pipeline bubble is vpp times shorter, with vpp times as many messages
    and more activations in memory. Needs pp > 1."""
    cp: PositiveInt = 1
    """Context-parallel size: each sequence is cut over this many ranks, which exchange keys and values in every layer.
    For sequences whose activations do not fit. Sequences are padded to a multiple of 2 x cp tokens."""
    ep: PositiveInt = 1
    """Expert-parallel size: the experts of a layer are distributed over this many data-parallel (and context-parallel)
    neighbours; divides the number of experts and dp x cp. Tokens are sent to their experts and back in every layer.
    Within an expert tp cuts as elsewhere."""
    ranks: PositiveInt | tuple[NonNegativeInt, PositiveInt] | None = None
    """Ranks that have the role: `8` is the first 8 of the run, `[8, 16]` are ranks 8 to 15 (the second is excluded);
    default: all. tp x cp x pp divides their number, and dp follows from it. Other ranks hold nothing of the role and
    wait while it computes. For roles that are only read: a reference, and the reward model of `rl`. A trained role is
    on all ranks, since all ranks make each update."""

    @model_validator(mode="before")
    @classmethod
    def _sequence_parallel_with_tp(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("sequence_parallel") is None:
            data = {**data, "sequence_parallel": data.get("tp") not in (None, 1, "1")}
        return data

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1; got tp = 1: set sequence_parallel to false")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} needs pp > 1, got pp = 1; set vpp to 1 or choose a larger pp")
        stages = self.pp * self.vpp
        if self.layers_per_stage is not None and len(self.layers_per_stage) != stages:
            count = f"pp = {self.pp}" if self.vpp == 1 else f"pp x vpp = {self.pp} x {self.vpp} = {stages}"
            raise ValueError(
                f"layers_per_stage has {len(self.layers_per_stage)} numbers for {count} stages; give {stages}"
            )
        if isinstance(self.ranks, tuple) and self.ranks[0] >= self.ranks[1]:
            raise ValueError(
                f"ranks = {list(self.ranks)} names no rank: it goes from the first to before the second; make the "
                "second larger than the first"
            )
        return self

    def chunks(self, num_layers: int) -> list[list[range]]:
        """The layers of each pipeline rank's model chunks: `layout.split_chunks`."""
        return split_chunks(num_layers, self.pp, self.vpp, self.layers_per_stage)

    def describe(self, layout: MeshLayout) -> str:
        """Text of a layout with the virtual stages, which the layout lacks: `tp 2 x pp 2 x dp 1, vpp 2`."""
        return f"{layout}, vpp {self.vpp}" if self.vpp > 1 else str(layout)

    def range_of_ranks(self, world_size: int, role: str = "actor") -> range:
        """Global ranks that have the role. Raises: ValueError if the run has fewer ranks."""
        first, stop = self.ranks if isinstance(self.ranks, tuple) else (0, self.ranks or world_size)
        if stop > world_size:
            given = list(self.ranks) if isinstance(self.ranks, tuple) else self.ranks
            raise ValueError(
                f"{role}.parallel.ranks = {given} goes up to rank {stop - 1}, and the run has {world_size} rank(s), 0 "
                f"to {world_size - 1}; start {stop} ranks (run.nproc), or name fewer"
            )
        return range(first, stop)

    def layout(self, world_size: int, role: str = "actor") -> MeshLayout:
        """Layout of the role's ranks in a run of `world_size` ranks; dp follows.

        Raises: ValueError if the run has too few ranks, or if tp x cp x pp does not divide their number.
        """
        ranks, model = self.range_of_ranks(world_size, role), self.tp * self.cp * self.pp
        dp, remainder = divmod(len(ranks), model)
        if remainder or not dp:
            near = sorted({max(dp, 1) * model, (dp + 1) * model})
            if self.ranks is not None:
                raise ValueError(
                    f"{role}.parallel.ranks are {len(ranks)} ranks, which is not a multiple of tp x cp x pp = "
                    f"{self.tp} x {self.cp} x {self.pp} = {model}; name {' or '.join(map(str, near))} ranks, or change "
                    "tp, cp and pp"
                )
            raise ValueError(
                f"{role}.parallel: world size {world_size} is not a multiple of tp x cp x pp = {self.tp} x {self.cp} x "
                f"{self.pp} = {model}; use {' or '.join(map(str, near))} ranks (run.nproc), "
                f"or change {role}.parallel"
            )
        if dp * self.cp % self.ep:
            group = f"dp = {dp}" if self.cp == 1 else f"dp x cp = {dp} x {self.cp}"
            raise ValueError(
                f"{role}.parallel.ep = {self.ep} does not divide {group}, which follows from {len(ranks)} ranks and "
                f"tp x cp x pp = {model}; choose a divisor of {dp * self.cp}, or ranks in multiples of "
                f"{model * self.ep}"
            )
        return MeshLayout(tp=self.tp, cp=self.cp, pp=self.pp, dp=dp, ep=self.ep, first=ranks.start)


def require_all_ranks(trained: Mapping[str, RoleConfig]) -> None:
    """Raises: ValueError for a role that is trained, or sampled from, on only some of the ranks."""
    for name, role in trained.items():
        if role.parallel.ranks is not None:
            raise ValueError(
                f"{name}.parallel.ranks = {role.parallel.ranks}, and {name} is trained or sampled from, which all ranks"
                " of a run do together: other ranks would wait through every update, and the optimizer's state would "
                "be sharded over fewer ranks. Leave ranks out; a reference or a reward model that is only read may be "
                "on some ranks"
            )


class OptimConfig(FrozenModel):
    lr: Positive = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up, over all optimizer steps of the run, down to `min_lr`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly: step k of n (k = 1 ... n) has rate lr x k / n. The
    schedule begins with step n: in a run of N steps, step k >= n is (k - n) / (N - n + 1) of the way down. No warm-up
    is the same as one step of it."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of a `linear` or `cosine` schedule; at most `lr`. `constant` does not read it."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """AdamW's decay of the mean of squared gradients."""
    eps: Positive = 1e-8
    """AdamW's addend to the root of that mean."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay; not applied to norms and biases."""
    clip_grad: NonNegative = 1.0
    """Largest global gradient norm, to which gradients are clipped; 0: no clipping."""
    overlap_grad_reduce: bool = True
    """Sum gradients over data-parallel ranks bucket by bucket during the backward of the last micro-batch, not after
    it. Without effect for one data-parallel rank."""
    overlap_param_gather: bool = True
    """Gather updated weights from data-parallel ranks bucket by bucket during the next forward, not before it."""
    distributed: Literal["auto"] | bool = "auto"
    """Shard the optimizer's state: each data-parallel rank holds and updates its share, then the weights are gathered.
    `auto`: if there are several such ranks. `false`: each rank holds and updates everything, which takes more memory
    and time; for comparisons. Results differ at most by rounding."""

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        if self.min_lr > self.lr:
            raise ValueError(
                f"min_lr = {self.min_lr:g} is above lr = {self.lr:g}, the peak from which the learning rate falls to "
                "it; lower min_lr or raise lr"
            )
        if self.schedule == "constant" and self.min_lr > 0:
            raise ValueError(
                f"min_lr = {self.min_lr:g}, but with schedule 'constant' the learning rate does not fall; set schedule "
                "to 'linear' or 'cosine', or leave min_lr out"
            )
        return self


class KernelsConfig(FrozenModel):
    logprobs: Literal["auto", "triton", "chunked", "reference"] = "auto"
    """Kernel for log-probs and entropy of a language model. `auto`: `triton` on a GPU that has it, otherwise `chunked`,
    the same algorithm in torch; both compute a slice of the logits at a time. `reference` computes all logits of a
    micro-batch's response tokens, for comparisons. The log names once the kernel and the reason."""
    save_mib: Annotated[int, Field(ge=0)] = 256
    """Memory on a rank of the last stage for logits that a forward keeps for its backward, of one micro-batch at a
    time. The rest is recomputed; 0 keeps none."""


class OffloadConfig(FrozenModel):
    """Parts of a role to keep in host memory while another role or the engine uses the device. They are loaded when the
    role is used. Results are the same to the bit.

    `auto` is true on a GPU in `rl` and `dpo`, and false elsewhere.
    """

    parameters: Literal["auto"] | bool = "auto"
    """Weights in the dtype of computation."""
    gradients: bool = True
    """Gradient buffers. They are allocated for a role's backward and freed when another role is used, never copied."""
    optimizer: Literal["auto", "stream"] | bool = "auto"
    """The optimizer's fp32 copy of the weights and its moments, which only its steps need. `stream`: a step loads,
    updates and offloads them in pieces, so that the moments are never on the device as a whole, and the copy of the
    weights only when it is created; also if the role does not share the device. `auto` streams."""


class RoleConfig(FrozenModel):
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = OptimConfig()
    """Read for roles that are trained."""
    kernels: KernelsConfig = KernelsConfig()
    """Read for language models: actor and reference."""
    recompute: Literal["none", "core_attention", "layers", "full"] = "none"
    """Activations that a training forward does not keep and the backward recomputes. `core_attention`: those between
    the projections of attention. `layers`: everything but the input of the first `recompute_layers` layers of each
    pipeline stage. `full`: the same for every layer. Results are the same to the bit. Read for roles that are
    trained."""
    recompute_layers: PositiveInt | None = None
    """`recompute: layers` only: number of layers of each (virtual) stage; a number above its layers means all."""
    router_aux_loss_coef: Literal["auto"] | NonNegative = "auto"
    """Weight of the load-balancing loss of a mixture of experts; 0 adds none. `auto`: as transformers trains the model.
    With `output_router_logits: true` in config.json a language model adds its `router_aux_loss_coef` (0.001 if that is
    absent); otherwise, and with a scalar head, nothing is added. The loss is the mean over layers and over the
    mini-batch's sequences, independent of layout and micro-batches. The log shows the weight. Read for roles that are
    trained."""
    offload: OffloadConfig = OffloadConfig()
    lora: LoraConfig | None = None
    """Train only a low-rank adapter on linear layers: `lora: {}` is one of rank 16 on all of them. [LoRA](lora.md)."""
    freeze: tuple[str, ...] = ()
    """Tensors that are not trained, by their Hugging Face names: the end of a tensor's or a module's name
    (`embed_tokens`, `q_proj.weight`), or a pattern with `*`, `?` or `[...]` (`model.layers.[0-7].*`). They have no
    gradient and no optimizer state. A name that matches nothing is refused, and so is freezing everything."""
    train_only: tuple[str, ...] = ()
    """The only tensors that are trained, named as in `freeze`. Read for roles that are trained."""

    @model_validator(mode="after")
    def _check_frozen(self) -> RoleConfig:
        if self.freeze and self.train_only:
            raise ValueError("freeze and train_only both select what is trained; give one of them")
        if self.lora is not None and (self.freeze or self.train_only):
            raise ValueError(
                f"lora trains the adapter alone, the whole model is frozen: leave "
                f"{'freeze' if self.freeze else 'train_only'} out, or leave lora out"
            )
        return self

    @model_validator(mode="after")
    def _check_recompute(self) -> RoleConfig:
        if (self.recompute == "layers") != (self.recompute_layers is not None):
            raise ValueError(
                f"got recompute = {self.recompute!r} and recompute_layers = {self.recompute_layers}; 'layers' needs a "
                "number of layers, and other values take none"
            )
        return self


def with_hub_models(cfg: ConfigT) -> ConfigT:
    """The configuration with local directories in place of models of the Hugging Face hub, which are downloaded.

    Raises: ValueError for a model that is neither here nor there.
    """
    changed: dict[str, Any] = {}
    for name in type(cfg).model_fields:
        section = getattr(cfg, name)
        if isinstance(section, RoleConfig) and not section.model.path.exists():
            path = from_hub(section.model.path, weights=not section.model.random_init)
            changed[name] = section.model_copy(update={"model": section.model.model_copy(update={"path": path})})
    return cfg.model_copy(update=changed) if changed else cfg
