"""What the rank processes do with rollouts that are cut off, go on, or lose their engine."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megarlhf.config import RoleConfig, RolloutConfig
from megarlhf.models.role import build_role
from megarlhf.models.settings import DTYPES
from megarlhf.parallel.mesh import GroupCache
from megarlhf.rollout import megatron_engine
from megarlhf.rollout.balance import EngineAssignment
from megarlhf.rollout.bank import RolloutBank, StepBank
from megarlhf.rollout.engine import RolloutInterrupted
from megarlhf.rollout.requests import EngineRequest
from megarlhf.rollout.responses import FinishedResponses, Sampling, sample_seed
from megarlhf.rollout.restarting import RestartingEngine
from megarlhf.rollout.vllm import engine as vllm_engine
from megarlhf.rollout.vllm.generate_loop import GenerateLoop
from megarlhf.rollouts import Rollouts
from megarlhf.runtime import Runtime
from tests.tables import make_response

EOS, STEP = 2, 7
SAMPLING = Sampling(max_tokens=12, temperature=1.0, end_ids=(EOS, 3))
PROMPTS = [torch.tensor([1] + [6 + (7 * n * n + 3 * k) % 10 for k in range(3 + n % 5)]) for n in range(12)]
# Longer than two blocks of vLLM's prefix cache (128 tokens on a CPU).
PROMPTS[5] = torch.tensor([1] + [6 + (7 * k * k + 3 * k) % 10 for k in range(290)])
SEEDS = [sample_seed(0, STEP, n) for n in range(len(PROMPTS))]

PAIRED = PROMPTS[:8]
"""Two samples of each are drawn where engines share them."""

Rows = list[tuple[list[int], list[float], bool]]


def _rows(rollouts: Rollouts) -> Rows:
    """Tokens, log-probs and whether it ended; equal only if all bits are."""
    columns = zip(rollouts.responses.rows(), rollouts.logprobs.rows(), rollouts.finished_N.tolist(), strict=True)
    return [(tokens.tolist(), logprobs.tolist(), ended) for tokens, logprobs, ended in columns]


class _Session:
    """An actor, and an engine with its weights that is built anew when it fails."""

    def __init__(
        self,
        runtime: Runtime,
        model: str,
        engine: str,
        tp: int,
        parallel: dict[str, int],
        dtype: str = "fp32",
        **options: Any,
    ) -> None:
        from megarlhf.rollout.megatron_engine import MegatronEngine

        section = RoleConfig.model_validate({"model": {"path": model, "dtype": dtype}, "parallel": parallel})
        role = build_role("actor", section, "lm", GroupCache(runtime), seed=0)
        self.runtime, self.actor = runtime, role.shard
        settings = RolloutConfig.model_validate(
            {"max_response_tokens": SAMPLING.max_tokens, "parallel": {"tp": tp}, **options}
        )
        self.built: list[weakref.ref[Any]] = []

        def build() -> Any:
            if engine == "megatron":
                return MegatronEngine(self.actor, 2, role.parts)
            assert all(memory() is None for memory in self.built), "the failed engine still holds its memory"
            made = vllm_engine.VllmEngine(settings, role, DTYPES[dtype], 320 - SAMPLING.max_tokens)
            runner = made._llm.llm_engine.model_executor.driver_worker.worker.model_runner
            self.built = [weakref.ref(runner.kv_caches[0]), weakref.ref(next(iter(made._parameters.values())))]
            return made

        self.engine = RestartingEngine(build, 2)
        self.engine.update_weights(self.actor, STEP)
        self.engine.verify_weights(self.actor)

    def share(self, balance: str) -> None:
        """From here on engines of vLLM's share the rows so; the other engine has nothing to share."""
        if isinstance(engine := self.engine.engine, vllm_engine.VllmEngine):
            engine._rollout = engine._rollout.model_copy(update={"balance": balance})

    def draw(self, **options: Any) -> Rows:
        return _rows(self.engine.generate(PROMPTS, SEEDS, SAMPLING, **options))


