"""The result of a run in a sentence: its figure of merit, first and last, and where its model is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megarlhf.config.lora import ADAPTER_SUFFIX
from megarlhf.observe.report.chart_list import Kind
from megarlhf.observe.report.recorded_run import RecordedRun, read_runs
from megarlhf.observe.terminal.progress import format_number

SHARES = ("eval_accuracy", "eval_pair_accuracy")
"""Metrics that are shown in per cent."""
MERITS: Mapping[str, str] = {
    "eval_accuracy": "Right answers on held-out prompts",
    "eval_pair_accuracy": "Held-out pairs ranked rightly",
    "eval_reward_mean": "{reward} on held-out prompts",
    "reward_mean": "{reward} of the samples",
    "eval_loss": "Held-out loss",
    "loss": "Training loss",
}
"""Figures of merit and their words. The first one that a run has logged is its own."""
_METHODS: Mapping[Kind, str] = {"sft": "SFT", "rm": "reward-model training", "rl": "reinforcement learning"}
_BY_ADVANTAGE: Mapping[object, str] = {
    "gae": "PPO",
    "group_relative": "GRPO",
    "leave_one_out": "RLOO",
    "remax": "ReMax",
    "reinforce_plus_plus": "REINFORCE++",
}
"""Names of `rl` with the policy loss of PPO, ratios by token and nothing of the advantage changed."""


def sentence(run: RecordedRun) -> str:
    """`Right answers on held-out prompts went from 52.0% to 85.6% in 60 steps of GRPO.`, for example.

    Empty for a run that has logged none of `MERITS`.
    """
    logged = [metric for metric in MERITS if _points(run, metric)]
    if not logged:
        return ""
    metric, points = logged[0], _points(run, logged[0])
    subject = MERITS[metric].format(reward="Mean learned reward" if run.reward_is_learned else "Mean reward")
    (first_step, first), (last_step, last) = points[0], points[-1]
    if run.kind in ("generate", "eval"):
        return f"{subject}: {_shown(metric, last)}."
    end, largest = run.rows[-1]["step"], max(abs(first), abs(last))
    if len(points) == 1:
        return f"{subject}: {_shown(metric, last)} at step {last_step} of {end} of {method(run)}."
    span = f"in {end} steps" if (first_step, last_step) == (0, end) else f"from step {first_step} to {last_step}"
    if last_step != end:
        span += f", of {end} steps"
    change = f"went from {_shown(metric, first, largest)} to {_shown(metric, last, largest)}"
    return f"{subject} {change} {span} of {method(run)}."


def closing_lines(run_dir: Path) -> list[str]:
    """Lines for the end of a training run: its result, where its model is, and what can be done next."""
    (run,) = read_runs([run_dir])
    model, report = model_of(run), f"megarlhf report {run_dir}"
    lines = [sentence(run)] * bool(sentence(run))
    if model is None:
        return [*lines, f"next: {report}"]
    use = f'megarlhf generate --model {model} --prompt "..."'
    if run.kind == "rm":
        use = f"reward_model.model.path={model} in a run of rl"
    if model.name.endswith(ADAPTER_SUFFIX):
        use = f"actor.lora.path={model} beside the model that it was trained on"
    return [*lines, f"model: {model}", f"next: {report}; {use}"]


def model_of(run: RecordedRun) -> Path | None:
    """The last exported model of a training run; None where there is none."""
    role = "reward_model" if run.kind == "rm" else "actor"
    if run.path is None or run.kind in ("generate", "eval"):
        return None
    exports = [run.path / "checkpoints" / "latest" / name for name in (role, role + ADAPTER_SUFFIX)]
    return next((export for export in exports if export.is_dir()), None)


def method(run: RecordedRun) -> str:
    """The method's usual name, as far as the configuration tells."""
    if run.kind == "dpo":
        return str(run.settings.get("loss", "dpo")).upper().replace("SIMPO", "SimPO")
    algo = run.settings.get("algo") or {}
    is_plain = algo.get("policy_loss") == "clip" and algo.get("ratio") == "token" and algo.get("scale_by_group_std")
    name = _BY_ADVANTAGE.get(algo.get("advantage")) if is_plain else None
    return name or _METHODS.get(run.kind, run.kind)


def _points(run: RecordedRun, metric: str) -> list[tuple[int, float]]:
    """Step and value. Without those of untrained DPO: implicit rewards of 0 rank no pair."""
    margins = dict(run.series("eval_reward_margin")) if metric == "eval_pair_accuracy" else {}
    return [(step, value) for step, value in run.finite(metric) if margins.get(step) != 0]


def _shown(metric: str, value: float, largest: float = 0.0) -> str:
    return f"{value:.1%}" if metric in SHARES else format_number(value, largest)
