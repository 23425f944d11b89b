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

from megarlhf.weights.checkpoint.formats.torch_dist.metadata import Blob, GlobalTensor

_VERSION = "1.0.0"
"""Version of the metadata, as torch 2.13 writes it; older ones ignore it."""
_PROTOCOL = 4


class _StandIn:
    """Pickles as an object with these attributes, of the class whose place the subclass takes."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


def _stand_in(name: str, module: str = "torch.distributed.checkpoint.metadata", **methods: Any) -> type[_StandIn]:
    return type(name, (_StandIn,), {"__module__": module, "__qualname__": name, **methods})


def _properties_state(self: Any) -> tuple[Any, ...]:
    """State that TensorProperties pickles: dtype, layout, requires_grad, memory format, pinned."""
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

_CLASSES = tuple(_StandIn.__subclasses__())


def pickle_metadata(tensors: Mapping[str, GlobalTensor], objects: Mapping[str, Blob]) -> bytes:
    """The content of `.metadata` for these tensors, and objects that each are one blob."""
    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for key, tensor in tensors.items():
        chunks = []
        for shard in tensor.shards:
            offset = torch.Size(shard.box.start)
            chunks.append(_ChunkStorageMetadata(offsets=offset, sizes=torch.Size(shard.box.shape)))
            places[_MetadataIndex(fqn=key, index=None, offset=offset)] = _info(shard.blob)
        described[key] = _TensorStorageMetadata(
            properties=_TensorProperties(dtype=tensor.dtype), size=torch.Size(tensor.shape), chunks=chunks
        )
    for key, blob in objects.items():
        described[key] = _BytesStorageMetadata()
        places[_MetadataIndex(fqn=key, index=None)] = _info(blob)
    metadata = _Metadata(
        state_dict_metadata=described,
        planner_data=None,
        storage_data=places,
        storage_meta=_StorageMeta(checkpoint_id=None, save_id=None, load_id=None, modules=[]),
        version=_VERSION,
    )
    return _pickled(metadata)


def _pickled(obj: Any) -> bytes:
    """`obj`, made of stand-ins, with the names of the real classes.

    A pickler looks every class up where it says it is from, and would find the real one, unless the class is in
    its memo: the names are written ahead, and their places in the memo given to the pickler.
    """
    buffer = io.BytesIO()
    buffer.write(pickle.PROTO + bytes([_PROTOCOL]))
    for cls in _CLASSES:
        for name in (cls.__module__, cls.__qualname__):
            buffer.write(pickle.SHORT_BINUNICODE + bytes([len(name)]) + name.encode("ascii"))
        buffer.write(pickle.STACK_GLOBAL + pickle.MEMOIZE + pickle.POP)
    pickler = pickle.Pickler(buffer, protocol=_PROTOCOL)
    pickler.memo = {id(cls): (place, cls) for place, cls in enumerate(_CLASSES)}
    pickler.dump(obj)
    return buffer.getvalue()


def _info(blob: Blob) -> _StandIn:
    return _StorageInfo(relative_path=blob.path.name, offset=blob.offset, length=blob.length)
