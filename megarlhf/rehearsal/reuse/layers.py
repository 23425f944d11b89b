"""Equal layers are rehearsed once: what the second layer of a stage does in a forward, and one at the stage's end in a
backward, the layers between them do too, tensor for tensor and message for message. It is noted on a tape and played
again.

The first layer of a stage meets memory that is made at first use, so it is no model for the others. Of a forward
without gradients the second layer's tape serves all that follow. With gradients the last layer runs too, since its
backward is the first. Before the last stage it gets its gradient from the schedule, which holds it meanwhile, so that
nothing can be added to it in place: there the last layer is no model either, and the one before it runs too.

Layers that are computed again in the backward are a group of their own. Their forward is one without gradients; what
is computed again comes from the last layer to the first, each followed by its backward, and so its model is the layer
at the end, as it is for backwards. Tests compare rehearsals with and without all this: nothing changes, but for what
`tests/rehearsal/test_reuse.py` names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megarlhf.models.build import ModelShard
from megarlhf.rehearsal.fake_device.known_values import Known
from megarlhf.rehearsal.fake_device.torch_patches import after_this_backward, storage_key
from megarlhf.rehearsal.reuse.buckets import Buckets
from megarlhf.rehearsal.reuse.tape import MemoryMark, Owner, Player, Tape, TapeRecorder

FEWEST = 4
"""Layers of a group for which it is worth it."""


@dataclass
class MicroBatchTapes:
    """Of one micro-batch in one group of layers."""

    forward: Tape
    """Of the second layer; where it is computed again, of the model."""
    input_is_kept: bool
    """Whether a layer's graph needs what came in, which its caller lets go of."""
    backward: Tape | None = None
    """Of the model."""


@dataclass
class Held:
    """What a played layer has left after a forward."""

    keys: dict[int, int] = field(default_factory=dict)
    """Of the ledger, by number of the forward's tape."""
    is_over: bool = True
    """Whether no backward is to come. What is there then is held by the layer's own attributes, as a dispatcher of
    tokens to experts holds how many go where, until its next forward puts others in their place."""


class LayerPosition(Enum):
    """Of a layer behind the first of its group."""

    SECOND = auto()
    """The model of forwards."""
    BETWEEN = auto()
    MODEL = auto()
    """Of backwards, and of what is computed again."""
    BEHIND = auto()
    """The last one, where it is not the model."""


class Noted:
    """A layer that runs and is noted, in all its forwards."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder = recorder
        self.tape: Tape | None = None
        """Of the last one."""

    def run(self, run: Callable[..., Any], hidden: Tensor, args: Any, kwargs: Any) -> Any:
        """A forward. What it lets go of that the one before it had left is noted as that one's."""
        before = {} if self.tape is None else self._recorder.left_of(self.tape, "before")
        self.tape = self._recorder.begin(before | {storage_key(hidden): ("input", 0)})
        try:
            out, context = run(hidden, *args, **kwargs)
            self.tape.goes_out(out)
        finally:
            self._recorder.end()
        return out, context


class EqualLayers:
    """Plays the layers of a stage that are like others."""

    def __init__(self, recorder: TapeRecorder, player: Player, known: Known, buckets: Buckets) -> None:
        self._recorder, self._player, self._known, self._buckets = recorder, player, known, buckets

    def install(self, shard: ModelShard) -> None:
        """From now on only the first two layers of each group run, and with gradients the last one or two."""
        for chunk in shard.chunks:
            self._install_in(chunk)

    def _install_in(self, chunk: Any) -> None:
        """A pipeline stage, or one of the virtual stages of a rank."""
        layers, again = list(chunk.decoder.layers), layers_again(chunk)
        for group in (layers[:again], layers[again:]):
            if len(group) < FEWEST:
                continue
            sends_on = group[-1] is layers[-1] and not chunk.post_process
            ends = [LayerPosition.MODEL, LayerPosition.BEHIND] if sends_on else [LayerPosition.MODEL]
            between = [LayerPosition.BETWEEN] * (len(group) - 2 - len(ends))
            again_too = group[0] in layers[:again]
            equal = _Group(self._recorder, self._player, self._known, self._buckets, again=again_too)
            for layer, place in zip(group[1:], [LayerPosition.SECOND, *between, *ends], strict=True):
                equal.put_into(layer, place)


def layers_again(chunk: Any) -> int:
    """How many layers of the stage, its first, are computed again in the backward."""
    config, count = chunk.config, len(chunk.decoder.layers)
    if config.recompute_granularity != "full":
        return 0
    return count if config.recompute_method == "uniform" else min(count, config.recompute_num_layers)


