"""Sleep of an engine: vLLM frees weights and cache while the trainer works. They are two parts of a `DeviceMemory`.

On a GPU this is vLLM's own sleep mode. It keeps addresses, which captured CUDA graphs need. On a CPU (tests and
rehearsals) the storages of the live tensors are freed, as for the trainer's roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.parallel.device_memory import DeviceMemory, Offloadable, Tensors
from megarlhf.runtime import Runtime, free_bytes, give_back_cached

GIB = 2**30


class Sleeper(Protocol):
    """Control of the weights and the cache of one engine: sleep and wake."""

    weights_lost: bool
    """Whether the weights' memory has no valid model."""

    @property
    def weights(self) -> Offloadable: ...

    @property
    def cache(self) -> Offloadable: ...

    @property
    def keeps_addresses(self) -> bool: ...

    def forget(self) -> None:
        """Forget the parts of an engine that is closed."""


Room = Callable[[int, str], None]
"""Check before a part comes back, by its bytes and its name. Collective. Raises where there is no room."""


@dataclass(frozen=True)
class EngineMemory:
    """Weights and cache of an engine, which may leave the device."""

    llm: Any
    """vLLM's `LLM`."""
    parameters: Mapping[str, Tensor]
    cache: Callable[[], Sequence[Tensor]]
    """Cache of keys and values."""


def make_sleeper(memory: EngineMemory, device_memory: DeviceMemory, level: int, room: Room) -> Sleeper:
    """The sleeper for this device. level: `rollout.vllm.sleep_level` without `auto`"""
    kind = _ByVllm if device_memory.on_gpu else _ByStorages
    return kind(memory, device_memory, level, room)


def cache_of_worker(llm: Any) -> list[Tensor]:
    """vLLM's cache of keys and values on this rank."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    caches = worker.model_runner.kv_caches
    return [tensor for layer in caches for tensor in (layer if isinstance(layer, list | tuple) else [layer])]


class _ByStorages:
    keeps_addresses = False

    def __init__(self, memory: EngineMemory, device_memory: DeviceMemory, level: int, room: Room) -> None:
        self.weights_lost = False
        self._device_memory, host = device_memory, device_memory.host

        def lost() -> None:
            self.weights_lost = level == 2

        self.weights = _Checked(Tensors(memory.parameters.values, host, copied=level == 1), "weights", room, lost)
        self.cache = _Checked(Tensors(memory.cache, host, copied=False), "cache", room)
        if level:
            device_memory.allow_offload(self.cache, self.weights)

    def forget(self) -> None:
        self._device_memory.forget(self.weights, self.cache)


class _Checked:
    """A part that checks for room before it is loaded."""

    def __init__(self, part: Tensors, what: str, room: Room, left: Callable[[], None] = lambda: None) -> None:
        self._part, self._what, self._room, self._left = part, what, room, left

    @property
    def present(self) -> bool:
        return self._part.present

    def offload(self) -> None:
        self._part.offload()
        self._left()

    def onload(self) -> None:
        self._room(self._part.nbytes, self._what)
        self._part.onload()

    def wait(self) -> None:
        self._part.wait()

    def synchronize(self) -> None: ...


class _ByVllm:
    """Sleep by vLLM: one call puts both parts to sleep, and each is woken by itself."""

    keeps_addresses = True

    def __init__(self, memory: EngineMemory, device_memory: DeviceMemory, level: int, room: Room) -> None:
        self.weights_lost = False
        self._llm, self._level, self._device_memory, self._room = memory.llm, level, device_memory, room
        self._asleep: set[str] = set()
        self.weights = _Tagged(self, "weights", "weights", _bytes_of(memory.parameters.values()))
        self.cache = _Tagged(self, "kv_cache", "cache", _bytes_of(memory.cache()) if level else 0)
        if level:
            device_memory.allow_offload(self.cache, self.weights)

    def left(self) -> None:
        """Note that a part is not needed. vLLM sleeps when neither is."""
        if not self.weights.present and not self.cache.present and "weights" not in self._asleep:
            self._llm.sleep(level=self._level)
            self._asleep = {"weights", "kv_cache"}
            self.weights_lost = self._level == 2

    def wake(self, part: _Tagged) -> None:
        """Wake a part, if it sleeps."""
        if part.tag in self._asleep:
            self._room(part.nbytes, part.what)
            self._llm.wake_up(tags=[part.tag])
            self._asleep.remove(part.tag)

    def forget(self) -> None:
        self._device_memory.forget(self.weights, self.cache)


class _Tagged:
    """One of vLLM's two kinds of memory, with vLLM's tag."""

    def __init__(self, of: _ByVllm, tag: str, what: str, nbytes: int) -> None:
        self._of, self.tag, self.what, self.nbytes = of, tag, what, nbytes
        self.present = True

    def offload(self) -> None:
        self.present = False
        self._of.left()

    def onload(self) -> None:
        self._of.wake(self)
        self.present = True

    def wait(self) -> None: ...

    def synchronize(self) -> None: ...


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def require_room(nbytes: int, what: str, runtime: Runtime) -> None:
    """Require free memory on every rank's device. Collective. Raises: RuntimeError, on every rank, if a rank has
    less."""
    give_back_cached(runtime)

    def error(reasons: Sequence[str]) -> RuntimeError:
        return RuntimeError(
            f"vLLM's {what} cannot come back: {'; '.join(reasons)}. The trainer holds more than when vLLM started. "
            "Lower rollout.vllm.gpu_memory_utilization; let more of the roles leave the device "
            "(ROLE.offload: parameters, optimizer); or cut the roles further (tp, pp)"
        )

    with raise_on_all_ranks(error) as problems:
        if (free := free_bytes(runtime)) < nbytes:
            problems.append(f"it takes {nbytes / GIB:.2f} GiB, and {free / GIB:.2f} GiB of the device are free")
