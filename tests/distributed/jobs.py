"""What the rank processes do. Each job is called on every rank and returns something that pickles."""

import contextlib
import io
import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.architectures.placements import Head
from megarlhf.config import RoleConfig, SFTConfig
from megarlhf.models.role import Role, build_role
from megarlhf.models.settings import DTYPES
from megarlhf.models.weights import load_weights
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel.batching import padded_length
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.parallel.vocab import logits_at
from megarlhf.rollout.megatron_engine import MegatronEngine
from megarlhf.rollout.responses import Sampling
from megarlhf.runtime import Runtime
from tests.distributed.fused_jobs import apex_gradients, fused_gradients  # noqa: F401
from tests.distributed.gathered import record_gradients, weights_of
from tests.distributed.kernel_jobs import largest_tensor, with_calls_of_the_reference  # noqa: F401
from tests.distributed.logical import Arrays
from tests.distributed.lora_jobs import lora_exports, lora_gradients, trained_bytes, vllm_with_adapter  # noqa: F401
from tests.distributed.rl_jobs import rl_step  # noqa: F401
from tests.distributed.samples import pair_samples, sft_samples
from tests.distributed.vllm_jobs import (  # noqa: F401
    vllm_broken,
    vllm_failing_steps,
    vllm_family,
    vllm_head,
    vllm_long_prompts,
    vllm_packed_experts,
    vllm_sleeps,
    vllm_tables,
)
from tests.distributed.vllm_session_jobs import vllm_prompt_once, vllm_session  # noqa: F401


def command(runtime: Runtime, *argv: str) -> str:
    """A command of `megarlhf` that has to succeed, on ranks that are there already, as under a launcher.

    Returns: what this rank wrote to stdout and stderr.
    """
    status, written = command_status(runtime, *argv)
    assert status == 0, f"exit status {status}\n{written}"
    return written


def command_status(runtime: Runtime, *argv: str) -> tuple[int, str]:
    """The same of one that may fail: its exit status, and what it wrote."""
    from megarlhf.commands.cli import main

    written, root = io.StringIO(), logging.getLogger()
    handlers, root.handlers = root.handlers, []  # so that the command sets up logging as in a process of its own
    try:
        with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
            status = main(argv)
    finally:
        root.handlers = handlers
    return status, written.getvalue()


def train_once(objective: Any, role: Role, samples: Any) -> Any:
    """One optimizer step outside of a run: its metrics."""
    from megarlhf.trainers.run.skipped_steps import Failures, StepGuard, Update
    from megarlhf.trainers.supervised.loop import train_on

    phases = Phases()
    bad_steps = StepGuard(objective.cfg.train, Failures.of(objective.cfg, objective.command), phases)
    return train_on(objective, role, samples, Update(0, None, ()), bad_steps, phases)


