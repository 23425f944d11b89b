"""Configuration of an environment that answers the model's turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PositiveInt, field_validator, model_validator

from megarlhf.config.own_names import PathOnly
from megarlhf.config.rewards import RewardConfig
from megarlhf.config.roles import FrozenModel, Positive
from megarlhf.config.tools import Tool
from megarlhf.own_code.interpreter import require_executable


class EnvironmentConfig(FrozenModel):
    """An environment makes conversations of responses: turns of the model, and what it writes between them."""

    function: PathOnly | None = None
    """Your class, `package.module:Class`, with `reset(fields, seed)` and `step(turn)` (docs/environments.md)."""
    args: Mapping[str, Any] = {}
    """Arguments of the class, by name."""
    interface: Literal["megarlhf", "gymnasium"] = "megarlhf"
    """Interface of the class. `gymnasium`: a class, or a function that makes an object, with gymnasium's
    `reset(*, seed, options)` and `step(action)`, whose observations and actions are texts."""
    tools: tuple[Tool, ...] = ()
    """Tools in place of a class (docs/tools.md): import paths of functions, `{mcp: COMMAND OR URL}`, `python`."""
    parser: str = "auto"
    """Form of the calls of tools: one of ours, such as `hermes`, or `vllm:NAME`, a parser of vLLM. `auto`: the form in
    which the chat template writes calls."""
    max_result_characters: PositiveInt = 10_000
    """Most characters of a tool's result; the rest is left out."""
    python: Path | None = None
    """Python that runs the environment, 3.10 or later: `/path/to/venv/bin/python`. It needs the environment's packages,
    and not megarlhf. Modules are found from the working directory and PYTHONPATH. Default: the Python of the run."""
    max_turns: PositiveInt = 8
    """Most turns of the model. A conversation that goes on beyond is truncated."""
    max_turn_tokens: PositiveInt | None = None
    """Most tokens of one turn; a turn that is cut ends the conversation. Default: `rollout.max_response_tokens`, the
    limit of all that stands after the prompt, sampled or not."""
    workers: PositiveInt = 1
    """Worker processes of each rank. Many conversations wait in one process if `step` is `async def`; other calls of a
    process run one after the other."""
    seconds_per_step: Positive = 60.0
    """Time limit of one call of `reset` or `step`, and of each call of a tool."""
    on_failure: Literal["redraw", "drop", "stop"] = "redraw"
    """Handling of an environment that raises, hangs, exits or returns what is no answer. `redraw`: the conversation
    begins anew with the same seed, up to three times, and then the run ends. `drop`: leave the sample out of the step
    and count it. `stop`: end the run."""
    history: Literal["refuse", "as_sampled"] = "refuse"
    """Handling of a turn that the chat template writes otherwise once an answer follows, such as without its thought.
    `refuse`: the run ends. `as_sampled`: later turns read what was sampled, and `turns_rewritten` counts such turns."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.function is None) == (not self.tools):
            given = "both function and tools" if self.tools else "neither function nor tools"
            raise ValueError(f"got {given}; give function, a class of yours, or tools, a list of tools")
        if self.tools and self.args:
            raise ValueError(f"args = {dict(self.args)} are arguments of a class, and tools have none; leave args out")
        if not self.tools and (of_tools := self.changed("parser", "max_result_characters")):
            raise ValueError(f"{of_tools[0]} is read with tools only; leave it out")
        if self.tools and (of_class := self.changed("interface", "python")):
            raise ValueError(
                f"{of_class[0]} is of a class, and tools run in the Python of the run; leave it out (functions with "
                "other packages may stand behind an MCP server)"
            )
        return self

    @field_validator("python")
    @classmethod
    def _require_executable(cls, python: Path | None) -> Path | None:
        return None if python is None else require_executable(python.expanduser(), "environment.python")

    @property
    def interpreter(self) -> str | None:
        """Path of the Python that runs the environment; None: that of the run."""
        return None if self.python is None else str(self.python)


def require_environment(environment: EnvironmentConfig | None, rewards: Sequence[RewardConfig]) -> None:
    """Raises: ValueError for a reward of an environment where there is none."""
    if environment is None and any(reward.kind == "environment" for reward in rewards):
        raise ValueError(
            "rewards names kind 'environment', and there is none: give a section environment with your class, "
            "environment: {function: mine:Guess}, or leave the reward out"
        )
