"""A pool of the environments in environments_for_tests.py, and what its conversations have answered."""

import time

from megarlhf.rollout.environments.answer import Answer, Turn
from megarlhf.rollout.environments.pool import EnvironmentPool

MODULE = "tests.rollout.environments_for_tests"


def turn(text, number=0):
    return Turn(text, number, finished=True, last=False)


class Talk:
    """A pool, and what its conversations have answered."""

    def __init__(self, folder, name="Sync", *, path="", args=None, workers=1, seconds=20.0):
        self.folder, self.names = folder, {}
        args = {"folder": str(folder)} if args is None else args
        self.pool = EnvironmentPool(path or f"{MODULE}:{name}", args, workers=workers, seconds_per_step=seconds)

    def begin(self, *names, history=(), **fields):
        keys = [self.pool.begin({"name": name, **fields}, 7, history) for name in names]
        self.names |= dict(zip(keys, names, strict=True))
        return keys if len(keys) > 1 else keys[0]

    def begun(self, *names, **options):
        """Keys of conversations that have answered to the beginning."""
        keys = self.begin(*names, **options)
        for reply in self.replies(*(keys if len(names) > 1 else [keys])):
            assert reply.answer == Answer([{"role": "user", "content": f"{self.names[reply.key]} 7"}])
        return keys

    def replies(self, *keys, seconds=30.0):
        """A reply of each conversation, in this order. There must be no other."""
        replies, until = {}, time.monotonic() + seconds
        while len(replies) < len(keys):
            assert time.monotonic() < until, f"no reply of {set(keys) - set(replies)}"
            self.pool.wait(1.0)
            for reply in self.pool.replies():
                assert reply.key in {*keys} - {*replies}, reply
                replies[reply.key] = reply
        return [replies.pop(key) for key in keys]

    def says(self, *keys, **asked):
        """The texts of their answers."""
        return [self.text(reply) for reply in self.replies(*keys, **asked)]

    @staticmethod
    def text(reply):
        assert reply.answer is not None, reply.error
        return reply.answer.messages[0]["content"]

    def step(self, key, text):
        self.pool.step(key, turn(text))

    def answer(self, key, text):
        """The reply to a turn."""
        self.step(key, text)
        return self.replies(key)[0]

    def log(self, name, event):
        """(process, time) of each such event of a conversation."""
        lines = [line.split(",") for line in (self.folder / "log").read_text().splitlines()]
        return [(int(pid), float(when)) for who, what, pid, when in lines if (who, what) == (name, event)]

    def when(self, name, event, count=1):
        """Wait until an event has happened so often. Returns the process of the last."""
        until = time.monotonic() + 20
        while not (self.folder / "log").exists() or len(self.log(name, event)) < count:
            assert time.monotonic() < until, f"{name} has no {event} number {count}"
            time.sleep(0.01)
        return self.log(name, event)[-1][0]


def talks(folder):
    """Maker of talks for a fixture; they are closed in the end."""
    made = []

    def make(*arguments, **options):
        made.append(Talk(folder, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.pool.close()
