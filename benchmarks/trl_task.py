"""The task of `make bench-trl`: short lists whose form and content a program can judge.

A task is two JSON lines files of prompts, for training and for figures, and a rule, `package.module:function`. A record
has `prompt`, what the user says; its other columns are handed to the rule as `fields`. Any files and any rule will do
(`python -m benchmarks.trl_curves --help`); this module makes those of the list task.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rule = Callable[[str, str, Mapping[str, Any]], float]
"""What the text of a response to a prompt is worth, given the other columns of the prompt's record."""
RULE = "benchmarks.trl_task:reward"
MEMBERS: Mapping[str, str] = {
    "fruits": "apple banana orange grape pear peach plum cherry mango kiwi lemon lime melon watermelon "
    "pineapple papaya strawberry blueberry raspberry blackberry cranberry apricot fig date coconut "
    "grapefruit pomegranate guava lychee",
    "vegetables": "carrot potato onion tomato pepper cucumber lettuce spinach broccoli cauliflower cabbage celery "
    "bean pea corn garlic radish beet turnip zucchini eggplant asparagus kale pumpkin leek squash "
    "mushroom artichoke",
    "animals": "dog cat horse cow pig sheep goat lion tiger bear elephant giraffe zebra monkey rabbit mouse rat "
    "fox wolf deer kangaroo panda koala dolphin whale shark fish bird snake frog turtle lizard "
    "crocodile chicken duck hamster",
    "birds": "eagle hawk owl sparrow robin crow raven pigeon dove parrot swan duck goose chicken turkey "
    "penguin ostrich falcon woodpecker hummingbird seagull pelican flamingo peacock canary finch "
    "cardinal stork heron crane",
    "colours": "red blue green yellow orange purple pink brown black white gray grey violet indigo turquoise "
    "gold silver magenta cyan maroon navy beige teal lavender crimson scarlet",
    "countries": "france germany italy spain portugal england china japan india brazil canada mexico australia "
    "egypt russia greece turkey sweden norway denmark finland poland austria switzerland belgium "
    "argentina chile peru kenya",
    "sports": "football soccer basketball baseball tennis golf hockey rugby cricket volleyball swimming running "
    "cycling boxing wrestling skiing badminton gymnastics surfing rowing archery fencing skating judo "
    "karate",
    "instruments": "piano guitar violin drum flute trumpet saxophone clarinet cello harp trombone banjo ukulele "
    "viola organ harmonica accordion tuba oboe bassoon mandolin xylophone bass keyboard",
    "tools": "hammer screwdriver saw drill wrench plier axe shovel chisel file ladder rake hoe level clamp "
    "knife scissor sander spade crowbar mallet",
    "clothes": "shirt trouser pant dress skirt jacket coat sock shoe hat scarf glove sweater jean short blouse "
    "tie belt suit boot vest hoodie cap sandal",
    "drinks": "water milk coffee tea juice wine beer soda lemonade cocoa cola whiskey vodka rum gin champagne "
    "cider smoothie",
    "trees": "oak pine maple birch willow cedar elm ash beech spruce fir palm redwood poplar cherry apple "
    "walnut chestnut cypress sycamore hemlock magnolia juniper",
}
COUNTS = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
WORDINGS = (
    "Name {count} {what}, in lower case, separated by commas.",
    "List {count} {what}. Write only the list: lower case, separated by commas.",
    "Give me {count} {what} as a list in lower case with commas between them and nothing else.",
    "Which {count} {what} come to mind? Answer in lower case, separated by commas, without any other words.",
)
NUM_TEST = 60


@dataclass(frozen=True)
class Task:
    """Where prompts stand, and what judges the responses to them."""

    train: Path
    test: Path
    rule: str


def records() -> list[dict[str, Any]]:
    """Every list that can be asked for, in an order that no part of it follows from another."""
    every = [
        {"prompt": wording.format(count=word, what=what), "what": what, "count": count}
        for what in MEMBERS
        for count, word in COUNTS.items()
        for wording in WORDINGS
    ]
    random.Random(0).shuffle(every)
    return every


def write_task(directory: Path) -> Task:
    """The list task. No prompt of the test split is in the training split."""
    every = records()
    directory.mkdir(parents=True, exist_ok=True)
    task = Task(directory / "train.jsonl", directory / "test.jsonl", RULE)
    write_records(task.train, every[NUM_TEST:])
    write_records(task.test, every[:NUM_TEST])
    return task


def write_records(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    """Raises: ValueError, which names the line, for what is no JSON lines file."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                records.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object, got {line[:60]!r} ({error})"
                ) from error
    return records


def reward(prompt: str, response: str, fields: Mapping[str, Any]) -> float:
    """0.4 for things that belong there, 0.3 for the form of the items between commas, 0.3 for their number, each in
    parts; 1 only for a list that is right."""
    items = [item.strip() for item in response.strip().split(",")]
    count, members = int(fields["count"]), set(MEMBERS[fields["what"]].split())
    words = "".join(letter if letter.isalpha() else " " for letter in response.lower()).split()
    named = len({singular(word, members) for word in words} & members)
    form = sum(map(is_item, items)) / len(items)
    return 0.4 * min(named, count) / count + 0.3 * form + 0.3 * max(0.0, 1 - abs(len(items) - count) / count)


def is_item(text: str) -> bool:
    """One word, as all members are, in lower case."""
    return text.isalpha() and text == text.lower()


def singular(word: str, members: set[str]) -> str:
    """The member that a word is the plural of; else the word."""
    forms = (word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y")
    return next((form for form in forms if form in members), word)


def rule_of(name: str) -> Rule:
    """`package.module:function`."""
    module, _, function = name.partition(":")
    rule: Rule = getattr(importlib.import_module(module), function)
    return rule


def conversation_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """As TRL takes them; the other columns are handed to the reward."""
    return {**record, "prompt": [{"role": "user", "content": record["prompt"]}]}


def text_of(conversation: Sequence[Mapping[str, str]], tokenizer: Any) -> str:
    """What the model reads, which our rules are given as the prompt."""
    return str(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))


def rewards_of(name: str, tokenizer: Any) -> Any:
    """The task's rule, as TRL asks for rewards."""
    rule = rule_of(name)

    def rewards(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        found = []
        for n, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            fields = {name: values[n] for name, values in columns.items() if isinstance(values, list)}
            found.append(rule(text_of(prompt, tokenizer), completion[-1]["content"], fields))
        return found

    return rewards


def right(reward: float) -> bool:
    """Whether a response is right in everything."""
    return reward > 0.999
