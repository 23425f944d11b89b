"""Reuse of equal layers: layers of a stage repeat, tensor for tensor and message for message, the forward of the second
layer and the backward of one at the stage's end. These are recorded on tapes and played.

The first layer of a stage is no model: it makes memory at first use. The tape of the second layer's forward without
gradients serves all that follow. With gradients the last layer runs too, since its backward is the first. Before the
last stage it gets its gradient from the schedule, which still holds it, so that nothing can be added to it in place.
There the last layer is no model either, and the one before it runs too.

Layers that are recomputed in the backward are a group of their own. Their forward is one without gradients.
Recomputation goes from the last layer to the first, each followed by its backward, and so its model is the layer at the
end, as it is for backwards. Tests compare rehearsals with and without all this: nothing changes, except for what
`tests/rehearsal/test_reuse.py` names.

Example, a last stage of 6 layers, with gradients: layers 1, 2 and 6 run; 3, 4 and 5 play the forward of 2 and the
backward of 6.
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
"""Least number of layers in a group for which this is worthwhile."""


@dataclass
class MicroBatchTapes:
    """Tapes of one micro-batch in one group of layers."""

    forward: Tape
    """Tape of the second layer; if layers are recomputed, of the model."""
    input_is_kept: bool
    """Whether a layer's graph needs its input, which the caller releases."""
    backward: Tape | None = None
    """Tape of the model."""


@dataclass
class LayerMemory:
    """Memory that a played layer holds after a forward."""

    keys: dict[int, int] = field(default_factory=dict)
    """Keys of the ledger, by number on the forward's tape."""
    is_over: bool = True
    """Whether no backward follows. The remaining memory is then held by the layer's own attributes, until its next
    forward replaces them. For example, a dispatcher of tokens to experts holds how many go where."""


class LayerPosition(Enum):
    """Position of a layer behind the first of its group."""

    SECOND = auto()
    """Model of forwards."""
    BETWEEN = auto()
    MODEL = auto()
    """Model of backwards, and of recomputation."""
    BEHIND = auto()
    """The last layer, if it is not the model."""


class RecordedLayer:
    """Recorder of all forwards of a layer that runs."""

    def __init__(self, recorder: TapeRecorder) -> None:
        self._recorder = recorder
        self.tape: Tape | None = None
        """Tape of the last forward."""

    def run(self, run: Callable[..., Any], hidden: Tensor, args: Any, kwargs: Any) -> Any:
        """Run a forward and record it. Memory of the forward before it that is released now is recorded as that
        forward's."""
        before = {} if self.tape is None else self._recorder.remaining_of(self.tape, "before")
        self.tape = self._recorder.begin(before | {storage_key(hidden): ("input", 0)})
        try:
            out, context = run(hidden, *args, **kwargs)
            self.tape.set_results(out)
        finally:
            self._recorder.end()
        return out, context


class EqualLayers:
    """Reuse of layers in a stage."""

    def __init__(self, recorder: TapeRecorder, player: Player, known: Known, buckets: Buckets) -> None:
        self._recorder, self._player, self._known, self._buckets = recorder, player, known, buckets

    def install(self, shard: ModelShard) -> None:
        """Let only the first two layers of each group run, and with gradients the last one or two."""
        for chunk in shard.chunks:
            self._install_in(chunk)

    def _install_in(self, chunk: Any) -> None:
        layers, recomputed = list(chunk.decoder.layers), num_recomputed(chunk)
        for group in (layers[:recomputed], layers[recomputed:]):
            if len(group) < FEWEST:
                continue
            sends_on = group[-1] is layers[-1] and not chunk.post_process
            ends = [LayerPosition.MODEL, LayerPosition.BEHIND] if sends_on else [LayerPosition.MODEL]
            between = [LayerPosition.BETWEEN] * (len(group) - 2 - len(ends))
            equal = _Group(
                self._recorder, self._player, self._known, self._buckets, recomputed=group[0] in layers[:recomputed]
            )
            for layer, position in zip(group[1:], [LayerPosition.SECOND, *between, *ends], strict=True):
                equal.install_in(layer, position)


def num_recomputed(chunk: Any) -> int:
    """Number of the stage's first layers that are recomputed in the backward."""
    config, count = chunk.config, len(chunk.decoder.layers)
    if config.recompute_granularity != "full":
        return 0
    return count if config.recompute_method == "uniform" else min(count, config.recompute_num_layers)


