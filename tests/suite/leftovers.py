"""A session fails that leaves a process behind, and says which.

Every process that a test starts inherits a variable of its environment, by which it is found wherever it has been
re-parented to. Not found: one that has left the tree of processes and was started with a cleared environment.
"""

import contextlib
import os
import time
from collections.abc import Iterator

import psutil
import pytest

MARK = "MEGARLHF_TEST_SESSIONS"
"""The sessions that a process belongs to: a test may start a session of its own."""
SECONDS = 10
"""For what is ending by itself."""
OWN_SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
"""Children that multiprocessing ends together with this process."""


class Leftovers:
    """Looks for them when a session ends, in the process that started it."""

    def __init__(self, config: pytest.Config) -> None:
        self._looks = not hasattr(config, "workerinput")  # a worker of xdist belongs to its session
        self._session = f"<{os.getpid()}.{time.time_ns()}>"
        self.commands: list[str] = []
        if self._looks:
            os.environ[MARK] = os.environ.get(MARK, "") + self._session

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._looks:
            return
        deadline = time.monotonic() + SECONDS
        while (left := list(self._living())) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            with contextlib.suppress(psutil.Error):
                self.commands.append(f"{process.pid}: {' '.join(process.cmdline()) or process.name()}")
                process.kill()
        if self.commands and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _living(self) -> Iterator[psutil.Process]:
        own = psutil.Process()
        descendants = set(own.children(recursive=True))
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process in descendants or self._session in process.environ().get(MARK, "")
                if not ours or process == own or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                server = any(name in argument for argument in process.cmdline() for name in OWN_SERVERS)
                if not (server and process.ppid() == own.pid):
                    yield process

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.commands:
            terminalreporter.section("processes that outlived the tests", red=True)
            terminalreporter.line("Ended now. The test that started them has to end them, with what they started:")
            for command in self.commands:
                terminalreporter.line(f"  {command}")
            count_as_error(terminalreporter, "processes that outlived the tests")


def count_as_error(terminalreporter: pytest.TerminalReporter, what: str) -> None:
    """In pytest's closing line, which otherwise says that all is well."""
    report = pytest.TestReport(what, (what, None, what), {}, "failed", what, "teardown")
    terminalreporter.stats.setdefault("error", []).append(report)
