"""Are there as many records as a batch takes? Else a sample would be in it twice, which a run refuses too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megarlhf.config import EvaluateConfig, GenerateConfig, PromptDataConfig, RLConfig, describe_sources
from megarlhf.config.data import PHASES
from megarlhf.data.sources.find import FoundSource
from megarlhf.planning.machine.capabilities import AnyConfig

_COUNTED_BYTES = 256 << 20
"""Of files whose lines are counted before a run."""


@dataclass(frozen=True)
class RecordsNeeded:
    """How many records a batch takes of `data.train`."""

    key: str
    """Of the configuration: what says it."""
    samples: int
    data: PromptDataConfig
    phase: int | None
    """Whose share of the records is read."""

    @staticmethod
    def of(command: str, cfg: AnyConfig) -> RecordsNeeded | None:
        """None for a command that reads its data once."""
        if isinstance(cfg, GenerateConfig | EvaluateConfig):
            return None
        key = "prompts_per_step" if isinstance(cfg, RLConfig) else "mini_batch_samples"
        phase = None if cfg.data.phases is None else PHASES[command]
        return RecordsNeeded(f"train.{key}", getattr(cfg.train, key), cfg.data, phase)

    def count(self, place: FoundSource) -> int | None:
        """How many records a source has; None where that cannot be told, or there are enough whatever its share."""
        least = 1 - (self.data.validation_share or 0)
        if self.phase is not None and (shares := self.data.phase_shares()) is not None:
            least *= shares[self.phase]
        return place.count_rows(_COUNTED_BYTES, math.ceil((self.samples + 1) / least) if least else 1)

    def require(self, counts: Sequence[int | None]) -> None:
        """`counts`: of each set. Raises: ValueError where a batch has more samples than there are records, or than a
        set has that it draws from by its weight."""
        usable = [None if count is None else self._in_phase(count) for count in counts]
        weights = [source.weight for source in self.data.train if source.weight is not None]
        for source, weight, most in zip(self.data.train, weights, usable, strict=False):
            if most is not None and (drawn := math.ceil(weight / sum(weights) * self.samples)) > most:
                raise ValueError(
                    f"{self.key} = {self.samples}: {source.words} gives {drawn} samples of a batch by its weight, "
                    f"{weight:g} of {sum(weights):g}, and has {most} records: some would be in it twice; lower "
                    f"{self.key} or the weight, or give more data"
                )
        if None in usable:
            return
        total = sum(most or 0 for most in usable)
        if self.data.validation_share is not None:
            total = round(total * (1 - self.data.validation_share))
        if self.samples > total:
            raise ValueError(
                f"{self.key} = {self.samples}: a batch would hold some of the {total} records of data.train = "
                f"{describe_sources(self.data.train)} twice; set {self.key} to at most {total}, or give more data"
            )

    def _in_phase(self, count: int) -> int:
        """As `selection.phase_share` cuts them."""
        shares = self.data.phase_shares()
        if shares is None or self.phase is None:
            return count
        first, end = (round(sum(shares[:n]) * count) for n in (self.phase, self.phase + 1))
        return end - first
