"""Pickles read without running anything that they name: a written allow-list, and records for the rest of it.

A pickle names classes and functions and asks for them to be called. Here a name is looked up in a table and
nowhere else: nothing is imported. What the table gives is one of three things.

- A constructor of ours, which makes plain data: a dict, a path, a shape.
- A constant: `torch.bfloat16`.
- For `INERT_MODULES`, whose enums, configs and functions stand in checkpoints, a `Record` of the name, the
  arguments and the state. A record is data: it has no behaviour to run, whatever its class would do. Names of
  functions (`torch.nn.functional.gelu`) become a `Global`, which is not callable.

Every other name is refused. So are the opcodes that could reach round the table: calls of anything but a
name from it, and state for objects that no constructor of the table made. Sizes are not limited: a pickle may
still ask for more memory than there is.
"""

from __future__ import annotations

import datetime
import io
import pathlib
import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch

Name = tuple[str, str]
"""(module, qualified name) as the pickle spells them."""
PersistentLoad = Callable[[Any], Any]

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
"""Modules, with all below them, whose classes become records and whose functions become names."""


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that is named and not called."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Record:
    """What a pickle says of an object of an inert class."""

    type: Global
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    items: list[Any] = field(default_factory=list)
    """What was appended, or put under a key as (key, value)."""

    def append(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


@dataclass(frozen=True, slots=True)
class StorageType:
    """torch's class of a storage; dtype None: untyped, which counts bytes."""

    dtype: torch.dtype | None


def _dict(*args: Any) -> dict[Any, Any]:
    """For a defaultdict (whose factory is dropped) and a Counter."""
    return dict(args[0]) if args and isinstance(args[0], dict) else {}


def _list(items: Any = (), maxlen: Any = None) -> list[Any]:
    return list(items)


def _path(kind: type[pathlib.PurePath]) -> Callable[..., pathlib.PurePath]:
    def make(*parts: str) -> pathlib.PurePath:
        return kind(*parts)

    return make


def _encode(text: str, encoding: str) -> bytes:
    """Python 3's bytes in protocol 2."""
    if encoding != "latin1":
        raise ValueError(f"bytes are encoded as {encoding!r}, expected 'latin1'")
    return text.encode("latin1")


def _size(dims: Any) -> tuple[int, ...]:
    return tuple(dims)


def _numpy_scalar(dtype: Record, raw: bytes) -> Any:
    """A number, for numpy's booleans, integers and floats; else a record."""
    kind = dtype.args[0] if dtype.args else None
    order = dtype.state[1] if isinstance(dtype.state, tuple) else "|"
    code = _NUMPY_CODES.get(kind) if isinstance(kind, str) else None
    if code is None or len(raw) != struct.calcsize(code):
        return Record(Global("numpy", "scalar"), (dtype, raw))
    return struct.unpack((">" if order == ">" else "<") + code, raw)[0]


_NUMPY_CODES = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip

_BUILTINS = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice)
_STORAGES: dict[str, torch.dtype] = {
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
        ("torch", "Size"): _size,
        ("torch", "device"): torch.device,
        ("torch.storage", "UntypedStorage"): StorageType(None),
        ("torch", "UntypedStorage"): StorageType(None),
    }
    table |= {("builtins", kind.__name__): kind for kind in _BUILTINS}
    table |= {("torch", name): StorageType(dtype) for name, dtype in _STORAGES.items()}
    table |= {("torch", name): getattr(torch, name) for name in _DTYPES if hasattr(torch, name)}
    for module in ("pathlib", "pathlib._local"):
        table |= {(module, name): _path(pathlib.PurePosixPath) for name in ("PosixPath", "PurePosixPath")}
        table |= {(module, name): _path(pathlib.PureWindowsPath) for name in ("WindowsPath", "PureWindowsPath")}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        table[module, "scalar"] = _numpy_scalar
    # Read as records: they would be harmless, but nobody needs what they do.
    records = (("functools", "partial"), ("_io", "BytesIO"), ("datetime", "datetime"), ("uuid", "UUID"))
    return table | {name: Global(*name) for name in records}


ALLOWED: Mapping[Name, Any] = MappingProxyType(_allowed())
"""The allow-list: (module, name) -> constructor, or constant when not callable. A `Global` makes records."""


