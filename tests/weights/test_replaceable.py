"""What --force deletes, and what comes back when a replacement is killed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarlhf.commands.convert import main
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.checkpoint.verify import digests
from tests.refuses import missing_names
from tests.weights.models import write_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path):
    return write_model("llama", tmp_path / "hf", dtype=torch.bfloat16)


def run(*arguments):
    return main(list(map(str, arguments)))


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("other", [
    "thesis.tex", "notes.md", "results.json", "figures.py", "checkpoint-500/model.safetensors",
])  # fmt: skip
def test_a_model_directory_with_anything_else_stays(model, tmp_path, capsys, other):
    assert run("hf-to-megatron", "--hf", model, "--out", tmp_path / "m") == 0
    out = tmp_path / "trainer"
    shutil.copytree(model, out)
    (out / other).parent.mkdir(exist_ok=True)
    (out / other).write_text("months of work")
    before = contents(out)
    assert run("megatron-to-hf", "--megatron", tmp_path / "m", "--out", out, "--force") == 2
    assert not missing_names(capsys.readouterr().err, "--force", str(out), Path(other).parts[0])
    assert contents(out) == before
    shutil.rmtree(out)
    shutil.copytree(model, out)
    assert run("megatron-to-hf", "--megatron", tmp_path / "m", "--out", out, "--force") == 0


def test_the_source_inside_the_output(model, tmp_path, capsys):
    outer = tmp_path / "outer"
    shutil.copytree(model, outer)
    shutil.copytree(model, outer / "sub")
    before = contents(outer)
    assert run("hf-to-megatron", "--hf", outer / "sub", "--out", outer, "--force") == 2
    assert not missing_names(capsys.readouterr().err, "--force", str(outer), "the source")
    assert contents(outer) == before


@pytest.mark.parametrize("form", ["torch_dist", "mp_rank"])
def test_one_iteration_of_a_run_is_not_a_root(model, tmp_path, capsys, form):
    assert run("hf-to-megatron", "--hf", model, "--out", tmp_path / "run", "--format", form) == 0
    before = contents(tmp_path / "run")
    iteration = tmp_path / "run" / "release"
    assert run("relayout", "--megatron", iteration, "--out", iteration, "--tp", "2", "--force") == 2
    assert not missing_names(capsys.readouterr().err, str(iteration), "one iteration")
    assert contents(tmp_path / "run") == before


KILLED = """
import os, signal, sys
from megarlhf.commands.convert import main
real = os.rename
def dying(*args):
    real(*args)
    os.kill(os.getpid(), signal.SIGKILL)
os.rename = dying
main(sys.argv[1:])
"""


def test_relayout_in_place_killed_between_its_renames(model, tmp_path, capsys):
    where = tmp_path / "m"
    assert run("hf-to-megatron", "--hf", model, "--out", where) == 0
    command = ["relayout", "--megatron", str(where), "--out", str(where), "--tp", "2", "--force"]
    done = subprocess.run([sys.executable, "-c", KILLED, *command], cwd=ROOT, check=False, env=os.environ)
    assert done.returncode == -9
    assert not where.exists()
    capsys.readouterr()
    assert run("inspect", where) == 2
    assert not missing_names(capsys.readouterr().err, ".m.megarlhf-replaced", "rename it back")
    assert run(*command) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m"]
    stored = open_checkpoint(where)
    assert stored.layout is not None
    assert stored.layout.tp == 2
    assert digests(stored) == digests(open_checkpoint(model))
