"""The pretraining mix of rl: micro-batches of plain text in addition to those of the samples.

Both go through the same forward and backward, so that their gradients add up before the optimizer step. A micro-batch
has either texts or samples: the micro-batches of samples stay those for which the log-probs were computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megarlhf.columns import Ragged
from megarlhf.config import MicroBatchConfig, RLConfig
from megarlhf.data.sample_types import Encoder
from megarlhf.data.samples.order import batches_of
from megarlhf.data.samples.texts import Text
from megarlhf.data.tokenize.load import SetLoader
from megarlhf.models.role import Role
from megarlhf.parallel.micro_batch import MicroBatch, TokenSpans, repeat_on_micro_batch, scatter_to_micro_batch
from megarlhf.planning.data.encoders import indexed_options, text_encoder
from megarlhf.resume.claim.identity import digest_of_samples

WEIGHTS = "ptx_weights"
"""Column: the weight of each text token in the loss, 0 elsewhere."""


class PretrainingMix:
    """Texts, and the order in which the updates read them."""

    def __init__(self, texts: Sequence[Text], batch_size: int, seed: int) -> None:
        self.texts = texts
        self._order = batches_of(texts, batch_size, seed, "ptx.mini_batch_samples")

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._order.load_state_dict(state)

    def digest(self) -> str:
        """Digest of the texts as tokens."""
        return digest_of_samples(self.texts)

    def add_texts(
        self, role: Role, cfg: MicroBatchConfig, update: int, batches: Sequence[MicroBatch]
    ) -> tuple[list[MicroBatch], int]:
        """Micro-batches of an update, followed by this data-parallel rank's micro-batches of texts; and the number of
        tokens of all texts.

        update: number of the update in the run, from 0
        """
        texts = [torch.tensor(self.texts[n].tokens) for n in self._order.take(update)]
        tokens = Ragged.from_rows(texts, torch.int64)
        learnt_N = tokens.lengths_N - 1  # the first token of a text is not predicted
        weights_N = torch.full(learnt_N.shape, 1 / int(learnt_N.sum()), dtype=torch.float64)
        spans, whole = TokenSpans.responses(torch.ones_like(learnt_N), learnt_N), TokenSpans.whole(tokens.lengths_N)
        device = role.mesh.runtime.device
        mixed = [
            replace(batch, columns={**batch.columns, WEIGHTS: torch.zeros_like(batch.tokens_BS, dtype=torch.float64)})
            for batch in batches
        ]
        for layout in role.batching(cfg).layouts([(n,) for n in range(len(texts))], tokens.lengths_N):
            tokens_BS = scatter_to_micro_batch(layout, tokens, whole).to(device)
            empty = {name: column.new_zeros(tokens_BS.shape) for name, column in batches[0].columns.items()}
            weights_BS = repeat_on_micro_batch(layout, weights_N, spans, device)
            mixed.append(MicroBatch(tokens_BS, {**empty, WEIGHTS: weights_BS}, layout))
        return mixed, int(tokens.lengths_N.sum())


def pretraining_mix(cfg: RLConfig) -> PretrainingMix | None:
    """The configured mix; None without one. Raises: ValueError for data without a text of two tokens."""
    if cfg.ptx is None:
        return None
    encoder: Encoder[Any] = text_encoder(cfg)
    loader = SetLoader(cfg.data, encoder, Text, ("text",), cfg.run.dir, indexed_options(cfg))
    texts, _ = loader.whole(cfg.ptx.data)
    return PretrainingMix(texts, cfg.ptx.mini_batch_samples or cfg.train.mini_batch_samples, cfg.run.seed)
