"""Check of prompt columns that neither the prompt nor a reward reads. Parts of a prompt among them are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarlhf.config import EvaluateConfig, RewardConfig, RLConfig
from megarlhf.data.json_rows import shown
from megarlhf.data.records.conversations import BESIDE_A_CONVERSATION
from megarlhf.data.sources.reasoning_gym import FIELD
from megarlhf.data.sources.unread_columns import NOT_READ
from megarlhf.own_code.gymnasium import SEED_COLUMN
from megarlhf.planning.data.rewards import first_samples
from megarlhf.rollout.rewards.answers import ANSWER
from megarlhf.rollout.rewards.rules import RULES

_PARTS = ("context", "contexts", "passage", "passages", "input", "instruction", "choices", "options")
_READ = {ANSWER, FIELD, SEED_COLUMN, NOT_READ, *BESIDE_A_CONVERSATION}


def check_unread_fields(cfg: RLConfig | EvaluateConfig) -> list[str]:
    """A note on columns of the first prompts that are not read, if the rewards' kinds tell which they read.

    Raises: ValueError for a column that should be part of the prompt.
    """
    if not cfg.rewards or any(map(_may_read_columns, cfg.rewards)):
        return []
    key, _, samples = first_samples(cfg)
    for sample in samples:
        for name in _PARTS:
            if any(text not in sample.text for text in _texts_in(sample.fields.get(name))):
                raise ValueError(
                    f"a record of {key} has {name!r} = {shown(sample.fields[name])}, which no reward reads and which "
                    "looks like a part of the prompt, but is not in it: join them by an adapter of yours. "
                    f"Where it means nothing, give it another name: columns: {{not_read: {name}}}"
                )
    columns = {name for sample in samples for name, value in sample.fields.items() if value not in (None, "", [], {})}
    names = ", ".join(sorted(columns - _READ))
    return [f"{key}: columns that no reward reads: {names}"] if names else []


def _may_read_columns(reward: RewardConfig) -> bool:
    return reward.kind == "http" or (reward.rule is not None and reward.rule not in RULES)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, list | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(part)
