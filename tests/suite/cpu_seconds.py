"""A file of tests may use the CPU for as long as the table says, more or less: the suite stays short.

Counted are CPU seconds: of the process that runs the tests, of what it started and has waited for, and of rank
processes at work for it. They depend on the machine, and a little on what else it does. So the table's figures are
scaled by the median of measured / table over its files, and a file may take twice its figure and twenty seconds more.
Compared are sessions that ran every file of the table. A file above its share is named at the end, and the session
passes all the same: on a machine with other work a file may take three times as long. Whoever adds tests that are
worth their time enters the new figure.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.launched import Command
from tests.ranks import RankPool

TABLE: dict[str, int] = {
    "tests/config/test_real_configurations.py": 11,
    "tests/data/test_encode_workers.py": 9,
    "tests/data/test_reasoning_gym.py": 10,
    "tests/distributed/test_bad_rewards.py": 10,
    "tests/distributed/test_best.py": 15,
    "tests/distributed/test_chat_environments.py": 14,
    "tests/distributed/test_context_parallel.py": 11,
    "tests/distributed/test_critic_warmup.py": 11,
    "tests/distributed/test_dist_checkpointing.py": 8,
    "tests/distributed/test_dpo_layouts.py": 30,
    "tests/distributed/test_dpo_runs.py": 13,
    "tests/distributed/test_environments.py": 50,
    "tests/distributed/test_eval.py": 11,
    "tests/distributed/test_families.py": 26,
    "tests/distributed/test_faults.py": 29,
    "tests/distributed/test_gpu_check.py": 17,
    "tests/distributed/test_invariance.py": 46,
    "tests/distributed/test_lora_layouts.py": 14,
    "tests/distributed/test_lora_runs.py": 23,
    "tests/distributed/test_memory_by_phase.py": 14,
    "tests/distributed/test_moving.py": 14,
    "tests/distributed/test_overlap.py": 10,
    "tests/distributed/test_own_code.py": 18,
    "tests/distributed/test_packed_layouts.py": 40,
    "tests/distributed/test_permuted_mesh.py": 9,
    "tests/distributed/test_profile.py": 7,
    "tests/distributed/test_ptx.py": 14,
    "tests/distributed/test_replay.py": 6,
    "tests/distributed/test_resume.py": 62,
    "tests/distributed/test_resume_elsewhere.py": 19,
    "tests/distributed/test_resume_state.py": 6,
    "tests/distributed/test_reward_runs.py": 14,
    "tests/distributed/test_rl_layouts.py": 15,
    "tests/distributed/test_rl_vllm.py": 9,
    "tests/distributed/test_rm_layouts.py": 9,
    "tests/distributed/test_rm_options.py": 6,
    "tests/distributed/test_rollout_resume.py": 8,
    "tests/distributed/test_sampling_options.py": 9,
    "tests/distributed/test_sft_layouts.py": 14,
    "tests/distributed/test_shared_prompts.py": 70,
    "tests/distributed/test_shown.py": 13,
    "tests/distributed/test_slices.py": 55,
    "tests/distributed/test_virtual_stages.py": 11,
    "tests/distributed/test_vllm.py": 6,
    "tests/distributed/test_vllm_families.py": 10,
    "tests/distributed/test_vocabulary.py": 16,
    "tests/distributed/test_what_need_not_run.py": 14,
    "tests/kernels/test_packed_triton.py": 13,
    "tests/kernels/test_triton.py": 31,
    "tests/planning/test_weight_traffic.py": 18,
    "tests/public/test_examples.py": 20,
    "tests/public/test_runs.py": 14,
    "tests/rehearsal/test_fits.py": 10,
    "tests/rehearsal/test_rehearse_command.py": 16,
    "tests/rehearsal/test_rehearse_faults.py": 11,
    "tests/rehearsal/test_rehearse_options.py": 12,
    "tests/rehearsal/test_rehearse_rewards.py": 18,
    "tests/rehearsal/test_resume_point.py": 9,
    "tests/rehearsal/test_reuse.py": 36,
    "tests/rehearsal/test_sweep.py": 12,
    "tests/rehearsal/test_transformer_engine.py": 12,
    "tests/rehearsal/test_truth.py": 22,
    "tests/rollout/test_restarting.py": 6,
    "tests/rollout/test_serve_reward.py": 10,
    "tests/test_bench_gpu_logprob.py": 12,
    "tests/test_bench_packing.py": 8,
    "tests/test_bench_prompts.py": 9,
    "tests/test_cli.py": 16,
    "tests/test_convert_cli.py": 6,
    "tests/test_demo_chat.py": 26,
    "tests/test_hanging_command.py": 11,
    "tests/test_launch.py": 13,
    "tests/test_pipeline.py": 23,
    "tests/test_resume_killed.py": 23,
    "tests/weights/test_convert_faults.py": 14,
    "tests/weights/test_mp_rank.py": 6,
}
"""CPU seconds of the files that take six or more, on two cores of a server of 2026."""
FACTOR, SLACK, LISTED = 2.0, 20.0, 10.0


def over_their_share(measured: Mapping[str, float], table: Mapping[str, float]) -> list[str]:
    """A line for each file; none where files of the table were not run."""
    if not table or not table.keys() <= measured.keys():
        return []
    scale = statistics.median(measured[file] / seconds for file, seconds in table.items())
    limits = {file: FACTOR * scale * table.get(file, 0.0) + SLACK * max(1.0, scale) for file in measured}
    return [
        f"{file}: {seconds:.0f} CPU seconds, allowed {limits[file]:.0f} (its figure in tests/suite/cpu_seconds.py is "
        f"{table.get(file, 0):.0f}, this machine takes {scale:.2f} of such seconds)"
        for file, seconds in sorted(measured.items(), key=lambda entry: -entry[1])
        if seconds > limits[file]
    ]


class CpuSeconds:
    """Measures each test where it runs, and adds up by file where the session is reported."""

    def __init__(self, config: pytest.Config, pools: Sequence[RankPool]) -> None:
        self._reports = not hasattr(config, "workerinput")
        self._pools = pools
        self._last = 0.0
        self._by_file: dict[str, float] = defaultdict(float)

    def _now(self) -> float:
        return sum(os.times()[:4]) + Command.cpu_seconds + sum(pool.cpu_seconds for pool in self._pools)

    def pytest_runtest_logstart(self) -> None:
        self._last = self._now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        report = yield
        now = self._now()
        report.cpu_seconds, self._last = now - self._last, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self._reports:
            self._by_file[report.nodeid.split("::")[0]] += getattr(report, "cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.config.getoption("durations") is not None:
            terminalreporter.section("CPU seconds of files")
            for file, seconds in sorted(self._by_file.items(), key=lambda entry: -entry[1]):
                if seconds >= LISTED:
                    terminalreporter.line(f"{seconds:6.0f} {file}")
            terminalreporter.line(f"{sum(self._by_file.values()):6.0f} all {len(self._by_file)} files")
        over = over_their_share(self._by_file, TABLE)
        if over:
            terminalreporter.section("files above their share of CPU time", yellow=True)
            for line in over:
                terminalreporter.line(line)
