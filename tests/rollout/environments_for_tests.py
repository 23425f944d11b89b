"""Environments that do what a turn tells them, for test_environment_pool.py. Worker processes import this module."""

import asyncio
import ctypes
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import numpy

from megarlhf.rollout.environments.answer import Answer

Words = list[str]


class Sync:
    """Answers with all turns so far, so that an answer is right only if the environment has seen all of them."""

    def __init__(self, folder: str) -> None:
        self.folder = pathlib.Path(folder)

    def reset(self, fields, seed):
        self.name, self.said = fields["name"], []
        self.log("reset")
        self.act(fields.get("reset", "").split())
        return [{"role": "user", "content": f"{self.name} {seed}"}]

    def step(self, turn):
        self.said.append(turn.text)
        self.log("step")
        answer = self.act(turn.text.split())
        self.log("stepped")
        return self.answer(turn) if answer is None else answer

    def close(self):
        self.log("close")
        if self.name == "fails to close":
            raise RuntimeError("not closed")

    def answer(self, turn) -> Answer:
        return Answer([{"role": "user", "content": " | ".join(self.said)}], float(len(self.said)), turn.text == "done")

    def log(self, event: str) -> None:
        with open(self.folder / "log", "a") as file:
            file.write(f"{self.name},{event},{os.getpid()},{time.monotonic()}\n")

    def is_first_time(self) -> bool:
        """Whether nothing has asked that before, in any process."""
        try:
            (self.folder / "seen").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def act(self, words: Words):
        if words[:1] == ["once"]:
            words = words[1:] if self.is_first_time() else []
        if not words:
            return None
        if words[0] == "sleep":
            time.sleep(float(words[1]))
        if words[0] == "family":
            program = subprocess.Popen(["sleep", "777"], start_new_session=True, close_fds=False)
            (self.folder / "program").write_text(str(program.pid))
            time.sleep(600)
        if words[0] == "raise":
            raise KeyError("answer")
        if words[0] == "sys.exit":
            sys.exit(3)
        if words[0] == "os._exit":
            os._exit(5)
        if words[0] == "crash":
            os.kill(os.getpid(), 11)
        if words[0] == "fork" and os.fork():
            os.wait()
            time.sleep(float(words[1]))
        if words[0] == "now":
            return Answer(str(time.monotonic()))
        if words[0] == "returns":
            return {"5": 5, "role": Answer([{"role": "assistant", "content": "me"}]), "nan": Answer("", float("nan"))}[
                words[1]
            ]
        if words[0] == "asyncio.run":
            asyncio.run(asyncio.sleep(0.01))
        if words[0] == "keep":  # the interpreter, in a thread, so that nothing else runs in the process
            threading.Timer(0.3, lambda: ctypes.PyDLL(None).sleep(600)).start()
        return None


class Async(Sync):
    """The same, but for `reset`, and for what has to be awaited."""

    async def step(self, turn):
        self.said.append(turn.text)
        self.log("step")
        words = turn.text.split()
        if words[0] == "wait":
            await asyncio.sleep(float(words[1]))
        elif words[0] == "waits":
            for _ in range(3):
                await asyncio.sleep(float(words[1]))
        elif words[0] == "refuse":
            await self.refuse(float(words[1]))
        elif words[0] == "cancel":
            for task in asyncio.all_tasks():
                task.cancel()
        elif words[0] == "stop":
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0.01)
        elif words[0] == "exit_in_task":
            await asyncio.wait({asyncio.create_task(self.later(["sys.exit"]))})
        elif words[0] == "later":
            self.task = asyncio.create_task(self.later(words[1:]))
        elif (answer := self.act(words)) is not None:
            return answer
        self.log("stepped")
        return self.answer(turn)

    async def refuse(self, seconds: float) -> None:
        """Sleep, also when it is cancelled once."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(seconds)

    async def later(self, words: Words) -> None:
        await asyncio.sleep(0.1)
        self.act(words)

    async def close(self):
        await asyncio.sleep(0.01)
        super().close()


class Draws:
    """Random numbers of all kinds, drawn in a task, in tasks of its own, and between suspensions."""

    async def reset(self, fields, seed):
        await asyncio.sleep(0)

    async def step(self, turn):
        numbers = [random.random(), numpy.random.rand()]
        await asyncio.sleep(random.random() / 100)
        numbers += await asyncio.gather(*(self.draw() for _ in range(3)))
        return Answer(" ".join(map(str, numbers)))

    async def draw(self) -> float:
        await asyncio.sleep(0.001)
        number = random.random()
        await asyncio.sleep(0)
        return number + numpy.random.rand()


class NoStep:
    def reset(self, fields, seed):
        return None


class OtherStep(NoStep):
    def step(self):
        return Answer()


class Unmade(Sync):
    def __init__(self, folder: str) -> None:
        raise OSError("no server")


def function(fields, seed):
    return None


class Collects:
    """Writes into its argument, and tells how much stands there."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def reset(self, fields, seed):
        pass

    def step(self, turn):
        self.seen.append(turn.text)
        return Answer(str(len(self.seen)))