def unpickle(
    data: bytes | BinaryIO,
    *,
    allowed: Mapping[Name, Any] = ALLOWED,
    inert: tuple[str, ...] = INERT_MODULES,
    persistent_load: PersistentLoad | None = None,
    source: str = "the pickle",
) -> Any:
    """The object pickled, made of plain data, `allowed` constructors' results and records.

    Extend the list with `allowed={**ALLOWED, (module, name): constructor}`; an entry goes before `inert`. A
    class in it receives state through its `__setstate__` or into its `__dict__`, as in plain pickle. `source`
    names the pickle in errors.

    Raises: ValueError on a name that is not allowed, and on bytes that are no pickle.
    """
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    reader = _Restricted(file, allowed, inert, persistent_load)
    try:
        return reader.load()
    except _Refused as error:
        raise ValueError(f"{source} {error}") from None
    except Exception as error:
        raise ValueError(
            f"{source} is damaged ({type(error).__name__}: {error}), expected a pickle; copy the file again from "
            "its source"
        ) from error


class _Refused(Exception):
    """What the pickle asked for and does not get."""


_Unpickler: Any = pickle._Unpickler  # written in Python: the opcodes of the one in C cannot be overridden


class _Restricted(_Unpickler):
    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def __init__(
        self,
        file: BinaryIO,
        allowed: Mapping[Name, Any],
        inert: tuple[str, ...],
        persistent_load: PersistentLoad | None,
    ) -> None:
        super().__init__(file)
        self.proto = 0  # until the pickle states it
        self._allowed = allowed
        self._inert = inert
        self._buildable = {Record, OrderedDict, SimpleNamespace}
        self._buildable |= {value for value in allowed.values() if isinstance(value, type)}
        self._persistent_load = persistent_load

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent_load is None:
            raise _Refused("refers to data outside itself, which only a file of torch.save may; was it cut out of one?")
        return self._persistent_load(pid)

    def find_class(self, module: str, name: str) -> Any:
        if self.proto < 3:  # names of Python 2
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        found = self._allowed.get((module, name), self)
        if found is not self:
            return Global(module, name) if callable(found) else found
        if any(module == prefix or module.startswith(prefix + ".") for prefix in self._inert):
            return Global(module, name)
        raise _Refused(
            f"names {module}.{name}, which is not on the allow-list, so nothing was run. If you trust the file, "
            "load it where that class is installed and save it again without it; a class that Megatron checkpoints "
            "may hold belongs into megarlhf/weights/checkpoint/formats/torch_file/unpickle.py"
        )

    def _call(self, function: Any, args: Any, kwargs: Mapping[str, Any] | None = None, *, new: bool = False) -> Any:
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise _Refused(f"calls a {type(function).__name__}, which no name stands for; get a sound copy of the file")
        make = self._allowed.get((function.module, function.name), function)
        if isinstance(make, Global):
            return Record(make, args, dict(kwargs or {}))
        if new and isinstance(make, type):
            return make.__new__(make, *args, **(kwargs or {}))
        return make(*args, **(kwargs or {}))

    def load_reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    def load_newobj(self) -> None:
        args = self.stack.pop()
        self.append(self._call(self.stack.pop(), args, new=True))

    def load_newobj_ex(self) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        self.append(self._call(self.stack.pop(), args, kwargs, new=True))

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) not in self._buildable:
            raise _Refused(f"sets the state of a {type(target).__name__}, which has none; get a sound copy of the file")
        if isinstance(target, Record):
            target.state = state
        elif (setstate := getattr(target, "__setstate__", None)) is not None:
            setstate(state)
        else:
            self._set_attributes(target, state)

    def _set_attributes(self, target: Any, state: Any) -> None:
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        for name, value in (attributes or {}).items():
            target.__dict__[str(name)] = value
        for name, value in (slots or {}).items():
            object.__setattr__(target, name, value)

    def _refuse_opcode(self) -> None:
        raise _Refused("uses an opcode that neither torch.save nor Megatron writes; get a sound copy of the file")

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build
    for _opcode in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        dispatch[_opcode[0]] = _refuse_opcode
