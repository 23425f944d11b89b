"""Held-out evaluation in the loop, the rules that end a run, and the choice of the best step.

The rules see the held-out reward, which is an accuracy where the reward is a rule that compares with the answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarlhf.algo.kl import kl_estimate
from megarlhf.columns import Ragged
from megarlhf.config import RewardConfig, StopConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.observe.records.metrics import Metric
from megarlhf.observe.records.sample_tables import Row, spread
from megarlhf.own_code.policy_terms import estimator_of
from megarlhf.rollout.conversations import draw_samples
from megarlhf.rollout.environments.environment import Environment
from megarlhf.rollout.factory import sampling_of
from megarlhf.rollout.in_flight import Requests
from megarlhf.rollout.responses import sample_seed
from megarlhf.rollout.rewards.accuracy import accuracy_metrics, find_accuracy
from megarlhf.rollout.rewards.score import gather_rewards, local_reward_batch, make_source, start_rewards
from megarlhf.rollouts import Rollouts
from megarlhf.trainers.experience.plan import StepPlan
from megarlhf.trainers.experience.prompts import make_experience
from megarlhf.trainers.experience.reward_outputs import reward_output, without_failures
from megarlhf.trainers.rl.build import RLRun
from megarlhf.trainers.rl.sample_rows import rows_of
from megarlhf.trainers.rl.scoring import policy_logprobs
from megarlhf.trainers.run.best_checkpoint import Best, Patience
from megarlhf.trainers.run.session import Session, is_due
from megarlhf.trainers.run.test_split import log_test_metrics, prefix_test


class Evaluator:
    """Greedy responses to the held-out prompts: mean reward, accuracy by a reward or rule, and a table of the same
    samples each time."""

    def __init__(self, run: RLRun) -> None:
        cfg, rewarder, validation, test = run.cfg, run.rewarder, run.data.validation, run.data.test
        self._run, self._validation, self._test = run, validation, test
        self._sampling = sampling_of(cfg.rollout, cfg.actor, rewarder.tokenizer, greedy=True, data=cfg.data)
        self._accuracy = find_accuracy(cfg.eval.accuracy, cfg.rewards)
        judge = self._accuracy.judge if validation or test else None
        self._judge = None if judge is None else Judge(judge, rewarder.tokenizer, run.environment)
        self._shown = spread(cfg.samples.count, len(validation))

    def close(self) -> None:
        """End the judge of held-out responses."""
        if self._judge is not None:
            self._judge.close()

    def __call__(
        self, step: int, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[dict[str, Metric], list[Row]]:
        """Metrics after `step`, and rows of its table; nothing without held-out prompts.

        Raises: Interrupted, on every rank, when `should_stop` returns True on any while responses are drawn or
        rewarded."""
        if not self._validation:
            return {}, []
        rollouts, total_N, rewards, metrics = self._measure(step, self._validation, should_stop)
        tokenizer, kl_N = self._run.rewarder.tokenizer, self._kl_of_shown(rollouts)
        shown, prompts, environment = self._shown, self._validation, self._run.environment
        rows = rows_of(step, shown, prompts, rollouts, total_N, rewards, tokenizer, kl_N, environment)
        return metrics, rows

    @property
    def has_test(self) -> bool:
        """Whether `data.test` has prompts."""
        return bool(self._test)

    def test(self, step: int, should_stop: Callable[[], bool]) -> dict[str, Metric]:
        """Metrics of `data.test` after `step`, under `test_` names; nothing without prompts. Raises: as `__call__`."""
        return prefix_test(self._measure(step, self._test, should_stop)[3]) if self._test else {}

    def _measure(
        self, step: int, prompts: Sequence[PromptSample], should_stop: Callable[[], bool]
    ) -> tuple[Rollouts, Tensor, dict[str, Tensor], dict[str, Metric]]:
        """Responses, sum of their rewards, values of each reward by name, and metrics."""
        run, tokens = self._run, [torch.tensor(prompt.tokens) for prompt in prompts]
        requests = Requests.whole(tokens, [0] * len(tokens), self._sampling.max_tokens)
        seeds = [sample_seed(run.cfg.run.seed, 0, prompt.index) for prompt in prompts]  # every evaluation has the same
        rollouts = draw_samples(
            run.engine,
            run.environment,
            prompts,
            requests,
            self._sampling,
            should_stop=should_stop,
            environment_seeds=seeds,
        )
        rollouts.versions.require(step)
        total_N, rewards = run.rewarder.validation(make_experience(prompts, rollouts, 1), prompts, should_stop)
        if self._judge is not None:
            rewards[self._judge.label] = self._judge(prompts, rollouts, should_stop)
        metrics: dict[str, Metric] = {"eval_reward_mean": float(total_N.nanmean())}
        if rollouts.dialogues:
            metrics["eval_conversations_failed"] = sum(talk.ended_by == "failure" for talk in rollouts.dialogues)
        if self._accuracy.label is not None:
            metrics |= accuracy_metrics(self._accuracy, rewards[self._accuracy.label])
        return rollouts, total_N, rewards, metrics

    def _kl_of_shown(self, rollouts: Rollouts) -> Tensor:
        """KL to the reference of the responses in the table, [N]: the mean over each response's tokens, estimated as in
        the metric `kl` of training. NaN for other responses, and without a reference. Collective."""
        kl_N = torch.full((len(self._validation),), math.nan)
        reference = self._run.reference
        if not self._shown or reference is None:
            return kl_N
        cfg, kl = self._run.cfg, self._run.cfg.algo.kl
        prompts = [self._validation[n] for n in self._shown]
        shown = make_experience(prompts, Rollouts.joined([(rollouts, self._shown)]), 1)
        plan = StepPlan.whole(shown, cfg.train)
        logprobs = [
            policy_logprobs(role, shown, plan, plan.mini_batches, temperature=cfg.rollout.temperature)
            for role in (self._run.actor, reference)
        ]
        kl_T = kl_estimate(logprobs[0].values_T, logprobs[1].values_T, estimator_of(kl.estimator), kl.clamp)
        kl_N[self._shown] = torch.stack([row.mean() for row in Ragged(kl_T, shown.response_lengths_N).rows()]).cpu()
        return kl_N


class Judge:
    """A rule that judges held-out responses and is not among the rewards."""

    def __init__(self, reward: RewardConfig, tokenizer: Tokenizer, environment: Environment | None) -> None:
        self.label, self._tokenizer, self._environment = reward.label, tokenizer, environment
        self._source = make_source(reward, torch.device("cpu"))

    def __call__(self, prompts: Sequence[PromptSample], rollouts: Rollouts, should_stop: Callable[[], bool]) -> Tensor:
        """Judge responses: [N], NaN without a verdict. Collective."""
        batch = local_reward_batch(prompts, rollouts, self._tokenizer, self._environment)
        pending = start_rewards(self._source, batch)
        results = gather_rewards(self.label, pending, batch, len(prompts), should_stop=should_stop)
        return without_failures(reward_output(results, torch.device("cpu")), rollouts).values_N.float()

    def close(self) -> None:
        self._source.close()


class StopRule:
    """Ends a run when the KL to the reference is too large, or when a held-out metric stops improving."""

    def __init__(self, cfg: StopConfig) -> None:
        self._cfg = cfg
        self._patience = Patience(cfg, "rl")
        self._last_kls: deque[float] = deque(maxlen=cfg.max_kl_steps)
        self.reason: str | None = None

    def state_dict(self) -> dict[str, Any]:
        patience = {"patience": self._patience.state_dict(), "kls": list(self._last_kls)}
        return {**patience, "reason": self.reason, "limits": self._cfg.model_dump()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. A stop by other limits than today's is ignored."""
        if "patience" in state:  # missing in points of earlier versions, which counted the reward alone
            self._patience.load_state_dict(state["patience"])
        self._last_kls.extend(state["kls"])
        self.reason = state["reason"] if state["limits"] == self._cfg.model_dump() else None

    def watch(self, evaluation: Mapping[str, Metric]) -> bool:
        """Record an evaluation that is due by `eval.every`; returns whether the run ends here.

        An evaluation after the last step counts only if it is due. A run that is prolonged then equals one that was
        planned that long.
        """
        self._patience.watch(evaluation)
        return self._over()

    def watch_kl(self, kl: float | None) -> bool:
        """Record the metric `kl` of a step, if it was measured; returns whether the run ends here."""
        if kl is not None:
            self._last_kls.append(kl)
        return self._over()

    def _over(self) -> bool:
        if self._cfg.max_kl is not None and self._last_kls:
            mean, count = sum(self._last_kls) / len(self._last_kls), len(self._last_kls)
            if mean > self._cfg.max_kl:
                steps = f"mean of the last {count} steps" if count > 1 else "of the first step"
                self.reason = (
                    f"stopped: kl {mean:.4g} per response token ({steps}) exceeds train.stop.max_kl = "
                    f"{self._cfg.max_kl}"
                )
        self.reason = self._patience.reason or self.reason
        return self.reason is not None


