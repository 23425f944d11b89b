"""Place in the program of an event: the innermost line of ours, and the kind of memory that is made there."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import megarlhf

PACKAGE = str(Path(megarlhf.__file__).resolve().parent)
REHEARSAL = f"{PACKAGE}/rehearsal"
STOP = "rehearsal/program.py"
"""Frame of the rehearsal itself, at which the search ends."""
PASSED_THROUGH = "megarlhf/parallel/megatron_cpu.py"
"""File between the program and torch in every call. It makes no memory."""
SHOWN = ("fakes/engine.py", "transformer_engine/optimizer.py", "transformer_engine/replace.py")
"""Files of the rehearsal that make memory in place of real objects."""
STAND_INS = "rehearsal/transformer_engine/layers.py"
"""File that is shown where no other is: autograd calls the backward of its stand-ins."""

OPTIMIZER_STATE, TEMPORARY = "optimizer state", "optimizer's temporaries"
KINDS: tuple[tuple[str, str, str], ...] = (
    ("torch/optim/", "_init_group", OPTIMIZER_STATE),
    ("torch/optim/", "", TEMPORARY),
    ("rehearsal/transformer_engine/optimizer.py", "_state", OPTIMIZER_STATE),
    ("megatron/core/distributed/param_and_grad_buffer.py", "", "gradients"),
    ("megatron/core/optimizer/", "__init__", "main parameters"),
    ("megatron/core/optimizer/", "_build_model_and_main_param_groups", "main parameters"),
    ("megatron/core/optimizer/", "", TEMPORARY),
    ("rehearsal/fakes/engine.py", "_weights", "engine's weights"),
    ("rehearsal/fakes/engine.py", "_cache", "engine's cache"),
    ("megarlhf/kernels/", "", "logits and kernels"),
    ("megarlhf/parallel/vocab.py", "", "logits and kernels"),
    ("megarlhf/weights/transport/", "", "buckets"),
    ("megarlhf/weights/", "", "checks"),
    ("megarlhf/columns.py", "", "experience"),
    ("megarlhf/experience.py", "", "experience"),
    ("megarlhf/parallel/batching.py", "", "experience"),
    ("megarlhf/parallel/micro_batch.py", "", "experience"),
    ("megarlhf/rollout/", "", "experience"),
    ("megarlhf/algo/", "", "experience"),
    ("megarlhf/models/build.py", "_build_chunk", "parameters"),
    ("megarlhf/parallel/step.py", "_run", "activations"),
    ("megarlhf/trainers/", "", "experience"),
)
"""(part of a path, function or any, kind of memory made there), matched from the innermost frame outwards."""

OTHERS = "others"
KIND_OF_PHASE = {"train": "activations", "score": "activations", "optimizer": TEMPORARY}
"""Kind of memory that no function of ours made, by phase. On a device that is no CPU, autograd runs the backward in a
thread of its own."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A place in the program."""

    where: str
    """`file:line in function`, of the innermost frame of megarlhf or Megatron-Core."""
    kind: str


@cache
def _look(file: str, name: str) -> tuple[str | None, str | None, bool]:
    """(displayed path or None, kind of memory or None, whether the search ends here) of a function. Functions are told
    apart by file and name: equal functions of different files have equal code objects."""
    file = file.replace("\\", "/")
    shown = None
    passed_through = (file.startswith(REHEARSAL) and not file.endswith(SHOWN)) or file.endswith(PASSED_THROUGH)
    if file.startswith(PACKAGE) and not passed_through:
        shown = "megarlhf" + file.removeprefix(PACKAGE)
    elif "/megatron/core/" in file:
        shown = "megatron/core/" + file.rpartition("/megatron/core/")[2]
    known = next((kind for part, function, kind in KINDS if part in file and function in ("", name)), None)
    return shown, known, file.endswith(STOP)


def origin_here() -> Origin:
    """Origin of the current call into torch."""
    frame, where, stand_in, kind = sys._getframe(1), "", "", None
    while frame is not None:
        shown, known, ends = _look(frame.f_code.co_filename, frame.f_code.co_name)
        if ends:
            break
        if not stand_in and frame.f_code.co_filename.endswith(STAND_INS):
            stand_in = f"megarlhf/{STAND_INS}:{frame.f_lineno} in {frame.f_code.co_name}"
        if shown and not where:
            where = f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
        if known and kind is None:
            kind = known
        if where and kind:
            break
        frame = frame.f_back  # type: ignore[assignment]
    return Origin(where or stand_in or "in the backward, or outside of this package", kind or OTHERS)


def callers() -> list[tuple[str, int, str]]:
    """(file, line, function) of our frames and Megatron-Core's that called into torch, innermost first."""
    frame, frames = sys._getframe(1), []
    while frame is not None:
        shown, _, ends = _look(frame.f_code.co_filename, frame.f_code.co_name)
        if ends:
            break
        if shown:
            frames.append((shown, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return frames
