"""Memory that machine and control groups leave, read from file trees as Linux shows them.

Not covered: limits that a kernel enforces, memory.high, and groups of version 1 without hierarchy (gone since Linux
5.11), whose limits we take to hold for the groups below.
"""

import pytest

from megarlhf.memory import available_bytes, peak_resident_bytes

MACHINE = 8_000_000 * 1024
V2 = "29 23 0:26 {shown} /sys/fs/cgroup rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 32 0:29 {shown} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "33 32 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"
FILES = {
    2: ("memory.max", "memory.current", "anon 5\ninactive_file {}\nactive_file 70\n"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 3\ntotal_inactive_file {}\n"),
}
"""Names of limit and usage, and what memory.stat says."""
UNLIMITED = 9223372036854771712
"""How version 1 writes it."""


def machine(root, groups, mounts):
    """proc of a machine with 8 GB available; a process that stands in `groups` and sees `mounts`."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        "MemTotal:       16000000 kB\nMemFree:         100 kB\nMemAvailable:   8000000 kB\nHugePages_Total:       0\n"
    )
    (proc / "cgroup").write_text("".join(f"{line}\n" for line in groups))
    (proc / "mountinfo").write_text("".join(f"{line}\n" for line in ["22 27 0:21 / /proc rw - proc proc rw", *mounts]))


def group(directory, version, limit, usage, inactive_file=0):
    directory.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name, stat = FILES[version]
    (directory / limit_name).write_text(f"{limit}\n")
    (directory / usage_name).write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(stat.format(inactive_file))


def test_without_limits_it_is_what_the_machine_has(tmp_path):
    """No mounted tree; a tree that limits nothing, whose topmost group has no memory.max."""
    machine(tmp_path / "none", [], [])
    assert available_bytes(tmp_path / "none") == MACHINE
    machine(tmp_path / "max", ["0::/user.slice"], [V2.format(shown="/")])
    group(tmp_path / "max/sys/fs/cgroup/user.slice", 2, "max", 9000, 100)
    assert available_bytes(tmp_path / "max") == MACHINE
    (tmp_path / "max/sys/fs/cgroup/user.slice/memory.max").write_text("10000\n")
    assert available_bytes(tmp_path / "max") == 10_000 - 9000 + 100, "the file was read"


@pytest.mark.parametrize(
    ("job", "step", "expected"),
    [
        ((50_000, 30_000, 0), ("max", 20_000, 0), 20_000),
        ((50_000, 30_000, 4000), ("max", 20_000, 0), 24_000),
        ((50_000, 30_000, 0), (30_000, 20_000, 0), 10_000),
        ((50_000, 45_000, 0), (30_000, 20_000, 0), 5000),
        ((50_000, 60_000, 0), ("max", 20_000, 0), 0),
        ((MACHINE * 2, 0, 0), ("max", 0, 0), MACHINE),
    ],
)
def test_version_2_takes_the_least_of_all_levels(tmp_path, job, step, expected):
    """(limit, usage, reclaimable) of a Slurm job and of its step: 50000 - 30000 + 4000 = 24000."""
    machine(tmp_path, ["0::/system.slice/job_7/step_0/user/task_1"], [V2.format(shown="/")])
    tree = tmp_path / "sys/fs/cgroup/system.slice"
    group(tree / "job_7", 2, *job)
    group(tree / "job_7/step_0", 2, *step)
    group(tree / "job_7/step_0/user/task_1", 2, "max", 10)
    group(tree / "job_8", 2, 1, 0)  # a neighbour's limit
    assert available_bytes(tmp_path) == expected


def test_version_1_has_a_tree_for_memory_alone(tmp_path):
    """30000 - 20000 + 6000 at the job; the tree of the CPUs lies elsewhere and says nothing of memory."""
    groups = ["5:memory:/slurm/job_7/step_0", "4:cpu,cpuacct:/other", "0::/"]
    machine(tmp_path, groups, [V1_CPU, V1.format(shown="/")])
    group(tmp_path / "sys/fs/cgroup/memory", 1, UNLIMITED, 70_000)
    group(tmp_path / "sys/fs/cgroup/memory/slurm/job_7", 1, 30_000, 20_000, 6000)
    group(tmp_path / "sys/fs/cgroup/memory/slurm/job_7/step_0", 1, UNLIMITED, 20_000)
    group(tmp_path / "sys/fs/cgroup/cpu/other", 1, 1, 0)
    assert available_bytes(tmp_path) == 16_000


def test_both_versions_mounted(tmp_path):
    """The tree of version 2 without a memory controller has none of its files."""
    unified = V2.format(shown="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    machine(tmp_path, ["5:memory:/a", "0::/a"], [V1.format(shown="/"), unified])
    (tmp_path / "sys/fs/cgroup/unified/a").mkdir(parents=True)
    group(tmp_path / "sys/fs/cgroup/memory/a", 1, 30_000, 20_000)
    assert available_bytes(tmp_path) == 10_000
    group(tmp_path / "sys/fs/cgroup/unified/a", 2, 25_000, 20_000)
    assert available_bytes(tmp_path) == 5000


@pytest.mark.parametrize(
    ("own", "shown"),
    [("/", "/"), ("/docker/1f", "/docker/1f"), ("/", "/../.."), ("/../host", "/"), ("/docker/1f/pod", "/kubepods/2a")],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_part_of_the_tree(tmp_path, version, own, shown):
    """With a namespace and without, and where names and mount do not fit: the mount's top is the container."""
    line, mount = {1: (f"5:memory:{own}", V1), 2: (f"0::{own}", V2)}[version]
    machine(tmp_path, [line], [mount.format(shown=shown)])
    group(tmp_path / "sys/fs/cgroup" / ("memory" if version == 1 else ""), version, 30_000, 20_000, 500)
    assert available_bytes(tmp_path) == 10_500


def test_a_group_below_the_part_that_a_container_sees(tmp_path):
    machine(tmp_path, ["0::/docker/1f/worker"], [V2.format(shown="/docker/1f")])
    group(tmp_path / "sys/fs/cgroup", 2, 30_000, 20_000)
    group(tmp_path / "sys/fs/cgroup/worker", 2, 9000, 2000)
    assert available_bytes(tmp_path) == 7000


def test_of_this_machine():
    assert 0 < available_bytes() < 1 << 45


def test_the_peak_of_this_process(tmp_path):
    """As the kernel says it, in a made-up file and of this very process."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name:\tpython\nVmPeak:\t 900 kB\nVmHWM:\t 700 kB\nVmRSS:\t 300 kB\n")
    assert peak_resident_bytes(tmp_path) == 700 * 1024
    used = bytearray(b"1") * 60_000_000
    assert peak_resident_bytes() > len(used)