class _Counting(StepBank):
    """Counts, on all ranks, what is added to a bank; asks to stop when `limit` responses were added on this rank."""

    limit: float = float("inf")
    added: list[int]

    @staticmethod
    def of(kept: StepBank, limit: float = float("inf")) -> _Counting:
        kept.__class__ = _Counting
        assert isinstance(kept, _Counting)
        kept.limit, kept.added = limit, []
        return kept

    def add(self, row: int, response: Any) -> None:
        super().add(row, response)
        self.added.append(row)

    def full(self) -> bool:
        return len(self.added) >= self.limit

    def of_all_ranks(self) -> list[int]:
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, self.added)
        return sorted(row for part in rows for row in part)


def _opened(folder: str, limit: float = float("inf"), fingerprint: str = "weights 7") -> _Counting:
    bank = RolloutBank(Path(folder))
    return _Counting.of(
        bank.open(STEP, fingerprint=fingerprint, sampling=SAMPLING, prompts=PROMPTS, seeds=SEEDS), limit
    )


def cut_off_and_continued(
    runtime: Runtime,
    model: str,
    engine: str,
    tp: int,
    parallel: dict[str, int],
    dtype: str,
    folder: str,
    limits: list[int],
) -> dict[str, Any]:
    """A rollout without interruption; and one that is cut off once for each limit, and then goes to its end.

    A limit is a number of responses of a rank in that opening, after which it asks to stop: with vLLM rank 0 alone. It
    is cut off with fixed shares, of which something is left then, and goes on on demand.
    """
    session = _Session(runtime, model, engine, tp, parallel, dtype)
    seen: dict[str, Any] = {"whole": session.draw(), "again": session.draw(), "added": [], "interrupted": []}
    session.share("fixed")
    for limit in limits:
        with _opened(folder, limit) as kept:
            try:
                asks = runtime.rank == 0 or engine == "megatron"
                session.draw(bank=kept, should_stop=kept.full if asks else lambda: False)
            except RolloutInterrupted as interruption:
                seen["interrupted"].append((interruption.num_finished, interruption.num_samples))
            seen["added"].append((kept.num_taken_over, kept.of_all_ranks()))
    session.share("on_demand")
    seen["alone"] = session.draw(bank=_all_but_the_longest(runtime, seen["whole"]))
    seen["clean"] = session.draw()  # the engine that was interrupted is as good as before
    session.engine.update_weights(session.actor, STEP)
    with _opened(folder) as kept:
        seen["continued"] = session.draw(bank=kept)
        seen["added"].append((kept.num_taken_over, kept.of_all_ranks()))
    with _opened(folder) as kept:
        seen["from_bank"] = session.draw(bank=kept)
        seen["added"].append((kept.num_taken_over, kept.of_all_ranks()))
    session.engine.close()
    seen["group"] = dist.is_initialized()
    return seen


def _all_but_the_longest(runtime: Runtime, whole: Rows) -> FinishedResponses:
    """Holds all rows but for one for each of two engines, which then computes with a single row at a time."""
    rows = sorted(range(len(whole)), key=lambda row: len(whole[row][0]))[:-2]
    return FinishedResponses({row: make_response(*whole[row], STEP) for row in rows} if runtime.is_main else {})


def forwards_of_a_rollout(runtime: Runtime, model: str) -> tuple[list[int], int]:
    """How long each response of the engine `megatron` is, and how many micro-batches of two rows it has run."""
    session, run = _Session(runtime, model, "megatron", 1, {}), list[int]()
    real = megatron_engine.forward_only

    def counted(module: Any, mesh: Any, batches: Sequence[Any], score: Any) -> Any:
        run.append(len(batches))
        return real(module, mesh, batches, score)

    with mock.patch.object(megatron_engine, "forward_only", counted):
        rows = session.draw()
    return [len(tokens) for tokens, _, _ in rows], sum(run)


def continued(runtime: Runtime, model: str, engine: str, tp: int, parallel: dict[str, int], folder: str) -> Any:
    """What another run, perhaps of another layout, makes of a bank."""
    session = _Session(runtime, model, engine, tp, parallel)
    with _opened(folder) as kept:
        seen = session.draw(bank=kept), kept.num_taken_over, kept.of_all_ranks()
    session.engine.close()
    return seen


