"""Which rank a process is, and what the machine is said to have.

Not covered: a real srun (tests marked `slurm`), NCCL, and a machine with a GPU beyond its driver's files.
"""

import json
import os
import socket
from unittest import mock

import pytest
import torch
import yaml

from megarlhf import runtime
from megarlhf.commands import cli
from megarlhf.commands.checked import rank_notes, refuse_shell_of_step
from megarlhf.config import RunConfig
from megarlhf.parallel.megatron_cpu import megatron_device
from megarlhf.runtime import RankInfo, capabilities, detect_rank, initialize, is_shell_of_step
from tests.ranks import RankPool
from tests.refuses import missing_names, refuses
from tests.weights.cases import TINY

SRUN = {
    "SLURM_PROCID": "26",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "28",
    "SLURM_STEP_TASKS_PER_NODE": "8(x3),4",
    # Of the allocation, not of the step: more tasks could run than this step has.
    "SLURM_NTASKS": "32",
    "SLURM_TASKS_PER_NODE": "8(x4)",
}


def without(names, env=SRUN):
    return {name: value for name, value in env.items() if name not in names}


ONE_TASK = {
    **SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip
SALLOC = {**ONE_TASK, "SLURM_STEP_ID": "4294967290"}
"""The shell that `salloc` opens on a node, with `LaunchParameters=use_interactive_step`."""
PTY = {**ONE_TASK, "SLURM_PTY_PORT": "41234", "SLURM_PTY_WIN_COL": "80", "SLURM_PTY_WIN_ROW": "24"}
"""`srun --pty bash`"""


@pytest.mark.parametrize("env, expected", [
    (SALLOC, True), (PTY, True), (ONE_TASK, False), (SRUN, False), ({}, False),
    ({"RANK": "0", "WORLD_SIZE": "1"}, False),
    ({**SRUN, "SLURM_PTY_PORT": "41234"}, False),
    ({**PTY, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, False),
    ({name: value for name, value in SALLOC.items() if name != "SLURM_STEP_ID"}, False),
])  # fmt: skip
def test_a_shell_in_a_step_is_told_from_a_task(env, expected):
    """A step of several tasks, torchrun in the shell, and a start without the step are none."""
    assert is_shell_of_step(env) is expected


@pytest.mark.parametrize("command", [["sft"], ["generate", "--prompt", "1"]])
@pytest.mark.parametrize("env", [SALLOC, PTY])
def test_several_ranks_in_a_shell_of_a_step_are_refused_with_the_way_out(env, command, tmp_path, monkeypatch, capsys):
    """They would silently be one. One rank may start there, and one plain task of a step is told how to have more."""
    clear_slurm(monkeypatch)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    tree = {"run": {"dir": str(tmp_path / "run")}, "actor": {"model": {"path": str(tmp_path)}}}
    if command == ["sft"]:
        tree |= {"data": {"train": "x"}, "train": {"num_steps": 1, "mini_batch_samples": 1, "micro_batch_samples": 1}}
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    for override in ("run.nproc=2", "run.world_size=2"):
        assert cli.main([*command, "-c", str(tmp_path / "file.yaml"), override]) == 2
        names = (override.replace("=", " = "), "env -u SLURM_STEP_ID megarlhf", "srun --pty", "torchrun", "run.nproc=1")
        assert not missing_names(capsys.readouterr().err, *names)
    refuse_shell_of_step(RunConfig(dir=tmp_path), "sft", env)  # one rank
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.delenv("SLURM_PTY_PORT", raising=False)
    (note,) = rank_notes(RunConfig(dir=tmp_path, nproc=2), 1, 1, launched=True)
    assert not missing_names(note, "run.nproc = 2", "not used", "env -u SLURM_STEP_ID megarlhf")


def clear_slurm(monkeypatch):
    for name in os.environ:
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)


def test_a_plain_start_is_no_rank():
    assert detect_rank({"HOME": "/root", "RANK": "3"}) is None


def test_torchrun():
    env = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert detect_rank(env) == RankInfo(rank=9, local_rank=1, world_size=16, local_world_size=8)
    # torchrun inside an sbatch script: its variables win.
    assert detect_rank({**SRUN, **env}) == RankInfo(rank=9, local_rank=1, world_size=16, local_world_size=8)
    # Left over in the shell that submitted the job, or set by the entry of a container: Slurm's numbers count.
    left_over = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert detect_rank({**SRUN, **left_over}) == detect_rank(SRUN)
    assert detect_rank({"RANK": "1", "WORLD_SIZE": "2"}) == RankInfo(
        rank=1, local_rank=0, world_size=2, local_world_size=2
    )


@pytest.mark.parametrize("node, tasks", [(0, 8), (2, 8), (3, 4)])
def test_srun(node, tasks):
    rank_info = detect_rank({**SRUN, "SLURM_NODEID": str(node)})
    assert rank_info == RankInfo(rank=26, local_rank=2, world_size=28, local_world_size=tasks)


def test_srun_of_an_older_slurm_has_the_jobs_numbers_only():
    env = without(["SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"])
    assert detect_rank(env) == RankInfo(rank=26, local_rank=2, world_size=32, local_world_size=8)


@pytest.mark.parametrize(
    "written, expected",
    [("1", [1]), ("4,2", [4, 2]), ("8(x3),4", [8, 8, 8, 4]), ("2(x2),1(x2)", [2, 2, 1, 1])],
)
def test_tasks_per_node_as_slurm_writes_it(written, expected):
    infos = [
        detect_rank({**SRUN, "SLURM_STEP_TASKS_PER_NODE": written, "SLURM_NODEID": str(node)})
        for node in range(len(expected))
    ]
    assert [info.local_world_size for info in infos] == expected


@pytest.mark.parametrize("name", ["SLURM_STEP_ID", "SLURM_PROCID"])
def test_the_shell_of_a_batch_script_is_no_rank(name):
    """sbatch gives its script SLURM_PROCID=0 and SLURM_NTASKS, but no step."""
    assert detect_rank(SRUN) is not None
    assert detect_rank(without([name])) is None


def test_a_rank_of_several_without_a_port_is_told_how_to_start():
    """Not covered: two ranks that were given different ports."""
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(runtime, "torch", mock.Mock(wraps=torch, **{"cuda.is_available.return_value": False})),
    ):
        os.environ.pop("MASTER_PORT", None)
        with pytest.raises(ValueError, match=r"rank 1 of 2 has no MASTER_PORT; start ranks with torchrun, .*sbatch"):
            initialize(RankInfo(rank=1, world_size=2, local_world_size=1), seed=0)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("visible", "local_rank", "exported"), [(1, 3, "0"), (8, 3, "3"), (2, 3, "1"), (0, 3, "3")])