class _Group:
    """Equal layers that follow each other in a stage; of a micro-batch its tapes, from the second layer on."""

    def __init__(self, recorder: TapeRecorder, player: Player, known: Known, buckets: Buckets, *, again: bool) -> None:
        """`again`: their backward computes them again."""
        self._recorder, self._player, self._known, self._buckets = recorder, player, known, buckets
        self._again = again
        self._second, self._model = Noted(recorder), Noted(recorder)
        self._tapes_again: MicroBatchTapes | None = None
        """Of the micro-batch that is computed again."""
        self._input: MemoryMark | None = None
        """What came into the second layer's last forward."""
        self._tapes: MicroBatchTapes | None = None

    def put_into(self, layer: Any, place: LayerPosition) -> None:
        run = layer.forward
        gradients = list(layer.parameters())
        held = Held()

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal held
            if place is LayerPosition.SECOND:
                self._input = self._recorder.mark(hidden_states)
                return self._second.run(run, hidden_states, args, kwargs)
            learns = torch.is_grad_enabled() and hidden_states.requires_grad
            if place is LayerPosition.MODEL and learns:
                return self._run_model(run, hidden_states, args, kwargs)
            if place is LayerPosition.BEHIND and learns:
                return run(hidden_states, *args, **kwargs)
            tapes = self._tapes_again if self._again and learns else self._tapes_now()
            assert tapes is not None, "a layer is computed again before its model"
            if len(tapes.forward.numbers) > 1:  # a layer that runs has attributes of its own, which a forward replaces
                if place is LayerPosition.MODEL:
                    return self._model.run(run, hidden_states, args, kwargs)
                if place is LayerPosition.BEHIND:
                    return run(hidden_states, *args, **kwargs)
            self._buckets.needed(gradients)
            before, held = held, Held(is_over=not learns)
            if learns:
                self._forget(gradients)
                learnt = partial(self._buckets.learnt, gradients[::-1])
                out = _Played.apply(hidden_states, self._player, tapes, before, held, learnt)
            else:
                with torch.set_grad_enabled(tapes.forward.results[0].requires_grad):
                    out = _PlayedAlone.apply(hidden_states, self._player, tapes.forward, before, held)
            assert not (before.is_over and before.keys), "a layer still holds what its next forward replaces"
            return out, None

        layer.forward = forward

    def _tapes_now(self) -> MicroBatchTapes:
        """Of the micro-batch at hand, when its third layer is called: now the second's input is held by its graph or
        by nobody."""
        tape = self._second.tape
        assert tape is not None, "a layer runs before the second of its group"
        assert self._input is not None
        if self._tapes is None or self._tapes.forward is not tape:
            self._tapes = MicroBatchTapes(tape, self._recorder.lives(self._input))
        return self._tapes

    def _run_model(self, run: Callable[..., Any], hidden: Tensor, args: Any, kwargs: Any) -> Any:
        """A forward of the model whose backward will be noted."""
        tapes = None if self._again else self._tapes_now()
        out, context = self._model.run(run, hidden, args, kwargs)
        own = self._model.tape
        assert own is not None
        if tapes is None:  # what comes in is held by whoever computes again
            tapes = self._tapes_again = MicroBatchTapes(own, input_is_kept=False)
        else:
            assert own.count == tapes.forward.count, (
                f"a layer at the end of a stage takes memory {own.count} times, its second {tapes.forward.count} times"
            )
        came_out, came_in = storage_key(out), list[int]()
        # Not the tensor, which the hooks would hold.
        inputs: dict[int, tuple[Owner, int]] = {storage_key(hidden): ("input", 0)} if tapes.input_is_kept else {}

        def begins(grad_output: Tensor) -> None:
            came_in.append(storage_key(grad_output))
            others = self._recorder.left_of(own, "forward")
            others.pop(came_out, None)
            tapes.backward = self._recorder.begin(others | inputs | {came_in[0]: ("grad_output", 0)})

        def ends(grad_input: Tensor) -> None:
            assert tapes.backward is not None
            tapes.backward.goes_out(grad_input)
            assert tapes.backward.results[0].number is not None or storage_key(grad_input) == came_in[0]
            if self._again:  # what came in is a leaf there, and leaves have no order: gradients of weights may follow
                after_this_backward(over)
            else:
                over()

        def over() -> None:
            assert tapes.backward is not None
            tapes.backward.without_first_use()
            self._recorder.end()

        out.register_hook(begins)
        hidden.register_hook(ends)
        return out, context

    def _forget(self, parameters: list[Tensor]) -> None:
        """Gradients are added that nobody knows."""
        for parameter in parameters:
            buffer = getattr(parameter, "main_grad", None)
            if buffer is not None:
                self._known.forget(buffer)


class _PlayedAlone(torch.autograd.Function):
    """The forward of a layer that is played, without a backward to come.

    Megatron-Core adds residuals with gradients also where its caller has switched them off. So what a stage receives,
    which requires a gradient, is held by the graph of what it sends, though no backward will follow.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, player: Player, tape: Tape, before: Held, held: Held) -> Tensor:
        (out,), held.keys = player.play(tape, {"input": hidden, "before": before.keys})
        return out


class _Played(torch.autograd.Function):
    """A layer that is played, forward and backward. `learnt` is called when its gradients are there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        player: Player,
        tapes: MicroBatchTapes,
        before: Held,
        held: Held,
        learnt: Callable[[], None],
    ) -> Tensor:
        (out,), held.keys = player.play(tapes.forward, {"input": hidden, "before": before.keys})
        ctx.player, ctx.tapes, ctx.held, ctx.learnt = player, tapes, held, learnt
        if tapes.input_is_kept:
            ctx.save_for_backward(hidden)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        tape, held = ctx.tapes.backward, ctx.held
        assert tape is not None, "a played layer's backward comes before that of its model"
        names: dict[Owner, Any] = {"grad_output": grad_output, "forward": held.keys}
        if ctx.saved_tensors:
            (names["input"],) = ctx.saved_tensors
        (grad_input,), kept = ctx.player.play(tape, names)
        held.is_over = True
        assert not kept, "memory of a played layer's backward lives on after it"
        ctx.learnt()
        return grad_input, None, None, None, None, None
