"""Equal layers are rehearsed once: what the second layer of a stage does in a forward, and the last one in a backward,
the layers between them do too, tensor for tensor and message for message. It is noted on a tape and played again.

The first layer of a stage meets memory that is made at first use, so it is no model for the others. Of a forward
without gradients the second layer's tape serves all that follow. With gradients the last layer runs too, since its
backward is the first. Tests compare rehearsals with and without this: nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarlhf.models.build import ModelShard
from megarlhf.rehearsal.known import Known, storage_key
from megarlhf.rehearsal.tape import Player, Recorder, Tape

FEWEST = 4
"""Layers of a stage for which it is worth it."""


@dataclass
class MicroBatchTapes:
    """Of one micro-batch in one stage."""

    forward: Tape
    """Of the second layer."""
    backward: Tape | None = None
    """Of the last layer."""


class EqualLayers:
    """Plays the layers of a stage that are like others."""

    def __init__(self, recorder: Recorder, player: Player, known: Known) -> None:
        self._recorder, self._player, self._known = recorder, player, known

    def install(self, shard: ModelShard) -> None:
        """From now on only the first, the second and the last layer of this stage run."""
        layers = list(shard.module.decoder.layers)
        if len(layers) < FEWEST:
            return
        stage = _Stage(self._recorder, self._player, self._known)
        for number, layer in enumerate(layers[1:], 1):
            stage.put_into(layer, first=number == 1, last=number == len(layers) - 1)


class _Stage:
    """The layers of one stage; of a micro-batch its tapes, from its second layer on."""

    def __init__(self, recorder: Recorder, player: Player, known: Known) -> None:
        self._recorder, self._player, self._known = recorder, player, known
        self._tapes: MicroBatchTapes | None = None

    def put_into(self, layer: Any, *, first: bool, last: bool) -> None:
        run = layer.forward
        gradients = list(layer.parameters())

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if first:
                return self._second(run, hidden_states, args, kwargs)
            tapes = self._tapes
            assert tapes is not None, "a layer runs before the second of its stage"
            learns = torch.is_grad_enabled() and hidden_states.requires_grad
            if last and learns:
                return self._last(run, tapes, hidden_states, args, kwargs)
            if not learns:
                out, kept = self._player.play(tapes.forward, {"input": hidden_states}, {})
                assert not kept, "memory of a forward without gradients lives on"
                return out, None
            self._forget(gradients)
            return _Played.apply(hidden_states, self._player, tapes), None

        layer.forward = forward

    def _second(self, run: Callable[..., Any], hidden: Tensor, args: Any, kwargs: Any) -> Any:
        tape = self._recorder.begin({storage_key(hidden): ("input", 0)})
        try:
            out, context = run(hidden, *args, **kwargs)
            tape.goes_out(out)
        finally:
            self._recorder.end()
        self._tapes = MicroBatchTapes(tape)
        return out, context

    def _last(self, run: Callable[..., Any], tapes: MicroBatchTapes, hidden: Tensor, args: Any, kwargs: Any) -> Any:
        own = self._recorder.begin({storage_key(hidden): ("input", 0)})
        try:
            out, context = run(hidden, *args, **kwargs)
            own.goes_out(out)
        finally:
            self._recorder.end()
        assert own.count == tapes.forward.count, (
            f"the last layer of a stage takes memory {own.count} times, its second {tapes.forward.count} times"
        )
        others: dict[int, Any] = {key: ("forward", number) for key, number in own.numbers.items()}
        others.pop(storage_key(out), None)
        others[storage_key(hidden)] = ("input", 0)

        came_in: list[int] = []

        def begins(grad_output: Tensor) -> None:
            came_in.append(storage_key(grad_output))
            tapes.backward = self._recorder.begin(others | {came_in[0]: ("grad_output", 0)})

        def ends(grad_input: Tensor) -> None:
            assert tapes.backward is not None
            tapes.backward.goes_out(grad_input)
            tapes.backward.without_first_use()
            self._recorder.end()
            assert tapes.backward.result is not None or storage_key(grad_input) == came_in[0]

        out.register_hook(begins)
        hidden.register_hook(ends)
        return out, context

    def _forget(self, parameters: list[Tensor]) -> None:
        """Gradients are added that nobody knows."""
        for parameter in parameters:
            buffer = getattr(parameter, "main_grad", None)
            if buffer is not None:
                self._known.forget(buffer)


class _Played(torch.autograd.Function):
    """A layer that is played, forward and backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, player: Player, tapes: MicroBatchTapes) -> Tensor:
        out, kept = player.play(tapes.forward, {"input": hidden}, {})
        ctx.player, ctx.tapes, ctx.kept = player, tapes, kept
        ctx.save_for_backward(hidden)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        tape = ctx.tapes.backward
        assert tape is not None, "a played layer's backward comes before that of the last layer"
        (hidden,) = ctx.saved_tensors
        grad_input, kept = ctx.player.play(tape, {"input": hidden, "grad_output": grad_output}, ctx.kept)
        left = {**kept, **ctx.kept}
        assert not left, f"memory of a played layer lives on after its backward: {left}"
        return grad_input, None, None