def test_the_exported_local_rank_is_the_number_of_the_visible_device(visible, local_rank, exported):
    """With --gpus-per-task=1 each task sees one device, number 0, and vLLM refuses a number beyond what it sees.
    Without a GPU it is the rank's own. Not covered: a GPU."""
    taken = {}
    fake = mock.Mock(wraps=torch, device=torch.device)
    fake.cuda.set_device.return_value = None
    fake.cuda.is_available.return_value, fake.cuda.device_count.return_value = visible > 0, visible
    with (
        mock.patch.dict(os.environ, {"MASTER_PORT": "1", "MASTER_ADDR": "127.0.0.1"}),
        mock.patch.object(runtime, "torch", fake),
        mock.patch.object(runtime.dist, "init_process_group", lambda backend, **options: taken.update(options)),
        mock.patch.object(runtime, "_ranks_per_block", return_value=4),
        mock.patch.object(torch._dynamo.config, "disable", torch._dynamo.config.disable),
    ):
        joined = initialize(RankInfo(rank=3, local_rank=local_rank, world_size=4, local_world_size=4), seed=0)
        assert os.environ["LOCAL_RANK"] == exported
        assert os.environ["RANK"] == "3"
    assert joined.local_rank == local_rank
    device = torch.device("cuda", int(exported)) if visible else None
    assert "device_id" not in taken, "further groups would be made by splitting the world"
    assert joined.device == (device or torch.device("cpu"))
    assert fake.cuda.set_device.call_args_list == ([mock.call(int(exported))] if visible else [])


