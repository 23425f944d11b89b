"""Interface of the supervised commands: samples, loss and metrics. The loop is common to all (`loop.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from megarlhf.architectures.placements import Head
from megarlhf.columns import Ragged
from megarlhf.config import DPOConfig, RMConfig, RoleConfig, SFTConfig
from megarlhf.data.sample_types import PAIR_SEQUENCES, Encoder, PairSample
from megarlhf.data.samples.limits import require_fitting
from megarlhf.models.role import Role
from megarlhf.models.weights import CHECKPOINTS, WeightSource
from megarlhf.observe.records.metrics import Metric
from megarlhf.parallel.device_memory import DeviceMemory
from megarlhf.parallel.loss import Loss
from megarlhf.parallel.mesh import GroupCache
from megarlhf.parallel.micro_batch import MicroBatch, MicroBatchLayout, TokenSpans, scatter_to_micro_batch
from megarlhf.planning.data.encoders import encoder_of

Sample = TypeVar("Sample")
Metrics = dict[str, Metric]
ShouldStop = Callable[[], bool] | None
"""Function that says whether to stop, called on every rank between two parts of work that can be interrupted."""


class Objective(ABC, Generic[Sample]):
    """Objective of a supervised command: its samples, its loss, and its metrics."""

    command: str
    role_name: str
    head: Head
    sample_type: type[Sample]
    sequence_fields: tuple[tuple[str, ...], ...]
    """For each sequence of a sample, the fields whose token ids it consists of."""
    sample_words: str
    """Description of a sample's tokens, for messages."""

    def __init__(self, cfg: SFTConfig | RMConfig | DPOConfig, section: RoleConfig) -> None:
        self.cfg, self.section = cfg, section

    def encoder(self) -> Encoder[Sample]:
        """Encoder of records into samples."""
        encoder: Any = encoder_of(self.cfg)
        return cast(Encoder[Sample], encoder)

    @abstractmethod
    def sequences(self, sample: Sample) -> list[list[int]]:
        """Sequences of a sample as token ids; they stay in one micro-batch, in this order."""

    def sequence_lengths(self, sample: Sample) -> list[int]:
        """Number of tokens of each sequence of a sample."""
        return [len(tokens) for tokens in self.sequences(sample)]

    @property
    def has_frozen(self) -> bool:
        """Whether `build_frozen` loads weights of another role."""
        return False

    def build_frozen(
        self,
        cache: GroupCache,
        trained: Role,
        weights: WeightSource = CHECKPOINTS,
        device_memory: DeviceMemory | None = None,
    ) -> list[Role]:
        """Build the roles that are not trained. Collective; called once, after the trained role is built."""
        return []

    def require_fitting(self, samples: Sequence[Sample], max_positions: int, source: str) -> None:
        """Raises: ValueError if a sequence exceeds the model's positions, or a sample exceeds a micro-batch."""
        require_fitting(
            samples,
            self.sequence_fields,
            positions=max_positions,
            model=str(self.section.model.path),
            budget=self.cfg.train.max_tokens_per_micro_batch,
            source=source,
            parts=self.sample_words,
        )

    @property
    def config_overrides(self) -> Mapping[str, Any]:
        """Keys of config.json in the role's exports; a key with None is left out."""
        return {}

    @property
    def scores(self) -> bool:
        """Whether `scored` adds anything to the samples."""
        return False

    def scored(self, role: Role, samples: Sequence[Sample], should_stop: ShouldStop = None) -> Sequence[Sample]:
        """Add values that the loss reads and that are computed before it, without gradients, to the samples of a
        mini-batch, or to all held-out ones. Collective. Raises: see `validation_sums`."""
        return samples

    def columns(self, samples: Sequence[Sample], layout: MicroBatchLayout, device: torch.device) -> dict[str, Tensor]:
        """Columns of a micro-batch that the loss reads beside the tokens."""
        return {}

    def layouts_by_rank(self, role: Role, samples: Sequence[Sample]) -> list[list[MicroBatchLayout]]:
        """Micro-batches of the samples' sequences, which are numbered one after the other, by data-parallel rank."""
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
        """Number of tokens, such as the prompt's, with which all sequences of a sample begin."""
        return 0

    def micro_batches(
        self, role: Role, samples: Sequence[Sample], by_rank: Sequence[list[MicroBatchLayout]] | None = None
    ) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches of the samples.

        by_rank: `layouts_by_rank` of the samples, if they are already planned
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

    def other_digests(self, validation: Sequence[Sample]) -> dict[str, str]:
        """Digests of other inputs of the computation, by name."""
        return {}

    @abstractmethod
    def training_loss(self, role: Role, samples: Sequence[Sample]) -> Loss:
        """Loss of a mini-batch, with a denominator of the whole mini-batch."""

    def validation_loss(self, role: Role, samples: Sequence[Sample]) -> Loss:
        """Loss on held-out samples."""
        return self.training_loss(role, samples)

    def training_metrics(self, sums: Mapping[str, float], samples: Sequence[Sample]) -> Metrics:
        """Further metrics of a step, from the loss's sums."""
        return {}

    @abstractmethod
    def validation_metrics(self, sums: Mapping[str, float], samples: Sequence[Sample]) -> Metrics:
        """Metrics of an evaluation, from the loss's sums; `loss` is among them."""

    def closing_report(
        self, role: Role, validation: Sequence[Sample], should_stop: ShouldStop
    ) -> tuple[Metrics, dict[str, Any]]:
        """Metrics of the last evaluation that need more than sums, and the content of `calibration.json`, which is not
        written if empty. Collective. Raises: Interrupted."""
        return {}, {}

    @property
    def rescales(self) -> bool:
        """Whether `rescale` is called after the last step, before the last evaluation and the last export."""
        return False

    def measure_scale(self, role: Role, validation: Sequence[Sample], should_stop: ShouldStop) -> float:
        """Measure the divisor of `rescale`; changes nothing. Collective. Raises: Interrupted."""
        raise NotImplementedError

    def rescale(self, role: Role, scale: float) -> str:
        """Change the weights without an update; returns a message."""
        raise NotImplementedError

    def rescaled(self, name: str) -> bool:
        """Whether `rescale` changes the parameter of this name."""
        return False


class PairObjective(Objective[PairSample]):
    """Objective on preference pairs: two sequences of a micro-batch, the chosen one before the rejected one."""

    sample_type, sequence_fields = PairSample, PAIR_SEQUENCES
    sample_words = "prompt and response, chosen and rejected together: a pair stays in one micro-batch"

    def sequences(self, sample: PairSample) -> list[list[int]]:
        """Chosen and rejected sequence, each with the prompt."""
        return [sample.prompt_tokens + response for response in (sample.chosen_tokens, sample.rejected_tokens)]

    def shared_length(self, sample: PairSample) -> int:
        return len(sample.prompt_tokens)
