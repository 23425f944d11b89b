"""Pickles read without running anything that they name: a written allow-list, and inert stand-ins.

A pickle names classes and functions and asks for them to be called. Here `find_class`, pickle's documented hook, looks
a name up in a table and nowhere else: nothing is imported. What the table gives is one of three things.

- A constructor of ours, which makes plain data: a dict, a path, a shape.
- A constant: `torch.bfloat16`.
- For `INERT_MODULES`, whose enums, configs and functions stand in checkpoints, a stand-in: a class made for this load
  whose objects, `InertObject`s, keep their arguments and state and do nothing.

Every other name is refused; or, where a caller asks for it (`foreign`), becomes a stand-in too, a `ForeignObject`, but
for `RUNNING`, names that only an attack has a use for. Nothing of a stand-in's class is imported or called. A pickle
can also set the state of what it has: that is plain data, a stand-in, or a built-in type, which Python does not let it
change; nothing of it outlives the load. Sizes are not limited: a pickle may still ask for more memory than there is.

torch's own unpickler (`weights_only`, with stand-ins by `safe_globals`) does not read protocol 4, in which `.metadata`
is written (docs/log.md).
"""

from __future__ import annotations

import datetime
import io
import pathlib
import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

Name = tuple[str, str]
"""(module, qualified name) as the pickle spells them."""

INERT_MODULES = (
    "megatron",
    "apex",
    "amp_C",
    "fp16",  # Megatron-LM before it was a package
    "modelopt",
    "nvidia_resiliency_ext",
    "transformer_engine",
    "torch.nn",
    "torch.optim",
    "torch.distributed",
    "torch._C",
    "numpy",
    "random",
    "signal",
)
"""Modules, with all below them, whose classes and functions become stand-ins."""

RUNNING = frozenset(
    {"os", "posix", "nt", "subprocess", "sys", "importlib", "runpy", "shutil", "socket", "pty", "ctypes", "code"}
    | {"commands", "webbrowser", "multiprocessing", "pickle", "_pickle", "platform", "timeit", "pdb", "bdb"}
    | {f"builtins.{name}" for name in ("eval", "exec", "compile", "open", "__import__", "input", "breakpoint")}
    | {"io.open", "_io.open", "_io.FileIO"}
)
"""Modules, with all below them, and functions that start programs, run code or open files. A training run's arguments
name none of them."""

INERT: Any = object()
"""Entry of an allow-list for a name that becomes a stand-in."""

UNTYPED = "untyped"
"""Dtype of a storage that counts bytes."""


class _StandInType(type):
    def __repr__(cls) -> str:
        return f"{cls.__module__}.{cls.__qualname__}"


class InertObject(metaclass=_StandInType):
    """Record of an object of a class that is not imported. `type(record)` has the name in the pickle."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    items: list[Any]
    """Values that were appended, or stored under a key as (key, value)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> InertObject:
        self = super().__new__(cls)
        self.args, self.kwargs, self.state, self.items = args, kwargs, None, []
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def add(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


class ForeignObject(InertObject):
    """Record of an object of a class of another package, which no list of ours has."""


def _dict(*args: Any) -> dict[Any, Any]:
    """For a defaultdict (whose factory is dropped) and a Counter."""
    return dict(args[0]) if args and isinstance(args[0], dict) else {}


def _list(items: Any = (), maxlen: Any = None) -> list[Any]:
    return list(items)


def _encode(text: str, encoding: str) -> bytes:
    """Python 3's bytes in protocol 2."""
    if encoding != "latin1":
        raise ValueError(f"bytes are encoded as {encoding!r}, expected 'latin1'")
    return text.encode("latin1")


def _numpy_scalar(dtype: InertObject, raw: bytes) -> Any:
    """A number, for numpy's booleans, integers and floats; else its dtype and bytes."""
    kind = dtype.args[0] if dtype.args else None
    order = dtype.state[1] if isinstance(dtype.state, tuple) else "|"
    code = _NUMPY_CODES.get(kind) if isinstance(kind, str) else None
    if code is None or len(raw) != struct.calcsize(code):
        return dtype, raw
    return struct.unpack((">" if order == ">" else "<") + code, raw)[0]


_NUMPY_CODES = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip

_BUILTINS = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice)
STORAGE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
        "ComplexDoubleStorage": torch.complex128,
        "ComplexFloatStorage": torch.complex64,
    }
)
"""torch's typed storages, by name."""
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip


