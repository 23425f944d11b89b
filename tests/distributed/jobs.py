"""What the rank processes do. Each job is called on every rank and returns something that pickles."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.architectures.placements import Head, hf_placements
from megarlhf.config import RLConfig, RoleConfig, SFTConfig
from megarlhf.data.samples import build_sft
from megarlhf.data.sources import load_records
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.models.build import ModelShard, placements_on
from megarlhf.models.role import Role, build_role
from megarlhf.models.settings import DTYPES
from megarlhf.models.weights import load_weights
from megarlhf.observe.phases import Phases
from megarlhf.parallel import step
from megarlhf.parallel.batching import padded_length
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch
from megarlhf.parallel.residency import RoleParts
from megarlhf.parallel.vocab import logits_at
from megarlhf.rollout.engine import Sampling
from megarlhf.rollout.megatron_engine import MegatronEngine
from megarlhf.runtime import Runtime
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.transport.reshard import Resharder
from tests.distributed.fused_jobs import apex_gradients, fused_gradients  # noqa: F401
from tests.distributed.kernel_jobs import largest_tensor, with_calls_of_the_reference  # noqa: F401
from tests.distributed.lora_jobs import lora_exports, lora_gradients, trained_bytes, vllm_with_adapter  # noqa: F401
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

Arrays = dict[str, np.ndarray]


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


def weights_of(role: Role) -> Arrays:
    """Logical tensors of a role's weights, on rank 0; empty elsewhere."""
    role.parts.to_compute()
    return gather(role.shard, role.shard.parameters())


def gather(part: ModelShard, storages: Mapping[str, Tensor]) -> Arrays:
    """Logical tensors out of every rank's storages, on rank 0; empty elsewhere."""
    wanted = hf_placements(part.arch, part.head, rank=0)
    plan = make_plan([placements_on(part, rank) for rank in range(dist.get_world_size())], [wanted])
    whole = {name: torch.zeros(shape) for name, shape in wanted.storages.items()} if dist.get_rank() == 0 else {}
    live = {name: tensor.detach().contiguous() for name, tensor in storages.items()}
    Resharder(plan, rank=dist.get_rank(), dtype=torch.float32, device=torch.device("cpu")).run(live, whole)
    return {name: tensor.numpy() for name, tensor in whole.items()}


def gather_gradients(role: Role) -> Arrays:
    """Logical gradients, after the reductions and before the optimizer. Each rank with the same weights has a shard."""
    trainer = role.trainer
    assert trainer is not None
    groups = role.mesh.groups
    of_buffers = [(buffer, groups.dp_cp) for chunk in trainer.chunks for buffer in chunk.buffers]
    of_buffers += [(buffer, groups.expt_dp) for chunk in trainer.chunks for buffer in chunk.expert_parallel_buffers]
    for buffer, group in of_buffers:
        for bucket in buffer.buckets:
            shards = list(bucket.grad_data.chunk(group.size()))
            whole = [torch.empty_like(shard) for shard in shards]
            dist.all_gather(whole, shards[group.rank()].clone(), group=group)
            bucket.grad_data.copy_(torch.cat(whole))
    live = role.shard.module.named_parameters()
    return gather(role.shard, {name: p.main_grad if p.requires_grad else torch.zeros_like(p) for name, p in live})


def record_gradients(role: Role, into: list[Arrays]) -> None:
    """From now on keep the gradients of every step of `role`."""
    assert role.trainer is not None
    original = role.trainer.gradient_norm

    def gradient_norm() -> float:
        into.append(gather_gradients(role))
        return original()

    role.trainer.gradient_norm = gradient_norm  # type: ignore[method-assign]


def train_once(objective: Any, role: Role, samples: Any) -> Any:
    """One optimizer step outside of a run: its metrics."""
    from megarlhf.trainers.bad_steps import BadSteps, Failures, Update
    from megarlhf.trainers.supervised import train_on

    phases = Phases()
    bad_steps = BadSteps(objective.cfg.train, Failures.of(objective.cfg, objective.command), phases)
    return train_on(objective, role, samples, Update(1, None, ()), bad_steps, phases)


