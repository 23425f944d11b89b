"""Sources that the digest of user code covers, and imports that a run refuses. Not covered: importlib.import_module."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarlhf.own_code.digest import digest_of, digest_of_script
from megarlhf.own_code.load import load, load_module
from tests.refuses import refuses

FILES = {
    "digested/__init__.py": "from digested import helper\n",
    "digested/helper.py": "K = 1\n",
    "digested/deep/__init__.py": "",
    "digested/deep/functions.py": "import statistics\nimport megarlhf\nfrom digested_maker import make\n\n\n"
    "def plain(step):\n    return statistics.K\n\n\ndeclared = megarlhf.advantage(make())\n",
    "digested_maker.py": "def make():\n    def made(step):\n        return step\n    return made\n",
    "statistics.py": "K = 1\n",
    "digested/unused.py": "K = 1\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The user's modules, in front of Python's own."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    known = sys.modules.pop("statistics", None)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("digested") or name == "statistics"]:
        del sys.modules[name]
    if known is not None:
        sys.modules["statistics"] = known


@pytest.mark.parametrize("function", ["plain", "declared"])
def test_packages_helpers_and_a_shadow_of_a_python_module_count(folder, function):
    """The package's `__init__` and what it imports, and a helper that is named like a module of Python."""
    path = f"digested.deep.functions:{function}"
    before = digest_of(path, "advantage")
    for name, text in FILES.items():
        (folder / name).write_text(text + "# changed\n")
        assert (digest_of(path, "advantage") != before) == (name != "digested/unused.py"), name
        (folder / name).write_text(text)
    assert digest_of(path, "advantage") == before


CHANGES = {
    "the handler of SIGTERM": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
    "the working directory": "import os\nos.chdir('/')\n",
    "torch's default dtype": "import torch\ntorch.set_default_dtype(torch.float64)\n",
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_import_that_changes_the_process_is_refused(what, tmp_path, monkeypatch):
    import torch

    name = f"changes_{list(CHANGES).index(what)}"
    (tmp_path / f"{name}.py").write_text(CHANGES[what])
    monkeypatch.syspath_prepend(tmp_path)
    directory, handler = os.getcwd(), signal.getsignal(signal.SIGTERM)
    try:
        with refuses(name, what):
            load_module(name, f"advantage '{name}:f'")
    finally:
        os.chdir(directory)
        signal.signal(signal.SIGTERM, handler)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("path", [":f", ".x:f", "a-b:f", "module:"])
def test_what_is_no_import_path_is_refused(path):
    with refuses(path.partition(":")[0] or path):
        load(path, "advantage")


def test_the_script_of_a_loop_counts_with_what_it_imports(folder, monkeypatch):
    """Also as `python -m package.script` with a relative import. A program that is installed, such as pytest, does
    not count."""
    assert digest_of_script() == {}
    for name, spec in (("__main__", None), ("digested.script", SimpleNamespace(name="digested.script"))):
        script, helper = folder / "digested/script.py", folder / "digested/helper.py"
        script.write_text("from .helper import K\n" if spec else "import digested.helper\n")
        monkeypatch.setitem(
            sys.modules, "__main__", SimpleNamespace(__file__=str(script), __spec__=spec, __name__=name)
        )
        before = digest_of_script()
        assert list(before) == ["script script.py"]
        for file in (script, helper):
            text = file.read_text()
            file.write_text(text + "# changed\n")
            assert digest_of_script() != before
            file.write_text(text)
        assert digest_of_script() == before
