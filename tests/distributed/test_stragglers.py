"""Two ranks in lockstep, one of which does more of its own: the first rank's log names it. Not covered: NCCL."""

import logging
import re
import time
from pathlib import Path

import torch.distributed as dist

from megarlhf.config import WatchdogConfig
from megarlhf.observe.watch.watchdog import watched_phases
from megarlhf.runtime import Runtime


def steps(runtime: Runtime, folder: str) -> tuple[list[str], list[dict[str, float]]]:
    """Three steps in which rank 1 takes 0.2 s for its share, and rank 0 waits for it. What was said, and the laps."""
    cfg = WatchdogConfig.model_validate({"stragglers": {"steps": 2, "min_excess": 0.05, "probe_every": 1}})
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log, laps = logging.getLogger("megarlhf.observe.watch.stragglers"), []
    log.addHandler(handler)
    with watched_phases(cfg, Path(folder), runtime) as phases:
        for step in range(3):
            with phases("reward"):
                with phases.local():
                    time.sleep(0.2 * runtime.rank)
                dist.barrier()
            laps.append(phases.end_step(step))
    log.removeHandler(handler)
    return said, laps


def test_the_slow_rank_is_named_though_both_take_equally_long(ranks, tmp_path) -> None:
    (said, laps), (silent, _) = ranks.run(2, steps, str(tmp_path))
    assert silent == [], "rank 0 speaks for all"
    rewards = [sentence for sentence in said if "reward" in sentence]
    assert len(rewards) == 1, said
    assert re.search(r"rank 1 .*phase 'reward' .*0\.2", rewards[0])
    # Of a step in which rank 0 came later to the phase than rank 1, it waits less: such steps are rare.
    assert max(lap["reward"] for lap in laps) > 0.19, "what the phase takes says nothing: rank 0 has waited"
    assert not (tmp_path / "failures").exists()
