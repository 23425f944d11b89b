"""Rights that a child gives up before it runs a model's code."""

from __future__ import annotations

import os
import resource
import sys

from megarlhf.rollout.tools.python import kernel
from megarlhf.rollout.tools.python.landlock import landlock_version, restrict_files
from megarlhf.rollout.tools.python.seccomp import has_seccomp, restrict_calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from megarlhf.rollout.tools.python.request import GuardRequest

PROTECTIONS = {"landlock": landlock_version, "seccomp": has_seccomp}
"""Whether the system has a protection, by its name."""
SPARE_MB = 32
"""Memory beyond the limit, for showing an error when memory is used up."""
_SYSTEM_LIBRARIES = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
    "/dev/urandom",
)
_OPEN_FILES = 128


def isolate(request: GuardRequest, folder: str) -> None:
    """Raises: OSError if the system has a protection that cannot be used."""
    limits = request["limits"]
    _set_limits(int(limits["seconds"]) + 2, int(limits["memory_mb"]) << 20, int(limits["file_mb"]) << 20)
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the process that the kernel ends first when the machine's memory is used up
    except OSError:  # /proc may be read-only in a container
        pass
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.drop_capabilities()
    if "landlock" in request["protections"]:
        # Not all of `sys.path`: the folder of the run is in it.
        installations = [os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)]
        standard = [path for path in sys.path if path != request["root"]]
        restrict_files([*_SYSTEM_LIBRARIES, *installations, *standard, *request["libraries"]], ["/dev/null"], folder)
    if "seccomp" in request["protections"]:
        restrict_calls()


def _set_limits(cpu_seconds: int, memory: int, file_size: int) -> None:
    """Set limits of the kernel. RLIMIT_NPROC is not among them: it counts all processes of the user, and not root's."""
    spare = SPARE_MB << 20
    limits = {
        resource.RLIMIT_AS: (memory, memory + spare),
        resource.RLIMIT_CPU: (cpu_seconds, cpu_seconds + 1),
        resource.RLIMIT_FSIZE: (file_size, file_size),
        resource.RLIMIT_NOFILE: (_OPEN_FILES, _OPEN_FILES),
        resource.RLIMIT_STACK: (8 << 20, 8 << 20),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    for limit, (soft, hard) in limits.items():
        highest = resource.getrlimit(limit)[1]
        if highest != resource.RLIM_INFINITY:
            soft, hard = min(soft, highest), min(hard, highest)
        resource.setrlimit(limit, (soft, hard))
