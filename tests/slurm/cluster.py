"""A Slurm of two nodes on this machine, for as long as a `with` block lasts.

Everything lies in one temporary directory, and munge, ports and node names are its own: another such cluster, or a
Slurm of the machine, may run beside it. Without systemd; as root, since slurmd starts the tasks as the user.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
KILL_WAIT = 15
"""Seconds between SIGTERM and SIGKILL, the cluster's KillWait."""

CPU = ("--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=100")
"""Options of sbatch for a job that fits beside another one."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
"""States from which a job does not go on."""

_CONF = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmctldParameters=enable_configless
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdSpoolDir={root}/spool.%n
SlurmdPidFile={root}/slurmd.%n.pid
SlurmdLogFile={root}/slurmd.%n.log
ProctrackType={proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout={slurmd_timeout}
KillWait={kill_wait}
OverTimeLimit=0
GresTypes=gpu
MailProg=/bin/true
PropagateResourceLimits=NONE
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=4000 Gres=gpu:2
PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here; None when it can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if absent:
        return f"Slurm is not installed: no {', '.join(absent)} (apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "a cluster on one machine is started as root, and this user is not"


@dataclass
class Cluster:
    """A running cluster; `root` holds its files and logs."""

    root: Path
    name: str
    nodes: tuple[str, ...]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's commands need; variables of a job that surrounds this one are left away."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return kept | {"SLURM_CONF": str(self.root / "slurm.conf"), "PATH": _path()}

    def call(self, *command: str, check: bool = True, **options: Any) -> str:
        """A command's output, without the last line feed."""
        options = {"env": self.environment, "timeout": 60} | options
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.rstrip("\n")

    def submit(self, *arguments: str, cwd: Path, **environ: str) -> int:
        """`sbatch ARGUMENTS` in `cwd`; returns the job's id."""
        return int(self.call("sbatch", "--parsable", *arguments, cwd=cwd, env=self.environment | environ))

    def job(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.call("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def start_now(self, job: int) -> None:
        """Bring the start of a requeued job forward, which Slurm otherwise holds back for a while."""
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)

    def wait(self, job: int, states: Sequence[str], seconds: float, *, until: Callable[[], bool] | None = None) -> str:
        """Until the job is in one of the states and `until` holds; a requeued job is not left waiting."""
        deadline, held_since = time.monotonic() + seconds, float("inf")
        while True:
            facts = self.job(job)
            if facts["JobState"] in states and (until is None or until()):
                return facts["JobState"]
            if facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime":
                held_since = min(held_since, time.monotonic())
                # Not at once: within a second its nodes would take the new credential for the one just revoked.
                if time.monotonic() - held_since > 2.5:
                    self.start_now(job)
            else:
                held_since = float("inf")
            assert time.monotonic() < deadline, f"job {job} is not {' or '.join(states)} after {seconds} s: {facts}"
            time.sleep(0.5)

    def start_node(self, node: str) -> None:
        """Start the node's slurmd."""
        command = ["slurmd", "-D", "-N", node, "-f", str(self.root / "slurm.conf")]
        self.daemons[node] = _start(command, self.environment, self.root / f"{node}.out")

    def lose_node(self, node: str) -> None:
        """The node dies: its daemon and all that runs there are killed, and nobody is told."""
        self.daemons[node].kill()
        self.daemons[node].wait()
        pids = self.processes(node)  # first the step daemons, which would report the death of their tasks
        for pid in sorted(pids, key=lambda pid: Path(f"/proc/{pid}/comm").read_text().strip() != "slurmstepd"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, node: str | None = None) -> list[int]:
        """Tasks, scripts and step daemons of this cluster (of one node), told by their environment."""
        marks = [f"SLURM_CONF={self.root}/slurm.conf".encode()]
        marks += [f"SLURMD_NODENAME={node}".encode()] if node else []
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (path / "environ").read_bytes().split(b"\0")
                of_node = all(mark in variables for mark in marks)
                stepd = node is not None and self._is_step_daemon(path, node)
                if (of_node or stepd) and int(path.name) != os.getpid():
                    found.append(int(path.name))
        return found

    def _is_step_daemon(self, path: Path, node: str) -> bool:
        if (path / "comm").read_text().strip() != "slurmstepd":
            return False
        log = self.root / f"slurmd.{node}.log"  # it writes to the log of the slurmd that has started it
        return any(os.readlink(fd) == str(log) for fd in (path / "fd").iterdir())


def output(folder: Path, job: int) -> str:
    """What the job has printed so far, in every attempt."""
    return "".join(path.read_text() for path in folder.glob(f"*-{job}.out"))


@contextlib.contextmanager
def running_cluster(num_nodes: int = 2, *, slurmd_timeout: int = 20) -> Iterator[Cluster]:
    """Start munged, slurmctld and a slurmd for each node, and end them and every process of a job afterwards."""
    reason = missing()
    assert reason is None, reason
    name = f"t{secrets.token_hex(3)}"
    root = Path(tempfile.mkdtemp(prefix=f"megarlhf-slurm-{name}-"))
    cluster = Cluster(root, name, tuple(f"{name}n{n}" for n in range(1, num_nodes + 1)))
    try:
        _configure(cluster, slurmd_timeout)
        munged = ["munged", "--foreground", "--force", f"--key-file={root}/munge.key", f"--socket={root}/munge.sock"]
        munged += [f"--pid-file={root}/munged.pid", f"--log-file={root}/munged.log", f"--seed-file={root}/munge.seed"]
        cluster.daemons["munged"] = _start(munged, cluster.environment, root / "munged.out")
        _await("munged", lambda: (root / "munge.sock").exists())
        controller = ["slurmctld", "-D", "-f", str(root / "slurm.conf")]
        cluster.daemons["slurmctld"] = _start(controller, cluster.environment, root / "slurmctld.out")
        for node in cluster.nodes:
            cluster.start_node(node)
        idle = ["sinfo", "--noheader", "--format=%T"]
        _await("nodes", lambda: cluster.call(*idle, check=False) == "idle", cluster)
        yield cluster
    finally:
        _end(cluster)
        if not os.environ.get("MEGARLHF_KEEP_CLUSTER"):
            shutil.rmtree(root, ignore_errors=True)


def _configure(cluster: Cluster, slurmd_timeout: int) -> None:
    root = cluster.root
    root.chmod(0o755)
    (root / "state").mkdir()
    (root / "munge.key").touch(mode=0o600)
    (root / "munge.key").write_bytes(secrets.token_bytes(128))
    for n in range(2):
        os.mknod(root / f"nvidia{n}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # stands for a GPU
    (root / "gres.conf").write_text(f"Name=gpu Flags=nvidia_gpu_env File={root}/nvidia[0-1]\n")
    first = _free_ports(len(cluster.nodes) + 1)
    text = _CONF.format(
        name=cluster.name,
        host=socket.gethostname(),
        root=root,
        proctrack=os.environ.get("MEGARLHF_PROCTRACK", "proctrack/linuxproc"),
        nodes=f"{cluster.name}n[1-{len(cluster.nodes)}]",
        port=first,
        first=first + 1,
        last=first + len(cluster.nodes),
        slurmd_timeout=slurmd_timeout,
        kill_wait=KILL_WAIT,
    )
    (root / "slurm.conf").write_text(text.replace("SlurmctldParameters=enable_configless\n", ""))


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row on which nobody listens."""
    for first in range(20000 + os.getpid() % 1000 * 8, 60000, 8):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError(f"no {count} free ports in a row")


def _await(what: str, ready: Callable[[], bool], cluster: Cluster | None = None, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        logs = "".join(path.read_text() for path in sorted(cluster.root.glob("*.out"))) if cluster else ""
        assert time.monotonic() < deadline, f"{what} did not come up in {seconds} s\n{logs[-3000:]}"
        time.sleep(0.1)


def _start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True, preexec_fn=_die_with_parent
        )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also when pytest is killed


def _end(cluster: Cluster) -> None:
    for pid in cluster.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for daemon in cluster.daemons.values():
        daemon.kill()
    for daemon in cluster.daemons.values():
        daemon.wait()


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


if __name__ == "__main__":  # a cluster to try things on: python -m tests.slurm.cluster
    with running_cluster() as cluster:
        print(f"export SLURM_CONF={cluster.root}/slurm.conf", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    sys.exit(0)
