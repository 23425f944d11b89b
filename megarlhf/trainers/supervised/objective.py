"""The part of a supervised command that is not the loop: what is learned, from which samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from megarlhf.architectures.placements import Head
from megarlhf.config import DPOConfig, RMConfig, RoleConfig, SFTConfig
from megarlhf.data.sample_types import Encoder
from megarlhf.data.samples.limits import require_fitting
from megarlhf.experience import Ragged
from megarlhf.models.role import Role
from megarlhf.models.weights import CHECKPOINTS, WeightSource
from megarlhf.observe.records.metrics import Metric
from megarlhf.parallel.device_memory import DeviceMemory
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch, MicroBatchLayout, TokenSpans, scatter_to_micro_batch
from megarlhf.parallel.step import Loss
from megarlhf.planning.data.encoders import encoder_of

Sample = TypeVar("Sample")
Metrics = dict[str, Metric]
ShouldStop = Callable[[], bool] | None
"""Asked on every rank between two parts of what may be left before it is complete."""


class Objective(ABC, Generic[Sample]):
    """Objective of a supervised command: what is learned, from which samples."""

    command: str
    role_name: str
    head: Head
    sample_type: type[Sample]
    sequence_fields: tuple[tuple[str, ...], ...]
    """The fields of token ids that each of a sample's sequences consists of."""
    sample_words: str
    """Name of what `num_tokens` counts, for messages."""

    def __init__(self, cfg: SFTConfig | RMConfig | DPOConfig, section: RoleConfig) -> None:
        self.cfg, self.section = cfg, section

    def encoder(self) -> Encoder[Sample]:
        """How records become samples."""
        encoder: Any = encoder_of(self.cfg)
        return cast(Encoder[Sample], encoder)

    @abstractmethod
    def sequences(self, sample: Sample) -> list[list[int]]:
        """The sample's sequences as token ids; they stay in one micro-batch, in this order."""

    def sequence_lengths(self, sample: Sample) -> list[int]:
        """Tokens of each of the sample's sequences."""
        return [len(tokens) for tokens in self.sequences(sample)]

    @property
    def has_frozen(self) -> bool:
        """Whether there is any of them."""
        return False

    def build_frozen(
        self,
        cache: GroupCache,
        trained: Role,
        weights: WeightSource = CHECKPOINTS,
        device_memory: DeviceMemory | None = None,
    ) -> list[Role]:
        """Build the roles that are read and not trained. Collective; called once, after the trained role is built."""
        return []

    def require_fitting(self, samples: Sequence[Sample], max_positions: int, source: str) -> None:
        """Raises: ValueError when a sequence does not fit the model's positions, or a sample a micro-batch."""
        model, budget = str(self.section.model.path), self.cfg.train.max_tokens_per_micro_batch
        require_fitting(
            samples, self.sequence_fields, positions=max_positions, model=model, budget=budget, source=source,
            parts=self.sample_words,
        )  # fmt: skip

    @property
    def stated(self) -> Mapping[str, Any]:
        """Keys of config.json in the role's exports; None: left out."""
        return {}

    @property
    def scores(self) -> bool:
        """Whether `scored` has anything to do."""
        return False

    def scored(self, role: Role, samples: Sequence[Sample], should_stop: ShouldStop = None) -> Sequence[Sample]:
        """The samples of a mini-batch, or all held-out ones, with what is computed of them before the loss, without
        gradients. Collective. Raises: see `validation_sums`."""
        return samples

    def columns(self, samples: Sequence[Sample], layout: MicroBatchLayout, device: torch.device) -> dict[str, Tensor]:
        """Columns that the loss reads of a micro-batch beside its tokens."""
        return {}

    def layouts_by_rank(self, role: Role, samples: Sequence[Sample]) -> list[list[MicroBatchLayout]]:
        """The micro-batches of the samples' sequences, numbered one after the other, by data-parallel rank."""
        lengths: list[int] = []
        groups: list[tuple[int, ...]] = []
        for sample in samples:
            own = self.sequence_lengths(sample)
            groups.append(tuple(range(len(lengths), len(lengths) + len(own))))
            lengths += own
        shared = [self.shared_length(sample) for sample in samples]
        lengths_N = torch.tensor(lengths, dtype=torch.int64)
        return role.batching(self.cfg.train).layouts_by_rank(groups, lengths_N, shared=shared if any(shared) else ())

    def shared_length(self, sample: Sample) -> int:
        """Tokens with which all sequences of a sample begin, known without looking at them."""
        return 0

    def micro_batches(
        self, role: Role, samples: Sequence[Sample], by_rank: Sequence[list[MicroBatchLayout]] | None = None
    ) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches of the samples, which it is about to compute.

        by_rank: `layouts_by_rank` of the samples, where they have been planned already
        """
        by_rank = self.layouts_by_rank(role, samples) if by_rank is None else by_rank
        device = role.mesh.runtime.device
        rows = [torch.tensor(tokens) for sample in samples for tokens in self.sequences(sample)]
        tokens = Ragged.from_rows(rows, torch.int64)
        whole = TokenSpans.whole(tokens.lengths_N)
        return [
            MicroBatch(
                tokens_BS=scatter_to_micro_batch(layout, tokens, whole).to(device),
                columns=self.columns(samples, layout, device),
                layout=layout,
            )
            for layout in role.batching(self.cfg.train).own(by_rank)
        ]

    def digests_beside(self, validation: Sequence[Sample]) -> dict[str, str]:
        """Digests of what else takes part in what is computed, by its name."""
        return {}

    @abstractmethod
    def training_loss(self, role: Role, samples: Sequence[Sample]) -> Loss:
        """The loss of a mini-batch, divided by a denominator of the whole mini-batch."""

    def validation_loss(self, role: Role, samples: Sequence[Sample]) -> Loss:
        """The loss that held-out samples are measured by."""
        return self.training_loss(role, samples)

    def training_metrics(self, sums: Mapping[str, float], samples: Sequence[Sample]) -> Metrics:
        """Metrics of a step beside loss, gradient norm, learning rate and tokens, from the loss's sums."""
        return {}

    @abstractmethod
    def validation_metrics(self, sums: Mapping[str, float], samples: Sequence[Sample]) -> Metrics:
        """Metrics of an evaluation, from the loss's sums; `loss` is among them."""

    def closing_report(
        self, role: Role, validation: Sequence[Sample], should_stop: ShouldStop
    ) -> tuple[Metrics, dict[str, Any]]:
        """Metrics of the last evaluation that need more than sums, and what is written to `calibration.json` (nothing
        where it is empty). Collective. Raises: Interrupted."""
        return {}, {}

    @property
    def rescales(self) -> bool:
        """Whether `rescale` is called after the last step, before the last evaluation and the last export, which are of
        the same model."""
        return False

    def measure_scale(self, role: Role, validation: Sequence[Sample], should_stop: ShouldStop) -> float:
        """Measure what `rescale` divides by; changes nothing. Collective.

        Raises: Interrupted."""
        raise NotImplementedError

    def rescale(self, role: Role, scale: float) -> str:
        """Change the weights other than by an update; returns what to tell the user."""
        raise NotImplementedError

    def rescaled(self, name: str) -> bool:
        """Whether `rescale` changes the parameter of this name."""
        return False
