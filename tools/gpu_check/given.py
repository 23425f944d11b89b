"""Responses that are given, in place of an engine: the same tokens on every machine, at every layout and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from megarlhf.layout import split_evenly
from megarlhf.models.build import ModelShard
from megarlhf.parallel.device_memory import Offloadable
from megarlhf.rollout.engine import gather_rollouts
from megarlhf.rollout.requests import RequestSource
from megarlhf.rollout.responses import FinishedResponses, Response, ResponsePart, Sampling
from megarlhf.rollouts import Rollouts
from megarlhf.runtime import Runtime
from megarlhf.weights.checks.certificate import Certificate

FIRST_WORD, WORDS = 4, 12
"""Of the demo's tokenizer: the digits, + and =."""


def response(seed: int, sampling: Sampling, version: int) -> Response:
    """A function of the sample's seed: 3 tokens up to the longest, with an end where it is shorter."""
    length = 3 + seed % (sampling.max_tokens - 2)
    tokens = [FIRST_WORD + (seed // 7 + seed % 11 * k + k * k) % WORDS for k in range(length)]
    finished = length < sampling.max_tokens
    if finished:
        tokens[-1] = sampling.end_ids[0]
    return Response(tokens, [-math.log(WORDS)] * length, finished, ((version, length),))


class GivenResponses:
    """A `RolloutEngine`; each rank answers for an equal share."""

    rebuilds, local_seconds = 0, 0.0
    cache_tokens: int | None = None

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self.weight_version = runtime, -1

    def needs(self, *, to_generate: bool) -> Sequence[Offloadable]:
        return ()

    def update_weights(self, actor: ModelShard, version: int) -> None:
        self.weight_version = version

    def verify_weights(self, actor: ModelShard) -> Certificate | None:
        return None

    def generate(
        self,
        prompts: Sequence[Tensor],
        seeds: Sequence[int],
        sampling: Sampling,
        *,
        parts: Sequence[ResponsePart] | None = None,
        bank: FinishedResponses | None = None,
        should_stop: Callable[[], bool] | None = None,
        conversations: RequestSource | None = None,
    ) -> Rollouts:
        """Whole responses: the checks draw no slices."""
        own = split_evenly(len(prompts), self._runtime.world_size)[self._runtime.rank]
        mine = {n: response(seeds[n], sampling, self.weight_version) for n in own}
        return gather_rollouts(mine, len(prompts), self._runtime.device)

    def close(self) -> None: ...
