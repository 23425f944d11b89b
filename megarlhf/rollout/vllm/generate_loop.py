"""Loop over the steps of a vLLM engine, from the first request to the last response.

The ranks of an engine take the same steps, and agree after each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megarlhf.rollout.engine import EngineFailure
from megarlhf.rollout.prompt_queue import NOTHING, PromptQueue
from megarlhf.rollout.requests import EngineRequest, News, RequestSource
from megarlhf.rollout.responses import FinishedResponses, Response, ResponsePart, Sampling

log = logging.getLogger(__name__)

Steps = Generator[tuple[int, int, list[News]], tuple[int, list[News]], None]
"""Yields the amount of unfinished work, the queue number that this rank has taken, or `NOTHING`, and the news that have
come in on it. Receives the number that a rank of the engine has taken, and the news of all its ranks."""


@dataclass
class GenerateLoop:
    """Generation of the responses to a queue's rows. A finished response goes into the bank.

    Every rank of an engine sees all responses. The rank at `place` of `num_places` owns every num_places-th row.
    """

    engine: Any
    """vLLM's `LLMEngine`."""
    enqueue: Callable[[Sequence[EngineRequest]], list[str]]
    """Function that hands requests to vLLM and returns their names."""
    feed: PromptQueue
    source: RequestSource
    """Source of the requests of each row."""
    sampling: Sampling
    version: int
    """Version of the weights that the engine holds."""
    bank: FinishedResponses
    place: int = 0
    num_places: int = 1
    _asked: dict[str, tuple[str, int, ResponsePart]] = field(default_factory=dict)
    """Name, row and part of each unfinished request, by the name that outputs have."""
    _num_begun: int = 0

    def run(self, should_stop: Callable[[], bool] | None = None, group: dist.ProcessGroup | None = None) -> bool:
        """Generate all responses. Collective over the engine's ranks, which `group` connects.

        Returns: whether it was stopped. The requests are then aborted, and the engine can take others.
        """

        def is_stopped() -> bool:
            return bool(self.source.failure) or (should_stop is not None and should_stop())

        stopped = run_in_lockstep(self._steps(), is_stopped, group)
        if stopped:
            self.feed.close()
            self.engine.abort_request([name for name, _, _ in self._asked.values()], internal=True)
        return stopped

    def _steps(self) -> Steps:
        engine, feed, source = self.engine, self.feed, self.source
        self._begin(feed.first)
        while (running := engine.get_num_unfinished_requests()) + source.num_waiting or feed.is_open:
            # A row that waits for its environment leaves its place to another.
            wants = feed.is_open and feed.wants_more(running, has_room(engine))
            unfinished = running + source.num_waiting + feed.is_open
            number, news = yield unfinished, feed.ask() if wants else NOTHING, source.news()
            self._go_on(news)
            if number != NOTHING:
                self._begin(feed.take(number))
            if engine.get_num_unfinished_requests():
                self._step()
            elif source.num_waiting:
                source.wait()

    def _step(self) -> None:
        """Take one step of the engine."""
        for output in self.engine.step():
            name, row, part = self._asked[output.request_id]
            if output.finished:
                response = response_of(output, self.sampling, self.version, part)
            elif self.sampling.stop is not None and part.ends(self.sampling, output.outputs[0].token_ids):
                response = response_so_far(output, self.version, finished=True)
                self.engine.abort_request([name], internal=True)
            else:
                continue
            del self._asked[output.request_id]
            if (finished := self.source.drawn(row, response)) is not None:
                self.bank.add(row, finished)

    def _begin(self, rows: Sequence[int]) -> None:
        requests = []
        for row in rows:
            request = self.source.begin(row, mine=self._num_begun % self.num_places == self.place)
            requests += [] if request is None else [(row, request)]
            self._num_begun += 1
        self._ask(requests)

    def _go_on(self, news: Sequence[News]) -> None:
        requests = []
        for item in sorted(news, key=lambda item: item.row):
            outcome = self.source.take(item)
            if isinstance(outcome, EngineRequest):
                requests.append((item.row, outcome))
            elif outcome is not None:
                self.bank.add(item.row, outcome)
        self._ask(requests)

    def _ask(self, requests: Sequence[tuple[int, EngineRequest]]) -> None:
        names = self.enqueue([request for _, request in requests]) if requests else []
        for name, (row, request) in zip(names, requests, strict=True):
            # vLLM appends a suffix to make a name unique; outputs have the name without it.
            self._asked[name.split("-")[0]] = name, row, request.part


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

    A step has vLLM's own collectives inside. After each step one all-reduce of six numbers tells whether a rank failed,
    whether one was asked to stop, whether all have the same amount of work left, which queue number the engine's first
    rank has taken, and whether a rank has news, which are then gathered. `group` communicates on the CPU; None: one
    rank alone.

    If a rank fails between two collectives of a step, the others wait inside that step and cannot be told. Therefore
    the reason is logged at once.

    Raises: the rank's own failure; EngineFailure when another rank failed, or the ranks have drifted apart.
    """
    taken: tuple[int, list[News]] | None = None
    while True:
        failure, unfinished, number, news = None, 0, NOTHING, list[News]()
        try:
            unfinished, number, news = next(steps) if taken is None else steps.send(taken)
        except StopIteration:
            pass
        except Exception as error:  # the other ranks have to learn of any error
            log.error("the rollout engine failed on rank %d", dist.get_rank(), exc_info=error)
            failure = error
        stop = should_stop is not None and should_stop()
        numbers = [failure is not None, stop, unfinished, -unfinished, number, len(news)]
        flags = torch.tensor(numbers, dtype=torch.int64)
        if group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        failed, stop, most, least = (int(flags[0]), bool(flags[1]), int(flags[2]), -int(flags[3]))
        if group is not None and int(flags[5]):
            by_rank: list[list[News]] = [[] for _ in range(group.size())]
            dist.all_gather_object(by_rank, news, group=group)
            news = [item for of_rank in by_rank for item in of_rank]
        taken = int(flags[4]), news
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
