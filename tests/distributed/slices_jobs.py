"""Runs whose samples are drawn in slices, with the columns of every step."""

import contextlib
from typing import Any
from unittest import mock

from megarlhf.runtime import Runtime
from megarlhf.trainers.rl import loop
from tests.distributed.jobs import command


def command_with_columns(runtime: Runtime, *argv: str) -> tuple[str, list[dict[str, Any]]]:
    """A run of rl: what this rank wrote, and of each step the samples and the columns that were trained on."""
    steps: list[dict[str, Any]] = []
    real = loop.train_on

    def noted(run: Any, state: Any, step: int, *arguments: Any) -> Any:
        metrics = real(run, state, step, *arguments)
        experience = state.experience.replicated()
        columns = {name: column.values_T.tolist() for name, column in experience.columns.items()}
        rollouts = experience.rollouts
        columns |= {name: values_N.tolist() for name, values_N in experience.per_sample.items()}
        columns |= {
            "prompts": [prompt.tolist() for prompt in experience.prompts],
            "responses": [row.tolist() for row in rollouts.responses.rows()],
            "engine's log-probs": rollouts.logprobs.values_T.tolist(),
            "finished": rollouts.finished_N.tolist(),
        }
        steps.append({"columns": columns, "versions": [row.tolist() for row in rollouts.versions.per_token().rows()]})
        return metrics

    with mock.patch.object(loop, "train_on", noted), contextlib.nullcontext():
        written = command(runtime, *argv)
    return written, steps
