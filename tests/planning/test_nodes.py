"""Machines that do not fit are named before anything is built, and nothing is left behind. Not covered: several
machines, NCCL, and a network file system that shows files late."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from megarlhf.config import SFTConfig
from megarlhf.planning.machine import nodes
from megarlhf.planning.machine.nodes import RankFacts, disk_problems, needed_bytes, notes, problems, require_gpus, where
from megarlhf.runtime import Runtime
from tests.ranks import RankPool
from tests.refuses import missing_names, refuses

GB = 10**9
Models = dict[str, Path]
Patch = pytest.MonkeyPatch


def facts(rank: int, **changes: Any) -> RankFacts:
    versions = {"torch": "2.13.0", "driver": "570"}
    plain = RankFacts(node=f"n{rank // 8 + 1}", rank=rank, versions=versions, open_files=65536)
    return replace(plain, **changes)


def job(**changes_by_rank: Any) -> list[RankFacts]:
    """Sixteen ranks; `rank_9={...}` changes one."""
    changes = {int(name.removeprefix("rank_")): change for name, change in changes_by_rank.items()}
    usual = [{"gpu": f"GPU-{rank}", "gpu_bytes": 80 * GB} for rank in range(16)]
    return [facts(rank, **(usual[rank] | changes.get(rank, {}))) for rank in range(16)]


def test_equal_nodes_have_no_problem() -> None:
    assert problems(job()) == []
    assert notes(job()) == []


def test_each_problem_names_node_rank_and_values() -> None:
    found = problems(job(
        rank_9={"versions": {"torch": "2.12.0"}}, rank_3={"open_files": 256}, rank_12={"gpu": "GPU-13"},
        rank_5={"gpu_used": 30 * GB}, rank_15={"skew": -90.0, "directory": ("cannot write",)},
    ))  # fmt: skip
    whole = "n1 (rank 0-7), n2 (rank 8, 10-15)"
    expected = [
        ("driver", f"570 on {whole}", "missing on n2 (rank 9)"),
        ("torch", f"2.13.0 on {whole}", "2.12.0 on n2 (rank 9)"),
        ("n1 (rank 3)", "ulimit -n is 256", "16 ranks", "576"),
        ("n2 (rank 12-13)", "GPU GPU-13"),
        ("n1 (rank 5)", "30.0 of 80.0 GB", "GPU GPU-5", "nvidia-smi"),
        ("n2 (rank 15)", "90.0 s behind", "rank 0", "NTP"),
        ("n2 (rank 15): cannot write",),
    ]
    assert [missing_names(problem, *names) for problem, names in zip(found, expected, strict=True)] == [[]] * 7


def test_the_same_device_number_on_two_nodes_is_two_gpus() -> None:
    assert problems([facts(0, gpu="0"), facts(8, gpu="0")]) == []


@pytest.mark.parametrize("skew, refused, noted", [(0.9, 0, 0), (-1.1, 0, 1), (59.0, 0, 1), (61.0, 1, 0)])
def test_a_clock_is_noted_from_a_second_and_refused_from_a_minute(skew: float, refused: int, noted: int) -> None:
    ranks = job(rank_8={"skew": skew})
    assert (len(problems(ranks)), len(notes(ranks))) == (refused, noted)


def test_many_nodes_are_counted() -> None:
    assert where([facts(8 * n) for n in range(6)]).endswith("n4 (rank 24) and 2 more nodes")


@pytest.mark.parametrize("gpus, sees, refused", [("8", False, True), ("8", True, False), ("0", False, False)])
def test_a_node_whose_gpus_are_not_seen_is_named(gpus: str, sees: bool, refused: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr(nodes, "sees_gpus", lambda: sees)
    environ = {"SLURM_GPUS_ON_NODE": gpus, "SLURMD_NODENAME": "n7"}
    if not refused:
        return require_gpus(3, environ)
    with refuses("n7 (rank 3)", "8 GPU(s)", "nvidia-smi", "--gpus-per-node=0"):
        require_gpus(3, environ)


def config(model: Path, run_dir: Path) -> SFTConfig:
    tree = {"run": {"dir": run_dir}, "actor": {"model": {"path": model}}}
    tree["data"] = {"train": "x.jsonl", "max_prompt_tokens": 8, "max_response_tokens": 8}
    tree["train"] = {"num_steps": 1, "mini_batch_samples": 2, "max_tokens_per_micro_batch": 64}
    return SFTConfig.model_validate(tree)


def test_disk_space_for_two_resume_points_and_an_export(two_layers: Models, tmp_path: Path) -> None:
    """fp32: 4 bytes a parameter in an export, 12 in a resume point (parameter and two moments)."""
    model = two_layers["plain"]
    parameters = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            parameters += sum(tensors.get_tensor(name).numel() for name in list(tensors.keys()))
    assert parameters > 10_000
    assert needed_bytes(config(model, tmp_path)) == parameters * (4 + 2 * 12)


def test_a_full_disk_is_named_unless_resume_points_of_the_run_fill_it(tmp_path: Path, monkeypatch: Patch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    run_dir = tmp_path / "not" / "there"
    assert disk_problems(run_dir, 5 * GB, "n1", 0) == []
    (problem,) = disk_problems(run_dir, 5 * GB + 1000, "n1", 0)
    assert missing_names(problem, "n1 (rank 0)", str(tmp_path), "5.00 GB free", "run.dir") == []
    point = tmp_path / "resume" / "step_000001" / "file"
    point.parent.mkdir(parents=True)
    point.write_bytes(b"x" * 1000)
    assert disk_problems(tmp_path, 5 * GB + 1000, "n1", 0) == []
    assert disk_problems(tmp_path, 5 * GB + 1000, "n1", 1) != [], "it is kept for good"


# --- on ranks -------------------------------------------------------------------------------------


def _check(runtime: Runtime, model: Path, run_dir: Path, deed: Callable[[Runtime], None] | None) -> str:
    """What `check_nodes` says, with each rank a node of its own; `deed` changes what rank 1 finds."""
    saved = {name: getattr(nodes, name) for name in ("_node", "_versions", "_appears", "time", "SEE_SECONDS")}
    nodes._node = lambda environ: f"n{runtime.rank + 1}"
    if deed is not None:
        deed(runtime)
    own = replace(runtime, local_rank=0, local_world_size=1)
    try:
        started = time.perf_counter()
        said = nodes.check_nodes(config(model, run_dir), own)
        assert time.perf_counter() - started < 20
        return f"fine {said}"
    except ValueError as error:
        return str(error)
    finally:
        for name, value in saved.items():
            setattr(nodes, name, value)


def _other_software(runtime: Runtime) -> None:
    if runtime.rank == 1:
        nodes._versions = lambda: {"torch": "1.0"}  # type: ignore[assignment]
    else:
        nodes._versions = lambda: {"torch": "2.0"}  # type: ignore[assignment]


def _other_directory(runtime: Runtime) -> None:
    """Rank 1 does not see what rank 0 writes, as where run.dir is a disk of the node."""
    nodes.SEE_SECONDS = 0.2
    if runtime.rank == 1:
        nodes._appears = lambda path: False


class _LateClock:
    """The module `time`, 100 seconds behind."""

    def __getattr__(self, name: str) -> Any:
        return (lambda: time.time() - 100) if name == "time" else getattr(time, name)


def _late_clock(runtime: Runtime) -> None:
    if runtime.rank == 1:
        nodes.time = _LateClock()  # type: ignore[assignment]


@pytest.mark.parametrize("deed, names", [
    (None, "fine []"), (_other_software, "torch|2.0 on n1 (rank 0)|1.0 on n2 (rank 1)"),
    (_other_directory, "n2 (rank 1)|run.dir"), (_late_clock, "n2 (rank 1)|100.0 s behind|rank 0"),
])  # fmt: skip
def test_ranks_find_together_what_one_of_them_is_and_leave_nothing(
    ranks: RankPool, two_layers: Models, tmp_path: Path, deed: Any, names: str
) -> None:
    """Each rank counts as a node. Every rank gets the same message; the directory does not exist before or after."""
    run_dir = tmp_path / "deep" / "run"
    said = ranks.run(2, _check, two_layers["plain"], run_dir, deed)
    assert said[0] == said[1]
    assert not missing_names(said[0], *names.split("|"))
    if deed is not None:
        assert not missing_names(said[0], "2 node(s)", "2 rank(s)", "1 problem(s)")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_in_use_is_left_as_it_was(ranks: RankPool, two_layers: Models, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    assert ranks.run(2, _check, two_layers["plain"], tmp_path, None) == ["fine []"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_path_that_cannot_be_a_directory_is_named(ranks: RankPool, two_layers: Models, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    said = ranks.run(2, _check, two_layers["plain"], tmp_path / "file" / "run", None)
    assert said[0] == said[1]
    assert not missing_names(said[0], "n1 (rank 0)", "run.dir", "cannot be written")


def test_a_wrong_sum_is_named_where_it_is_found(ranks: RankPool, two_layers: Models, tmp_path: Path) -> None:
    """A rank with a wrong result stops; the others would learn it from the end of the job."""
    said = ranks.run(2, _check_sum, tmp_path)
    assert said[0] == "fine"
    assert missing_names(said[1], "n2 (rank 1)", "all ranks", "4", "3", "NCCL_SOCKET_IFNAME") == []


def _check_sum(runtime: Runtime, folder: Path) -> str:
    saved = _, real = nodes._node, nodes._require_equal
    nodes._node = lambda environ: f"n{runtime.rank + 1}"
    if runtime.rank == 1:
        nodes._require_equal = lambda value, expected: real(value + 1, expected)
    try:
        nodes._require_sum("all ranks", [0, 1], None, runtime)
        return "fine"
    except ValueError as error:
        return str(error)
    finally:
        nodes._node, nodes._require_equal = saved
