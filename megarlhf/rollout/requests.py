"""The requests of one engine of vLLM's, from the first step to the last.

The ranks of an engine take the same steps, and agree after each of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.rollout.engine import EngineFailure, KeptResponses, Response, Sampling

log = logging.getLogger(__name__)


def draw(
    engine: Any,
    enqueue: Callable[[], list[str]],
    rows: Sequence[int],
    sampling: Sampling,
    bank: KeptResponses,
    should_stop: Callable[[], bool] | None,
    group: dist.ProcessGroup | None,
    mine: Collection[int] | None = None,
) -> bool:
    """Run the requests that `enqueue` makes of these rows; each response goes into the bank when it is finished.

    `mine`: the rows whose responses this rank reads and answers for, of an engine of several ranks; None: all.
    `engine` is vLLM's `LLMEngine`; `enqueue` returns the names of the requests. Returns whether it was stopped: the
    requests are then aborted, and the engine takes others.
    """
    requests: list[str] = []
    mine = rows if mine is None else mine

    def steps() -> Iterator[int]:
        requests.extend(enqueue())
        # An output bears the number of the request, without what vLLM appends to make the name unique.
        row_of = {request.split("-")[0]: row for request, row in zip(requests, rows, strict=True)}
        while unfinished := engine.get_num_unfinished_requests():
            yield unfinished
            for output in engine.step():
                row = row_of[output.request_id]
                if output.finished:
                    if row in mine:
                        bank.add(row, response_of(output, sampling))
                elif sampling.stop is not None and sampling.ends(output.outputs[0].token_ids):
                    if row in mine:
                        bank.add(row, response_so_far(output, finished=True))
                    engine.abort_request([requests[rows.index(row)]], internal=True)

    stopped = run_in_lockstep(steps(), should_stop, group)
    if stopped:
        engine.abort_request(requests, internal=True)
    return stopped


def response_of(output: Any, sampling: Sampling) -> Response:
    """Raises: EngineFailure unless it ended with an end token, or else has as many tokens as it may have."""
    sampled = output.outputs[0]
    tokens = list(sampled.token_ids)
    by_token, ended = bool(tokens) and tokens[-1] in sampling.end_ids, sampling.ends(tokens)
    expected = "stop" if by_token else "length" if len(tokens) == sampling.max_tokens else "neither"
    if sampled.finish_reason != expected:
        raise EngineFailure(
            f"vLLM ended a request for the reason {sampled.finish_reason!r} after {len(tokens)} of at most "
            f"{sampling.max_tokens} tokens, {'with' if by_token else 'without'} an end token"
        )
    return response_so_far(output, finished=ended)


def response_so_far(output: Any, *, finished: bool) -> Response:
    """Of a request in whatever state."""
    sampled = output.outputs[0]
    tokens, flat = list(sampled.token_ids), sampled.logprobs
    # Lists of numbers in place of objects for each token; the first of a position is that of the token that was drawn.
    if [flat.token_ids[n] for n in flat.start_indices] != tokens:
        raise EngineFailure("vLLM's log-probs are of other tokens than those that it returns")
    return Response(tokens=tokens, logprobs=[flat.logprobs[n] for n in flat.start_indices], finished=finished)


def run_in_lockstep(
    steps: Iterator[int], should_stop: Callable[[], bool] | None = None, group: dist.ProcessGroup | None = None
) -> bool:
    """Take the steps to their end, or until a rank of `group` is asked to stop; returns whether that was so.

    A step is what ranks do together, with collectives of their own inside; it yields the number of requests that are
    not finished. One all-reduce of four numbers after each step tells whether a rank failed, whether one was asked to
    stop, and whether all have the same number of requests. `group` communicates on the CPU; None is a rank alone.

    A rank that fails between two collectives of a step leaves the others waiting inside it: this cannot be agreed on.
    So the reason goes into the log at once.

    Raises: the rank's own failure; EngineFailure when another rank failed, or the ranks have drifted apart.
    """
    while True:
        failure, unfinished = None, 0
        try:
            unfinished = next(steps, 0)
        except Exception as error:  # whatever it is, the other ranks have to learn of it
            log.error("the rollout engine failed on rank %d", dist.get_rank(), exc_info=error)
            failure = error
        stop = should_stop is not None and should_stop()
        flags = torch.tensor([failure is not None, stop, unfinished, -unfinished], dtype=torch.int64)
        if group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        failed, stop, most, least = (int(flags[0]), bool(flags[1]), int(flags[2]), -int(flags[3]))
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
