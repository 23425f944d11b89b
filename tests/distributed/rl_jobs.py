"""One step of rl on ranks, for tests that compare steps."""

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.sampling import sample
from megarlhf.config import RLConfig
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.models.role import Role, build_role
from megarlhf.observe.watch.phases import Phases
from megarlhf.parallel import step
from megarlhf.parallel.device_memory import RoleParts
from megarlhf.runtime import Runtime
from tests.distributed.gathered import record_gradients, weights_of
from tests.distributed.logical import Arrays
from tests.distributed.samples import prompt_samples


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
    from megarlhf.rollout import factory as asked
    from megarlhf.trainers.experience.prompts import PromptData
    from megarlhf.trainers.rl import build as building
    from megarlhf.trainers.rl.metrics import describe
    from megarlhf.trainers.rl.rollout import complete
    from megarlhf.trainers.rl.scoring import score
    from megarlhf.trainers.rl.update import StepState, train_on
    from megarlhf.trainers.run.session import Session

    cfg = RLConfig.model_validate(config)
    tokenizer = load_tokenizer(cfg.actor.model.hf_directory())
    prompts = prompt_samples(cfg.data.train, cfg.actor.model.hf_directory(), cfg.data.max_prompt_tokens)
    prompts = prompts[: cfg.train.prompts_per_step]
    actor_order = {"return_value": order} if order else {"wraps": asked.actor_order}
    with (
        mock.patch.object(asked, "actor_order", **actor_order),
        # Where a test has no reward model, a language model with a random head stands for one.
        mock.patch.object(building, "build_role", partial(build_role, new_head=True)),
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group,
        mock.patch.object(step, "PIECE_BYTES", piece_bytes),
    ):
        run = building.build(cfg, runtime, PromptData(prompts, [], tokenizer, []), Phases())
    if old_before:
        cfg = cfg.model_copy()
        object.__setattr__(cfg, "old_logprobs_in_training", lambda step: False)
        run = replace(run, cfg=cfg)
    roles = [role for role in (run.actor, run.reference, run.critic, run.rewarder.reward_model) if role]
    gradients: dict[str, list[Arrays]] = {role.name: [] for role in run.trained}
    there: dict[str, Any] = {}
    for role in run.trained:
        record_gradients(role, gradients[role.name])
    run.engine.update_weights(run.actor.shard, version=0)
    experience = sample(cfg, run.engine, prompts, run.sampling, 0)
    session = Session(runtime, cfg.run.dir)
    rollout = complete(run, session, prompts, experience, 0)
    with mock.patch.object(step, "_run", noting(step._run, roles, there)):
        experience, plan, rewards = score(run, session, rollout, 0)
    state = StepState.begin(run, experience, plan, rewards)
    told: list[Any] = []

    def watch(gap: Any) -> None:
        told.append(gap["rollout_logprob_gap_max"])
        if watch_fails:
            raise InterruptedError

    metrics: dict[str, Any] = {}
    with (
        contextlib.suppress(InterruptedError),
        mock.patch.object(step, "_run", noting(step._run, roles, there)),
        mock.patch.object(run.gap_guard, "watch", watch),
    ):
        metrics = train_on(run, state, 0)
    metrics = {**state.metrics, **describe(state.experience, cfg), **metrics}
    experience = state.experience.replicated()
    result = {
        "told": told,
        "there": there,
        "host_bytes": run.actor.parts.device_memory.host.nbytes,
        "roles": [role.name for role in roles],
        "num_groups": new_group.call_count,
        "orders": {role.name: role.mesh.layout.order for role in roles},
        "metrics": metrics,
        "responses": [row.tolist() for row in experience.rollouts.responses.rows()],
        "columns": {name: column.values_T.numpy() for name, column in experience.columns.items()},
        "rewards": experience.per_sample["rewards"].numpy(),
        "gradients": gradients,
        "weights": {role.name: weights_of(role) for role in run.trained},
    }
    run.rewarder.close()
    run.engine.close()  # last: vLLM destroys the default group
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
