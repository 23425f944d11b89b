"""Words about a step that takes long. Not covered: how a terminal draws them (test_progress.py)."""

import io
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from megarlhf.observe.terminal.activity import Activity, Part
from megarlhf.observe.terminal.progress import Progress
from megarlhf.observe.watch.phases import Phases
from megarlhf.rollout.rewards.batch import DeferredBatch, RewardBatch, RewardResult
from megarlhf.rollout.rewards.pool import Pending
from megarlhf.trainers.experience.rewards import PendingRewards


@pytest.mark.parametrize(("share", "words"), [
    (1.0, "step 3: rollout 0:01:40, 30 of 100 responses, 60 tokens/s, 0:05:50 left"),
    (0.25, "step 3: rollout 0:01:40, about 80 of 100 responses, 240 tokens/s, 0:00:50 left"),
])  # fmt: skip
def test_a_phase_whose_work_is_counted(share, words):
    """10 were in the bank. In 100 s this rank has drawn 20 (or 10) more; with a quarter of the ranks' work the others
    are taken to be as far."""
    now = 0.0
    phases, bank = Phases(lambda: now), Part(10, 500)
    activity = Activity(phases)
    assert activity.text() == ""
    phases.begin_step(3)
    with phases("rollout"), activity.counting(100, "responses", lambda: bank, share=share):
        assert "left" not in activity.text(), "nothing to go by"
        now, bank = 100.0, Part(30 if share == 1 else 20, 6500)
        assert activity.text() == words
    with phases("train/actor"):
        now += 61
        assert activity.text() == "step 3: train/actor 0:01:01"


def test_a_log_file_gets_a_line_when_nothing_was_printed_for_an_interval():
    told, file = threading.Event(), io.StringIO()

    def activity():
        told.set()
        return "step 1: rollout 0:01:00, 3 of 8 responses"

    with Progress("rl", 2, console=Console(file=file, width=200), interval_seconds=0.05, activity=activity):
        assert told.wait(10)
    assert "rl 0/2 0%  elapsed 0:00:00  left -:--:--  step 1: rollout 0:01:00, 3 of 8 responses" in file.getvalue()
    file = io.StringIO()
    with Progress("rl", 2, console=Console(file=file, width=200), interval_seconds=3600, activity=activity) as progress:
        progress.step(1, {})
    assert "rollout" not in file.getvalue()


def test_results_of_slow_rewards_are_counted():
    """Two rewards of four samples, of which this rank has two; one result and both of the other are there."""
    batch = RewardBatch(["p"] * 2, ["r"] * 2, [[1]] * 2, [[2]] * 2, [True] * 2, [{}] * 2, [None] * 2, [0, 1])
    slow, quick = Pending(2), DeferredBatch(lambda part: [RewardResult(value=1.0)] * len(part), batch, 1)
    experience = SimpleNamespace(num_samples=4)
    rewards = PendingRewards(SimpleNamespace(), experience, [], batch, {"slow": slow, "quick": quick})
    phases = Phases(lambda: 0.0)
    activity = Activity(phases)
    with phases("reward"), rewards.counting(activity):
        assert "about 0 of 8 rewards" in activity.text()
        slow.put([1], [RewardResult(value=1.0)], 0.1)
        quick.wait()
        assert "about 6 of 8 rewards" in activity.text()
    with phases("reward"):
        assert "rewards" not in activity.text()
