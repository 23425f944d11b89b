"""Environments with gymnasium's interface, on texts: `environment.interface: gymnasium`.

The class, or the object that a function makes, has gymnasium's methods; the package gymnasium is not needed:

    class Guess:
        def reset(self, *, seed=None, options=None):    # options: the record's fields -> observation, info
            return "Guess my number.", {}
        def step(self, action):                         # the turn's text
            return "higher", 0.0, False, False, {}      # observation, reward, terminated, truncated, info
        def close(self): ...                            # optional

An observation is a text, and becomes a message of the user; where prompts have no template, it is written as it is.
That of `reset` follows the prompt, if it is not empty. Records of a data source `environment:...` have that observation
as their prompt, and the column `environment_seed`: then `reset` is called with that seed and without options, and the
observation must be the prompt.

Both `terminated` and `truncated` end the conversation as `done`, which counts as finished: a limit of a wrapper is a
rule of the game. Limits of the run, such as `environment.max_turns`, count as truncated. Each method may be
`async def`. Only the standard library is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from megarlhf.own_code.failures import short
from megarlhf.own_code.gymnasium import SEED_COLUMN, observation_of_reset, reset_keywords, short_values, text_of
from megarlhf.rollout.environments.answer import Answer, Messages, Turn
from megarlhf.rollout.environments.user_code import CallError

_STEP = "observation, reward, terminated, truncated, info"


def adapted(make: Callable[..., Any], **args: Any) -> GymnasiumAdapter:
    """An environment of ours around the user's. `make`: the user's class or function"""
    return GymnasiumAdapter(make(**args))


class GymnasiumAdapter:
    """An environment of ours around one with gymnasium's methods."""

    def __init__(self, environment: Any) -> None:
        """Raises: CallError if a method is missing."""
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):
                raise CallError(
                    f"is {short(environment)}, which has no method {method}, expected an environment with gymnasium's "
                    "reset and step; return one from the function that is named"
                )
        self._environment = environment
        self._writes_texts = False
        """Whether prompts have no template."""

    def reset(self, fields: Mapping[str, Any], seed: int) -> Any:
        """Begin a conversation: None, or messages that follow the prompt, perhaps to be awaited. Raises: CallError."""
        self._writes_texts = fields.get("messages") is None
        made_prompt = fields.get(SEED_COLUMN) is not None
        # The prompt was made without options: with other arguments it might be another one.
        given = {"seed": fields[SEED_COLUMN]} if made_prompt else {"seed": seed % 2**32, "options": dict(fields)}
        reset = self._environment.reset
        returned = reset(**{name: given[name] for name in reset_keywords(reset) if name in given})
        return _then(returned, lambda value: self._opening(value, fields if made_prompt else None))

    def step(self, turn: Turn) -> Any:
        """The answer, perhaps to be awaited. Raises: CallError."""
        return _then(self._environment.step(turn.text), self._answer)

    def close(self) -> Any:
        """Close the environment, if it has a method for that."""
        close = getattr(self._environment, "close", None)
        return close() if callable(close) else None

    def _opening(self, returned: Any, asked: Mapping[str, Any] | None) -> Messages | str | None:
        """Messages behind the prompt. `asked`: the record whose prompt must be the observation"""
        observation = _read(observation_of_reset, returned)
        if asked is None:
            return self._written(observation) if observation else None
        if observation != (prompt := _last_prompt(asked)):
            raise CallError(
                f"returned the observation {short(observation)} from reset with seed {asked[SEED_COLUMN]}, and the "
                f"record's prompt, which it made with this seed, is {short(prompt)}; give environment.args the same "
                "values as the data source has, and let reset depend on them and on the seed only"
            )
        return None

    def _answer(self, returned: Any) -> Answer:
        if not isinstance(returned, tuple | list) or len(returned) != 5:
            raise CallError(
                f"returned {short_values(returned)} from step, expected five values: {_STEP}; write a class around an "
                "environment that returns others, such as the four of gym"
            )
        observation, reward, terminated, truncated, _ = returned
        done = _truth(terminated, "terminated") | _truth(truncated, "truncated")
        return Answer(self._written(_read(text_of, observation, "step")), reward, done)

    def _written(self, observation: str) -> Messages | str:
        return observation if self._writes_texts else [{"role": "user", "content": observation}]


def _last_prompt(fields: Mapping[str, Any]) -> Any:
    """The prompt as the environment wrote it: the last message, or the text where prompts have no template."""
    messages = fields.get("messages")
    return messages[-1].get("content") if messages else fields.get("prompt")


def _truth(value: Any, name: str) -> bool:
    try:
        return {True: True, False: False}[value]  # numpy's booleans are equal to Python's
    except (KeyError, TypeError):
        raise CallError(f"returned {name} = {short(value)} from step, expected True or False; {_STEP}") from None


def _read(read: Callable[..., str], *values: Any) -> str:
    try:
        return read(*values)
    except ValueError as error:
        raise CallError(str(error)) from None


def _then(returned: Any, read: Callable[[Any], Any]) -> Any:
    """`read(returned)`, to be awaited if the user's method is async."""
    if not inspect.isawaitable(returned):
        return read(returned)

    async def waited(awaitable: Awaitable[Any]) -> Any:
        return read(await awaitable)

    return waited(returned)
