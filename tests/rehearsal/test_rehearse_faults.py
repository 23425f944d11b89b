"""Faults that a rehearsal must find, each planted in the program of one rank, and rehearsals that are ended early.

Not covered: what else a replay finds (`test_replay_faults.py`).
"""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megarlhf.parallel.loss import Accumulated
from megarlhf.parallel.step import Trainer
from tests.refuses import missing_names
from tests.rehearsal.jobs import Rehearsed, job_tree, run_command, write_job

Plant = Callable[[Trainer, int], None]
"""What a rank does at the beginning of the training phase."""


def plant(monkeypatch: pytest.MonkeyPatch, act: Plant) -> None:
    original = Trainer.accumulate

    def accumulate(self: Trainer, *args: Any) -> Accumulated:
        act(self, dist.get_rank())
        return original(self, *args)

    monkeypatch.setattr(Trainer, "accumulate", accumulate)


def two_stages(folder: Path, *options: str) -> Rehearsed:
    file = write_job("sft", folder, job_tree("sft", folder, pp=2))
    return run_command("sft", file, folder / "out", "--world-size", "2", *options)


def zeros(trainer: Trainer, number: int) -> torch.Tensor:
    return torch.zeros(number, device=trainer.mesh.runtime.device)


def another_size(trainer: Trainer, rank: int) -> None:
    dist.all_reduce(zeros(trainer, 8 if rank == 0 else 6))


def another_order(trainer: Trainer, rank: int) -> None:
    def gather() -> None:
        dist.all_gather_into_tensor(zeros(trainer, 8), zeros(trainer, 4))

    def reduce() -> None:
        dist.all_reduce(zeros(trainer, 8))

    for call in (gather, reduce) if rank == 0 else (reduce, gather):
        call()


def one_more(trainer: Trainer, rank: int) -> None:
    if rank == 1:
        dist.broadcast(zeros(trainer, 5), src=0)


def a_send_more(trainer: Trainer, rank: int) -> None:
    if rank == 0:
        dist.send(zeros(trainer, 16), dst=1)


