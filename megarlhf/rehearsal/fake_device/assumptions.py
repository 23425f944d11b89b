"""Places where the program reads a number that a rehearsal does not know, each with the assumed answer and its reason.

Reading such a number anywhere else ends the rehearsal: its effect would be a guess that nobody has looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.rehearsal.fake_device.origins import callers

Number = float | int | bool


@dataclass(frozen=True)
class Site:
    """A function that reads a number from the device."""

    file: str
    """End of its path."""
    function: str
    answer: Number
    reason: str


SITES: tuple[Site, ...] = (
    Site("parallel/step.py", "accumulate", 1.0, "sums of a loss, which are reported"),
    Site("parallel/step.py", "gradient_norm", 1.0, "every gradient is taken to be finite: no update is skipped"),
    Site("megatron/core/optimizer/clip_grads.py", "get_grad_norm_fp32", 1.0, "the norm is finite"),
    Site("megatron/core/utils.py", "local_multi_tensor_l2_norm", 1.0, "norms of single gradients are finite"),
    Site("megatron/core/optimizer/optimizer.py", "get_grad_norm", 1.0, "the norm is finite"),
    Site(
        "megatron/core/optimizer/optimizer.py", "_unscale_main_grads_and_check_for_nan", 0.0, "no gradient is infinite"
    ),
    Site("trainers/supervised/loop.py", "validation_sums", 1.0, "sums of a loss, which are reported"),
    Site(
        "trainers/supervised/dpo.py",
        "logprobs",
        -1.0,
        "log-probs under the reference, which the loss reads and no shape does",
    ),
    Site("weights/checks/", "", 0, "digests of both sides are taken to be equal, and padding to be zero"),
    Site("observe/", "", 1.0, "what is measured is shown to nobody"),
    Site("trainers/experience/reward_outputs.py", "metrics_of", 1.0, "metrics of rewards"),
    Site("algo/reward_scaling.py", "update", 1.0, "moments of rewards, which the next steps scale them by"),
    Site("trainers/rl/metrics.py", "share_without_signal", 0.0, "every step has something to learn"),
    Site("trainers/rl/metrics.py", "", 1.0, "metrics"),
    Site(
        "trainers/experience/no_signal.py",
        "watch",
        0.0,
        "rewards differ, so that no step is without something to learn",
    ),
    Site("algo/advantages.py", "explained_variance", 1.0, "metrics"),
    Site(
        "trainers/experience/statistics.py",
        "",
        0.0,
        "metrics of tokens: the log-prob gap is zero, no limit ends the run",
    ),
    Site("rollouts.py", "to", -1.0, "the engine's log-probs of slices in flight, which no shape follows from"),
    Site("trainers/rl/logprob_gap.py", "", 0.0, "the log-prob gap is zero: no limit ends the run"),
    Site("trainers/rl/kl_controller.py", "", 0.0, "metrics of the KL, which steer no shape"),
)


@dataclass(frozen=True)
class Assumption:
    """A number that was read and assumed."""

    where: str
    what: str
    answer: str
    reason: str


class UnknownNumber(RuntimeError):
    """The program reads a number that a rehearsal cannot know."""


class Assumptions:
    """Assumptions of one rank, counted."""

    def __init__(self, sites: Sequence[Site] = SITES) -> None:
        self._sites = sites
        self.counts: Counter[Assumption] = Counter()

    def number(self, what: str) -> Number:
        """The assumed answer for the line that reads a number. Raises: UnknownNumber where none is listed.

        A site is the line itself, or its caller in the same file. Code in other files that a listed function calls,
        such as a loss, is not part of it.
        """
        frames = callers()
        sites = list(self._sites)
        for file, _, function in frames:
            sites = [site for site in sites if site.file in file]
            for site in sites:
                if site.function in ("", function):
                    where = "{}:{} in {}".format(*frames[0])
                    self.counts[Assumption(where, what, str(site.answer), site.reason)] += 1
                    return site.answer
        places = "\n  ".join(f"{file}:{line} in {function}" for file, line, function in frames[:4])
        raise UnknownNumber(
            f"the program reads {what}, which only a device knows, at\n  {places}\nIts effect would be a guess. "
            "Add the place with the answer and the reason to megarlhf/rehearsal/fake_device/assumptions.py, or make "
            "the number known"
        )

    def note(self, what: str, answer: str, reason: str) -> None:
        """Count an assumption that holds wherever it is needed."""
        file, line, function = next(iter(callers()), ("elsewhere", 0, ""))
        self.counts[Assumption(f"{file}:{line} in {function}", what, answer, reason)] += 1
