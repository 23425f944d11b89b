"""What is said when a resume point cannot be written, and what the process that writes it is handed."""

from collections import namedtuple
from pathlib import Path

import torch

from megarlhf.resume import writer
from tests.command import python


def test_a_full_disk_is_called_that(tmp_path: Path, monkeypatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage(12))
    said = writer._in_words(RuntimeError("unexpected pos 704 vs 598"), tmp_path / "x")
    assert said.startswith(f"the disk is full (12 bytes are free at {tmp_path}); RuntimeError: unexpected")
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage(10**9))
    assert writer._in_words(RuntimeError("other"), tmp_path / "x") == "RuntimeError: other"


def test_host_memory_of_a_run_on_a_gpu_is_copied_before_the_fork() -> None:
    """Pinned memory is shared with a forked process, which would find what training has made of it meanwhile. Without a
    GPU the fork itself is the copy. Not covered: pinned memory itself."""
    data = torch.arange(6.0).view(2, 3)
    of_gpu, of_cpu = (writer.to_fork(data, torch.device(kind)) for kind in ("cuda", "cpu"))
    data.fill_(9.0)
    assert of_gpu.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert of_cpu is data


PARENT_OF_TWO_THREADS = """
import multiprocessing, os
from pathlib import Path
import torch
from megarlhf.resume import writer
torch.set_num_threads(2)
held = torch.zeros(1 << 22)
held.clone()  # OpenMP's threads are there
torch.set_num_threads = lambda number: None  # what vLLM's worker does
writer._write_files = lambda *_: held.clone()
writer._leave_note = lambda *_: print("cloned", flush=True)
context = multiprocessing.get_context("fork")
ours, theirs = context.Pipe(duplex=False)
process = context.Process(target=writer._write, args=(Path(), 0, [], {}, None, theirs, os.getpid()))
process.start()
process.join(30)
print("ended", process.exitcode, ours.recv() if process.exitcode == 0 else None)
process.kill()
"""


def test_a_rank_of_several_threads_with_vllm_can_write() -> None:
    """The process that is forked has none of OpenMP's threads, and would wait for them for ever."""
    done = python("-c", PARENT_OF_TWO_THREADS)
    assert done.stdout.split("\n")[:2] == ["cloned", "ended 0 (None, 0)"], done.stdout + done.stderr[-2000:]
