"""A whole run of a command on the ranks of a pool, with the eyes of a test: what each update saw and did."""

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from megarlhf.columns import Ragged
from megarlhf.config import RLConfig, RMConfig, SFTConfig
from megarlhf.models.build import placements_on
from megarlhf.models.role import Role, build_role
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.parallel import step
from megarlhf.parallel.chunks import chunks_of
from megarlhf.parallel.loss import Accumulated, Loss
from megarlhf.rollout.megatron_engine import MegatronEngine
from megarlhf.rollouts import Rollouts, VersionRuns
from megarlhf.runtime import Runtime
from megarlhf.trainers.rl import build as rl_components
from megarlhf.trainers.rl import loop as rl
from megarlhf.trainers.run.factories import RunFactories
from megarlhf.trainers.supervised import loop as supervised
from megarlhf.trainers.supervised import rm, sft
from tests.distributed.invariance_routing import Routing
from tests.distributed.logical import Held

COMMANDS: dict[str, tuple[Any, Callable[..., None]]] = {
    "sft": (SFTConfig, sft.run), "rm": (RMConfig, rm.run), "rl": (RLConfig, rl.run),
}  # fmt: skip
PIECE_BYTES, BUCKET = 4096, 20_000
"""Of streamed optimizer state, and elements of a gradient bucket: so that the tiny models have several of each.
Megatron-Core has several buckets only where it overlaps."""
Given = tuple[list[list[int]], list[list[float]], list[bool]]
"""Responses, their log-probs, and which have ended."""


@dataclass
class Seen:
    """Of a trained role, update by update."""

    role: Role
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Held | None = None
    """Of the first update, summed over all ranks and not yet clipped."""
    packed: set[bool] = field(default_factory=set)
    """Of the micro-batches."""
    recomputed: int = 0
    """How often the attention of a layer was computed again."""


class GivenEngine(MegatronEngine):
    """Says what it is given; without, what the actor says, and keeps it."""

    given: Given | None = None

    def generate(self, *args: Any, **kwargs: Any) -> Rollouts:
        if self.given is None:
            drawn = super().generate(*args, **kwargs)
            rows = drawn.responses.rows(), drawn.logprobs.rows()
            tokens, logprobs = ([row.tolist() for row in each] for each in rows)
            self.given = tokens, logprobs, drawn.finished_N.tolist()
            return drawn
        tokens, logprobs, finished = self.given
        responses = Ragged.from_rows([torch.tensor(row) for row in tokens], torch.int64)
        return Rollouts(
            responses=responses,
            logprobs=Ragged.from_rows([torch.tensor(row) for row in logprobs], torch.float32),
            finished_N=torch.tensor(finished),
            versions=VersionRuns.constant(self.weight_version, responses.lengths_N),
        )


def train(runtime: Runtime, command: str, config: Mapping[str, Any], given: Given | None) -> dict[str, Any]:
    """The command's own run, to its end. `given`: what the engine of rl says."""
    section, run = COMMANDS[command]
    small_buckets = partial(step.DistributedDataParallelConfig, bucket_size=BUCKET)
    cfg = section.model_validate(config)
    seen: dict[str, Seen] = {}
    engines: list[GivenEngine] = []
    routing = Routing()

    def build(*args: Any, **kwargs: Any) -> Role:
        role = build_role(*args, **kwargs)
        if role.trainer is not None:
            seen[role.name] = watched(role, routing)
            routing.watch(role)
        return role

    def engine(rollout: Any, actor: Role, max_prompt_tokens: int, micro_batch_samples: int) -> GivenEngine:
        made = GivenEngine(actor.shard, micro_batch_samples, actor.parts)
        made.given = given
        engines.append(made)
        return made

    with (
        mock.patch.object(supervised, "build_role", build),
        mock.patch.object(rl_components, "build_role", build),
        mock.patch.object(step, "PIECE_BYTES", PIECE_BYTES),
        mock.patch.object(step, "DistributedDataParallelConfig", small_buckets),
        contextlib.redirect_stdout(io.StringIO()),
        routing.listening(),
    ):
        run(cfg, runtime, RunFactories(engine=engine))
    first = next(iter(seen.values())).role
    result: dict[str, Any] = {
        "metrics": read_metrics(cfg.run.dir)[-1] if runtime.is_main else {},
        "given": engines[0].given if engines else None,
        "host_bytes": first.parts.device_memory.host.nbytes,
        "router_gap": routing.gap,
        "choices": routing.choices,
        "roles": {},
    }
    for name, each in seen.items():
        each.role.parts.to_compute()
        live = {key: flat(value) for key, value in each.role.shard.parameters().items()}
        result["roles"][name] = {
            "losses": each.losses, "norms": each.norms, "gradients": each.gradients, "weights": held(each.role, live),
            "how": how(each),
        }  # fmt: skip
    return result


