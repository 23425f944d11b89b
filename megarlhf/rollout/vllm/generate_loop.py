"""Loop over the steps of a vLLM engine, from the first request to the last response.

The ranks of an engine take the same steps, and agree after each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.rollout.engine import EngineFailure, FinishedResponses, Response, ResponsePart, Sampling
from megarlhf.rollout.prompt_queue import NOTHING, PromptQueue

log = logging.getLogger(__name__)

Steps = Generator[tuple[int, int], int, None]
"""Yields the amount of unfinished work, and the queue number that this rank has taken, or `NOTHING`. Receives the
number that a rank of the engine has taken."""


def run_requests(
    engine: Any,
    enqueue: Callable[[Sequence[int]], list[str]],
    feed: PromptQueue,
    sampling: Sampling,
    version: int,
    bank: FinishedResponses,
    should_stop: Callable[[], bool] | None,
    group: dist.ProcessGroup | None,
    place: int = 0,
    num_places: int = 1,
    *,
    part_of: Callable[[int], ResponsePart] | None = None,
) -> bool:
    """Generate responses to the feed's rows. A finished response goes into the bank.

    Every rank of an engine sees all responses. The rank at `place` of `num_places` keeps every num_places-th row.

    engine:  vLLM's `LLMEngine`
    version: version of the weights that it holds
    enqueue: hands rows to vLLM and returns the names of the requests
    part_of: part of a row's response that is drawn; default: the whole response

    Returns: whether it was stopped. The requests are then aborted, and the engine can take others.
    """
    requests: dict[int, str] = {}
    row_of: dict[str, int] = {}
    mine: set[int] = set()
    part = part_of or (lambda row: ResponsePart((), sampling.max_tokens))

    def begin(rows: Sequence[int]) -> None:
        for name, row in zip(enqueue(rows) if rows else (), rows, strict=True):
            if len(requests) % num_places == place:
                mine.add(row)
            requests[row] = name
            # vLLM appends a suffix to make a name unique; outputs have the name without it.
            row_of[name.split("-")[0]] = row

    def steps() -> Steps:
        begin(feed.first)
        while (unfinished := engine.get_num_unfinished_requests()) or feed.is_open:
            wants = feed.is_open and feed.wants_more(unfinished, has_room(engine))
            number = yield unfinished + feed.is_open, feed.ask() if wants else NOTHING
            if number != NOTHING:
                begin(feed.take(number))
            for output in engine.step() if engine.get_num_unfinished_requests() else ():
                row = row_of[output.request_id]
                if output.finished:
                    if row in mine:
                        bank.add(row, response_of(output, sampling, version, part(row)))
                elif sampling.stop is not None and part(row).ends(sampling, output.outputs[0].token_ids):
                    if row in mine:
                        bank.add(row, response_so_far(output, version, finished=True))
                    engine.abort_request([requests[row]], internal=True)

    stopped = run_in_lockstep(steps(), should_stop, group)
    if stopped:
        feed.close()
        engine.abort_request(list(requests.values()), internal=True)
    return stopped


def has_room(engine: Any) -> bool:
    """Whether vLLM's batch can take one more request: none waits, and fewer run than the limit."""
    running, waiting = engine.engine_core.engine_core.scheduler.get_request_counts()
    return bool(not waiting and running < engine.vllm_config.scheduler_config.max_num_seqs)


def response_of(output: Any, sampling: Sampling, version: int, part: ResponsePart | None = None) -> Response:
    """The tokens of a finished request. Raises: EngineFailure unless it ended with an end token or at the limit."""
    part = part or ResponsePart((), sampling.max_tokens)
    sampled = output.outputs[0]
    tokens = list(sampled.token_ids)
    by_token, ended = bool(tokens) and tokens[-1] in sampling.end_ids, part.ends(sampling, tokens)
    expected = "stop" if by_token else "length" if len(tokens) == part.max_tokens else "neither"
    if sampled.finish_reason != expected:
        raise EngineFailure(
            f"vLLM ended a request for the reason {sampled.finish_reason!r} after {len(tokens)} of at most "
            f"{part.max_tokens} tokens, {'with' if by_token else 'without'} an end token"
        )
    return response_so_far(output, version, finished=ended)


def response_so_far(output: Any, version: int, *, finished: bool) -> Response:
    """Tokens and log-probs of a request so far, all drawn by one version of the weights."""
    sampled = output.outputs[0]
    tokens, flat = list(sampled.token_ids), sampled.logprobs
    # Flat lists of numbers; the first entry of a position is the sampled token.
    if [flat.token_ids[n] for n in flat.start_indices] != tokens:
        raise EngineFailure("vLLM's log-probs belong to other tokens than the ones that it returns")
    logprobs = [flat.logprobs[n] for n in flat.start_indices]
    return Response(tokens, logprobs, finished, versions=((version, len(tokens)),))


def run_in_lockstep(
    steps: Steps, should_stop: Callable[[], bool] | None = None, group: dist.ProcessGroup | None = None
) -> bool:
    """Take all steps, or stop early if a rank of `group` is asked to. Returns whether it stopped early.

    A step has vLLM's own collectives inside. After each step one all-reduce of five numbers tells whether a rank
    failed, whether one was asked to stop, whether all have the same amount of work left, and which queue number the
    engine's first rank has taken. `group` communicates on the CPU; None: one rank alone.

    If a rank fails between two collectives of a step, the others wait inside that step and cannot be told. Therefore
    the reason is logged at once.

    Raises: the rank's own failure; EngineFailure when another rank failed, or the ranks have drifted apart.
    """
    taken: int | None = None
    while True:
        failure, unfinished, number = None, 0, NOTHING
        try:
            unfinished, number = next(steps) if taken is None else steps.send(taken)
        except StopIteration:
            pass
        except Exception as error:  # the other ranks have to learn of any error
            log.error("the rollout engine failed on rank %d", dist.get_rank(), exc_info=error)
            failure = error
        stop = should_stop is not None and should_stop()
        flags = torch.tensor([failure is not None, stop, unfinished, -unfinished, number], dtype=torch.int64)
        if group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        failed, stop, most, least = (int(flags[0]), bool(flags[1]), int(flags[2]), -int(flags[3]))
        taken = int(flags[4])
        if failure is not None:
            raise failure
        if failed:
            raise EngineFailure("another rank of the same engine failed")
        if most != least:
            raise EngineFailure(
                f"the ranks of the engine have drifted apart: {least} to {most} requests are unfinished"
            )
        if stop or not most:
            return bool(most)
