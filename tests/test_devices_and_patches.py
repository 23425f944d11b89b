"""Only a few files name CUDA, and only a few patch another project: read from the text of megarlhf/.

Not covered: patches of another project's objects (as opposed to what an import binds).
"""

from __future__ import annotations

import ast
import inspect

import pytest
from torch.distributed import distributed_c10d

from megarlhf.parallel.process_groups import made_by_members
from tests.source_files import is_in, sources

# The margin of a rehearsal names what it estimates, and where its numbers are from; it runs nothing.
CUDA_IN = (
    "runtime.py",
    "parallel/megatron_cpu.py",
    "parallel/device_memory.py",
    "rollout/vllm/build.py",
    "kernels/",
    "rehearsal/cost_model/margin.py",
    "planning/machine/gpu_environment.py",
    "api/process.py",
    "own_code/guarded.py",
    "weights/checkpoint/formats/megatron/fields.py",  # names of Megatron-Core's fields
)
PATCHES_IN = (
    "parallel/process_groups.py",
    "parallel/megatron_cpu.py",
    "rollout/tools/python/child.py",  # a process of its own, which runs nothing but a model's code
    "rollout/vllm/patches.py",
    "rehearsal/fake_device/torch_patches.py",
)

SETTINGS = {
    "runtime.py": {
        "torch._dynamo.config.disable",
        "torch._inductor.config.deterministic",
        "torch.backends.cudnn.benchmark",
        "torch.backends.cudnn.deterministic",
    },
    "rehearsal/processes.py": {"tempfile.tempdir"},
    "api/process.py": {  # put back after a run in the user's process
        "torch._dynamo.config.disable",
        "torch.backends.cudnn.benchmark",
        "torch.backends.cudnn.deterministic",
    },
}
"""Assignments to another project's module that are no patch: a setting which that project documents."""


# --- names of devices -----------------------------------------------------------------------------


def cuda_names(files: dict[str, str]) -> list[str]:
    """Where code (not a docstring, not a comment) says CUDA."""
    violations = []
    for file, text in files.items():
        if is_in(file, CUDA_IN):
            continue
        tree = ast.parse(text)
        documentation = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if id(node) not in documentation:
                words = [word for word in _words(node) if "cuda" in word.lower()]
                violations += [f"{file}:{getattr(node, 'lineno', 0)} names {word!r}" for word in words]
    return violations


def _words(node: ast.AST) -> list[str]:
    """The text that this node itself brings: a name, a parameter, an imported module, a string."""
    match node:
        case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
            return [word]
        case ast.FunctionDef(name=word) | ast.AsyncFunctionDef(name=word) | ast.ClassDef(name=word):
            return [word]
        case ast.Constant(value=str(word)):
            return [word]
        case ast.alias():
            return [node.name, node.asname or ""]
        case ast.ImportFrom():
            return [node.module or ""]
    return []


# --- patches --------------------------------------------------------------------------------------


def patches(files: dict[str, str]) -> list[str]:
    """Attributes that are set or deleted on what was imported from another project."""
    violations = []
    for file, text in files.items():
        if is_in(file, PATCHES_IN):
            continue
        tree = ast.parse(text)
        foreign = _foreign_names(tree)
        for node in ast.walk(tree):
            for target in _set_on(node):
                written = ast.unparse(target)
                root = written.split(".")[0].split("[")[0].split("(")[0]
                if root in foreign and written not in SETTINGS.get(file, set()):
                    violations.append(f"{file}:{target.lineno} sets {written}")
    return violations


def _foreign_names(tree: ast.AST) -> set[str]:
    """Names that an import of another project binds anywhere in the file."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] != "megarlhf":
            names |= {alias.asname or alias.name for alias in node.names}
    return names - {"megarlhf"}


def _set_on(node: ast.AST) -> list[ast.expr]:
    """Expressions `x.y` that this node sets or deletes; of `setattr(x, ...)`, x."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
        return node.args[:1]
    flat: list[ast.expr] = []
    for target in targets:
        flat += target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return [target for target in flat if isinstance(target, ast.Attribute)]


