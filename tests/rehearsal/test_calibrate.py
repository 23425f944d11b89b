"""`megarlhf calibrate`: what it writes loads and prices. Not covered: whether its figures are right
(`benchmarks/rehearsal/time.py`), NCCL, and several nodes."""

import os

import pytest
import torch

from megarlhf.commands.cli import main
from megarlhf.commands.launch import MARK
from megarlhf.rehearsal.calibrate.messages import groups_of
from megarlhf.rehearsal.calibrate.run import calibrate, require_writable, write_hardware
from megarlhf.rehearsal.calibrate.stopwatch import undisturbed_clock
from megarlhf.rehearsal.calibrate.work import RING, RING_BYTES, copies_of, in_turn
from megarlhf.rehearsal.cost_model.hardware import Hardware, load_hardware
from megarlhf.rehearsal.cost_model.pricing import Pricing
from megarlhf.runtime import Runtime
from tests.refuses import missing_names, refuses
from tests.rehearsal.test_hardware import tree


def calibrated(runtime: Runtime) -> Hardware | None:
    return calibrate(runtime, quick=True)


def test_two_ranks_measure_a_file_that_loads_and_prices(ranks, tmp_path):
    """Every table has rows of what it is about, a measured point is met, and nothing is free."""
    hardware, nothing = ranks.run(2, calibrated)
    assert nothing is None, "only the first rank has it"
    path = tmp_path / "here.yaml"
    write_hardware(hardware, path)
    assert load_hardware(path) == hardware
    assert [each.name for each in tmp_path.iterdir()] == ["here.yaml"], "nothing is left beside it"
    measured = hardware.measured
    assert {row.dtype for row in measured.products} == {"float32", "bfloat16"}
    assert {row.kind for row in measured.memory} == {
        "copy", "cast", "math", "norm", "largest", "reduce", "index", "fill",
    }  # fmt: skip
    assert {row.direction for row in measured.attention} == {"forward", "backward"}
    assert {(row.operation, row.ranks, row.nodes) for row in measured.collectives} >= {
        ("all_reduce", 2, 1), ("all_gather", 2, 1), ("reduce_scatter", 2, 1), ("all_to_all", 2, 1), ("send", 2, 1),
    }  # fmt: skip
    assert 1e-7 < hardware.launch.value < 1e-3
    price, row = Pricing(hardware, 2), measured.products[0]
    asked = ("matmul", 1.0, 8, row.dtype, (row.batch, row.m, row.k, row.n))
    assert price.operation_seconds(*asked) == pytest.approx(hardware.launch.value + row.seconds)
    said = next(each for each in measured.collectives if each.operation == "all_reduce" and each.nbytes > 4)
    assert price.collective_seconds("all_reduce", (0, 1), said.nbytes, host=False) == pytest.approx(said.seconds)
    assert "megarlhf calibrate" in hardware.sources["measured"]


def test_groups_inside_and_between_nodes():
    """Two nodes of 4: 2 and 4 ranks of the first, one rank of each, and all; one node of 2: the two."""
    assert groups_of(8, 4) == {(0, 1): 1, (0, 1, 2, 3): 1, (0, 4): 2, tuple(range(8)): 2}
    assert groups_of(2, 2) == {(0, 1): 1}
    assert groups_of(1, 1) == {}
    assert groups_of(3, 3) == {(0, 1): 1, (0, 1, 2): 1}


def test_tensors_are_used_in_turn_so_that_no_cache_holds_them():
    assert copies_of(1 << 10) == RING
    assert copies_of(RING_BYTES // 4) == 4
    assert copies_of(RING_BYTES) == 2
    seen: list[int] = []
    call = in_turn([lambda: seen.append(0), lambda: seen.append(1)])
    for _ in range(3):
        call()
    assert seen == [0, 1, 0]


def test_the_clock_runs_while_the_thread_works():
    began = undisturbed_clock()
    for _ in range(200):
        torch.randn(64, 64) @ torch.randn(64, 64)
    assert 0 < undisturbed_clock() - began < 60


def test_where_a_file_cannot_be_is_said_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    """A rank is never started: the measurement would take longer than the test may."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", MARK):
        monkeypatch.delenv(name, raising=False)
    assert main(["calibrate", "-o", str(tmp_path / "none" / "x.yaml")]) == 2
    assert f"no directory {tmp_path / 'none'}" in capsys.readouterr().err
    assert main(["calibrate", "-o", str(tmp_path)]) == 2
    assert not missing_names(capsys.readouterr().err, str(tmp_path), "is a directory", "name a file")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main(["calibrate", "-o", str(tmp_path / "x.yaml"), "--nproc", "3"]) == 2
    assert not missing_names(capsys.readouterr().err, "--nproc 3", "launcher", "2 rank")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "x.yaml"
    path.write_text("before")
    require_writable(path)
    hardware = Hardware.model_validate(tree())

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with refuses("-o", "No space left"):
        write_hardware(hardware, path)
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["x.yaml"]
    monkeypatch.undo()
    write_hardware(hardware, path)
    assert load_hardware(path) == hardware
