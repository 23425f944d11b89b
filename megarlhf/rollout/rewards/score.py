"""Rule rewards over a batch of responses, shared out over the ranks of the run."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.data.samples import PromptSample
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import Interrupted
from megarlhf.experience import Rollouts
from megarlhf.layout import split_evenly
from megarlhf.rollout.rewards.rules import RULES, Rule

_SHOWN = 60
"""Characters of a text in a message."""


class RewardError(ValueError):
    """A rule that failed, or returned what is no number: the user's mistake, with rule, sample and line."""


def response_texts(rollouts: Rollouts, tokenizer: Tokenizer) -> list[str]:
    """The responses as rules read them."""
    return [tokenizer.decode(row.tolist(), continuation=True) for row in rollouts.responses.rows()]


def rule_rewards(
    rule: Rule,
    prompts: Sequence[PromptSample],
    responses: Sequence[str],
    device: torch.device,
    *,
    local: Callable[[], AbstractContextManager[None]] = nullcontext,
    should_stop: Callable[[], bool] = lambda: False,
) -> Tensor:
    """The rule's value for each response, [N] fp32, the same on every rank. Each rank computes its share.

    local: entered around this rank's share, in which it waits for nobody (`Phases.local`)
    should_stop: asked on this rank before each sample

    Raises: RewardError, on every rank, for the first sample on which the rule fails or returns no finite number;
    WatchdogTimeout, on every rank, where the rule hangs on one; Interrupted, on every rank, when values are missing
    because `should_stop` said so on one.
    """
    share = split_evenly(len(responses), dist.get_world_size())[dist.get_rank()]
    values: list[float] = []
    with raise_on_all_ranks(lambda reasons: RewardError(reasons[0])) as problems, local():
        try:
            for n in share:
                if should_stop():
                    break
                values.append(reward_of(rule, n, prompts[n].text, responses[n], prompts[n].fields))
        except RewardError as failure:
            problems.append(str(failure))
    parts: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(parts, values)
    every = [value for part in parts for value in part]
    if len(every) < len(responses):
        raise Interrupted(f"a reward was asked to stop with {len(every)} of {len(responses)} samples done")
    return torch.tensor(every, dtype=torch.float32, device=device)


def reward_of(rule: Rule, sample: int, prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """The rule's value for one response.

    Raises: RewardError naming the rule, the sample, and the line of the user's file that failed.
    """
    where = f"reward rule {name_of(rule)} on sample {sample} (prompt {_short(prompt)}, response {_short(response)})"
    try:
        value: Any = rule(prompt, response, fields)
    except Exception as error:
        if rule in RULES.values():  # the message says all; the line would be one of ours
            raise RewardError(f"{where}: {error}") from error
        line = _line_of(rule, error.__traceback__)
        raise RewardError(f"{where} raised {type(error).__name__}: {error}; {line}") from error
    if isinstance(value, str | bytes) or value is None:
        raise RewardError(f"{where} returned {_short(value)}, expected a number; return a float for every response")
    try:
        number = float(value)
    except Exception as error:
        raise RewardError(f"{where} returned {_short(value)}, expected a number; return a float") from error
    if not math.isfinite(number):
        raise RewardError(f"{where} returned {number}, expected a finite number; return a float for every response")
    return number


def name_of(rule: Rule) -> str:
    """As the configuration names it."""
    registered_name = next((repr(name) for name, function in RULES.items() if function is rule), None)
    module, name = getattr(rule, "__module__", "?"), getattr(rule, "__qualname__", type(rule).__name__)
    return registered_name or repr(f"{module}:{name}")


def _line_of(rule: Rule, trace: TracebackType | None) -> str:
    """The last line of the rule's own file on the way to the error; of any file where none is the rule's."""
    frames = traceback.extract_tb(trace)[1:]  # the first is ours
    own = getattr(getattr(rule, "__code__", None), "co_filename", None)
    last = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1] if frames else None)
    return "it takes other arguments" if last is None else f"{last.filename}:{last.lineno}: {last.line}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
