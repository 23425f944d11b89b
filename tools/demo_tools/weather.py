"""The demo's task: questions that only a tool can answer, the tool, and the reward.

    How humid is it in Oslo?   ->   weather(city="Oslo", quantity="humidity")   ->   48   ->   It is 48.

The numbers are digests of city and quantity, so no model can know them. Training, choices and tests ask about different
cities. Every prompt begins with one example.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

QUESTIONS: Mapping[str, Sequence[str]] = {
    "temperature": ("How warm is it in {}?", "What is the temperature in {}?", "How hot is it in {} today?"),
    "wind": ("How strong is the wind in {}?", "What is the wind speed in {}?", "How windy is it in {} today?"),
    "humidity": ("How humid is it in {}?", "What is the humidity in {}?", "How moist is the air in {} today?"),
    "pressure": ("How high is the pressure in {}?", "What is the air pressure in {}?", "How heavy is the air in {}?"),
}
"""Questions by quantity."""
SHOWN = "Paris"
"""City of the example."""
CITIES = (Path(__file__).parent / "cities.txt").read_text(encoding="utf-8").split()
SHARES = {"train": 0.6, "validation": 0.15, "test": 0.25}
"""Share of the cities of each file."""
SIZES = {"train": 256, "validation": 32, "test": 96}
"""Records of each file."""


def weather(city: str, quantity: Literal["temperature", "wind", "humidity", "pressure"]) -> int:
    """Look up the weather in a city.

    Args:
        city: The name of the city.
        quantity: What is measured.
    """
    return value_of(city, quantity)


def value_of(city: str, quantity: str) -> int:
    """The measured value, from 10 to 99."""
    digest = hashlib.sha256(f"{city.strip().lower()} {quantity}".encode()).digest()
    return 10 + int.from_bytes(digest[:4], "big") % 90


def example(city: str, quantity: str) -> list[dict[str, Any]]:
    """A question with a call, the tool's result and an answer."""
    function = {"name": weather.__name__, "arguments": {"city": city, "quantity": quantity}}
    return [
        {"role": "user", "content": QUESTIONS[quantity][0].format(city)},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": str(value_of(city, quantity))},
        {"role": "assistant", "content": f"It is {value_of(city, quantity)}."},
    ]


def records(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Records of a file: conversations that end with a question."""
    draw = random.Random(f"{seed} {name}")
    shown = example(SHOWN, "temperature")
    cities, made = cities_of(name, seed), []
    for number in range(count):
        city, quantity = cities[number % len(cities)], draw.choice(list(QUESTIONS))
        asked = {"role": "user", "content": draw.choice(QUESTIONS[quantity]).format(city)}
        made.append({"messages": [*shown, asked], "answer": str(value_of(city, quantity))})
    return made


def cities_of(name: str, seed: int) -> list[str]:
    """Cities that only the file `name` asks about."""
    cities = [city for city in CITIES if city != SHOWN]
    random.Random(f"{seed} cities").shuffle(cities)
    start = 0
    for other, share in SHARES.items():
        end = start + round(share * len(cities))
        if other == name:
            return cities[start:end]
        start = end
    raise ValueError(f"no file {name!r}; the files are {', '.join(SHARES)}")


def write(out: Path, seed: int, sizes: Mapping[str, int] = SIZES) -> None:
    """Write the files that are not there."""
    out.mkdir(parents=True, exist_ok=True)
    for name, count in sizes.items():
        if not (path := out / f"{name}.jsonl").exists():
            path.write_text("".join(json.dumps(record) + "\n" for record in records(name, count, seed)))


def right(response: str, fields: Mapping[str, Any]) -> float:
    """1 if the last turn has the value, and no other number."""
    return float(re.findall(r"\d+", response) == [fields["answer"]])


def reward(response: str, fields: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> float:
    """1 for a right answer, 0.5 where only a call has returned the value, 0.2 for any other call that was executed."""
    if right(response, fields):
        return 1.0
    asked = max(number for number, message in enumerate(messages) if message["role"] == "user")
    results = [message["content"] for message in messages[asked:] if message["role"] == "tool"]
    executed = [result for result in results if not result.startswith("error:")]
    return 0.5 if fields["answer"] in executed else 0.2 if executed else 0.0
