"""An engine that is rebuilt when it fails, so that a failure costs the unfinished responses and not the run."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.models.build import ModelShard
from megarlhf.parallel.device_memory import Offloadable
from megarlhf.rollout.engine import EngineFailure, RolloutEngine, RolloutInterrupted, any_rank, missing_rows
from megarlhf.rollout.requests import RequestSource
from megarlhf.rollout.responses import FinishedResponses, ResponsePart, Sampling
from megarlhf.rollouts import Rollouts
from megarlhf.weights.checks.certificate import Certificate, CertificateError

log = logging.getLogger(__name__)


class RestartingEngine:
    """A rollout engine around another one, which `build` makes. Every call is collective.

    If the engine fails while it draws responses, it is closed and rebuilt, gets the actor's weights and is certified.
    Then the missing responses are drawn. If it fails while it takes over weights, it is rebuilt too. The actor must
    keep the weights of the last update until the next.
    """

    def __init__(self, build: Callable[[], RolloutEngine], max_rebuilds: int) -> None:
        """max_rebuilds: in one rollout. An update allows one; with 0 the first failure is raised."""
        self._build, self._max_rebuilds = build, max_rebuilds
        self._engine: RolloutEngine | None = build()
        self._actor: ModelShard | None = None
        self._certificate: Certificate | None = None
        self.rebuilds = 0

    @property
    def engine(self) -> RolloutEngine:
        """Current engine. Raises: EngineFailure if it could not be rebuilt."""
        if self._engine is None:
            raise EngineFailure("the rollout engine failed and could not be rebuilt; start the run again")
        return self._engine

    @property
    def weight_version(self) -> int:
        return self.engine.weight_version

    @property
    def local_seconds(self) -> float:
        return self.engine.local_seconds

    @property
    def cache_tokens(self) -> int | None:
        return self.engine.cache_tokens

    def needs(self, *, to_generate: bool) -> Sequence[Offloadable]:
        return self.engine.needs(to_generate=to_generate)

    def update_weights(self, actor: ModelShard, version: int) -> None:
        """Update the engine's weights.

        Raises: EngineFailure on every rank if the engine fails and may not be rebuilt, or the new one fails too.
        """
        self._actor = actor
        try:
            self.engine.update_weights(actor, version=version)
            return
        except EngineFailure as failure:
            if not self._max_rebuilds:
                raise
            reason = str(failure)
        self._rebuild(reason, version)

    def verify_weights(self, actor: ModelShard) -> Certificate | None:
        self._certificate = self.engine.verify_weights(actor)
        return self._certificate

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
        """Draw responses: see `RolloutEngine.generate`. Responses that are finished before a failure are kept, in
        `bank` or in memory.

        Raises: EngineFailure on every rank after more than `max_rebuilds` failures.
        """
        bank = FinishedResponses() if bank is None else bank
        for rebuilds in range(self._max_rebuilds + 1):
            try:
                return self.engine.generate(
                    prompts,
                    seeds,
                    sampling,
                    parts=parts,
                    bank=bank,
                    should_stop=should_stop,
                    conversations=conversations,
                )
            except EngineFailure as failure:
                # Kept as text: the traceback refers to the engine, whose memory the next one needs.
                reason = str(failure)
            if should_stop is not None and any_rank(should_stop()):
                raise RolloutInterrupted(len(prompts) - len(missing_rows(bank, len(prompts))), len(prompts))
            if rebuilds < self._max_rebuilds:
                self._rebuild(reason, self.weight_version)
        raise EngineFailure(
            f"{reason}\nThis was failure {self._max_rebuilds + 1} in one rollout, and rollout.max_engine_rebuilds = "
            f"{self._max_rebuilds}. Responses that were finished are in the rollout bank, if there is one"
        )

    def _rebuild(self, reason: str, version: int) -> None:
        engine, actor = self.engine, self._actor
        assert actor is not None, "an engine without weights has drawn responses"
        if dist.get_rank() == 0:
            log.warning("%s\nThe rollout engine is rebuilt; finished responses are kept", reason)
        self._engine = None
        with raise_on_all_ranks(lambda reasons: EngineFailure(f"{reason}\nIt cannot be closed: {'; '.join(reasons)}")):
            engine.close()
        del engine
        gc.collect()
        engine = self._build()
        engine.update_weights(actor, version=version)
        known, proof = self._certificate, engine.verify_weights(actor)
        if known is not None and proof is not None and known.version == version and known.digest != proof.digest:
            raise CertificateError(
                f"the actor's weights have digest {proof.digest}, and had {known.digest} when they were version "
                f"{version}: they changed after the engine got them, and its responses would come from two models"
            )
        self._engine = engine
        self.rebuilds += 1

    def close(self) -> None:
        self.engine.close()
