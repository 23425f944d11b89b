"""Equal layers are rehearsed once: what the second layer of a stage does in a forward, and one at the stage's end in a
backward, the layers between them do too, tensor for tensor and message for message. It is noted on a tape and played
again.

The first layer of a stage meets memory that is made at first use, so it is no model for the others. Of a forward
without gradients the second layer's tape serves all that follow. With gradients the last layer runs too, since its
backward is the first. Before the last stage it gets its gradient from the schedule, which holds it meanwhile, so that
nothing can be added to it in place: there the last layer is no model either, and the one before it runs too. Tests
compare rehearsals with and without this: nothing changes, but for what `tests/rehearsal/test_reuse.py` names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from megarlhf.models.build import ModelShard
from megarlhf.rehearsal.interfaces import storage_key
from megarlhf.rehearsal.known import Known
from megarlhf.rehearsal.tape import Mark, Owner, Player, Recorder, Tape

FEWEST = 4
"""Layers of a stage for which it is worth it."""


@dataclass
class MicroBatchTapes:
    """Of one micro-batch in one stage."""

    forward: Tape
    """Of the second layer."""
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
    tokens to experts holds its last routing, until its next forward puts others in their place."""


class Place(Enum):
    """Of a layer behind the first of its stage."""

    SECOND = auto()
    """The model of forwards."""
    BETWEEN = auto()
    MODEL = auto()
    """Of backwards."""
    BEHIND = auto()
    """The last one, where it is not the model."""


class EqualLayers:
    """Plays the layers of a stage that are like others."""

    def __init__(self, recorder: Recorder, player: Player, known: Known) -> None:
        self._recorder, self._player, self._known = recorder, player, known

    def install(self, shard: ModelShard) -> None:
        """From now on only the first two layers of this stage run, and with gradients the last one or two."""
        layers = list(shard.module.decoder.layers)
        if len(layers) < FEWEST:
            return
        stage = _Stage(self._recorder, self._player, self._known)
        ends = [Place.MODEL] if shard.mesh.is_last_stage else [Place.MODEL, Place.BEHIND]
        between = [Place.BETWEEN] * (len(layers) - 2 - len(ends))
        for layer, place in zip(layers[1:], [Place.SECOND, *between, *ends], strict=True):
            stage.put_into(layer, place)


class _Stage:
    """The layers of one stage; of a micro-batch its tapes, from its second layer on."""

    def __init__(self, recorder: Recorder, player: Player, known: Known) -> None:
        self._recorder, self._player, self._known = recorder, player, known
        self._tape: Tape | None = None
        """Of the second layer's last forward."""
        self._input: Mark | None = None
        """What came into it."""
        self._tapes: MicroBatchTapes | None = None

    def put_into(self, layer: Any, place: Place) -> None:
        run = layer.forward
        gradients = list(layer.parameters())
        held = Held()

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal held
            if place is Place.SECOND:
                return self._second(run, hidden_states, args, kwargs)
            tapes = self._tapes_now()
            learns = torch.is_grad_enabled() and hidden_states.requires_grad
            if place is Place.MODEL and learns:
                return self._model(run, tapes, hidden_states, args, kwargs)
            runs = place in (Place.MODEL, Place.BEHIND)
            if runs and (
                learns or len(tapes.forward.numbers) > 1
            ):  # it has attributes of its own, which a forward replaces
                return run(hidden_states, *args, **kwargs)
            before, held = held, Held(is_over=not learns)
            if learns:
                self._forget(gradients)
                out = _Played.apply(hidden_states, self._player, tapes, before.keys, held)
            else:
                with torch.set_grad_enabled(tapes.forward.results[0].requires_grad):
                    out = _PlayedAlone.apply(hidden_states, self._player, tapes.forward, before.keys, held)
            assert not (before.is_over and before.keys), "a layer still holds what its next forward replaces"
            return out, None

        layer.forward = forward

    def _tapes_now(self) -> MicroBatchTapes:
        """Of the micro-batch at hand, when its third layer is called: now the second's input is held by its graph or
        by nobody."""
        assert self._tape is not None, "a layer runs before the second of its stage"
        assert self._input is not None
        if self._tapes is None or self._tapes.forward is not self._tape:
            self._tapes = MicroBatchTapes(self._tape, self._recorder.lives(self._input))
        return self._tapes

    def _second(self, run: Callable[..., Any], hidden: Tensor, args: Any, kwargs: Any) -> Any:
        before = {} if self._tape is None else self._recorder.left_of(self._tape, "before")
        self._input = self._recorder.mark(hidden)
        tape = self._tape = self._recorder.begin(before | {storage_key(hidden): ("input", 0)})
        try:
            out, context = run(hidden, *args, **kwargs)
            tape.goes_out(out)
        finally:
            self._recorder.end()
        return out, context

    def _model(self, run: Callable[..., Any], tapes: MicroBatchTapes, hidden: Tensor, args: Any, kwargs: Any) -> Any:
        own = self._recorder.begin({storage_key(hidden): ("input", 0)})
        try:
            out, context = run(hidden, *args, **kwargs)
            own.goes_out(out)
        finally:
            self._recorder.end()
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
            tapes.backward.without_first_use()
            self._recorder.end()
            assert tapes.backward.results[0].number is not None or storage_key(grad_input) == came_in[0]

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
    def forward(ctx: Any, hidden: Tensor, player: Player, tape: Tape, before: dict[int, int], held: Held) -> Tensor:
        (out,), held.keys = player.play(tape, {"input": hidden, "before": before})
        return out


class _Played(torch.autograd.Function):
    """A layer that is played, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, player: Player, tapes: MicroBatchTapes, before: dict[int, int], held: Held
    ) -> Tensor:
        (out,), held.keys = player.play(tapes.forward, {"input": hidden, "before": before})
        ctx.player, ctx.tapes, ctx.held = player, tapes, held
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
        return grad_input, None, None, None, None
