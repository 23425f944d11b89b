"""A version of this repository in a directory of its own, and its commands."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.equality.start import Processes, become_command, become_launcher, fork, rank_environments

RENAMED: dict[str, str] = {
    "rollout.vllm.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "rollout.vllm.cpu_cache_gib": "rollout.cpu_cache_gib",
    "rollout.vllm.sleep_level": "rollout.sleep_level",
    "rollout.vllm.args": "rollout.engine_args",
}
"""New configuration key: old key. For example `{"rollout.vllm.gpu_memory_utilization":
"rollout.gpu_memory_utilization"}`. `ROLE` stands for any role, `[]` for each item of a list: `rewards[].shift`."""
ROLES = ("actor", "critic", "reference", "reward_model")
NOT_INHERITED = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "MEGARLHF_", "TORCHELASTIC_", "PYTHON")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def git(repository: Path, *arguments: str) -> bytes:
    """The output of a git command."""
    return subprocess.run(["git", *arguments], cwd=repository, check=True, stdout=subprocess.PIPE).stdout


def extract_commit(repository: Path, commit: str, directory: Path) -> None:
    """Write a commit's files to a new directory."""
    archive = git(repository, "archive", "--format=tar", commit)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(directory, filter="data")


def copy_working_tree(repository: Path, directory: Path) -> None:
    """Write the present files to a new directory, also new ones that git does not ignore."""
    names = git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard").decode().split("\0")
    for name in sorted(filter(None, set(names))):
        source = repository / name
        if source.is_file() or source.is_symlink():  # not one that was removed, nor a repository inside this one
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


@dataclass(frozen=True)
class CodeTree:
    """A version's files."""

    root: Path
    inputs: Path
    """A directory from which reward functions are imported."""

    def require_own_package(self) -> None:
        """Raises: RuntimeError where `import megarlhf` takes another version's."""
        program = "import megarlhf; print(megarlhf.__file__)"
        output = subprocess.run(
            [sys.executable, "-c", program], cwd=self.root, env=self.environment(), check=True, stdout=subprocess.PIPE
        ).stdout.decode()
        if Path(output.strip()).resolve() != (self.root / "megarlhf" / "__init__.py").resolve():
            raise RuntimeError(f"`import megarlhf` in {self.root} takes {output.strip()}")

    def environment(self) -> dict[str, str]:
        """Of every command."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
        paths = os.pathsep.join(map(str, (self.root, self.inputs)))
        return {**inherited, **ENVIRONMENT, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}

    def pages(self) -> str:
        """The text of its documentation, whose tables list all configuration keys."""
        return "\n".join(page.read_text(encoding="utf-8") for page in sorted((self.root / "docs").rglob("*.md")))

    def start(self, argv: Sequence[str], log: Path, cache: Path, ranks: int, *, plain: bool = False) -> Processes:
        """Start `megarlhf ARGV`: as so many ranks, or `plain`, as a user does, by a process that starts them."""
        environment = {**self.environment(), "MEGARLHF_CACHE": str(cache)}
        if plain:
            return Processes([fork(partial(become_launcher, self.root, environment, argv), log)])
        each = [{**environment, **more} for more in rank_environments(ranks)]
        return Processes([fork(partial(become_command, self.root, [self.inputs], one, argv), log) for one in each])


def in_keys_of(pages: str, config: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """A configuration with the old key of each key of `renamed` that a version's documentation does not list."""
    result = dict(config)
    for new, old in renamed.items():
        if f"| `{new}` |" in pages or f"| `{new}." in pages:
            continue
        for role in ROLES if new.startswith("ROLE.") else ("ROLE",):
            result = with_key_moved(result, new.replace("ROLE", role, 1), old.replace("ROLE", role, 1))
    return result


def with_key_moved(config: Mapping[str, Any], source: str, target: str) -> dict[str, Any]:
    """The value at the dotted key `source`, if there is one, stands at `target`; sections that are then empty go."""
    if "[]." in source:
        section, _, rest = source.partition("[].")
        items = config.get(section) or []
        moved = [with_key_moved(item, rest, target.partition("[].")[2]) for item in items]
        return {**config, section: moved} if items else dict(config)
    value, rest_of = _taken(config, source.split("."))
    return dict(config) if value is None else _put(rest_of, target.split("."), value)


def _taken(config: Mapping[str, Any], path: list[str]) -> tuple[Any, dict[str, Any]]:
    """The value at a path (None where there is none), and the configuration without it."""
    left = dict(config)
    if path[0] not in left:
        return None, left
    if len(path) == 1:
        return left.pop(path[0]), left
    if not isinstance(left[path[0]], Mapping):
        return None, left
    value, inner = _taken(left[path[0]], path[1:])
    left[path[0]] = inner
    if value is not None and not inner:
        del left[path[0]]
    return value, left


def _put(config: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """The configuration with a value at a path."""
    if len(path) == 1:
        return {**config, path[0]: value}
    return {**config, path[0]: _put(config.get(path[0]) or {}, path[1:], value)}