PLANTED: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "another size": (another_size, ("32", "24", "all_reduce")),
    "another order": (another_order, ("all_gather", "all_reduce")),
    "one more": (one_more, ("10 on rank 0 and 11 on rank 1", "must issue the same collectives")),
    "a send without its receive": (a_send_more, ("64", "send")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_ranks_that_do_not_fit_together(name, tmp_path, monkeypatch, capsys) -> None:
    """Ranks, phase and sizes are named; the exit status is that of a job that does not run."""
    act, words = PLANTED[name]
    plant(monkeypatch, act)
    done = two_stages(tmp_path, "--steps", "1")
    assert done.status == 1
    sentence = done.json()["faults"][0]
    for word in (*words, "rank 0", "rank 1", "train/actor"):
        assert word in sentence, sentence
    assert sentence[:60] in " ".join(capsys.readouterr().out.split())


def test_memory_runs_out_in_the_second_step_only(tmp_path, capsys) -> None:
    """Adam's state is made in the first update, when activations are gone; the second step's training meets both. On a
    device of a size between the needs of the last stage the first step fits by itself."""
    last = ("--ranks", "1")
    one, two = (two_stages(tmp_path, "--steps", steps, *last).json() for steps in ("1", "2"))
    needs = [max(rank["need"] for rank in said["ranks"]) for said in (one, two)]
    assert needs[0] + 1024 < needs[1]
    size = ("--gpu-memory-gib", str(sum(needs) / 2 / 2**30))
    first = two_stages(tmp_path, "--steps", "1", *last, *size)
    assert (first.status, first.json()["fits"]) == (0, True)
    capsys.readouterr()
    second = two_stages(tmp_path, "--steps", "2", *last, *size)
    said = second.json()
    assert (second.status, said["fits"]) == (1, False)
    (tightest,) = said["ranks"]
    assert tightest["peak_at"] == [2, "train/actor"]
    told = capsys.readouterr().out
    assert not missing_names(told, "Rank 1 (stage 1 of actor)", "train/actor in step 2", "does not fit")


def rl_with(folder: Path, utilisation: float, *options: str) -> Rehearsed:
    """One rank of an rl job whose engine has this share of a device."""
    tree = job_tree("rl", folder)
    tree["rollout"]["vllm"] = {"gpu_memory_utilization": utilisation}
    del tree["critic"], tree["reward_model"]
    tree |= {"rewards": [{"kind": "rule", "rule": "exact_match"}], "algo": {"advantage": "group_relative"}}
    file = write_job("rl", folder, tree)
    return run_command("rl", file, folder / "out", "--world-size", "1", "--steps", "1", *options)


def test_an_engine_without_room(tmp_path) -> None:
    """Its share holds its weights and no sequence; or more of the device is taken than the share leaves."""
    done = rl_with(tmp_path, 0.01)
    (sentence,) = done.json()["refusals"]
    assert (done.status, done.json()["fits"]) == (1, False)
    assert not missing_names(sentence, "vLLM", "rollout.vllm.gpu_memory_utilization = 0.01", "96 tokens")
    done = rl_with(tmp_path, 0.97, "--gpu-memory-gib", "16")
    assert done.status == 1
    assert any(not missing_names(each, "free", "roles") for each in done.json()["refusals"])


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_a_stop_while_a_rank_starts_ends_that_rank(tmp_path, temporary, monkeypatch, capsys) -> None:
    """The signal comes right after the fork, before anybody has noted the new process."""
    start = ForkProcess.start

    def interrupted(self: ForkProcess) -> None:
        start(self)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # until it is handled, if it is not held back

    monkeypatch.setattr(ForkProcess, "start", interrupted)
    before = children()
    assert two_stages(tmp_path).status == 128 + signal.SIGTERM
    assert children() <= before
    assert os.listdir(temporary) == []
    assert "nothing is written" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_rehearsal_leaves_nothing(number, request, tmp_path, temporary, monkeypatch, capsys) -> None:
    """The signal comes while two ranks are at work. Where tests run in the background SIGINT may be ignored."""
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, heard))
    hung_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, hung_up))
    seen: list[tuple[set[int], list[str]]] = []

    def told(self: Any, at: Any) -> None:
        if at.step == 1:
            seen.append((children(), os.listdir(temporary)))
            os.kill(os.getpid(), number)

    monkeypatch.setattr("megarlhf.rehearsal.progress._View.note", told)
    before = signal.getsignal(signal.SIGTERM)
    others = children()
    assert two_stages(tmp_path).status == 128 + number
    at_work, folders = seen[0]
    assert at_work - others
    assert len(folders) == 1
    assert children() <= others
    assert os.listdir(temporary) == []
    assert not (tmp_path / "out").exists()
    assert "nothing is written" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def wait_for(happened: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.usefixtures("temporary")  # which such a command cannot tidy up
def test_a_rank_ends_with_a_command_that_is_killed(tmp_path, monkeypatch) -> None:
    """By SIGKILL, while its ranks are busy and say nothing."""

    def sleep(trainer: Trainer, rank: int) -> None:
        (tmp_path / "asleep").touch()
        time.sleep(600)

    plant(monkeypatch, sleep)
    command = multiprocessing.get_context("fork").Process(target=two_stages, args=(tmp_path,))
    command.start()
    started = psutil.Process(command.pid)
    wait_for((tmp_path / "asleep").exists)
    ranks = started.children()
    assert ranks
    command.kill()
    command.join()
    wait_for(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))


def test_a_rank_that_dies(tmp_path, temporary, monkeypatch, capsys) -> None:
    """As by the system when memory runs out."""
    plant(monkeypatch, lambda trainer, rank: os._exit(9) if rank == 1 else None)
    assert two_stages(tmp_path).status == 1
    told = capsys.readouterr().err
    assert missing_names(told, "rank 1", "exit status 9", "--workers") == []
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()
    assert os.listdir(temporary) == []


def test_a_program_that_fails(tmp_path, monkeypatch, capsys) -> None:
    """An error of the program comes with its traceback, a refusal of ours as a sentence."""

    def fail(trainer: Trainer, rank: int) -> None:
        raise KeyError("planted")

    plant(monkeypatch, fail)
    assert two_stages(tmp_path).status == 1
    told = capsys.readouterr().err
    assert not missing_names(told, "failed", "KeyError: 'planted'", "Traceback")
    assert not (tmp_path / "out").exists()