def _allowed() -> dict[Name, Any]:
    table: dict[Name, Any] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("collections", "defaultdict"): _dict,
        ("collections", "Counter"): _dict,
        ("collections", "deque"): _list,
        ("_codecs", "encode"): _encode,
        ("argparse", "Namespace"): SimpleNamespace,
        ("types", "SimpleNamespace"): SimpleNamespace,
        ("datetime", "timedelta"): datetime.timedelta,
        ("torch", "Size"): tuple,
        ("torch", "device"): torch.device,
        ("torch.storage", "UntypedStorage"): UNTYPED,
        ("torch", "UntypedStorage"): UNTYPED,
    }
    table |= {("builtins", kind.__name__): kind for kind in _BUILTINS}
    table |= {("torch", name): dtype for name, dtype in STORAGE_DTYPES.items()}
    table |= {("torch", name): getattr(torch, name) for name in _DTYPES if hasattr(torch, name)}
    for module in ("pathlib", "pathlib._local"):
        table |= {(module, name): lambda *parts: pathlib.PurePosixPath(*parts) for name in _names("Posix")}
        table |= {(module, name): lambda *parts: pathlib.PureWindowsPath(*parts) for name in _names("Windows")}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        table[module, "scalar"] = _numpy_scalar
    # Stand-ins: they would be harmless, but nobody needs what they do.
    names = (("functools", "partial"), ("_io", "BytesIO"), ("datetime", "datetime"), ("uuid", "UUID"))
    return table | dict.fromkeys(names, INERT)


def _names(system: str) -> tuple[str, str]:
    return f"{system}Path", f"Pure{system}Path"


ALLOWED: Mapping[Name, Any] = MappingProxyType(_allowed())
"""The allow-list: (module, name) -> constructor, constant when not callable, or INERT. Classes in it are built in, so
that a pickle cannot change them."""


def unpickle(
    data: bytes,
    *,
    allowed: Mapping[Name, Any] = ALLOWED,
    inert: tuple[str, ...] = INERT_MODULES,
    foreign: bool = False,
    persistent_load: Callable[[Any], Any] | None = None,
    source: str = "the pickle",
) -> Any:
    """The object pickled, made of plain data, `allowed` constructors' results and records.

    Extend the list with `allowed={**ALLOWED, (module, name): function}`; an entry goes before `inert`. `foreign`: names
    of no list become `ForeignObject`s. `source` names the pickle in errors.

    Raises: ValueError on a name that is not allowed, and on bytes that are no pickle.
    """
    try:
        return _Restricted(data, allowed, inert, foreign, persistent_load).load()
    except _Refused as error:
        raise ValueError(f"{source} {error}") from None
    except Exception as error:
        raise ValueError(
            f"{source} is damaged ({type(error).__name__}: {error}), expected a pickle; copy the file again from "
            "its source"
        ) from error


class _Refused(Exception):
    """A pickle asks for something that it may not have."""


class _Restricted(pickle.Unpickler):
    def __init__(
        self,
        data: bytes,
        allowed: Mapping[Name, Any],
        inert: tuple[str, ...],
        foreign: bool,
        persistent_load: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed, self._inert, self._foreign, self._persistent_load = allowed, inert, foreign, persistent_load
        self._names_of_python_2 = data[:1] != pickle.PROTO or data[1] < 3
        self._globals: dict[Name, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_load is None:
            raise _Refused("refers to data outside itself, which only a file of torch.save may; was it cut out of one?")
        return self._persistent_load(pid)

    def find_class(self, module: str, name: str) -> Any:
        if self._names_of_python_2:
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if (module, name) not in self._globals:
            self._globals[module, name] = self._resolve(module, name)
        return self._globals[module, name]

    def _resolve(self, module: str, name: str) -> Any:
        value = self._allowed.get((module, name), self)
        if value is INERT or (value is self and _is_below(module, self._inert)):
            return _stand_in(InertObject, module, name)
        if value is self:
            attack = _is_below(f"{module}.{name}", RUNNING)
            if self._foreign and not attack:
                return _stand_in(ForeignObject, module, name)
            remedy = (
                "No checkpoint needs it: open the file with nothing else, and ask who made it"
                if attack
                else "If you trust the file, load it where that class is installed and save it again without it; a "
                "class that Megatron checkpoints may hold belongs into "
                "megarlhf/weights/checkpoint/formats/torch_file/unpickle.py"
            )
            raise _Refused(f"names {module}.{name}, which is not on the allow-list, so nothing was run. {remedy}")
        if isinstance(value, type) or not callable(value):
            return value
        return lambda *args: value(*args)  # of this load alone: a pickle may set a function's attributes


def _is_below(name: str, roots: Iterable[str]) -> bool:
    return f"{name}.".startswith(tuple(f"{root}." for root in roots))


def _stand_in(base: type[InertObject], module: str, name: str) -> Any:
    return _StandInType(name.rpartition(".")[2], (base,), {"__module__": module, "__qualname__": name})
