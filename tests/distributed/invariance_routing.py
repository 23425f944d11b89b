"""Which experts each token of an update has been sent to, so that two layouts can be compared token by token.

A token is known by what its router sees, which is all of its sequence up to it: the layout of a micro-batch says where
sequences stand in its grid, padding has no key.

Legend: B rows of a micro-batch, S columns, S' those of this rank, T = S' x B, E experts.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megarlhf.models.experts import Router
from megarlhf.models.role import Role
from megarlhf.parallel import step
from megarlhf.parallel.chunks import chunks_of

Choice = tuple[str, int, int, int]
"""Role, update, layer, and the token's key."""
Choices = dict[Choice, frozenset[int]]
"""The experts of each as the bits of a number: of several, where several forwards did not agree."""
NO_TOKEN = 0


@dataclass
class Routing:
    """What the routers of a rank have decided in its updates."""

    choices: Choices = field(default_factory=dict)
    gap: float = float("inf")
    """By how much, at least, the last expert taken was above the first one left, in its logit."""
    now: tuple[str, int] | None = None
    """Role and update whose gradients are being accumulated."""
    _keys: dict[int, Tensor] = field(default_factory=dict)
    """[B, S] of each micro-batch, by its tokens."""
    _keys_BS: Tensor | None = None
    """[B, S'] of the forward that is under way, and no recomputation of it."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Learns which micro-batch is computed."""
        run, positions_and_share = step._run, step._positions_and_share

        def noted(chunks: Any, mesh: Any, batches: Sequence[step.MicroBatch], *args: Any, **kwargs: Any) -> Any:
            self._keys = {id(batch.tokens_BS): keys_of(batch) for batch in batches} if self.now else {}
            return run(chunks, mesh, batches, *args, **kwargs)

        def began(tokens_BS: Tensor, *args: Any) -> Any:
            positions_S, share = positions_and_share(tokens_BS, *args)
            keys_BS = self._keys.get(id(tokens_BS))  # none of a filler
            self._keys_BS = keys_BS if keys_BS is None or share is None else share.cut(keys_BS)
            return positions_S, share

        with mock.patch.object(step, "_run", noted), mock.patch.object(step, "_positions_and_share", began):
            yield

    def watch(self, role: Role) -> None:
        """All of the role's routers."""
        at, tp = role.mesh.coordinates.tp, role.mesh.layout.tp
        top = role.shard.arch.experts_per_token

        def ended(*_: Any) -> None:
            self._keys_BS = None

        def routed(router: Router, logits_SBE: Tensor, *args: Any, **kwargs: Any) -> Any:
            scores, is_chosen_TE = routing(router, logits_SBE, *args, **kwargs)
            if self.now is not None and self._keys_BS is not None:
                keys_SB = self._keys_BS.T
                if router.config.sequence_parallel:
                    keys_SB = keys_SB.chunk(tp)[at]
                self._note(router.layer_number, keys_SB.flatten(), logits_SBE.detach().flatten(0, 1), is_chosen_TE, top)
            return scores, is_chosen_TE

        routing = Router.routing
        for chunk in chunks_of(role.shard.module):
            chunk.register_forward_hook(ended)
            for module in chunk.modules():
                if isinstance(module, Router):
                    module.routing = routed.__get__(module)

    def _note(self, layer: int, keys_T: Tensor, logits_TE: Tensor, is_chosen_TE: Tensor, top: int) -> None:
        assert self.now is not None
        assert len(keys_T) == len(logits_TE) == len(is_chosen_TE)
        assert (is_chosen_TE.sum(-1) == top).all()
        real_T = keys_T != NO_TOKEN
        if not real_T.any():
            return
        best = logits_TE[real_T].topk(top + 1, dim=-1).values
        self.gap = min(self.gap, float((best[:, top - 1] - best[:, top]).min()))
        bits_T = (is_chosen_TE.long() << torch.arange(is_chosen_TE.size(-1))).sum(-1)
        for key, bits in zip(keys_T[real_T].tolist(), bits_T[real_T].tolist(), strict=True):
            choice = (*self.now, layer, key)
            self.choices[choice] = self.choices.get(choice, frozenset()) | {bits}


def keys_of(batch: step.MicroBatch) -> Tensor:
    """[B, S] int64: of each token of a sequence what stands for the sequence up to it."""
    assert batch.layout is not None
    tokens_X = batch.tokens_BS.flatten().tolist()
    keys_X = [NO_TOKEN] * len(tokens_X)
    for places in batch.layout.tokens_R.split(batch.layout.lengths):
        key = NO_TOKEN
        for at in places.tolist():
            keys_X[at] = key = hash((key, tokens_X[at]))  # of whole numbers: the same in every process
    return torch.tensor(keys_X).view(batch.tokens_BS.shape)


def union(by_rank: Sequence[Mapping[Choice, frozenset[int]]]) -> Choices:
    """Of all ranks: each has its own layers, and its own tokens or all."""
    found: Choices = {}
    for choices in by_rank:
        for choice, experts in choices.items():
            found[choice] = found.get(choice, frozenset()) | experts
    return found


def other_choices(actual: Choices, expected: Choices) -> tuple[int, int]:
    """(decisions that are not the same, all decisions); both have made the same ones."""
    assert actual.keys() == expected.keys(), f"{len(actual.keys() ^ expected.keys())} decisions are of one run only"
    return sum(len(actual[choice] | experts) > 1 for choice, experts in expected.items()), len(expected)
