"""What ranks do in tests of `megarlhf dpo`."""

from typing import Any

from megarlhf.config import DPOConfig
from megarlhf.data.samples.encoders import PairSample
from megarlhf.models.role import build_role
from megarlhf.parallel.mesh import GroupCache
from megarlhf.runtime import Runtime
from tests.distributed.gathered import record_gradients, weights_of
from tests.distributed.jobs import train_once
from tests.distributed.logical import Arrays
from tests.distributed.samples import pair_samples


def pairs_of(cfg: DPOConfig) -> list[PairSample]:
    return pair_samples(cfg.data.train, cfg.actor.model.hf_directory())


def dpo_steps(
    runtime: Runtime, config: dict[str, Any], losses: dict[str, dict[str, Any]], num_steps: int, num_validation: int
) -> dict[str, Any]:
    """With each of the losses: held-out evaluation before training, metrics and gradients of the first steps, and the
    weights after them."""
    from megarlhf.trainers.supervised.dpo import PreferenceOptimisation
    from megarlhf.trainers.supervised.loop import evaluate

    made, cache = {}, GroupCache(runtime)
    for name, keys in losses.items():
        cfg = DPOConfig.model_validate({**config, **keys})
        objective, pairs = PreferenceOptimisation(cfg), pairs_of(cfg)
        actor = build_role("actor", cfg.actor, "lm", cache, seed=0, num_optimizer_steps=num_steps)
        frozen = objective.build_frozen(cache, actor)
        gradients: list[Arrays] = []
        record_gradients(actor, gradients)
        before = evaluate(objective, actor, pairs[:num_validation])
        size = cfg.train.mini_batch_samples
        steps = [train_once(objective, actor, pairs[n * size : (n + 1) * size]) for n in range(num_steps)]
        made[name] = {
            "frozen": [(role.name, role.trainer) for role in frozen], "evaluation": before, "steps": steps,
            "gradients": gradients, "weights": weights_of(actor),
        }  # fmt: skip
    return made
