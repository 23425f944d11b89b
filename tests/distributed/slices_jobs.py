"""Runs whose samples are drawn in slices, with the columns of every step, and faults that the gap must show."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from megarlhf.parallel.step import Trainer
from megarlhf.rollout.prompt_queue import PromptQueue
from megarlhf.rollout.rewards import score as rewards
from megarlhf.rollout.vllm import engine as vllm_engine
from megarlhf.rollout.vllm import generate_loop
from megarlhf.rollout.vllm.engine import VllmEngine
from megarlhf.runtime import Runtime
from megarlhf.trainers.rl import loop, scoring
from tests.distributed.jobs import command, command_status


def command_with_columns(
    runtime: Runtime, delayed: int | None, backwards: bool, *argv: str
) -> tuple[str, list[dict[str, Any]]]:
    """A run of rl: what this rank wrote, and of each step the samples and the columns that were trained on.

    delayed: seed of waits at random moments, in engine, rewards and trainer; None: no waits
    backwards: each engine gets its rows in the opposite order
    """
    steps: list[dict[str, Any]] = []
    real = loop.train_on

    def noted(run: Any, state: Any, step: int, *arguments: Any) -> Any:
        metrics = real(run, state, step, *arguments)
        experience = state.experience.replicated()
        rollouts = experience.rollouts
        columns = {name: column.values_T.tolist() for name, column in experience.columns.items()}
        columns |= {name: values_N.tolist() for name, values_N in experience.per_sample.items()}
        columns |= {
            "prompts": [prompt.tolist() for prompt in experience.prompts],
            "responses": [row.tolist() for row in rollouts.responses.rows()],
            "engine's log-probs": rollouts.logprobs.values_T.tolist(),
            "finished": rollouts.finished_N.tolist(),
            "sequences": [row.tolist() for row in experience.sequences.rows()],
            "dialogues": [dialogue.to_json() for dialogue in rollouts.dialogues],
        }
        steps.append({"columns": columns, "versions": [row.tolist() for row in rollouts.versions.per_token().rows()]})
        return metrics

    with mock.patch.object(loop, "train_on", noted), waits(delayed, runtime.rank), rows_in_order(backwards):
        return command(runtime, *argv), steps


@contextlib.contextmanager
def rows_in_order(backwards: bool) -> Iterator[None]:
    """The order in which each engine gets its rows."""
    real = vllm_engine.assign

    def reversed_rows(*arguments: Any) -> Any:
        assignment = real(*arguments)
        return replace(assignment, first=[list(rows)[::-1] for rows in assignment.first])

    with mock.patch.object(vllm_engine, "assign", reversed_rows if backwards else real):
        yield


@contextlib.contextmanager
def waits(seed: int | None, rank: int) -> Iterator[None]:
    """Waits of up to 20 ms, each rank its own, before steps of the engine, takes from the queue, rewards, updates."""
    if seed is None:
        yield
        return
    chance = random.Random(f"{seed}/{rank}")

    def late(real: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*arguments: Any, **options: Any) -> Any:
            time.sleep(0.02 * chance.random() * (chance.random() < 0.3))
            return real(*arguments, **options)

        return waited

    places: list[tuple[Any, str]] = [
        (generate_loop, "has_room"), (PromptQueue, "take"), (rewards, "call_in_rank"), (Trainer, "step"),
        (VllmEngine, "update_weights"),
    ]  # fmt: skip
    with contextlib.ExitStack() as scope:
        for place, name in places:
            scope.enter_context(mock.patch.object(place, name, late(getattr(place, name))))
        yield


def command_with_fault(runtime: Runtime, fault: str, *argv: str) -> tuple[int, str, list[tuple[int, int]]]:
    """A run whose engine has a fault from the second update on: status, words, and the probes: (step that trains, step
    of the sample) of each probed response."""
    probed: list[tuple[int, int]] = []
    real_update, real_probe, real_joined = VllmEngine.update_weights, scoring.probe_gap, scoring.Rollouts.joined

    def update(engine: Any, actor: Any, version: int) -> None:
        if fault == "no update" and version >= 2:
            engine._version = version
            return
        real_update(engine, actor, version)
        parameters = engine._parameters
        if version >= 2 and fault == "stale tensor":
            name = next(name for name in parameters if "down_proj" in name)
            parameters[name].data.copy_(engine.kept)
        elif version == 1:
            engine.kept = next(tensor for name, tensor in parameters.items() if "down_proj" in name).clone()

    def probe(run: Any, session: Any, requests: Any, drawn: Any, step: int) -> Any:
        def joined(parts: Any) -> Any:
            ((_, chosen),) = parts
            probed.extend((step, requests.origins[row][0]) for row in chosen)
            return real_joined(parts)

        with mock.patch.object(scoring.Rollouts, "joined", joined):
            return real_probe(run, session, requests, drawn, step)

    patches: list[Any] = [
        mock.patch.object(VllmEngine, "update_weights", update),
        mock.patch.object(scoring, "probe_gap", probe),
        mock.patch.object(loop, "closed_at_the_end", contextlib.closing),  # also after a failure, for the next test
    ]
    if fault == "temperature":
        patches.append(mock.patch("megarlhf.rollout.vllm.engine.enqueue", at_other_temperature()))
    if fault == "prefix cache":
        patches.append(mock.patch("vllm.LLM.reset_prefix_cache", return_value=True))
    with contextlib.ExitStack() as scope:
        for patch in patches:
            scope.enter_context(patch)
        status, written = command_status(runtime, *argv)
    return status, written, probed


def at_other_temperature() -> Callable[..., Any]:
    from megarlhf.rollout.vllm.build import enqueue

    def other(llm: Any, sampling: Any, requests: Any, **options: Any) -> Any:
        return enqueue(llm, replace(sampling, temperature=1.3 * sampling.temperature), requests, **options)

    return other
