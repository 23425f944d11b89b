"""Environments that make prompts, or fail to, for test_environment_source.py. Other processes import this module."""

import os
import time

WORDS = {"one", "two", "three", "four", "five", "six", "seven"}


class Asks:
    """Prompts by a method, with parameters of the class."""

    def __init__(self, times=1, more=()):
        self.times, self.more = times, more

    def prompts(self, size, seed):
        return [{"prompt": f"{n} x {self.times}", "answer": n * self.times} for n in range(seed, seed + size)]


class Static:
    """Prompts without an object, from a generator, in the order of a set."""

    def __init__(self, needed):
        raise AssertionError("no object is needed")

    @staticmethod
    def prompts(size, seed):
        print("printed")
        words = list(WORDS)
        for n in range(size):
            yield {"messages": [{"role": "user", "content": f"{words[(seed + n) % len(words)]}"}]}


class Game:
    """Gymnasium's interface."""

    made = 0

    def __init__(self, **options):
        Game.made += 1

    def reset(self, *, seed=None, options=None):
        return f"game {seed} {options} {Game.made}", {}

    def close(self):
        Game.made -= 1


class AsyncGame(Game):
    async def reset(self, *, seed=None, options=None):
        return f"async {seed}", {}


class Returns:
    """`prompts` returns what is asked for."""

    def __init__(self, what):
        self.what = what

    def prompts(self, size, seed):
        records = [{"prompt": "a"}] * size
        return {
            "fewer": records[1:],
            "more": iter(lambda: records[0], None),
            "text": "abc",
            "none": None,
            "numbers": [5] * size,
            "set": [{"prompt": "a", "parts": {1}}] * size,
            "clock": [{"prompt": "a"}, {"prompt": str(time.monotonic_ns())}, {"prompt": "b"}],
        }[self.what]


class Raises:
    def prompts(self, size, seed):
        raise KeyError("the user's")


class Ends:
    def prompts(self, size, seed):
        os._exit(3)


class Ours:
    def reset(self, fields, seed):
        return None


class Nothing:
    pass


class NoSeed:
    def reset(self):
        return "a", {}


class OtherPrompts:
    def prompts(self, size):
        return []


class NoText(Game):
    def reset(self, *, seed=None, options=None):
        return [seed], {}


def make_game():
    return Game()