def sft_steps(
    runtime: Runtime, config: dict[str, Any], num_steps: int, order: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Losses, gradient norms and gradients of the first steps, and the weights after them."""
    from megarlhf.trainers.supervised.sft import SupervisedFineTuning

    cfg = SFTConfig.model_validate(config)
    objective, samples = SupervisedFineTuning(cfg), _sft_samples(cfg)
    actor = build_role(
        "actor", cfg.actor, "lm", GroupCache(runtime), seed=0, num_optimizer_steps=num_steps, order=order
    )
    gradients: list[Arrays] = []
    record_gradients(actor, gradients)
    size = cfg.train.mini_batch_samples
    steps = [train_once(objective, actor, samples[n * size : (n + 1) * size]) for n in range(num_steps)]
    return {
        "coordinates": (actor.mesh.coordinates.tp, actor.mesh.coordinates.dp, actor.mesh.coordinates.pp),
        "places": tuple(dist.get_rank(getattr(actor.mesh.groups, axis)) for axis in ("tp", "dp", "pp")),
        "loss": [step["loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
        "gradients": gradients,
        "weights": weights_of(actor),
    }


def _sft_samples(cfg: SFTConfig) -> list[Any]:
    return list(sft_samples(cfg.data.train, cfg.actor.model.hf_directory()))


def saved_roles(runtime: Runtime, config: dict[str, Any], root: str, order: tuple[int, ...] | None) -> None:
    """Checkpoints of actor and critic: as loaded, after a step of SFT, and of the last one loaded again."""
    from megarlhf.trainers.run.exports import save_roles
    from megarlhf.trainers.supervised.sft import SupervisedFineTuning

    cfg = SFTConfig.model_validate(config)
    objective, samples = SupervisedFineTuning(cfg), _sft_samples(cfg)
    cache = GroupCache(runtime)
    actor = build_role("actor", cfg.actor, "lm", cache, seed=0, num_optimizer_steps=1, order=order)
    critic = build_role("critic", cfg.actor, "scalar", cache, seed=0, order=order, new_head=True)
    save_roles(Path(root), 1, [actor, critic])
    train_once(objective, actor, samples[: cfg.train.mini_batch_samples])
    saved = save_roles(Path(root), 2, [actor, critic])
    for role in (actor, critic):
        load_weights(role.shard, role.section.model.model_copy(update={"path": saved / role.name}), seed=1)
    save_roles(Path(root), 3, [actor, critic])


def outputs_and_greedy(
    runtime: Runtime,
    models: list[str],
    parallel: dict[str, Any],
    head: Head,
    rows: list[list[int]],
    new_tokens: int,
    dtype: str = "fp32",
) -> list[tuple[np.ndarray, list[list[int]]] | None]:
    """Of each model: its output at every position of right-padded rows, [B, S, V], and what it says greedily.

    Returns: None on ranks that do not own outputs. A scalar head is asked for no tokens.
    """
    cache = GroupCache(runtime)
    answers: list[tuple[np.ndarray, list[list[int]]] | None] = []
    for model in models:
        section = RoleConfig.model_validate({"model": {"path": model, "dtype": dtype}, "parallel": parallel})
        role = build_role("actor", section, head, cache, seed=0)
        assert {p.dtype for p in role.shard.module.parameters()} == {DTYPES[dtype]}
        tokens = torch.zeros(len(rows), padded_length(max(map(len, rows)), role.mesh), dtype=torch.int64)
        for tokens_S, row in zip(tokens, rows, strict=True):
            tokens_S[: len(row)] = torch.tensor(row)
        (outputs,) = role.forward([MicroBatch(tokens, {})], partial(_whole_vocabulary, role)) or [torch.empty(0)]
        greedy: list[list[int]] = []
        if new_tokens:
            sampling = Sampling(max_tokens=new_tokens, greedy=True, end_ids=())
            prompts = [torch.tensor(row) for row in rows]
            rollouts = MegatronEngine(role.shard, 2, role.parts).generate(prompts, [0] * len(rows), sampling)
            greedy = [row.tolist() for row in rollouts.responses.rows()]
        answers.append((outputs.float().numpy(), greedy) if role.mesh.owns_outputs else None)
    return answers


def _whole_vocabulary(role: Role, output: Tensor, batch: MicroBatch) -> Tensor:
    """[B, S, V] logits, or [B, S, 1] scores."""
    if role.shard.head == "scalar":
        return output
    rows, length = batch.tokens_BS.shape
    rows_K, positions_K = torch.arange(rows).repeat_interleave(length), torch.arange(length).repeat(rows)
    logits_KV = logits_at(role.shard.vocabulary(), output, rows_K, positions_K, share=batch.share)
    return logits_KV.view(rows, length, -1)


def rm_steps(runtime: Runtime, config: dict[str, Any], num_steps: int) -> dict[str, Any]:
    """The same for the reward model, with its held-out evaluation before training."""
    from megarlhf.config import RMConfig
    from megarlhf.trainers.supervised.loop import evaluate
    from megarlhf.trainers.supervised.rm import RewardModelling, divide_head, score_deviation

    cfg = RMConfig.model_validate(config)
    objective = RewardModelling(cfg)
    pairs = pair_samples(cfg.data.train, cfg.reward_model.model.hf_directory())
    cache = GroupCache(runtime)
    model = build_role(
        "reward_model", cfg.reward_model, "scalar", cache, seed=0, num_optimizer_steps=num_steps, new_head=True
    )
    gradients: list[Arrays] = []
    record_gradients(model, gradients)
    before = evaluate(objective, model, pairs[:33])  # 33 does not divide: fillers take part
    size = cfg.train.mini_batch_samples
    steps = [train_once(objective, model, pairs[n * size : (n + 1) * size]) for n in range(num_steps)]
    weights = weights_of(model)
    ranked = evaluate(objective, model, pairs[:33])
    deviation = score_deviation(objective, model, pairs[:33])
    divide_head(model, deviation)
    again = evaluate(objective, model, pairs[:33])
    return {
        "scaling": (deviation, ranked, again, score_deviation(objective, model, pairs[:33])),
        "evaluation": before,
        "loss": [step["loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
        "gradients": gradients,
        "weights": weights,
    }


def forward_without_the_cpu_scope(runtime: Runtime, model: str) -> str:
    """The error of Megatron's own schedule when it is called on a CPU as it is."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    section = RoleConfig.model_validate({"model": {"path": model}})
    actor = build_role("actor", section, "lm", GroupCache(runtime), seed=0)
    try:
        get_forward_backward_func(pp_size=1, vp_size=None)(
            forward_step_func=lambda batches, module: (module(*next(batches)), None),
            data_iterator=iter([(torch.ones(1, 4, dtype=torch.int64), torch.arange(4)[None], None)]),
            model=actor.shard.module,
            num_microbatches=1,
            seq_length=4,
            micro_batch_size=1,
            forward_only=True,
            pg_collection=actor.mesh.groups,
        )
    except Exception as error:  # noqa: BLE001 -- whatever it is, the test looks at it
        return repr(error)
    return ""