class Evaluation:
    """Held-out metrics over a run, and the decisions by them: whether it ends, and which step is the best."""

    def __init__(self, run: RLRun) -> None:
        cfg = run.cfg
        self.stop, self.best = StopRule(cfg.train.stop), Best(cfg.checkpoint.best, "rl")
        self.evaluator = Evaluator(run)
        self._eval_every, self._num_steps = cfg.eval.every, cfg.train.num_steps
        self.last = False
        """Whether the latest step is the last of the run."""
        self.is_best = False
        """Whether the latest step is the best so far."""

    @property
    def stop_reason(self) -> str | None:
        """Message of the rule that ended the run; None: no rule did."""
        return self.stop.reason

    def before_training(self, session: Session) -> dict[str, Metric]:
        """Metrics of the model before the first step."""
        return self._evaluate(session, 0, due=True)

    def after_step(self, session: Session, step: int, kl: float | None) -> dict[str, Metric]:
        """Decide whether the run ends after `step` steps; returns metrics if it does, or if an evaluation is due.

        kl: the step's KL to the reference, if it was measured
        """
        due = is_due(step, self._eval_every)
        self.last = self.stop.watch_kl(kl) or step == self._num_steps
        self.is_best, metrics = False, {}
        if due or self.last:
            metrics = self._evaluate(session, step, due=due)
            self.is_best = self.best.watch(metrics)
            self.last = self.last or self.stop.reason is not None
        if self.last and self.evaluator.has_test:
            with session.stoppable("eval"):
                test_metrics = self.evaluator.test(step, session.asked_to_stop)
            log_test_metrics(session, test_metrics)
            metrics |= test_metrics
        return metrics

    def _evaluate(self, session: Session, step: int, *, due: bool) -> dict[str, Metric]:
        """Evaluate the held-out prompts; the stop rules see only evaluations that are due by `eval.every`."""
        with session.stoppable("eval"):
            metrics, rows = self.evaluator(step, session.asked_to_stop)
        session.show("eval", step, rows)
        if due:
            self.stop.watch(metrics)
        return metrics

    def close(self) -> None:
        """End the judge of held-out responses."""
        self.evaluator.close()
