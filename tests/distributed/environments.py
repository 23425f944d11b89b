"""Environments of the tests, whose prompts are sums as texts: `12+3=`."""

import asyncio
import os
import random
import re
import time
import zlib

from megarlhf import Answer


class Again:
    """Asks the sum once more after a wrong answer. A turn earns less the later it is."""

    def __init__(self, factor=0.5):
        self.factor = factor

    def reset(self, fields, seed):
        self.asked, self.answer = fields["prompt"], str(fields["answer"])
        self.texts = []

    def step(self, turn):
        assert turn.number == len(self.texts), (turn, self.texts)
        self.texts.append(turn.text)
        if turn.text.strip() == self.answer:
            return Answer(reward=self.factor**turn.number, done=True)
        return Answer(self.asked[-3:], reward=-0.1)


class Chance(Again):
    """Observations, rewards and the end follow from the process's random numbers."""

    def step(self, turn):
        if (chance := random.random()) < 0.2:
            return Answer(reward=1.0, done=chance < 0.1)
        return Answer("".join(random.choices("123456789", k=random.randint(1, 4))), reward=round(random.random(), 3))


class Slow(Chance):
    """As `Chance`, and each answer takes a time of its own."""

    def __init__(self, seconds=0.05, salt=""):
        super().__init__()
        self.seconds, self.salt = seconds, salt

    async def step(self, turn):
        answer = super().step(turn)
        share = zlib.crc32(f"{self.salt}{self.asked}{turn.text}".encode()) % 1000 / 1000
        await asyncio.sleep(self.seconds * share)
        return answer


class Drifts(Again):
    """Answers a turn otherwise each time."""

    calls = 0

    def step(self, turn):
        Drifts.calls += 1
        answer = super().step(turn)
        return answer if answer.done else Answer(f"{Drifts.calls % 10}", reward=-0.1)


class Opens(Again):
    """Adds to the prompt, in each sample otherwise."""

    def reset(self, fields, seed):
        super().reset(fields, seed)
        return str(seed % 10) * (1 + seed % 2)


class Over:
    """Ends the conversation with its first turn."""

    def reset(self, fields, seed):
        self.answer = str(fields["answer"])

    def step(self, turn):
        # Rewards without an environment read no special tokens inside a response.
        return Answer(reward=right("", re.sub("<[^>]*>", "", turn.text), {}), done=True)


class Faulty(Again):
    """Fails in the way and at the turn that are given, in some conversations."""

    def __init__(self, how="raises", at=1, marker=None):
        super().__init__()
        self.how, self.at, self.marker = how, at, marker

    def reset(self, fields, seed):
        super().reset(fields, seed)
        self.fails = seed % 3 == 0
        if self.at < 0:
            self.fail()

    def step(self, turn):
        if turn.number == self.at:
            self.fail()
        return super().step(turn)

    def fail(self):
        if not self.fails or (self.marker and self.has_failed()):
            return
        if self.how == "raises":
            raise KeyError("planted")
        if self.how == "hangs":
            time.sleep(1000)
        if self.how == "exits":
            os._exit(7)

    def has_failed(self):
        """Whether this conversation failed before; it leaves a file."""
        path = f"{self.marker}/{zlib.crc32(self.asked.encode())}"
        if os.path.exists(path):
            return True
        open(path, "w").close()
        return False


def right(prompt, response, fields):
    """The reward of `Over` as a rule."""
    return float(response[:1] in "13579")


class Guess:
    """Answers with messages: hints by a user, in the first turns two of a tool, or with a text first."""

    def __init__(self, role="user", begins=False, turns=3, fails=(), inside=""):
        self.role, self.begins, self.turns, self.fails, self.inside = role, begins, turns, fails, inside

    def reset(self, fields, seed):
        self.answer = fields.get("answer")
        return [{"role": "user", "content": "a number, please"}] if self.begins else None

    def step(self, turn):
        if turn.number == 1 and self.answer in self.fails:
            raise KeyError("planted")
        if turn.number + 1 == self.turns:
            return Answer(reward=len(turn.text) / 10, done=True)
        if turn.number == 0 and self.inside:
            return Answer(self.inside)
        content = f"{turn.number}: {'higher' if len(turn.text) % 2 else 'lower'}"
        messages = [{"role": self.role, "content": content}]
        if self.role == "tool" and turn.number == 0:
            messages += [{"role": "tool", "content": "and a second reply"}]
        return Answer(messages, reward=-0.25)


def noted(prompt, response, fields, messages, turns):
    """A reward that refuses what is no conversation as its environment writes it."""
    roles = [message["role"] for message in messages]
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    assert turns == [*said, response], (turns, said, response)
    assert roles[:2] in (["user", "assistant"], ["user", "user"], ["user"]), roles
    assert prompt.endswith("<|im_start|>assistant\n"), prompt
    assert all(message["content"] in prompt for message in messages), prompt
    return float(len(turns))


def some(prompt, response, fields):
    """A rule that is right for some responses. It is not called for a conversation that has failed."""
    assert fields["answer"] not in ("3", "4", "9") or fields.get("check")
    return float(len(response) % 2)


class Wrong:
    """Answers a chat model in the way that is given."""

    def __init__(self, how):
        self.how = how

    def reset(self, fields, seed):
        if self.how == "longer than the room":
            return [{"role": "user", "content": "word " * 200}]
        return None

    def step(self, turn):
        return {
            "no answer": lambda: 5,
            "a message in place of a list": lambda: Answer({"role": "user", "content": "a"}),
            "an unknown role": lambda: Answer([{"role": "umpire", "content": "a"}]),
            "the assistant's role": lambda: Answer([{"role": "assistant", "content": "a"}]),
            "no content": lambda: Answer([{"role": "user"}]),
            "a reward that is no number": lambda: Answer([{"role": "user", "content": "a"}], reward="high"),
            "not a number": lambda: Answer(reward=float("nan"), done=True),
            "what JSON cannot hold": lambda: Answer([{"role": "user", "content": {1, 2}}]),
            "without end": lambda: Answer([{"role": "user", "content": "again"}], reward=0.5),
            "longer than the room": lambda: Answer(done=True),
        }[self.how]()
