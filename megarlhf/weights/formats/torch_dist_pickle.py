"""The pickle of `torch.distributed.checkpoint.metadata.Metadata`, made without importing that module.

The import takes a second, half the time of converting a small model. Stand-ins pickle as objects of the real
classes; a test unpickles them as such.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from megarlhf.weights.formats.torch_dist_metadata import Blob, GlobalTensor

_VERSION = "1.0.0"
"""Of the metadata, as torch 2.13 writes it; older ones ignore it."""


class _StandIn:
    """Pickles as an object with these attributes, of the class whose place the subclass takes."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


def _stand_in(name: str, module: str = "torch.distributed.checkpoint.metadata", **methods: Any) -> type[_StandIn]:
    return type(name, (_StandIn,), {"__module__": module, "__qualname__": name, **methods})


def _properties_state(self: Any) -> tuple[Any, ...]:
    """As TensorProperties pickles: dtype, layout, requires_grad, memory format, pinned."""
    return self.dtype, torch.strided, False, _MemoryFormat(), False


_Metadata = _stand_in("Metadata")
_MetadataIndex = _stand_in("MetadataIndex")
_TensorStorageMetadata = _stand_in("TensorStorageMetadata")
_ChunkStorageMetadata = _stand_in("ChunkStorageMetadata")
_BytesStorageMetadata = _stand_in("BytesStorageMetadata")
_StorageMeta = _stand_in("StorageMeta")
_StorageInfo = _stand_in("_StorageInfo", "torch.distributed.checkpoint.filesystem")
_TensorProperties = _stand_in("TensorProperties", __getstate__=_properties_state)
# An enum; its first member is the contiguous format.
_MemoryFormat = _stand_in("_MEM_FORMAT_ENCODING", __reduce__=lambda self: (type(self), (0,)))

_PythonPickler: Any = pickle._Pickler  # the one in C looks every class up where it says it is from


class _Pickler(_PythonPickler):
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, _StandIn):
            self.save(obj.__module__)
            self.save(obj.__qualname__)
            self.write(pickle.STACK_GLOBAL)
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def pickle_metadata(tensors: Mapping[str, GlobalTensor], objects: Mapping[str, Blob]) -> bytes:
    """The content of `.metadata` for these tensors, and objects that each are one blob."""
    described: dict[str, Any] = {}
    where: dict[Any, Any] = {}
    for key, tensor in tensors.items():
        chunks = []
        for chunk in tensor.chunks:
            offset = torch.Size(chunk.box.start)
            chunks.append(_ChunkStorageMetadata(offsets=offset, sizes=torch.Size(chunk.box.shape)))
            where[_MetadataIndex(fqn=key, index=None, offset=offset)] = _info(chunk.blob)
        described[key] = _TensorStorageMetadata(
            properties=_TensorProperties(dtype=tensor.dtype), size=torch.Size(tensor.shape), chunks=chunks
        )
    for key, blob in objects.items():
        described[key] = _BytesStorageMetadata()
        where[_MetadataIndex(fqn=key, index=None)] = _info(blob)
    metadata = _Metadata(
        state_dict_metadata=described,
        planner_data=None,
        storage_data=where,
        storage_meta=_StorageMeta(checkpoint_id=None, save_id=None, load_id=None, modules=[]),
        version=_VERSION,
    )
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=4).dump(metadata)
    return buffer.getvalue()


def _info(blob: Blob) -> _StandIn:
    return _StorageInfo(relative_path=blob.path.name, offset=blob.offset, length=blob.length)
