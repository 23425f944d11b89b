"""The environment of runs with conversations, and its faults: `function: benchmarks.faults.environments:Hints`."""

from __future__ import annotations

import asyncio
import os
import random
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarlhf import Answer
from megarlhf.rollout.environments.answer import Turn

FAULT_FILE = "FAULTS_ENVIRONMENT"
"""Environment variable with the path of a file that says what goes wrong, once. It is renamed when that happens.

`blocks`: the next call never returns, nor lets others run. `waits`: the next call waits for ever. `exits`: the next
call ends the process. `answers_otherwise SEED TURN`: another answer to this turn (0 is the first) of the conversation
with this seed.
"""
EXIT_STATUS = 7


class Hints:
    """Answers each turn with an end of the sum, or with digits, after a time that depends on the turn's text.

    By its seed a conversation has three to five turns, or is ended by a limit of five.
    """

    def __init__(self, seconds: float = 0.06) -> None:
        """seconds: longest time of an answer"""
        self.seconds = seconds

    def reset(self, fields: Mapping[str, Any], seed: int) -> None:
        self.asked, self.answer, self.seed = fields["prompt"], str(fields["answer"]), seed
        self.turns = 3 + seed % 4

    async def step(self, turn: Turn) -> Answer:
        fault = take_fault(self.seed, turn.number)
        if fault == "blocks":
            time.sleep(100000)
        elif fault == "waits":
            await asyncio.sleep(100000)
        elif fault == "exits":
            os._exit(EXIT_STATUS)
        number = zlib.crc32(f"{self.asked}/{turn.number}/{turn.text}".encode())
        await asyncio.sleep(self.seconds * (number % 1000) / 1000)
        reward = sum(a == b for a, b in zip(turn.text, self.answer, strict=False)) / len(self.answer)
        if turn.number + 1 == self.turns:
            return Answer(reward=reward, done=True)
        drawn = "".join(random.choices("0123456789", k=1 + number % 3))
        hint = self.asked[-4:] if number % 2 else f"{drawn}="
        return Answer(f"1{hint}" if fault else hint, reward)


def take_fault(seed: int, turn: int) -> str:
    """What goes wrong in this call; empty if nothing does."""
    file = os.environ.get(FAULT_FILE)
    try:
        kind, *only = Path(file).read_text(encoding="utf-8").split() if file else [""]
        if not kind or (only and only != [str(seed), str(turn)]):
            return ""
        Path(file or "").rename(f"{file}.happened")
    except FileNotFoundError:
        return ""
    return kind
