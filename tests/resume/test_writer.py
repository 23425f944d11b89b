"""What is said when a resume point cannot be written, and what the process that writes it is handed."""

from collections import namedtuple

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter, load

from megarlhf.resume.points import writer
from tests.command import python
from tests.refuses import missing_names


def test_a_full_disk_is_called_that(tmp_path, monkeypatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage(12))
    said = writer._in_words(RuntimeError("unexpected pos 704 vs 598"), tmp_path / "x")
    assert not missing_names(said, "full", "12 bytes", str(tmp_path), "RuntimeError: unexpected")
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
from megarlhf.resume.points import writer
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


def test_the_process_that_writes_leaves_the_gpu_alone(tmp_path, monkeypatch) -> None:
    """torch's writer asks for a stream where it sees a GPU, which a forked process is refused ("Cannot re-initialize
    CUDA in forked subprocess"); so is this one, whose torch has no CUDA. Without a GPU only that is covered:
    `make test-gpu` has the rest."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({"weight": torch.arange(6.0)}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    (plan,) = FileSystemWriter("unused").prepare_global_plan(plans)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("the process that writes asked for a GPU"))
    note = writer._write_files(tmp_path, [(tmp_path / "actor", planner.finish_plan(plan), planner)], {})
    writer._finish(tmp_path, "actor", metadata, [note.results["actor"]], {})
    monkeypatch.undo()
    found = {"weight": torch.zeros(6)}
    load(found, storage_reader=FileSystemReader(tmp_path / "actor"), no_dist=True)
    assert found["weight"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_nothing_of_the_device_is_left_to_the_process_that_writes() -> None:
    """Samples of the step that a point lies in, by a stand-in for a tensor on a GPU; what is no tensor stays."""

    class OnDevice(torch.Tensor):
        def to(self, *arguments: object, **options: object) -> torch.Tensor:  # type: ignore[override]
            assert (arguments, options) == (("cpu",), {"non_blocking": True})
            return torch.tensor([7.0])

    table = {"experience": {"columns": [OnDevice()]}, "updates": 3, "why": ("x", None)}
    host = writer.to_host(table)
    assert host["experience"]["columns"][0].tolist() == [7.0]
    assert {**host, "experience": 0} == {"experience": 0, "updates": 3, "why": ("x", None)}