class _Group:
    """Equal layers that follow each other in a stage, and their tapes for a micro-batch, from the second layer on."""

    def __init__(
        self, recorder: TapeRecorder, player: Player, known: Known, buckets: Buckets, *, recomputed: bool
    ) -> None:
        """`recomputed`: whether their backward recomputes them."""
        self._recorder, self._player, self._known, self._buckets = recorder, player, known, buckets
        self._recomputed = recomputed
        self._second, self._model = RecordedLayer(recorder), RecordedLayer(recorder)
        self._recomputed_tapes: MicroBatchTapes | None = None
        """Tapes of the micro-batch that is recomputed."""
        self._input: MemoryMark | None = None
        """Input of the second layer's last forward."""
        self._tapes: MicroBatchTapes | None = None

    def install_in(self, layer: Any, position: LayerPosition) -> None:
        run = layer.forward
        parameters = list(layer.parameters())
        held = LayerMemory()

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal held
            if position is LayerPosition.SECOND:
                self._input = self._recorder.mark(hidden_states)
                return self._second.run(run, hidden_states, args, kwargs)
            learns = torch.is_grad_enabled() and hidden_states.requires_grad
            if position is LayerPosition.MODEL and learns:
                return self._run_model(run, hidden_states, args, kwargs)
            if position is LayerPosition.BEHIND and learns:
                return run(hidden_states, *args, **kwargs)
            tapes = self._recomputed_tapes if self._recomputed and learns else self._current_tapes()
            assert tapes is not None, "a layer is recomputed before its model"
            if len(tapes.forward.numbers) > 1:  # a layer that runs has attributes of its own, which a forward replaces
                if position is LayerPosition.MODEL:
                    return self._model.run(run, hidden_states, args, kwargs)
                if position is LayerPosition.BEHIND:
                    return run(hidden_states, *args, **kwargs)
            self._buckets.await_weights(parameters)
            before, held = held, LayerMemory(is_over=not learns)
            if learns:
                self._known.forget_gradients(parameters)
                ready = partial(self._buckets.mark_ready, parameters[::-1])
                out = _Played.apply(hidden_states, self._player, tapes, before, held, ready)
            else:
                with torch.set_grad_enabled(tapes.forward.results[0].requires_grad):
                    out = _PlayedAlone.apply(hidden_states, self._player, tapes.forward, before, held)
            assert not (before.is_over and before.keys), "a layer still holds what its next forward replaces"
            return out, None

        layer.forward = forward

    def _current_tapes(self) -> MicroBatchTapes:
        """Tapes of the current micro-batch. To be called at its third layer: by then the second's input is held by its
        graph or by nobody."""
        tape = self._second.tape
        assert tape is not None, "a layer runs before the second of its group"
        assert self._input is not None
        if self._tapes is None or self._tapes.forward is not tape:
            self._tapes = MicroBatchTapes(tape, self._recorder.is_alive(self._input))
        return self._tapes

    def _run_model(self, run: Callable[..., Any], hidden: Tensor, args: Any, kwargs: Any) -> Any:
        """Run a forward of the model and record its backward."""
        tapes = None if self._recomputed else self._current_tapes()
        out, context = self._model.run(run, hidden, args, kwargs)
        own = self._model.tape
        assert own is not None
        if tapes is None:  # the input is held by whoever recomputes
            tapes = self._recomputed_tapes = MicroBatchTapes(own, input_is_kept=False)
        else:
            assert own.count == tapes.forward.count, (
                f"a layer at the end of a stage takes memory {own.count} times, its second {tapes.forward.count} times"
            )
        output_key, grad_keys = storage_key(out), list[int]()
        # A key and not the tensor, which the hooks would hold.
        inputs: dict[int, tuple[Owner, int]] = {storage_key(hidden): ("input", 0)} if tapes.input_is_kept else {}

        def begin_backward(grad_output: Tensor) -> None:
            grad_keys.append(storage_key(grad_output))
            others = self._recorder.remaining_of(own, "forward")
            others.pop(output_key, None)
            tapes.backward = self._recorder.begin(others | inputs | {grad_keys[0]: ("grad_output", 0)})

        def end_backward(grad_input: Tensor) -> None:
            assert tapes.backward is not None
            tapes.backward.set_results(grad_input)
            assert tapes.backward.results[0].number is not None or storage_key(grad_input) == grad_keys[0]
            if self._recomputed:
                # The input is a leaf there, and leaves have no order: gradients of weights may follow.
                after_this_backward(finish)
            else:
                finish()

        def finish() -> None:
            assert tapes.backward is not None
            tapes.backward.drop_first_use()
            self._recorder.end()

        out.register_hook(begin_backward)
        hidden.register_hook(end_backward)
        return out, context


class _PlayedAlone(torch.autograd.Function):
    """The forward of a played layer without a backward.

    Megatron-Core adds residuals with gradients even where its caller has switched them off. So the input of a stage,
    which requires a gradient, is held by the graph of its output, though no backward will follow.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, player: Player, tape: Tape, before: LayerMemory, held: LayerMemory) -> Tensor:
        (out,), held.keys = player.play(tape, {"input": hidden, "before": before.keys})
        return out


class _Played(torch.autograd.Function):
    """A played layer, forward and backward. `ready` is called when its gradients are there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        player: Player,
        tapes: MicroBatchTapes,
        before: LayerMemory,
        held: LayerMemory,
        ready: Callable[[], None],
    ) -> Tensor:
        (out,), held.keys = player.play(tapes.forward, {"input": hidden, "before": before.keys})
        ctx.player, ctx.tapes, ctx.held, ctx.ready = player, tapes, held, ready
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
        ctx.ready()
        return grad_input, None, None, None, None, None
