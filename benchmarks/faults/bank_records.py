"""What the rollout bank of a run has, read from its files as they are at any moment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True)
class OpenConversation:
    """A conversation of which the bank has answered turns, and not the end."""

    step: int
    """Step that draws it, from 1."""
    seed: int
    turns: Sequence[Record]
    """Records of its turns. Where the step began the conversation, the first is the answer of `reset`."""

    @property
    def num_answered(self) -> int:
        """Turns of the model that are answered, but for those of earlier slices."""
        return len([turn for turn in self.turns if turn["tokens"]])

    @property
    def has_third_turn(self) -> bool:
        """Whether its third turn is answered. Where earlier slices had turns, each of the last slice comes after two
        (`runs.Site.case`: talks_slices)."""
        begun_earlier = bool(self.turns[0]["tokens"])
        return "until" not in self.turns[0] if begun_earlier else self.num_answered >= 3


@dataclass(frozen=True)
class BankContent:
    """Finished responses and unfinished conversations."""

    finished: Mapping[int, int]
    """Number of finished responses by step, from 1."""
    conversations: Sequence[OpenConversation]

    @property
    def num_open(self) -> Mapping[int, int]:
        """Number of unfinished conversations by step, from 1."""
        steps = [conversation.step for conversation in self.conversations]
        return {step: steps.count(step) for step in steps}

    @property
    def third_turns(self) -> int:
        """Number of unfinished conversations whose third turn is answered."""
        return sum(conversation.has_third_turn for conversation in self.conversations)


def read_bank(run: Path, newest: bool = False) -> BankContent:
    """The bank of a run. `newest`: only of its newest step"""
    finished: dict[int, int] = {}
    conversations: list[OpenConversation] = []
    folders = sorted((run / "bank").glob("step_*"))
    for folder in folders[-1:] if newest else folders:
        step = int(folder.name.split("_")[1]) + 1  # `step_000001`, or `step_000001_refill_1`
        rows, turns = set[int](), dict[int, list[Record]]()
        for record in _records(folder):
            if "turn" not in record:
                rows.add(record["row"])
            else:
                before = turns.get(record["row"], [])
                turns[record["row"]] = [*before[: record["turn"]], record]
        finished[step] = finished.get(step, 0) + len(rows)
        conversations += [
            OpenConversation(step, records[0]["seed"], records) for row, records in turns.items() if row not in rows
        ]
    return BankContent(finished, conversations)


def _records(folder: Path) -> list[Record]:
    """Records of all rows. The last line of a file may be incomplete."""
    lines = [
        line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text("utf-8").split("\n")[:-1] if line
    ]
    return [record for record in (json.loads(line)["record"] for line in lines) if "row" in record]