# --- the package as it stands ---------------------------------------------------------------------

CHECKS = {"names of CUDA": cuda_names, "patches": patches}


@pytest.mark.parametrize("name", CHECKS)
def test_no_other_file_does(name):
    assert CHECKS[name](sources()) == []


def test_the_exceptions_are_needed():
    """A list of exceptions that nothing uses would hide the next violation."""
    files = sources()
    assert all(f"{setting} = " in files[file] for file, settings in SETTINGS.items() for setting in settings)
    for place in (*PATCHES_IN, "rollout/vllm/build.py", "runtime.py"):
        assert place in files
    assert {file for file in PATCHES_IN if patches({"elsewhere.py": files[file]})} == set(PATCHES_IN)
    assert cuda_names({"elsewhere.py": files["runtime.py"]})
    assert cuda_names({"elsewhere.py": files["parallel/megatron_cpu.py"]})


# --- planted violations ---------------------------------------------------------------------------

PLANTED = [
    ("names of CUDA", "models/build.py", "x = tensor.cuda()"),
    ("names of CUDA", "models/build.py", "x = torch.zeros(1, device='cuda:0')"),
    ("names of CUDA", "models/build.py", "x = f'on CUDA device {n}'"),
    ("names of CUDA", "models/build.py", "on_cuda = True"),
    ("names of CUDA", "models/build.py", "from torch.cuda import Stream"),
    ("names of CUDA", "models/build.py", "def f(use_cuda): ..."),
    ("names of CUDA", "commands/doctor.py", "f(cuda=1)"),
    ("patches", "models/build.py", "import torch\ntorch.cuda.synchronize = None"),
    ("patches", "models/build.py", "import torch\nsetattr(torch.nn, 'Linear', None)"),
    ("patches", "models/build.py", "import torch\ndel torch.nn.Linear"),
    ("patches", "models/build.py", "from megatron.core import parallel_state as ps\nps._X, y = 1, 2"),
    ("patches", "models/build.py", "def f():\n    import vllm.x as layers\n    layers.f = None"),
    ("patches", "models/build.py", "from torch import Tensor\nTensor.to = None"),
    ("patches", "models/build.py", "import torch\ntorch._dynamo.config.disable = True"),
]


@pytest.mark.parametrize("name, file, text", PLANTED)
def test_a_planted_violation_is_found(name, file, text):
    assert len(CHECKS[name]({file: text})) == 1


PERMITTED = [
    ("names of CUDA", "models/build.py", '"""Runs on CUDA."""\nx: int = 1\n"""On CUDA too."""\n# cuda'),
    ("names of CUDA", "kernels/logprob.py", "x = tensor.cuda()"),
    (
        "patches",
        "models/build.py",
        "import torch\nmodule = torch.nn.Linear(1, 1)\nmodule.weight = None\nclass A:\n  x = 1",
    ),
    ("patches", "runtime.py", "import torch\ntorch._dynamo.config.disable = True"),
    ("patches", "runtime.py", "import os\nos.environ['X'] = '1'\nsetattr(groups, 'tp', 1)"),
]


@pytest.mark.parametrize("name, file, text", PERMITTED)
def test_what_is_permitted_is_not_reported(name, file, text):
    assert CHECKS[name]({file: text}) == []


def test_torch_still_counts_groups_in_their_names():
    """Where this fails, torch names a group that its members make by its ranks alone, or otherwise: look whether
    `parallel/process_groups.py` is still needed."""
    original = distributed_c10d._hash_ranks_to_str
    assert "len(_world.pg_names)" in inspect.getsource(original)
    with made_by_members():
        name = distributed_c10d._hash_ranks_to_str([0, 1])
        assert distributed_c10d._hash_ranks_to_str([0, 2]) != name
        assert distributed_c10d._hash_ranks_to_str is not original
    with made_by_members("to be destroyed"):
        assert distributed_c10d._hash_ranks_to_str([0, 1]) != name
    assert distributed_c10d._hash_ranks_to_str is original
