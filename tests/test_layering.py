"""The arrows of the house point down: read from every import in megarlhf/, those inside functions too.

Not covered: modules loaded under a name that is computed at run time, and `tools/`, which stands outside.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

import pytest

from tests.source_files import is_in, sources

HOUSE: tuple[dict[str, str], ...] = (
    {"__main__": "`python -m megarlhf`: calls a command", "api": "what `import megarlhf` offers"},
    {"commands": "load a configuration, check it, start ranks; call all below and are called by nobody"},
    {"commands.arguments": "command lines: parsers, completion, the list of keys"},
    {"rehearsal": "the program itself on devices that hold no numbers; only its commands import it"},
    {
        "rehearsal.fakes": "stand-ins for what a run reads and starts",
        "rehearsal.reuse": "equal layers are computed once",
        "rehearsal.calibrate": "measurements of this machine",
    },
    {"rehearsal.cost_model": "seconds on a described machine", "rehearsal.report": "results for people"},
    {
        "rehearsal.result": "what a rehearsal returns",
        "rehearsal.timeline": "simulated time of all ranks",
        "rehearsal.transformer_engine": "stand-ins for its layers",
    },
    {"rehearsal.fake_device": "shapes without numbers, and the patches of torch and Megatron-Core"},
    {"trainers.entries": "which function runs a command"},
    {
        "trainers.generation": "commands that generate and evaluate without training",
        "trainers.replay": "a skipped step, repeated",
    },
    {
        "trainers.rl": "reinforcement learning, in the order in which data flows",
        "trainers.supervised": "sft, rm and dpo",
    },
    {
        "trainers.experience": "from responses to numbers, for rl and for eval",
        "trainers.run": "what every training run has: directory, resume, exports",
    },
    {"trainers": "the package's name"},
    {"planning.init": "the configuration that `megarlhf init` writes"},
    {"planning": "decides about a run from configuration, config.json, rules and nodes; builds nothing"},
    {"planning.data": "checks of data and rewards"},
    {"planning.batch": "batch arithmetic", "planning.machine": "checks of kernels, memory and nodes"},
    {
        "rollout": "engines: read a model, fill experience",
        "resume": "the package's name",
    },
    {
        "rollout.vllm": "vLLM as an engine",
        "resume.claim": "may this start use this run directory",
    },
    {
        "rollout.prompt_queue": "the samples that an engine asks for",
        "rollout.engine_spec": "what planning asks of an engine, and how it is made",
    },
    {"rollout.balance": "which engine draws what"},
    {"rollout.engine": "the interface of engines"},
    {"rollout.requests": "what an engine is asked for"},
    {
        "rollout.rewards": "rules, models and services that judge a response",
        "resume.points": "resume points on disk",
    },
    {"rollout.environments": "the user's code that answers a model's turns, and the text between turns"},
    {"rollout.tools": "calls of tools: their forms, MCP servers, Python, descriptions"},
    {"rollout.responses": "what is drawn", "rollout.workers": "processes that run the user's code"},
    {"resume.signals": "how a run is asked to stop"},
    {"models": "parts of Megatron-Core put together on a mesh, filled by copy plans"},
    {"models.attention": "attention over rows of each kind"},
    {"models.elementwise": "chains of element-wise operations as single steps"},
    {"parallel": "meshes, schedules, optimizer: run any model that they are handed"},
    {"parallel.packing": "which sequences stand together in a row"},
    {"parallel.context": "the columns of a row that a rank computes"},
    {"weights.checkpoint": "models on disk: opened, converted, exported, compared"},
    {
        "weights.checkpoint.formats.huggingface": "safetensors, and older .bin files",
        "weights.checkpoint.formats.mp_rank": "Megatron's file a rank",
        "weights.checkpoint.formats.torch_dist": "Megatron's distributed checkpoints",
    },
    {"weights.checkpoint.formats.megatron": "what Megatron's formats share: arguments, tracker"},
    {"weights.checkpoint.formats.torch_file": "files of torch.save, which the other formats consist of"},
    {"weights.checkpoint.staging": "a directory that appears whole or not at all"},
    {"weights.checks": "is what arrived right: digests, certificates, comparisons"},
    {"weights.transport": "how elements move: inside a rank, between ranks, from files to files"},
    {"weights.plan": "what moves: copy plans, pure data"},
    {
        "architectures": "what a model is, and where its tensors stand in each system",
        "kernels": "log-probs over a sharded vocabulary, arithmetic of packed rows: tensors and a process group",
        "data": "the package's name",
        "observe": "the package's name",
    },
    {"data.tokenize": "sets of samples, made by worker processes and kept", "observe.report": "pages about runs"},
    {"data.samples": "samples of tokens", "observe.terminal": "progress for people"},
    {"data.records": "records as conversations and pairs", "observe.watch": "slow and hanging ranks"},
    {"data.sources": "records from files and data sets", "observe.records": "metrics and tables on disk"},
    {"data.text": "chat templates"},
    {"data.json_text": "messages in columns of text", "data.tokenizers": "tokenizers, from a directory's files"},
    {
        "data.blocks": "digests of large files",
        "data.json_rows": "lines of JSON",
        "data.sample_types": "what a sample is",
    },
    {"architectures.families": "a file for each model_type: its config.json and its table"},
    {"architectures.moe": "entries of experts"},
    {"architectures.entries": "entries that families share"},
    {"architectures.rules": "how a system puts an entry's tensors into one storage"},
    {"architectures.table": "what a table consists of, and placements from it"},
    {
        "architectures.config_spec": "how a config.json states an architecture",
        "architectures.shards": "one rank's storage put together from boxes",
    },
    {"architectures.rope": "how a config.json states a rotary embedding and its scaling"},
    {"architectures.architecture": "sizes and switches of a model; knows no file and no system"},
    {
        "config": "what may be said; derived numbers are made above",
        "experience": "the table that rollouts, trainers and losses share; knows none of them",
    },
    {"rollouts": "responses of an engine"},
    {
        "columns": "ragged columns, and their movement between ranks",
        "own_code.policy_terms": "the user's parts of the policy loss",
    },
    {
        "runtime": "device, rank and process group of this process",
        "layout": "pure integers",
        "placement": "boxes of tensors in storages: pure integers",
        "algo": "mathematics of tensors",
        "collective_errors": "a failure on one rank is raised on all",
        "provenance": "where a trained model comes from: megarlhf.json",
        "weights": "the package's name",
        "__init__": "the version, and names that are imported when they are used",
    },
    {"model_directory": "where config.json and tokenizer stand"},
    {
        "atomic_write": "files that appear complete or not at all",
        "lease": "a file that belongs to one process at a time",
        "memory": "what the machine and its control groups leave: files of /proc and /sys",
        "errors": "exceptions that several rooms share",
        "packages": "versions of what is installed",
        "own_code": "the user's code, named by import path: the standard library only",
    },
)
"""From the roof to the ground. A room may import rooms of lower floors, and none of its own floor."""

FRONT_DOOR = "__init__.py"
"""It names modules of every room, and imports none of them by itself: `front_door` checks that."""

FLOOR = {room: -number for number, floor in enumerate(HOUSE) for room in floor}

ONLY_IN: dict[str, tuple[str, ...]] = {
    # A rehearsal puts stand-ins in place of kernels that it cannot import.
    "megatron": (
        "parallel/",
        "models/",
        "resume/",
        "rehearsal/fake_device/torch_patches.py",
        "rehearsal/fake_device/megatron_patches.py",
    ),
    # The engine, and apart from it what is patched: they change for different reasons. Its parsers of calls, by name.
    "vllm": (
        "rollout/vllm/build.py",
        "rollout/vllm/engine.py",
        "rollout/vllm/patches.py",
        "rollout/tools/forms/vllm_parser.py",
    ),
    # A rehearsal counts a kernel instead of compiling it.
    "triton": ("kernels/", "rehearsal/fake_device/torch_patches.py"),
}
"""Packages that change under us, and the files that may import them."""

ALGO_IMPORTS = {"torch", "megarlhf.algo"} | set(sys.stdlib_module_names) - {"os", "logging", "socket", "subprocess"}


def room_of(module: str) -> str:
    """`megarlhf.weights.plan.overlaps` -> weights.plan, the longest name in the table; the package is `__init__`.

    What `python -m` runs is a command wherever it lies: it stands on the roof, and nobody may import it.
    """
    parts = module.split(".")
    if "__main__" in parts:
        return "__main__"
    names = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
    return next((name for name in names if name in FLOOR), parts[1] if len(parts) > 1 else "__init__")


# --- what a module imports ------------------------------------------------------------------------

_ENTRY = re.compile(r"(?!megarlhf\.json$)(megarlhf(?:\.\w+)+)(?::\w+)?")


def imports(file: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, of names that a later import_module may get, and of relative imports."""
    package = ["megarlhf", *file.split("/")[:-1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            # With the name: `from megarlhf.weights.transport import reshard` imports a module by its last part.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and (named := _ENTRY.fullmatch(str(node.value))):
            yield node.lineno, named[1]


def upward_arrows(files: dict[str, str]) -> list[str]:
    violations = []
    for file, text in files.items():
        if file == FRONT_DOOR:
            continue
        here = room_of("megarlhf." + file.removesuffix(".py").replace("/", "."))
        for line, module in imports(file, text):
            if module.split(".")[0] in ("tools", "tests"):
                violations.append(f"{file}:{line} imports {module}, which is not installed")
            if module.split(".")[0] != "megarlhf":
                continue
            there = room_of(module)
            if there != here and (there not in FLOOR or here not in FLOOR or FLOOR[there] >= FLOOR[here]):
                violations.append(f"{file}:{line} ({here}) imports {module} ({there}), which is not below it")
    return violations


def import_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Which modules of the package each of them imports, anywhere in its file; a package stands for its `__init__`."""
    module_of = {
        file: "megarlhf." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files
    }
    modules = set(module_of.values())
    graph: dict[str, set[str]] = {}
    for file, text in files.items():
        names = set() if file == FRONT_DOOR else {name for _, name in imports(file, text)}
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module_of[file]] = targets & modules - {module_of[file]}
    return graph


def cycles(files: dict[str, str]) -> list[str]:
    """Groups of modules each of which imports all others of the group, over any number of steps."""
    graph = import_graph(files)
    reachable: dict[str, set[str]] = {}
    for module in graph:
        reachable[module] = set()
        pending = [module]
        while pending:
            new = graph[pending.pop()] - reachable[module]
            reachable[module] |= new
            pending += new
    groups = {
        tuple(sorted(other for other in reachable[module] if module in reachable[other]))
        for module in graph
        if module in reachable[module]
    }
    return [f"a cycle of imports: {', '.join(group)}" for group in sorted(groups)]


def front_door(files: dict[str, str]) -> list[str]:
    """Imports that `import megarlhf` itself would make: only those for type checkers name our own modules, and those
    inside functions. Names that are imported later may come from any room."""
    statements = ast.parse(files.get(FRONT_DOOR, "")).body
    at_once = [node for node in statements if not isinstance(node, ast.If | ast.FunctionDef | ast.Assign)]
    text = "\n".join(map(ast.unparse, at_once))
    known = {"__future__", "typing"}
    return [
        f"{FRONT_DOOR} imports {module} at once"
        for _, module in imports(FRONT_DOOR, text)
        if module.split(".")[0] not in known
    ]


def strangers(files: dict[str, str]) -> list[str]:
    """Imports of a package outside the files that may have it."""
    return [
        f"{file}:{line} imports {module}; only {', '.join(ONLY_IN[module.split('.')[0]])} may"
        for file, text in files.items()
        for line, module in imports(file, text)
        if module.split(".")[0] in ONLY_IN and not is_in(file, ONLY_IN[module.split(".")[0]])
    ]


def impure_mathematics(files: dict[str, str]) -> list[str]:
    """algo/ imports torch (but not its process groups), the standard library and itself."""
    violations = []
    for file, text in files.items():
        for line, module in imports(file, text):
            known = module.split(".")[0] in ALGO_IMPORTS or ".".join(module.split(".")[:2]) in ALGO_IMPORTS
            if is_in(file, ("algo/",)) and (not known or module.startswith("torch.distributed")):
                violations.append(f"{file}:{line} imports {module}; algo/ knows torch only")
    return violations


# --- the house as it stands -----------------------------------------------------------------------

CHECKS = {
    "upward arrows": upward_arrows,
    "cycles": cycles,
    "front door": front_door,
    "strangers": strangers,
    "impure mathematics": impure_mathematics,
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_house_is_in_order(name):
    assert CHECKS[name](sources()) == []


def test_the_table_of_rooms_is_the_package():
    """Each room has a floor and a reason, and each floor's rooms exist."""
    rooms = {room_of("megarlhf." + file.removesuffix(".py").replace("/", ".")) for file in sources()}
    assert rooms - set(FLOOR) == set()
    assert set(FLOOR) - rooms == set()
    assert sum(map(len, HOUSE)) == len(FLOOR), "a room stands on two floors"
    assert all(reason for floor in HOUSE for reason in floor.values())


def test_the_packages_with_exceptions_are_imported():
    """A list of exceptions that nothing uses would hide the next violation."""
    imported = {module.split(".")[0] for file, text in sources().items() for _, module in imports(file, text)}
    assert {"megatron", "vllm"} <= imported


# --- planted violations ---------------------------------------------------------------------------

PLANTED = [
    ("upward arrows", "models/build.py", "from megarlhf.trainers.rl.loop import run"),
    ("upward arrows", "models/build.py", "def f():\n    import megarlhf.rollout.engine"),
    ("upward arrows", "rollout/engine.py", "from megarlhf.planning.batch import BatchNumber"),
    ("upward arrows", "parallel/mesh.py", "from megarlhf import models"),
    ("upward arrows", "parallel/mesh.py", "from ..models import build"),
    ("upward arrows", "weights/plan/overlaps.py", "from ...parallel.mesh import Mesh"),
    ("upward arrows", "runtime.py", "from megarlhf.layout import MeshLayout"),
    ("upward arrows", "runtime.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import megarlhf.config"),
    ("upward arrows", "trainers/rl/loop.py", "import importlib\nimportlib.import_module('megarlhf.commands.cli')"),
    ("upward arrows", "trainers/rl/loop.py", "ENTRY = 'megarlhf.commands.launch:as_rank'"),
    ("upward arrows", "trainers/rl/loop.py", "from megarlhf.cellar.barrel import wine"),
    ("upward arrows", "trainers/rl/loop.py", "from tools.demo.make_data import base_files"),
    ("upward arrows", "weights/plan/overlaps.py", "from megarlhf.planning.weight_traffic import main"),
    ("upward arrows", "weights/plan/overlaps.py", "from megarlhf.weights.transport.schedule import ElementRange"),
    ("upward arrows", "architectures/table.py", "from megarlhf.weights.plan.copy_plan import Copy"),
    ("upward arrows", "commands/cli.py", "from megarlhf.__main__ import main"),
    ("upward arrows", "architectures/architecture.py", "def f():\n    from megarlhf.architectures import hf_config"),
    ("upward arrows", "architectures/table.py", "from megarlhf.architectures.families import FAMILIES"),
    ("upward arrows", "architectures/families/llama.py", "from megarlhf.architectures.placements import table_of"),
    ("upward arrows", "weights/checkpoint/staging.py", "from megarlhf.weights.checkpoint.export import export"),
    (
        "upward arrows",
        "weights/checkpoint/formats/mp_rank/read.py",
        "from megarlhf.weights.checkpoint.formats.torch_dist import keys",
    ),
    ("upward arrows", "commands/cli.py", "from megarlhf.api.run import run"),
    ("front door", "__init__.py", "from megarlhf.api.run import run"),
    ("front door", "__init__.py", "import torch"),
    ("strangers", "trainers/rl/loop.py", "from megatron.core import parallel_state"),
    ("strangers", "weights/plan/overlaps.py", "def f():\n    import megatron.core"),
    ("strangers", "rollout/engine.py", "from vllm import LLM"),
    ("strangers", "models/norm.py", "import triton.language as tl"),
    ("impure mathematics", "algo/kl.py", "import numpy as np"),
    ("impure mathematics", "algo/kl.py", "from megarlhf.layout import MeshLayout"),
    ("impure mathematics", "algo/kl.py", "import torch.distributed as dist"),
    ("impure mathematics", "algo/kl.py", "from megarlhf import config"),
    ("impure mathematics", "algo/kl.py", "import logging"),
]


def test_a_planted_cycle_is_found():
    """Over three modules, one import inside a function, one of a package by its name; a diamond is no cycle."""
    files = {
        "a/__init__.py": "from megarlhf.b import f",
        "b.py": "def f():\n    import megarlhf.a.c",
        "a/c.py": "from megarlhf import a",
        "d.py": "from megarlhf.b import f\nfrom megarlhf.a.c import g",
    }
    assert import_graph(files)["megarlhf.d"] == {"megarlhf.b", "megarlhf.a.c"}
    assert cycles(files) == ["a cycle of imports: megarlhf.a, megarlhf.a.c, megarlhf.b"]
    assert cycles(files | {"a/c.py": ""}) == []


@pytest.mark.parametrize("name, file, text", PLANTED)
def test_a_planted_violation_is_found(name, file, text):
    assert len(CHECKS[name]({file: text})) == 1


PERMITTED = [
    (
        "upward arrows",
        "trainers/rl/loop.py",
        "from megarlhf.rollout.engine import Any\nimport megarlhf.algo.kl",
    ),
    ("upward arrows", "weights/plan/overlaps.py", "from megarlhf.weights.plan.box import Box\nfrom .box import Box"),
    (
        "upward arrows",
        "commands/cli.py",
        "ENTRY = 'megarlhf.trainers.supervised.sft:run'\nfrom megarlhf.commands import launch",
    ),
    ("upward arrows", "__main__.py", "from megarlhf.commands.plan import main"),
    ("upward arrows", "api/run.py", "from megarlhf.commands.cli import main"),
    (
        "front door",
        "__init__.py",
        "if TYPE_CHECKING:\n    from megarlhf.api.run import run\nX = {'a': 'megarlhf.api:a'}",
    ),
    ("upward arrows", "observe/x.py", "import logging\nlogging.getLogger('megarlhf')\nimport torch"),
    ("strangers", "resume/save.py", "from megatron.core import dist_checkpointing"),
    ("strangers", "kernels/logprob.py", "import triton"),
    ("impure mathematics", "algo/kl.py", "import math\nimport torch.nn.functional as F\nfrom megarlhf.algo import kl"),
]


@pytest.mark.parametrize("name, file, text", PERMITTED)
def test_what_is_permitted_is_not_reported(name, file, text):
    assert CHECKS[name]({file: text}) == []