def _blocks(joined):
    """As if the four ranks stood on machines of the given sizes."""
    blocks = []
    for sizes in ([4, 4, 4, 4], [2, 2, 2, 2], [3, 3, 3, 1]):
        info = RankInfo(rank=joined.rank, world_size=4, local_world_size=sizes[joined.rank])
        blocks.append(initialize(info, seed=0).ranks_per_block)
    return blocks


def test_all_ranks_know_the_block_that_fits_into_every_machine(ranks: RankPool):
    """Also where machines differ in size: the mesh's order depends on it."""
    assert ranks.run(4, _blocks) == [[4, 2, 1]] * 4


def test_capabilities_of_this_machine():
    """Versions are the installed ones; a missing package is None, not an error."""
    machine = capabilities()
    assert machine.versions["torch"] == torch.__version__
    assert set(machine.versions) == set(runtime.PACKAGES)
    assert "gloo" in machine.backends
    assert machine.device_type == ("cuda" if torch.cuda.is_available() else "cpu")
    if machine.device_type == "cpu":
        assert (machine.device_count, machine.device_name) == (0, f"{os.uname().machine} CPU")


def test_a_gpus_name_comes_from_the_driver_and_no_context_is_made():
    """torch's own call for the name initialises CUDA on the device; here it would raise."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "_lazy_init", side_effect=AssertionError("a context was made")),
    ):
        machine = capabilities()
        with pytest.raises(AssertionError, match="a context was made"):
            torch.cuda.get_device_name(0)
    assert (machine.device_type, machine.device_count) == ("cuda", 2)
    assert machine.device_name


def test_names_that_the_driver_lists(tmp_path):
    assert runtime._gpu_names(tmp_path / "absent") == "GPU (the driver lists no name)"
    for bus, model in (("0000:04:00.0", "NVIDIA H200"), ("0000:05:00.0", "NVIDIA H200"), ("0000:06:00.0", "NVIDIA A2")):
        (tmp_path / bus).mkdir()
        text = f"Model: \t\t {model}\nIRQ:   \t\t 33\nGPU UUID: \t GPU-0\nBus Type: \t PCIe\n"
        (tmp_path / bus / "information").write_text(text)
    assert runtime._gpu_names(tmp_path) == "NVIDIA A2, NVIDIA H200"


@pytest.mark.parametrize("package", ["transformer-engine", "apex"])
def test_version_of_a_package_that_may_be_missing_imports_nothing(package):
    version = runtime.version_of(package)
    assert version is None or version[0].isdigit()
    assert runtime.version_of("torch") == torch.__version__


def test_a_version_is_looked_up_once():
    """On a CPU it is asked for at every micro-batch."""
    assert runtime.version_of("megatron-core") is not None
    with mock.patch("importlib.metadata.version", side_effect=AssertionError("looked up again")):
        assert runtime.version_of("megatron-core") == runtime.version_of("megatron-core")
        with megatron_device(torch.device("cpu")):
            pass


def test_free_memory_of_a_cpu_is_shared_by_the_ranks_of_the_machine():
    """Not covered: ranks of one machine in control groups of their own, whose shares are smaller than need be."""
    here = runtime.Runtime(
        rank=5, local_rank=1, world_size=8, local_world_size=4, device=torch.device("cpu"), backend="gloo"
    )
    with mock.patch.object(runtime, "available_bytes", return_value=8003) as asked:
        assert runtime.free_bytes(here) == 2000
    asked.assert_called_once_with()
    assert 0 < runtime.free_bytes(here) < 1 << 45


def test_a_first_host_that_no_node_knows_is_named_at_once(monkeypatch):
    """torch would wait for it for half an hour."""
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("MASTER_PORT", "1")
    unknown = mock.Mock(side_effect=socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # a resolver may take long to say so
    with refuses("rank 1", "'no-such-host.invalid'", "MASTER_ADDR", "MEGARLHF_ENV"):
        runtime._default_rendezvous(RankInfo(rank=1, world_size=2), 0)
