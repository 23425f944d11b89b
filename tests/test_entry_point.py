"""The command line where it begins: signals while modules are imported, a task's directory, exit statuses handed on."""

import os
import subprocess
import sys

import pytest

from megarlhf.commands import cli
from tests.command import ROOT, python


@pytest.mark.parametrize("module", ["yaml", "torch.nn"])
def test_ctrl_c_is_one_line_also_while_modules_are_imported(module):
    """SIGINT when the named module is about to be imported: early by the command line, late by the command."""
    code = f"""
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
sys.meta_path.insert(0, Interrupt())
sys.argv = ["megarlhf", "doctor"]
runpy.run_module("megarlhf", run_name="__main__")
"""
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "megarlhf doctor: interrupted\n")


@pytest.mark.parametrize("given, expected", [(None, "ERROR"), ("INFO", "INFO")])
def test_warnings_of_torch_s_c_code_are_off_before_torch_is_imported(given, expected, monkeypatch):
    """Unless the user asks for them."""
    code = """
import os, sys
class Torch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("TORCH_CPP_LOG_LEVEL"))
            sys.exit(3)
sys.meta_path.insert(0, Torch())
from megarlhf.__main__ import main
sys.argv = ["megarlhf", "doctor"]
main()
"""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    if given is not None:
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given)
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (3, f"{expected}\n"), done.stderr


def test_a_signal_to_save_is_kept_while_modules_are_imported():
    """The run notes it as its own when it begins; before, it would end the process as a crash."""
    code = """
import os, runpy, signal, sys
from importlib.machinery import ModuleSpec
from megarlhf.resume.signals import StopRequest
class Signal:
    def find_spec(self, name, path=None, target=None):
        if name == "megarlhf.commands.cli":
            os.kill(os.getpid(), signal.SIGUSR1)
            return ModuleSpec(name, Loader())
class Loader:
    create_module = staticmethod(lambda spec: None)
    exec_module = staticmethod(lambda module: setattr(module, "main", run))
def run():
    with StopRequest() as stop:
        print(stop.requested().name)
    return 0
sys.meta_path.insert(0, Signal())
sys.argv = ["megarlhf", "rl"]
runpy.run_module("megarlhf", run_name="__main__")
"""
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (0, "SIGUSR1\n"), done.stderr


def test_a_task_in_another_directory_than_its_batch_script_is_refused(tmp_path, monkeypatch, capsys):
    """As in a container that begins in a directory of its own: relative paths would name other files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGARLHF_DIRECTORY", str(tmp_path / "submitted"))
    assert cli.main(["sft", "-c", "x.yaml", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert f"this task works in {tmp_path}, and the batch script in {tmp_path}/submitted" in said
    assert "--container-workdir" in said
    monkeypatch.setenv("MEGARLHF_DIRECTORY", str(tmp_path))
    assert cli.main(["sft", "-c", "x.yaml", "--dry-run"]) == 2
    assert "x.yaml" in capsys.readouterr().err


def test_the_console_script_is_the_guarded_entry_point():
    assert '"megarlhf=megarlhf.__main__:main"' in (ROOT / "setup.py").read_text()


@pytest.mark.parametrize("status", [0, 1])
def test_doctor_hands_on_its_exit_status(status, monkeypatch):
    monkeypatch.setattr("megarlhf.commands.doctor.report", lambda findings: status)
    assert cli.main(["doctor"]) == status


def test_a_report_of_a_directory_that_is_no_run_is_a_mistake(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    assert "no metrics.jsonl in" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_the_console_script_finds_rules_of_the_working_directory(tmp_path):
    """As `python -m megarlhf` does; python starts a script without the working directory among its paths."""
    (tmp_path / "rules_of_mine.py").write_text("")
    code = "import sys; sys.path.remove(''); sys.argv = ['megarlhf', '--version']; from megarlhf.__main__ import main\n"
    code += "status = main(); import rules_of_mine; raise SystemExit(status)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
