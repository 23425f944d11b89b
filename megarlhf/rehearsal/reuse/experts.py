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
class _ExpertTapes:
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
                self._install_in(module)

    def _install_in(self, module: Any) -> None:
        run, tapes = module.forward, dict[int, _ExpertTapes]()

        def forward(hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Any:
            numbers = self._known.twin(tokens_per_expert)
            tapes.clear()
            if numbers is not None:
                tapes.update((n, _ExpertTapes(number)) for n, number in Counter(numbers.tolist()).items())
            return run(hidden, tokens_per_expert, probs)

        module.forward = forward
        for expert in module.local_experts:
            self._install_in_expert(expert, tapes)

    def _install_in_expert(self, expert: Any, tapes: dict[int, _ExpertTapes]) -> None:
        run, parameters = expert.forward, list(expert.parameters())

        def forward(tokens: Tensor, probs: Tensor) -> Any:
            equal = tapes.get(len(tokens))
            if equal is None or equal.number < FEWEST or not len(tokens):
                return run(tokens, probs)
            equal.called += 1
            learns = torch.is_grad_enabled() and (tokens.requires_grad or probs.requires_grad)
            if equal.called == 1:
                return run(tokens, probs)
            if equal.called == 2:
                return self._record_second(run, equal, tokens, probs)
            if equal.called == equal.number and learns:
                return self._record_last(run, equal, tokens, probs)
            if not learns:
                return self._play(equal, tokens)
            self._known.forget_gradients(parameters)
            return _Played.apply(
                tokens, probs, self._player, equal, partial(self._buckets.mark_ready, parameters)
            ), None

        expert.forward = forward

    def _record_second(self, run: Any, equal: _ExpertTapes, tokens: Tensor, probs: Tensor) -> Any:
        tape = equal.forward = self._recorder.begin({})
        try:
            out, bias = run(tokens, probs)
            tape.set_results(out)
        finally:
            self._recorder.end()
        assert bias is None, "an expert with a bias that is added later"
        return out, None

    def _play(self, equal: _ExpertTapes, tokens: Tensor) -> Any:
        assert equal.forward is not None
        (out,), keys = self._player.play(equal.forward, {"input": tokens})
        assert not keys, "an expert holds memory after a forward without gradients"
        return out.requires_grad_(equal.forward.results[0].requires_grad), None

    def _record_last(self, run: Any, equal: _ExpertTapes, tokens: Tensor, probs: Tensor) -> Any:
        def end_backward(gradients: tuple[Tensor | None, ...]) -> None:
            assert equal.backward is not None
            equal.backward.set_results(*(gradient for gradient in gradients if gradient is not None))
            equal.backward.drop_first_use()
            self._recorder.end()

        tokens, probs = _Gate.apply(tokens, probs, end_backward)
        own = self._recorder.begin({})
        try:
            out, _ = run(tokens, probs)
            own.set_results(out)
        finally:
            self._recorder.end()
        assert equal.forward is not None
        assert own.count == equal.forward.count, (
            f"the last of equal experts takes memory {own.count} times, the second {equal.forward.count} times"
        )
        output_key = storage_key(out)

        def begin_backward(grad_output: Tensor) -> None:
            others = self._recorder.remaining_of(own, "forward")
            others.pop(output_key, None)
            equal.backward = self._recorder.begin(others)

        out.register_hook(begin_backward)
        return out, None


class _Gate(torch.autograd.Function):
    """Identity on an expert's inputs. `end_backward` gets their gradients when all of its backward is done."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor, end_backward: Any) -> Any:
        ctx.end_backward = end_backward
        return tokens.view_as(tokens), probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.end_backward(gradients)
        return *gradients, None


class _Played(torch.autograd.Function):
    """A played expert, forward and backward. `ready` is called when its gradients are there."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor, player: Player, equal: _ExpertTapes, ready: Callable[[], None]
    ) -> Tensor:
        assert equal.forward is not None
        (out,), ctx.keys = player.play(equal.forward, {"input": tokens})
        ctx.save_for_backward(tokens, probs)
        ctx.player, ctx.equal, ctx.ready = player, equal, ready
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        tape = ctx.equal.backward
        assert tape is not None, "a played expert's backward comes before that of the last one"
        names: dict[Owner, Any] = {"grad_output": grad_output, "forward": ctx.keys}
        results, kept = ctx.player.play(tape, names)
        assert not kept, "memory of a played expert's backward lives on after it"
        ctx.ready()
        gradients = iter(results)
        return *(next(gradients) if needed else None for needed in ctx.needs_input_grad[:2]), None, None, None
