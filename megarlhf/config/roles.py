"""Configuration of a role: its model, how it is cut over ranks, how it is trained. The same in every command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megarlhf.config.frozen import Fraction as Fraction
from megarlhf.config.frozen import FrozenModel, NonNegative, Positive
from megarlhf.config.lora import LoraConfig
from megarlhf.layout import MeshLayout, split_chunks
from megarlhf.model_directory import require_hf_directory


class ModelConfig(FrozenModel):
    path: Path
    """A Hugging Face directory, or a Megatron checkpoint (`torch_dist` or `mp_rank`) of any layout. With
    `random_init` only its config.json and tokenizer are read."""
    hf: Path | None = None
    """A directory with config.json and tokenizer, for a Megatron checkpoint that has none of its own."""
    tokenizer: Path | None = None
    """A directory with another tokenizer than the model's directory has, or that has none: `tokenizer.json`,
    `tokenizer.model`, or `vocab.json` with `merges.txt`; or a SentencePiece file. It goes into exports."""
    random_init: bool = False
    """Start from random weights of the architecture in config.json (the same at every layout)."""
    fresh_head: bool = False
    """The scalar head starts at zero, and so do all values; the rest is read from `path`. For the critic of `rl` only,
    where `path` is a language model, which has no such head (without it that is refused), or a reward model, whose
    scores of unfinished responses are no estimate of a return. `rm` draws its head at random by itself."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of parameters and activations. `auto`: that of the tensors stored at `path`; with `random_init` what config.json
    says, otherwise fp32. A checkpoint in fp16 or in several dtypes needs one named here. The table that a start prints
    says which dtype it is. Sums of gradients, the optimizer's copy of the weights and its moments are fp32 always."""
    vocab_multiple: PositiveInt = 128
    """The vocabulary is padded to a multiple of this x tp, as Megatron does; padding is masked."""

    def hf_directory(self) -> Path:
        """The directory with the model's config.json and tokenizer.

        Raises: ValueError when there is none.
        """
        return require_hf_directory(self.path, self.hf)

    def tokenizer_place(self) -> Path:
        """The directory, or the SentencePiece file, with the model's tokenizer. Raises: ValueError when there is no
        such place; whether a tokenizer is there is not looked at."""
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
    """Uneven pipeline stages, first to last: layers of each. With virtual stages those of all pp x vpp, in the order of
    the model."""
    sequence_parallel: bool = False
    """Shard the sequence between tensor-parallel regions: less memory for as many bytes on the wire. Left out, it is on
    where tp > 1, without which it cannot be."""
    vpp: PositiveInt = 1
    """Virtual pipeline stages per rank (Megatron-Core's interleaved schedule). The layers are cut into pp x vpp stages,
    of which rank p holds number p, p + pp, and so on. Ranks wait for the first and the last micro-batch a vpp-th as
    long; there are vpp times as many messages, and more activations are in flight. Needs pp > 1."""
    cp: PositiveInt = 1
    """Context-parallel size: each sequence is cut over so many ranks, which give each other their keys and values in
    every layer. For sequences whose activations do not fit. Sequences are padded to a multiple of 2 x cp tokens."""
    ep: PositiveInt = 1
    """Expert-parallel size: between so many data-parallel (and context-parallel) neighbours the experts of a layer are
    shared out; divides the experts and dp x cp. Tokens travel to their experts and back in every layer. Inside an
    expert tp cuts as elsewhere."""
    ranks: PositiveInt | tuple[NonNegativeInt, PositiveInt] | None = None
    """Ranks that have the role: `8` is the first 8 of the run, `[8, 16]` are ranks 8 to 15 (from the first to before
    the second); left out, all. tp x cp x pp divides their number, and dp follows from it. The others hold nothing of
    the role, and wait while it computes. For roles that are only read: a reference, and the reward model of `rl`. One
    that is trained is on all ranks, since each update is made by all."""

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
            words = f"pp = {self.pp}" if self.vpp == 1 else f"pp x vpp = {self.pp} x {self.vpp} = {stages}"
            raise ValueError(
                f"layers_per_stage has {len(self.layers_per_stage)} numbers for {words} stages; give {stages}"
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
        """`tp 2 x pp 2 x dp 1, vpp 2`: the layout of so many ranks, with what the mesh alone does not know."""
        return f"{layout}, vpp {self.vpp}" if self.vpp > 1 else str(layout)

    def range_of_ranks(self, world_size: int, role: str = "actor") -> range:
        """The global ranks that have the role.

        Raises: ValueError where the run has fewer.
        """
        first, stop = self.ranks if isinstance(self.ranks, tuple) else (0, self.ranks or world_size)
        if stop > world_size:
            given = list(self.ranks) if isinstance(self.ranks, tuple) else self.ranks
            raise ValueError(
                f"{role}.parallel.ranks = {given} goes up to rank {stop - 1}, and the run has {world_size} rank(s), 0 "
                f"to {world_size - 1}; start {stop} ranks (run.nproc), or name fewer"
            )
        return range(first, stop)

    def layout(self, world_size: int, role: str = "actor") -> MeshLayout:
        """The layout in a run of `world_size` ranks, on those that the role has; dp follows.

        Raises: ValueError when the run has too few ranks, or when tp x cp x pp does not divide their number.
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
            shared = f"dp = {dp}" if self.cp == 1 else f"dp x cp = {dp} x {self.cp}"
            raise ValueError(
                f"{role}.parallel.ep = {self.ep} does not divide {shared}, which follows from {len(ranks)} ranks and "
                f"tp x cp x pp = {model}; choose a divisor of {dp * self.cp}, or ranks in multiples of "
                f"{model * self.ep}"
            )
        return MeshLayout(tp=self.tp, cp=self.cp, pp=self.pp, dp=dp, ep=self.ep, first=ranks.start)


def require_all_ranks(trained: Mapping[str, RoleConfig]) -> None:
    """Raises: ValueError for a role that is trained, or sampled from, on some of the ranks only."""
    for name, role in trained.items():
        if role.parallel.ranks is not None:
            raise ValueError(
                f"{name}.parallel.ranks = {role.parallel.ranks}, and {name} is trained or sampled from, which all "
                "ranks of a run do together: on some of them only, the others would wait through every update, and its "
                "optimizer's state would have fewer ranks to be shared between. Leave ranks out; a reference or a "
                "reward model that is only read may be on some ranks"
            )


class OptimConfig(FrozenModel):
    lr: Positive = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up, over all optimizer steps of the run, down to `min_lr`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises linearly: step k of n (k = 1 ... n) has rate lr x k / n. The
    schedule begins with the last of them: of N steps, step k >= n is (k - n) / (N - n + 1) of the way down. No warm-up
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
    """Decoupled; not applied to norms and biases."""
    clip_grad: NonNegative = 1.0
    """Global gradient norm is clipped to this; 0 clips nothing."""
    overlap_grad_reduce: bool = True
    """Gradients are summed over data-parallel ranks bucket by bucket, while the backward of the last micro-batch still
    runs, and not after it. One data-parallel rank sums nothing."""
    overlap_param_gather: bool = True
    """Updated weights are gathered from data-parallel ranks bucket by bucket, while the next forward already runs, and
    not before it."""
    distributed: Literal["auto"] | bool = "auto"
    """Whether each data-parallel rank holds and updates its share of the optimizer's state only, after which the
    weights are gathered. `auto`: where there are several such ranks. `false`: each holds and updates all of it, which
    takes more memory and time; to compare with. Results differ by rounding at most."""

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
    """What computes log-probs and entropy of a language model. `auto`: `triton` on a GPU that has it, otherwise
    `chunked`, the same algorithm in torch; both make a slice of the logits at a time. `reference` makes all logits of
    a micro-batch's response tokens, and is there to compare with. The log says once which was taken, and why."""
    save_mib: Annotated[int, Field(ge=0)] = 256
    """Memory on a rank of the last stage in which a forward keeps logits for its backward, one micro-batch's at a
    time. What does not fit is computed again; 0 keeps none."""


class OffloadConfig(FrozenModel):
    """What of a role is in host memory while others work, where several share the device: the other roles, the engine.
    It comes back for each turn of the role. Results stay the same to the bit.

    `auto` is true on a GPU in `rl` and `dpo`, and false elsewhere.
    """

    parameters: Literal["auto"] | bool = "auto"
    """Weights as the model computes with them."""
    gradients: bool = True
    """Gradient buffers come with a role's backward and leave when others take their turn. They are never copied."""
    optimizer: Literal["auto", "stream"] | bool = "auto"
    """The optimizer's fp32 copy of the weights and its moments, which its steps alone need. `stream`: a step brings
    them to the device and back in pieces, which an update is made of one by one, so that moments are never there as a
    whole, and the copy of the weights only where it is made; also where a role does not share the device. `auto`
    streams."""


class RoleConfig(FrozenModel):
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = OptimConfig()
    """Read for roles that are trained."""
    kernels: KernelsConfig = KernelsConfig()
    """Read for language models: actor and reference."""
    recompute: Literal["none", "core_attention", "layers", "full"] = "none"
    """What a training forward does not keep for its backward, which then computes it again. `core_attention`: what lies
    between the projections of an attention. `layers`: of the first `recompute_layers` layers of each pipeline stage
    everything but their input. `full`: of every layer. Results stay the same to the bit. Read for roles that are
    trained."""
    recompute_layers: PositiveInt | None = None
    """`recompute: layers` only: how many of a stage, of each virtual one; more than it has are all of them."""
    router_aux_loss_coef: Literal["auto"] | NonNegative = "auto"
    """Of a mixture of experts: this number x its load-balancing loss is added to the loss; 0 adds none. `auto` is as
    transformers trains the model: with `output_router_logits: true` in config.json a language model adds its
    `router_aux_loss_coef` (0.001 where that is absent); otherwise, and with a scalar head, nothing is added. The loss
    is the mean over layers and over the mini-batch's sequences, which no layout and no micro-batch changes. The log
    says what is added. Read for roles that are trained."""
    offload: OffloadConfig = OffloadConfig()
    lora: LoraConfig | None = None
    """Train a low-rank adapter on linear layers, and nothing else: `lora: {}` is one of rank 16 on all of them.
    [LoRA](lora.md)."""
    freeze: tuple[str, ...] = ()
    """Tensors that are not trained, by their Hugging Face names: the end of a name, or of that of a module
    (`embed_tokens`, `q_proj.weight`), or a pattern with `*`, `?` or `[...]` (`model.layers.[0-7].*`). They have no
    gradient and no optimizer state. One that names nothing is refused, and so is freezing everything."""
    train_only: tuple[str, ...] = ()
    """The other way round: the only tensors that are trained. Read for roles that are trained."""

    @model_validator(mode="after")
    def _check_frozen(self) -> RoleConfig:
        if self.freeze and self.train_only:
            raise ValueError("freeze and train_only both say what is trained; give one of them")
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
                "number of layers, and nothing else takes one"
            )
        return self