def sft_steps(
    runtime: Runtime, config: dict[str, Any], num_steps: int, order: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Losses, gradient norms and gradients of the first steps, and the weights after them."""
    from megarlhf.trainers.sft import SupervisedFineTuning

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
    samples, _ = build_sft(
        load_records(cfg.data.train, fields=("prompt", "response")),
        load_tokenizer(cfg.actor.model.hf_directory()),
        max_prompt_tokens=64,
        max_response_tokens=64,
    )
    return samples


def saved_roles(runtime: Runtime, config: dict[str, Any], root: str, order: tuple[int, ...] | None) -> None:
    """Checkpoints of actor and critic: as loaded, after a step of SFT, and of the last one loaded again."""
    from megarlhf.trainers.exports import save_roles
    from megarlhf.trainers.sft import SupervisedFineTuning

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
    from megarlhf.data.samples import build_pairs
    from megarlhf.trainers.rm import RewardModelling, divide_head, score_deviation
    from megarlhf.trainers.supervised import evaluate

    cfg = RMConfig.model_validate(config)
    objective = RewardModelling(cfg)
    pairs, _ = build_pairs(
        load_records(cfg.data.train, fields=("prompt", "chosen", "rejected")),
        load_tokenizer(cfg.reward_model.model.hf_directory()),
        max_prompt_tokens=64,
        max_response_tokens=64,
    )
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


def rl_step(
    runtime: Runtime,
    config: dict[str, Any],
    order: tuple[int, ...] | None = None,
    old_before: bool = False,
    watch_fails: bool = False,
    piece_bytes: int = step.PIECE_BYTES,
) -> dict[str, Any]:
    """One whole step of rl with the configured engine, without certificates: what it sampled, learned and became.

    order: the actor's, as if an engine of vLLM's asked for it; None: what the configured engine asks for
    old_before: old log-probs are made before the training also where the configuration does without
    watch_fails: whoever is told the gap to the engine in the training ends it there
    piece_bytes: of the optimizer's state, where it is streamed
    """
    from megarlhf.rollout.bank import Bank
    from megarlhf.trainers import prompts as asked
    from megarlhf.trainers import rl_components
    from megarlhf.trainers.rl_metrics import describe
    from megarlhf.trainers.rl_rollout import Drawing, sample
    from megarlhf.trainers.rl_score import score
    from megarlhf.trainers.rl_updates import StepInProgress, train_on
    from megarlhf.trainers.session import Session

    cfg = RLConfig.model_validate(config)
    tokenizer = load_tokenizer(cfg.actor.model.hf_directory())
    prompts = _prompts(cfg, tokenizer)[: cfg.train.prompts_per_step]
    actor_order = {"return_value": order} if order else {"wraps": asked.actor_order}
    with (
        mock.patch.object(asked, "actor_order", **actor_order),
        # Where a test has no reward model, a language model with a random head stands for one.
        mock.patch.object(rl_components, "build_role", partial(build_role, new_head=True)),
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
        mock.patch.object(step, "PIECE_BYTES", piece_bytes),
    ):
        parts = rl_components.build(cfg, runtime, tokenizer, Phases())
    if old_before:
        cfg = cfg.model_copy()
        object.__setattr__(cfg, "old_logprobs_in_training", lambda step: False)
    roles = [role for role in (parts.actor, parts.reference, parts.critic, parts.rewarder.reward_model) if role]
    gradients: dict[str, list[Arrays]] = {role.name: [] for role in parts.trained}
    there: dict[str, Any] = {}
    for role in parts.trained:
        record_gradients(role, gradients[role.name])
    parts.engine.update_weights(parts.actor.shard, version=0)
    experience = sample(cfg, parts.engine, prompts, parts.sampling, 0)
    drawing = Drawing(cfg, parts, prompts, Bank(cfg.run.dir / "bank"), Session(runtime, cfg.run.dir), 0)
    with mock.patch.object(step, "_run", noting(step._run, roles, there)):
        experience, rewards = score(drawing, experience, prompts)
    work = StepInProgress.begun(cfg, parts, experience, rewards)
    told: list[Any] = []

    def watch(found: Any) -> None:
        told.append(found["rollout_logprob_gap_max"])
        if watch_fails:
            raise InterruptedError

    metrics: dict[str, Any] = {}
    with contextlib.suppress(InterruptedError), mock.patch.object(step, "_run", noting(step._run, roles, there)):
        metrics = train_on(cfg, parts, work, 0, watch=watch)
    parts.actor.parts.residency.turn(*(role.parts.parameters for role in parts.trained))
    metrics = {**work.found, **describe(work.experience, cfg), **metrics}
    experience = work.experience.replicated()
    result = {
        "told": told,
        "there": there,
        "host_bytes": parts.actor.parts.residency.host.nbytes,
        "roles": [role.name for role in roles],
        "num_groups": new_group.call_count,
        "orders": {role.name: role.mesh.layout.order for role in roles},
        "metrics": metrics,
        "responses": [row.tolist() for row in experience.rollouts.responses.rows()],
        "columns": {name: column.values_T.numpy() for name, column in experience.columns.items()},
        "rewards": experience.per_sample["rewards"].numpy(),
        "gradients": gradients,
        "weights": {role.name: weights_of(role) for role in parts.trained},
    }
    parts.rewarder.close()
    parts.engine.close()  # last: vLLM destroys the default group
    return result


def noting(run: Any, roles: list[Role], there: dict[str, Any]) -> Any:
    """`step._run`, which tells what of each role is on the device when a role computes."""

    def noted(chunks: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(chunks[0], "module", chunks[0])
        phase = "score" if kwargs["forward_only"] else "train"
        (name,) = [role.name for role in roles if role.shard.chunks[0] is own]
        there[f"{phase}/{name}"] = {role.name: bytes_there(role.parts) for role in roles}
        return run(chunks, *args, **kwargs)

    return noted


def bytes_there(parts: RoleParts) -> dict[str, int]:
    """Of each kind of a role's memory, by the storages that have any."""
    kinds = {"parameters": [parts.parameters], "gradients": [parts.gradients], "optimizer": list(parts.optimizer)}
    found: dict[str, int] = {}
    seen: set[int] = set()
    for kind, each in kinds.items():
        tensors = [tensor for part in each if part is not None for tensor in part._tensors()]
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
        found[kind] = sum(nbytes for key, nbytes in storages.items() if key not in seen)
        seen |= storages.keys()
    return found


def _prompts(cfg: RLConfig, tokenizer: Any) -> list[Any]:
    from megarlhf.data.samples import build_prompts

    records = load_records(cfg.data.train, fields=("prompt",))
    return build_prompts(records, tokenizer, max_prompt_tokens=cfg.data.max_prompt_tokens)[0]


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
