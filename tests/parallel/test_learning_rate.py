"""Learning rates, step by step, as the configuration states them. Not covered: weight decay."""

import math
from types import SimpleNamespace

import pytest

from megarlhf.config import OptimConfig
from megarlhf.parallel.optimizer_settings import lr_scheduler

LR, MIN_LR = 2.0, 0.5


def rates(num_steps, **optim):
    """The rate of each optimizer step."""
    group = {"lr": 0.0, "weight_decay": 0.0, "max_lr": LR, "min_lr": None}
    cfg = OptimConfig(lr=LR, **optim)
    group["min_lr"] = LR if cfg.schedule == "constant" else cfg.min_lr
    optimizer = SimpleNamespace(param_groups=[group])
    scheduler = lr_scheduler(optimizer, cfg, num_steps)
    lrs = []
    for _ in range(num_steps):
        lrs.append(group["lr"])
        scheduler.step(increment=1)
    return lrs


def stated(step, num_steps, warmup, shape):
    """The formula of `OptimConfig.warmup_steps`; steps count from 1."""
    warmup = max(1, warmup)
    if step < warmup:
        return LR * step / warmup
    return MIN_LR + (LR - MIN_LR) * shape((step - warmup) / (num_steps - warmup + 1))


SHAPES = {"linear": lambda way: 1 - way, "cosine": lambda way: (1 + math.cos(math.pi * way)) / 2}


@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize("warmup", [0, 1, 4, 10])
def test_rates_are_those_that_are_stated(schedule, warmup):
    expected = [stated(step, 10, warmup, SHAPES[schedule]) for step in range(1, 11)]
    assert rates(10, schedule=schedule, warmup_steps=warmup, min_lr=MIN_LR) == pytest.approx(expected)


def test_a_warm_up_by_hand():
    """Four steps to the peak; none of them stands still. One step of warm-up is none."""
    assert rates(6, warmup_steps=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    assert rates(3, warmup_steps=1) == rates(3) == [2.0, 2.0, 2.0]
    assert rates(2, schedule="cosine", warmup_steps=1) == rates(2, schedule="cosine") == [2.0, 1.0]


def test_half_a_run_of_critic_warm_up_leaves_the_actor_a_whole_schedule():
    """20 steps in which only the critic is trained and 20 of both: the actor's last rate is near the end of its cosine,
    and not half of the peak, which 40 steps would give."""
    assert rates(20, schedule="cosine")[-1] < 0.01 * LR
    assert rates(40, schedule="cosine")[19] > 0.5 * LR
