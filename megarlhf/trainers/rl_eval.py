"""Held-out evaluation in the loop, and the rules that end a run.

The rules see the held-out reward, which is an accuracy where the reward is a rule that compares with the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megarlhf.config import RLConfig, StopConfig
from megarlhf.data.samples import PromptSample
from megarlhf.rollout.engine import RolloutEngine
from megarlhf.rollout.rewards.rules import exact_match
from megarlhf.rollout.rewards.score import response_texts
from megarlhf.trainers.prompts import sampling_of
from megarlhf.trainers.rl_rewards import Rewarder
from megarlhf.trainers.rl_rollout import make_experience


class Evaluator:
    """Greedy responses to the held-out prompts: mean reward, and exact match where prompts have answers."""

    def __init__(
        self, cfg: RLConfig, engine: RolloutEngine, rewarder: Rewarder, heldout: Sequence[PromptSample]
    ) -> None:
        self._engine, self._rewarder, self._heldout = engine, rewarder, heldout
        self._sampling = sampling_of(cfg.rollout, cfg.actor, rewarder.tokenizer, greedy=True)

    def __call__(self, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Metrics; nothing without held-out prompts. Raises: Interrupted, on every rank, when `should_stop` says so on
        one while responses are drawn or rewarded."""
        if not self._heldout:
            return {}
        prompts = [torch.tensor(prompt.tokens) for prompt in self._heldout]
        rollouts = self._engine.generate(prompts, [0] * len(prompts), self._sampling, should_stop=should_stop)
        experience = make_experience(self._heldout, rollouts, 1)
        metrics = {"eval_reward_mean": self._rewarder.mean(experience, self._heldout, should_stop)}
        if all(prompt.fields.get("answer") is not None for prompt in self._heldout):
            responses = response_texts(rollouts, self._rewarder.tokenizer)
            matches = [
                exact_match(prompt.text, response, prompt.fields)
                for prompt, response in zip(self._heldout, responses, strict=True)
            ]
            metrics["eval_accuracy"] = sum(matches) / len(matches)
        return metrics


class StopRule:
    """Ends a run on the KL to the reference, or when the held-out reward stands still."""

    def __init__(self, cfg: StopConfig) -> None:
        self._cfg = cfg
        self._best = -float("inf")
        self._evaluations_since = 0
        self._kls: deque[float] = deque(maxlen=cfg.max_kl_steps)
        """Of the last steps."""
        self.reason: str | None = None

    def state_dict(self) -> dict[str, Any]:
        limits = self._cfg.model_dump()
        since, kls = self._evaluations_since, list(self._kls)
        return {"best": self._best, "evaluations_since": since, "kls": kls, "reason": self.reason, "limits": limits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """That other limits than today's have ended the run does not count."""
        self._best, self._evaluations_since = state["best"], state["evaluations_since"]
        self._kls.extend(state["kls"])
        self.reason = state["reason"] if state["limits"] == self._cfg.model_dump() else None

    def watch(self, evaluation: Mapping[str, float]) -> bool:
        """Take note of an evaluation that is due by `eval.every`; returns whether the run ends here.

        The one after the last step counts only where it is due anyway: a run that is prolonged is then the run that was
        planned as long.
        """
        if "eval_reward_mean" in evaluation:
            if evaluation["eval_reward_mean"] > self._best:
                self._best, self._evaluations_since = evaluation["eval_reward_mean"], 0
            else:
                self._evaluations_since += 1
        return self._over()

    def watch_kl(self, kl: float) -> bool:
        """Take note of the metric `kl` of a step; returns whether the run ends here."""
        self._kls.append(kl)
        return self._over()

    def _over(self) -> bool:
        if self._cfg.max_kl is not None and self._kls:
            mean = sum(self._kls) / len(self._kls)
            if mean > self._cfg.max_kl:
                of = f"mean of the last {len(self._kls)} steps" if len(self._kls) > 1 else "of the first step"
                self.reason = (
                    f"stopped: kl {mean:.4g} per response token ({of}) exceeds train.stop.max_kl = {self._cfg.max_kl}"
                )
        patience = self._cfg.heldout_reward_patience
        if patience is not None and self._evaluations_since >= patience:
            self.reason = f"stopped: the held-out reward has not risen for {patience} evaluations"
        return self.reason is not None
