"""Exceptions that several packages share. Imports are few: the command line starts fast."""

from __future__ import annotations

from pathlib import Path


class Interrupted(Exception):
    """A stage was asked to stop before it was complete. Raised on every rank."""


class WatchdogInterrupt(BaseException):
    """Raised by the watchdog in the main thread of a rank whose phase exceeded its time limit.

    It is not an `Exception`, so that a user's function that turns every exception into a reward of 0 does not catch it.
    """


class WatchdogTimeout(RuntimeError):
    """A phase exceeded its time limit: the run ends with its own exit status.

    agreed: every rank raises it at the same place, so that they can still save together
    """

    def __init__(self, message: str, *, agreed: bool) -> None:
        super().__init__(message)
        self.agreed = agreed


class RewardError(ValueError):
    """A reward failed, or returned something other than a number. The message names the reward, the sample, and the
    line of the user's code. Raised on every rank."""


class EnvironmentFailure(RewardError):
    """An environment failed, and the run does not go on without the sample. The message names the sample, the turn, and
    the line of the user's code. Raised on every rank."""


class OwnCodeError(ValueError):
    """Code of the user that every rank calls in a step has failed. Raised on every rank at the same place, so that they
    can still save together."""


def raised_here(error: BaseException) -> bool:
    """Whether our own code raised the error, so that its message is a sentence for users. torch's errors keep their
    traceback."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and Path(frame.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parent)
