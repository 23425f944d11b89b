"""Reuse of equal experts: those of a layer that get equally many tokens do the same, tensor for tensor.

For each number of tokens the second expert is recorded in a forward, and later ones play its tape. With gradients the
last one runs too, since its backward is the first. The very first expert is no model: it makes memory at first use.
Tests compare rehearsals with and without this: nothing changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarlhf.models.build import ModelShard
from megarlhf.rehearsal.fake_device.known_values import Known
from megarlhf.rehearsal.fake_device.torch_patches import SequentialMLP, storage_key
from megarlhf.rehearsal.reuse.buckets import Buckets
from megarlhf.rehearsal.reuse.tape import Owner, Player, Tape, TapeRecorder

FEWEST = 4
"""Least number of experts with equally many tokens for which this is worthwhile."""


@dataclass
class _Tapes:
    """Tapes of the experts with one number of tokens, in one forward of a layer."""

    number: int
    """Number of such experts."""
    called: int = 0
    forward: Tape | None = None
    """Tape of the second expert."""
    backward: Tape | None = None
    """Tape of the last expert."""


class EqualExperts:
    """Reuse of experts in the layers of a stage."""

    def __init__(self, recorder: TapeRecorder, player: Player, known: Known, buckets: Buckets) -> None:
        self._recorder, self._player, self._known, self._buckets = recorder, player, known, buckets

    def install(self, shard: ModelShard) -> None:
        """Let at most three experts of each number of tokens run in a layer."""
        for module in shard.module.modules():
            if isinstance(module, SequentialMLP) and len(module.local_experts) >= FEWEST:
                self._put_into(module)

    def _put_into(self, module: Any) -> None:
        run, tapes = module.forward, dict[int, _Tapes]()

        def forward(hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Any:
            numbers = self._known.twin(tokens_per_expert)
            tapes.clear()
            if numbers is not None:
                tapes.update((n, _Tapes(number)) for n, number in Counter(numbers.tolist()).items())
            return run(hidden, tokens_per_expert, probs)

        module.forward = forward
        for expert in module.local_experts:
            self._put_into_expert(expert, tapes)

    def _put_into_expert(self, expert: Any, tapes: dict[int, _Tapes]) -> None:
        run, gradients = expert.forward, list(expert.parameters())

        def forward(tokens: Tensor, probs: Tensor) -> Any:
            equal = tapes.get(len(tokens))
            if equal is None or equal.number < FEWEST or not len(tokens):
                return run(tokens, probs)
            equal.called += 1
            learns = torch.is_grad_enabled() and (tokens.requires_grad or probs.requires_grad)
            if equal.called == 1:
                return run(tokens, probs)
            if equal.called == 2:
                return self._noted(run, equal, tokens, probs)
            if equal.called == equal.number and learns:
                return self._last(run, equal, tokens, probs)
            if not learns:
                return self._play(equal, tokens)
            for parameter in gradients:
                if (buffer := getattr(parameter, "main_grad", None)) is not None:
                    self._known.forget(buffer)  # gradients are added that nobody knows
            return _Played.apply(tokens, probs, self._player, equal, partial(self._buckets.learnt, gradients)), None

        expert.forward = forward

    def _noted(self, run: Any, equal: _Tapes, tokens: Tensor, probs: Tensor) -> Any:
        tape = equal.forward = self._recorder.begin({})
        try:
            out, bias = run(tokens, probs)
            tape.goes_out(out)
        finally:
            self._recorder.end()
        assert bias is None, "an expert with a bias that is added later"
        return out, None

    def _play(self, equal: _Tapes, tokens: Tensor) -> Any:
        assert equal.forward is not None
        (out,), keys = self._player.play(equal.forward, {"input": tokens})
        assert not keys, "an expert holds memory after a forward without gradients"
        return out.requires_grad_(equal.forward.results[0].requires_grad), None

    def _last(self, run: Any, equal: _Tapes, tokens: Tensor, probs: Tensor) -> Any:
        def ends(gradients: tuple[Tensor | None, ...]) -> None:
            assert equal.backward is not None
            equal.backward.goes_out(*(each for each in gradients if each is not None))
            equal.backward.without_first_use()
            self._recorder.end()

        tokens, probs = _Gate.apply(tokens, probs, ends)
        own = self._recorder.begin({})
        try:
            out, _ = run(tokens, probs)
            own.goes_out(out)
        finally:
            self._recorder.end()
        assert equal.forward is not None
        assert own.count == equal.forward.count, (
            f"the last of equal experts takes memory {own.count} times, the second {equal.forward.count} times"
        )
        came_out = storage_key(out)

        def begins(grad_output: Tensor) -> None:
            others = self._recorder.left_of(own, "forward")
            others.pop(came_out, None)
            equal.backward = self._recorder.begin(others)

        out.register_hook(begins)
        return out, None


class _Gate(torch.autograd.Function):
    """Identity on the inputs of an expert. `ends` gets their gradients when all of the expert's backward is done."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor, ends: Any) -> Any:
        ctx.ends = ends
        return tokens.view_as(tokens), probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.ends(gradients)
        return *gradients, None


class _Played(torch.autograd.Function):
    """A played expert, forward and backward. `ready` is called when its gradients are there."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor, player: Player, equal: _Tapes, learnt: Callable[[], None]
    ) -> Tensor:
        assert equal.forward is not None
        (out,), ctx.keys = player.play(equal.forward, {"input": tokens})
        ctx.save_for_backward(tokens, probs)
        ctx.player, ctx.equal, ctx.learnt = player, equal, learnt
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        tape = ctx.equal.backward
        assert tape is not None, "a played expert's backward comes before that of the last one"
        names: dict[Owner, Any] = {"grad_output": grad_output, "forward": ctx.keys}
        found, kept = ctx.player.play(tape, names)
        assert not kept, "memory of a played expert's backward lives on after it"
        ctx.learnt()
        gradients = iter(found)
        return *(next(gradients) if needed else None for needed in ctx.needs_input_grad[:2]), None, None, None
