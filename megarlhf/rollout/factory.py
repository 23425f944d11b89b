"""Build the configured rollout engine, its sampling, and the order of ranks that suits it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from megarlhf.config import ConversationConfig, RoleConfig, RolloutConfig
from megarlhf.data.text.end_tokens import turn_end_of
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.layout import engine_order
from megarlhf.model_directory import end_tokens
from megarlhf.models.role import Role
from megarlhf.models.settings import DTYPES
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.rollout.engines import engine_of
from megarlhf.rollout.responses import Sampling, StopStrings
from megarlhf.rollout.restarting import RestartingEngine
from megarlhf.runtime import Runtime


def actor_order(rollout: RolloutConfig, actor: RoleConfig, runtime: Runtime) -> tuple[int, ...] | None:
    """Order of ranks in the actor's mesh by which few bytes move into the engines; the same on all ranks.

    Ranks change places inside their machine only, and where machines differ in size inside blocks that fit into each.
    """
    if not engine_of(rollout).has_own_weights:
        return None
    return engine_order(actor.parallel.layout(runtime.world_size), rollout.tp(actor), runtime.ranks_per_block)


def mesh_orders(
    rollout: RolloutConfig, sections: Mapping[str, RoleConfig], runtime: Runtime
) -> dict[str, tuple[int, ...] | None]:
    """Order of ranks in each role's mesh. Roles with the actor's layout get the actor's order and share its process
    groups (each costs a communicator); the others are ordered by rank number."""
    layouts = {name: section.parallel.layout(runtime.world_size, name) for name, section in sections.items()}
    order = actor_order(rollout, sections["actor"], runtime)
    return {name: order if layout == layouts["actor"] else None for name, layout in layouts.items()}


def make_engine(rollout: RolloutConfig, actor: Role, max_prompt_tokens: int, micro_batch_samples: int) -> RolloutEngine:
    """The configured engine, still without weights."""
    spec, dtype = engine_of(rollout), engine_dtype(rollout, actor)
    build = partial(spec.make, rollout, actor, dtype, max_prompt_tokens, micro_batch_samples)
    return RestartingEngine(build, rollout.max_engine_rebuilds) if spec.has_own_weights else build()


def engine_dtype(rollout: RolloutConfig, actor: Role) -> torch.dtype:
    """Type of the rollout engine's weights and computation."""
    return actor.shard.dtype if rollout.dtype == "auto" else DTYPES[rollout.dtype]


def sampling_of(
    rollout: RolloutConfig,
    actor: RoleConfig,
    tokenizer: Tokenizer,
    *,
    greedy: bool = False,
    data: ConversationConfig | None = None,
) -> Sampling:
    """How this configuration draws responses. They end where the model's directory says, and where the chat template of
    `data` ends an answer, as `sft` has taught it. Raises: ValueError for an end token that the tokenizer does not
    have."""
    if unknown := [token for token in rollout.stop_token_ids if token >= tokenizer.vocab_size]:
        raise ValueError(
            f"rollout.stop_token_ids names {unknown}; the tokenizer has ids from 0 to {tokenizer.vocab_size - 1}"
        )
    ends = [*end_tokens(actor.model.hf_directory(), tokenizer.eos_id)]
    if data is not None and (turn_end := turn_end_of(data, tokenizer)) is not None:
        ends.append(turn_end)
    return Sampling(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        greedy=greedy,
        end_ids=tuple(dict.fromkeys([*ends, *rollout.stop_token_ids])),
        stop=StopStrings(rollout.stop, partial(tokenizer.decode, continuation=True)) if rollout.stop else None,
        top_p=1.0 if greedy else rollout.top_p,
        top_k=0 if greedy else rollout.top_k,
        min_p=0.0 if greedy else rollout.min_p,
    )
