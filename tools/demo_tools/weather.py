"""The demo's task: questions that only a tool can answer, the tool, and the reward.

    How warm is it in Lisbon?   ->   weather(city="Lisbon", quantity="temperature") returns 317   ->   It is 317.

The numbers are digests of city and quantity, so no model can know them. Training, choices and tests ask about different
cities.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

Quantity = Literal["temperature", "wind", "humidity"]

QUESTIONS: Mapping[str, Sequence[str]] = {
    "temperature": ("How warm is it in {}?", "What is the temperature in {}?", "How hot is it in {} today?"),
    "wind": ("How strong is the wind in {}?", "What is the wind speed in {}?", "How windy is it in {} today?"),
    "humidity": ("How humid is it in {}?", "What is the humidity in {}?", "How moist is the air in {} today?"),
}
CITIES = (Path(__file__).parent / "cities.txt").read_text(encoding="utf-8").split()
SHOWN = "Paris"
"""City of the example in every prompt."""
SHARES = {"train": 0.6, "validation": 0.15, "test": 0.25}
"""Share of the cities of each file."""
SIZES = {"train": 256, "validation": 32, "test": 96}
"""Records of each file."""


def weather(city: str, quantity: Quantity) -> int:
    """Look up the weather in a city.

    Args:
        city: The name of the city.
        quantity: What is measured.
    """
    return value_of(city, quantity)


def value_of(city: str, quantity: str) -> int:
    """The measured value, from 100 to 999."""
    digest = hashlib.sha256(f"{city.strip().lower()} {quantity}".encode()).digest()
    return 100 + int.from_bytes(digest[:4], "big") % 900


def example(city: str, quantity: str) -> list[dict[str, Any]]:
    """A question with a call, the tool's result and an answer."""
    function = {"name": weather.__name__, "arguments": {"city": city, "quantity": quantity}}
    value = str(value_of(city, quantity))
    return [
        {"role": "user", "content": QUESTIONS[quantity][0].format(city)},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": value},
        {"role": "assistant", "content": f"It is {value}."},
    ]


def records(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Records of a file: one question with its call and answer, then the question to answer."""
    draw = random.Random(f"{seed} {name}")
    shown = example(SHOWN, "temperature")
    cities = cities_of(name, seed)
    made = []
    for number in range(count):
        city, quantity = cities[number % len(cities)], draw.choice(get_args(Quantity))
        question = draw.choice(QUESTIONS[quantity]).format(city)
        messages = [*shown, {"role": "user", "content": question}]
        made.append({"messages": messages, "city": city, "quantity": quantity, "answer": str(value_of(city, quantity))})
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
    """1 for a right answer; half of it if only a call has returned the value."""
    if right(response, fields):
        return 1.0
    asked = max(n for n, message in enumerate(messages) if message["role"] == "user")
    results = [message["content"] for message in messages[asked:] if message["role"] == "tool"]
    return 0.5 * (fields["answer"] in results)
