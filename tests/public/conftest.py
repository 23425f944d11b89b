"""A tiny model, its data and small configurations for scripts that import megarlhf only."""

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.tiny import write_tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer, with a tokenizer of digits."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama", num_layers=1)


@pytest.fixture
def sft(model, data, tmp_path):
    """Configuration of a short run in a folder of this test."""

    def config(name: str = "run", **sections: Any) -> dict[str, Any]:
        return {
            "run": {"dir": tmp_path / name},
            "actor": {"model": {"path": model}, "optim": {"lr": 1e-3}},
            "data": {"train": data["sft"], "max_prompt_tokens": 16, "max_response_tokens": 8},
            "train": {"num_steps": 2, "mini_batch_samples": 4, "max_tokens_per_micro_batch": 64},
            "checkpoint": {"background": False},
        } | sections

    return config


ROLLOUT = {"engine": "megatron", "num_samples_per_prompt": 2, "max_response_tokens": 6}
STEPS = {"num_steps": 2, "prompts_per_step": 2, "mini_batch_samples": 4, "max_tokens_per_micro_batch": 64}


@pytest.fixture
def loop(model, tmp_path):
    """Configuration of a short loop of the user's own."""

    def config(name: str = "loop", **sections: Any) -> dict[str, Any]:
        return {
            "run": {"dir": tmp_path / name},
            "actor": {"model": {"path": model}, "optim": {"lr": 1e-3}},
            "data": {"max_prompt_tokens": 16},
            "train": STEPS,
            "rollout": ROLLOUT,
            "checkpoint": {"background": False},
        } | sections

    return config


@pytest.fixture
def rl(loop, data):
    """Configuration of a short run of rl, with a reward function `MODULE:FUNCTION` that runs in the rank itself."""

    def config(rule: str, name: str = "rl", **sections: Any) -> dict[str, Any]:
        reward = {"kind": "rule", "rule": rule, "workers": 0, "check": "none"}
        prompts = {"train": data["prompts"], "max_prompt_tokens": 16}
        return loop(name) | {"data": prompts, "rewards": [reward], "algo": {"advantage": "grpo"}} | sections

    return config


@pytest.fixture
def on_two_ranks(monkeypatch):
    """Call a function of a module on two ranks of a launcher, and return what each returns."""

    def call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, **job}
        context = multiprocessing.get_context("forkserver")
        with ProcessPoolExecutor(2, mp_context=context) as ranks:
            futures = [ranks.submit(_as_rank, rank, environment, function, arguments) for rank in range(2)]
            return [future.result(timeout=120) for future in futures]

    return call


@pytest.fixture
def run_script():
    """Run a script in a process of its own, as `python SCRIPT ARGUMENTS` does, and return one of its variables. It is
    forked from a server that has imported torch."""

    def run(script: Path, variable: str, *arguments: str) -> Any:
        context = multiprocessing.get_context("forkserver")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            return process.submit(_run_script, script, variable, arguments, dict(os.environ)).result(timeout=120)

    return run


def _run_script(script: Path, variable: str, arguments: Sequence[str], environment: dict[str, str]) -> Any:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(script.parent)
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent)
    return runpy.run_path(str(script), run_name="__main__")[variable]


def _as_rank(rank: int, environment: dict[str, str], function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    return function(*arguments)
