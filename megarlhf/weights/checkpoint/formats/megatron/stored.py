"""Megatron's arguments as a checkpoint stores them: plain data, and objects of classes that are not imported."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from megarlhf.weights.checkpoint.formats.torch_file.unpickle import ForeignObject, InertObject

NO_PARAMETERS = ("_extra_state", ".inv_freq", ".local_tokens_per_expert")
"""Ends of names in a state dict that are no parameters: quantization state, computed buffers, counters."""


@dataclass(frozen=True, kw_only=True)
class StoredArgs:
    """The arguments of the run that saved a checkpoint; empty when it stored none."""

    values: dict[str, Any] = field(default_factory=dict)
    """Arguments that are plain data, by name."""
    objects: dict[str, InertObject] = field(default_factory=dict)
    """Arguments that are, or hold, an object of a class: a record of it, with the class's name."""

    def foreign(self) -> dict[str, str]:
        """Name and class of the arguments whose class is neither Megatron's nor torch's."""
        return {name: repr(type(made)) for name, made in self.objects.items() if isinstance(made, ForeignObject)}

    def classes(self, names: Collection[str]) -> str:
        """`a is an object of x.A; b is an object of x.B`, of those among `names`; "" where none is."""
        stated = ((name, type(made)) for name, made in self.objects.items() if name in names)
        return "; ".join(f"{name} is an object of {kind!r}" for name, kind in stated)


def stored_args(content: Any, where: object) -> StoredArgs:
    """The arguments in what a run saved: a dict whose `args` is a Namespace, a dict, or an object with attributes.

    Raises: ValueError when it is something else; `where` names the file.
    """
    if not isinstance(content, dict):
        raise ValueError(
            f"{where} holds a {type(content).__name__}, expected the dict that Megatron saves; give a checkpoint that "
            "Megatron saved"
        )
    args = content.get("args")
    if isinstance(args, InertObject):  # a dataclass of the trainer's own: its attributes are its state
        args = args.state
    if not isinstance(args, SimpleNamespace | dict | None):
        kind = type(content["args"])
        raise ValueError(
            f"{where} has args of type {kind!r}, expected a Namespace; read and save the checkpoint with the program "
            "that wrote it, or save the model in Hugging Face's format there"
        )
    named = dict(vars(args) if isinstance(args, SimpleNamespace) else args or {})
    objects = {name: made for name, value in named.items() if (made := next(_objects(value), None)) is not None}
    return StoredArgs(values={name: named[name] for name in named if name not in objects}, objects=objects)


def _objects(value: Any) -> Iterator[InertObject]:
    """The objects in plain data."""
    seen: set[int] = set()  # a pickle can make a list that holds itself
    left = [value]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, InertObject):
            yield each
        left += list(each.values()) if isinstance(each, dict) else list(each) if isinstance(each, list | tuple) else []
