"""Exceptions that several rooms share. Imports nothing, so that the command line can name them at once."""

from __future__ import annotations


class Interrupted(Exception):
    """A stage was asked to stop before it was complete. Raised on every rank; its results are dropped or kept."""


class WatchdogInterrupt(BaseException):
    """Raised by the watchdog in the main thread of a rank whose phase has passed its limit.

    Not an `Exception`: a user's function that takes every exception for a reward of 0 must not take this one.
    """


class WatchdogTimeout(RuntimeError):
    """A phase has passed its limit: the run ends with its own exit status.

    agreed: whether every rank raises it at the same place, so that they can still do something together (save).
    """

    def __init__(self, message: str, *, agreed: bool) -> None:
        super().__init__(message)
        self.agreed = agreed


class RewardError(ValueError):
    """A reward failed, or returned something that is no number. The message names the reward, the sample, and the line
    of the user's code. Raised on every rank alike."""
