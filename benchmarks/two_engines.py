"""Two ranks for two engines of vLLM, and responses of given lengths, which vLLM does not know beforehand."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as mp

from benchmarks.machine import ROOT
from benchmarks.packing_workload import Sizes, write_model
from megarlhf.runtime import RankInfo, free_port, initialize, shutdown


def on_two_ranks(measure: Callable[..., Any], sizes: Sizes, load: Any, rounds: int) -> Any:
    """Result of `measure(runtime, model, load, rounds)` on the first of two ranks of one thread, as JSON has it."""
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        return on_ranks(2, measure, write_model(Path(folder) / "model", sizes), load, rounds)


def on_ranks(count: int, measure: Callable[..., Any], model: Path, load: Any, rounds: int) -> Any:
    """The same of any number of ranks, and of a model that is there."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        out = Path(folder) / "found.json"
        mp.spawn(_run_rank, (count, free_port(), measure, model, load, rounds, out), nprocs=count)
        return json.loads(out.read_text())


def _run_rank(
    rank: int, count: int, port: int, measure: Callable[..., Any], model: Path, load: Any, rounds: int, out: Path
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    runtime = initialize(RankInfo(rank=rank, local_rank=rank, world_size=count, local_world_size=count), seed=0)
    torch.set_num_threads(1)
    found = measure(runtime, model, load, rounds)
    if runtime.is_main:
        out.write_text(json.dumps(found))
    shutdown()


@contextlib.contextmanager
def planted(lengths: Sequence[int]) -> Iterator[None]:
    """Scope in which the response of row n ends when it has lengths[n] tokens, earlier parts included."""
    from megarlhf.rollout import requests
    from megarlhf.rollout.responses import ResponsePart, Sampling
    from megarlhf.rollout.vllm import engine as vllm_engine
    from megarlhf.rollout.vllm import generate_loop

    @dataclasses.dataclass(frozen=True)
    class PlantedPart(ResponsePart):
        length: int

    def whole_rows(prompts: Any, seeds: Any, parts: Sequence[ResponsePart]) -> requests.WholeRows:
        limited = [
            PlantedPart(part.so_far, min(part.until, length), length)
            for part, length in zip(parts, lengths, strict=True)
        ]
        return requests.WholeRows(prompts, seeds, limited)

    def response_of(output: Any, sampling: Sampling, version: int, part: PlantedPart) -> Any:
        drawn = len(part.so_far) + len(output.outputs[0].token_ids)
        return generate_loop.response_so_far(output, version, finished=drawn == part.length < sampling.max_tokens)

    with (
        mock.patch.object(vllm_engine, "WholeRows", whole_rows),
        mock.patch.object(generate_loop, "response_of", response_of),
    ):
        yield