@contextmanager
def _failing(runtime: Runtime, session: _Session, where: str, ranks: tuple[int, ...], call: int) -> Iterator[list[int]]:
    """The engine raises in one call on these ranks, after what it does there; yields the calls so far of this rank."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    owner, name = {"step": (LLMEngine, "step"), "forward": (CPUModelRunner, "_model_forward")}[where]
    real, calls = getattr(owner, name), [0]

    def fail(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        result = real(*arguments, **options)
        if calls[0] == call and runtime.rank in ranks:
            raise RuntimeError(f"planted in {where}")
        return result

    setattr(owner, name, fail)
    try:
        yield calls
    finally:
        setattr(owner, name, real)


@contextmanager
def _counted_rows() -> Iterator[list[int]]:
    """The number of rows that this rank's engine has begun in each attempt."""
    real, drawn = vllm_engine.GenerateLoop, list[int]()

    def counting(
        engine: Any, enqueue: Callable[[Sequence[EngineRequest]], list[str]], *rest: Any, **named: Any
    ) -> GenerateLoop:
        drawn.append(0)

        def counted(requests: Sequence[EngineRequest]) -> list[str]:
            drawn[-1] += len(requests)
            return enqueue(requests)

        return real(engine, counted, *rest, **named)

    with mock.patch.object(vllm_engine, "GenerateLoop", counting):
        yield drawn


def engine_failures(
    runtime: Runtime, model: str, tp: int, parallel: dict[str, int], faults: list[tuple[str, tuple[int, ...], int]]
) -> dict[str, Any]:
    """An undisturbed rollout; and one for each fault, with what was drawn anew after it and how often."""
    session = _Session(runtime, model, "vllm", tp, parallel)
    seen: dict[str, Any] = {"whole": session.draw(), "rows": [], "drawn": [], "rebuilds": []}
    for where, ranks, call in faults:
        with _counted_rows() as drawn, _failing(runtime, session, where, ranks, call) as calls:
            seen["rows"].append(session.draw())
            assert calls[0] >= call
        seen["drawn"].append(drawn)
        seen["rebuilds"].append(session.engine.rebuilds)
    gc.collect()
    session.engine.close()
    numbers = torch.ones(1)
    dist.all_reduce(numbers)  # the run's own group outlives its engines
    seen["sum"] = float(numbers)
    return seen


def balanced(runtime: Runtime, model: str, tp: int, dtype: str) -> dict[str, Any]:
    """Two samples of each prompt, drawn in each way of sharing them, two at a time in an engine; and once more with a
    queue where the second of two engines begins with the longest responses."""
    session = _Session(runtime, model, "vllm", tp, {"tp": 2}, dtype, vllm={"args": {"max_num_seqs": 2}})
    prompts = [prompt for prompt in PAIRED for _ in range(2)]
    seeds = [sample_seed(0, STEP, n) for n in range(len(prompts))]
    seen: dict[str, Any] = {"rows": {}, "held": {}, "idle": {}}

    def drawn(name: str, pause: float = 0.0) -> Rows:
        bank = FinishedResponses()
        rollouts = session.engine.generate(
            prompts, seeds, SAMPLING, bank=bank, should_stop=lambda: bool(time.sleep(pause))
        )
        seen["rows"][name], seen["held"][name] = _rows(rollouts), list(bank.held)
        seen["idle"][name] = rollouts.idle_seconds
        return seen["rows"][name]

    for balance in ("fixed", "length", "on_demand"):
        session.share(balance)
        rows = drawn(balance)
    by_length = sorted(range(len(rows)), key=lambda row: len(rows[row][0]))
    seen["first"], seen["last"], queue = by_length[:4], by_length[-4:], by_length[4:-4]
    dealt = EngineAssignment([seen["first"], seen["last"]], [(row,) for row in queue], max_unfinished=len(rows) // 2)
    with mock.patch.object(vllm_engine, "assign", return_value=dealt):
        drawn("uneven", pause=0.01)  # so that the number of steps decides, and not what else the machine does
    session.engine.close()
    return seen