def how(seen: Seen) -> dict[str, Any]:
    """What the role's training was in fact."""
    trainer, at = seen.role.trainer, seen.role.mesh.layout
    assert trainer is not None
    first = trainer.chunks[0]
    sharded = [isinstance(each, step.DistributedOptimizer) for each in step.optimizers_in(trainer.optimizer)]
    return {
        "sizes": {
            **{axis: getattr(at, axis) for axis in ("tp", "cp", "pp", "dp", "ep")},
            "vpp": len(trainer.chunks),
            "sequence_parallel": first.config.sequence_parallel,
        },
        "packed": seen.packed,
        "recomputed": seen.recomputed > 0,
        "distributed": any(sharded),
        "overlap": (first.ddp_config.overlap_grad_reduce, first.ddp_config.overlap_param_gather),
        "several_buckets": any(len(buffer.buckets) > 1 for buffer in trainer.buffers),
    }


def watched(role: Role, routing: Routing) -> Seen:
    """Looks at the role's updates between the accumulation and the optimizer's step."""
    trainer, seen = role.trainer, Seen(role)
    assert trainer is not None
    accumulate, gradient_norm = trainer.accumulate, trainer.gradient_norm

    def count(by: int) -> Callable[..., None]:
        def counted(*_: Any) -> None:
            seen.recomputed += by if routing.now else 0

        return counted

    for chunk in chunks_of(role.shard.module):
        attentions = [module for name, module in chunk.named_modules() if name.endswith(".core_attention")]
        assert attentions
        for attention in attentions:
            attention.register_forward_hook(count(1))
        chunk.register_forward_hook(count(-len(attentions)))

    def accumulated(batches: Sequence[step.MicroBatch], loss: Loss) -> Accumulated:
        routing.now = role.name, len(seen.losses)
        seen.packed |= {batch.layout.packed for batch in batches if batch.layout is not None}
        result = accumulate(batches, loss)
        routing.now = None
        seen.losses.append(result.sums["loss"])
        if seen.gradients is None:
            seen.gradients = held(role, own_gradients(role))
        return result

    def norm() -> float:
        seen.norms.append(gradient_norm())
        return seen.norms[-1]

    trainer.accumulate = accumulated  # type: ignore[method-assign]
    trainer.gradient_norm = norm  # type: ignore[method-assign]
    return seen


def own_gradients(role: Role) -> dict[str, np.ndarray]:
    """By parameter, flat; NaN where the sum is another data-parallel rank's."""
    assert role.trainer is not None
    own = role.trainer.own_gradients()
    gradients = {}
    for name, parameter in role.shard.parameters().items():
        whole = np.full(parameter.numel(), np.nan, np.float32)
        if name in own:
            start = own[name].storage_offset() - parameter.main_grad.storage_offset()
            whole[start : start + own[name].numel()] = flat(own[name])
        gradients[name] = whole
    return gradients


def held(role: Role, storages: dict[str, np.ndarray]) -> Held:
    """What this rank holds of the role, with where it stands."""
    at = role.mesh.coordinates
    placements = placements_on(role.shard, role.mesh.runtime.rank)
    return Held(placements, storages, ((at.dp, at.cp) == (0, 0), role.mesh.experts.dp == 0))


def flat(tensor: Tensor) -> np.ndarray:
    """A copy in fp32. Not of numpy: it would hold the storage, which could then not be given back."""
    return tensor.detach().to(torch.float32, copy=True).view(-1).numpy()
