"""What the ranks of the tests of `make test-gpu` do, and how such a test starts them."""

import contextlib
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarlhf.parallel.device_memory import resize
from megarlhf.runtime import Runtime
from tests.ranks import RankPool
from tools.gpu_check.cases import Launch
from tools.gpu_check.rank import run_launch


class CountedTensors(TorchDispatchMode):
    """Stands in for an allocator that counts, on a CPU: storages that operations return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        """Bytes by storage."""
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args[:1], output) if func is resize.default else output):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return output

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = int(storage._cdata), storage.nbytes()
        if key not in self.live:
            if not nbytes:
                return
            weakref.finalize(storage, self._gone, key).atexit = False
        self.total += nbytes - self.live.get(key, 0)
        self.live[key] = nbytes
        self.largest = max(self.largest, self.total)

    def _gone(self, key: int) -> None:
        self.total -= self.live.pop(key)

    def peak(self) -> int:
        return self.largest

    def reset(self) -> None:
        self.largest = self.total


def gpu_check_launch(runtime: Runtime, path: str, counted: bool) -> None:
    """The jobs of a launch; `counted`: with memory, of tensors."""

    def join(name: str) -> AbstractContextManager[Runtime]:
        return contextlib.nullcontext(runtime)

    if not counted:
        run_launch(join, Path(path))
        return
    with CountedTensors() as meter:
        run_launch(join, Path(path), lambda _: meter)


@dataclass
class PoolStart:
    """Starts ranks of a pool instead of processes."""

    ranks: RankPool
    counted: bool = False

    def __call__(self, launch: Launch, path: Path) -> str:
        try:
            self.ranks.run(launch.ranks, gpu_check_launch, str(path), self.counted)
        except AssertionError as error:
            (path.parent / "output.log").write_text(str(error))
            return "ended with exit status 1"
        return ""
