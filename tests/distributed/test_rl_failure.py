"""`megarlhf rl` and `generate` on two ranks with vLLM, when the weights cannot be carried over.

Not covered: GPUs; a failure inside vLLM's own collectives.
"""

import contextlib
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.runtime import Runtime
from tests.command import argv_of, python
from tests.distributed.interrupted_jobs import at_call
from tests.distributed.jobs import command_status
from tests.distributed.test_rl_layouts import config
from tests.refuses import missing_names

FAULTY = """
import os, sys, time
from megarlhf.commands.cli import main
from megarlhf.rollout.vllm.engine import VllmEngine
from megarlhf.weights.{room} import {module} as module

def plant(engine, actor, **version):
    if os.environ["RANK"] == "1" and engine.weight_version == {after}:
        print("planted at", time.time(), flush=True)
        module.{name} = lambda *arguments, **options: [][0]
    return real(engine, actor, **version)

real, VllmEngine.{method} = VllmEngine.{method}, plant
raise SystemExit(main())
"""
"""A rank of the real command; rank 1 loses a function of `module` at the call of `method` after version `after`."""

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "rl": (
        "rl",
        {"room": "transport", "module": "reshard", "name": "_copy_inside", "method": "update_weights", "after": 0},
        "transport.reshard.TransferError: rank 1: IndexError:",
    ),
    "generate": (
        "generate",
        {"room": "checks", "module": "certificate", "name": "replica_digests", "method": "verify_weights", "after": 0},
        "checks.certificate.CertificateError:",
    ),
}


def configured(command: str, two_layers: dict[str, Path], data: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    cfg = config({**two_layers, "other": two_layers["scorer"]}, data["prompts"], {"pp": 2})
    cfg["run"] = {"dir": str(tmp_path / "run"), "nproc": 2}
    cfg["rollout"] |= {"engine": "vllm", "parallel": {"tp": 2}}
    if command == "generate":
        cfg = {name: cfg[name] for name in ("run", "actor", "data", "rollout")}
        del cfg["actor"]["optim"]
        cfg["rollout"]["num_samples_per_prompt"] = 1  # greedy ones would be equal
    return cfg


def broken_transfer(runtime: Runtime, *argv: str) -> tuple[str, bool]:
    """Of a command in which rank 1 loses `_copy_inside` at the second update of weights: the error that ends it, and
    whether it says that it came while another was handled."""
    from megarlhf.weights.transport import reshard

    def lose() -> None:
        if runtime.rank == 1:
            stack.enter_context(mock.patch.object(reshard, "_copy_inside", side_effect=lost))

    lost = IndexError("list index out of range")
    with contextlib.ExitStack() as stack:
        stack.enter_context(at_call(2, "megarlhf.rollout.vllm.engine:VllmEngine", "update_weights", lose))
        try:
            command_status(runtime, *argv)
        except reshard.TransferError as error:
            return str(error), error.__context__ is not None and not error.__suppress_context__
    raise AssertionError("the command came to its end")


def test_every_rank_ends_with_the_reason(two_layers, data, fresh_ranks, tmp_path) -> None:
    """The transfer after the first step breaks on rank 1; nothing is exported, and the step is not logged."""
    first, second = fresh_ranks.run(
        2, broken_transfer, *argv_of("rl", configured("rl", two_layers, data, tmp_path), tmp_path / "cfg.yaml")
    )
    assert first == second == ("rank 1: IndexError: list index out of range", False)
    assert not (tmp_path / "run/checkpoints").exists()
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_command_ends_at_once_with_the_reason(case, two_layers, data, tmp_path) -> None:
    """A step's transfer breaks on rank 1 in rl, its certificate in generate: rank 0 says so last and nothing else, the
    command fails within seconds of the fault, and leaves neither a checkpoint nor responses."""
    command, fault, reason = CASES[case]
    cfg = configured(command, two_layers, data, tmp_path)
    (tmp_path / "faulty.py").write_text(FAULTY.format(**fault))
    call = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(tmp_path / "faulty.py")]
    done = python(*call, *argv_of(command, cfg, tmp_path / "cfg.yaml"))
    ended = time.time()
    planted = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("planted at")]
    assert len(planted) == 1, done.stderr[-5000:]
    assert ended - planted[0] < 60
    assert done.returncode != 0
    last = [line for line in done.stderr.splitlines() if line.startswith("[rank0]: ")][-1]
    assert last.startswith(f"[rank0]: megarlhf.weights.{reason}"), done.stderr[-5000:]
    assert not missing_names(last, "rank 1", "IndexError"), last
    assert "During handling of the above exception" not in done.stderr
    assert not (tmp_path / "run/checkpoints").exists()
    assert not (tmp_path / "run/responses.jsonl").exists()
    if command == "rl":
        assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0]
