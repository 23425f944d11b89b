"""Samples of one step, drawn whole by an engine that has its weights."""

from __future__ import annotations

from collections.abc import Sequence

from megarlhf.config import RLConfig
from megarlhf.data.sample_types import PromptSample
from megarlhf.experience import Experience
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.rollout.responses import Sampling
from megarlhf.trainers.experience.prompts import make_experience
from megarlhf.trainers.rl.rollout import whole_requests


def sample(
    cfg: RLConfig, engine: RolloutEngine, prompts: Sequence[PromptSample], sampling: Sampling, step: int
) -> Experience:
    """Responses to the prompts of a step, as a run without slices draws them. Collective."""
    requests = whole_requests(cfg, prompts, step)
    rollouts = engine.generate(requests.prompts, requests.seeds, sampling)
    return make_experience(prompts, rollouts, cfg.rollout.num_samples_per_prompt)
