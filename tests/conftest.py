"""Rank processes and tiny models for all tests, and what is asked of the suite as a whole."""

import gc
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.tiny import write_data, write_reward_model, write_tiny_llama
from tests.ranks import RankPool
from tests.suite.cpu_seconds import CpuSeconds
from tests.suite.lanes import Lanes
from tests.suite.leftovers import Leftovers

MEMORY, ROOM = Path("/dev/shm"), 1 << 30
POOLS: pytest.StashKey[list[RankPool]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    # Temporary directories, 0.1 GB, lie in memory where there is room: conversions wait for the disk otherwise.
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    if "MEGARLHF_CACHE" not in os.environ:  # one for the session, also for its workers and ranks
        os.environ["MEGARLHF_CACHE"] = tempfile.mkdtemp(prefix="megarlhf-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop("MEGARLHF_CACHE"), ignore_errors=True))
    config.stash[POOLS] = []
    for plugin in (Leftovers(config), CpuSeconds(config, config.stash[POOLS]), Lanes()):
        config.pluginmanager.register(plugin)


def pytest_collection_finish(session: pytest.Session) -> None:
    modules = ["torch.distributed"]
    if any({"distributed", "public", "rehearsal"} & set(item.path.parts) for item in session.items):
        modules.append("tests.preload")
    if any({"vllm_ranks", "fresh_ranks"} & set(getattr(item, "fixturenames", ())) for item in session.items):
        modules.append("tests.preload_vllm")
    multiprocessing.set_forkserver_preload(modules)  # by the server, before the first rank is forked from it
    gc.collect()
    gc.freeze()  # a million objects of modules and tests, which each later collection would look through


def pytest_unconfigure() -> None:
    gc.unfreeze()  # Triton's bindings name as leaks what is left when the process ends


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """A test that fails may leave its ranks in any state: the next one gets fresh ones."""
    report = yield
    if report.failed:
        for pool in item.config.stash[POOLS]:
            pool.close()
    return report


def _pool(config: pytest.Config, size: int) -> Iterator[RankPool]:
    pool = RankPool(size)
    config.stash[POOLS].append(pool)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ranks(pytestconfig) -> Iterator[RankPool]:
    """Up to four ranks, shared by all tests."""
    yield from _pool(pytestconfig, 4)


@pytest.fixture(scope="session")
def vllm_ranks(pytestconfig) -> Iterator[RankPool]:
    """Up to four ranks, shared by all tests with vLLM, which keeps state of its own in a process."""
    yield from _pool(pytestconfig, 4)


@pytest.fixture
def fresh_ranks(pytestconfig) -> Iterator[RankPool]:
    """Ranks for one test alone, which may leave an engine of vLLM's behind."""
    yield from _pool(pytestconfig, 4)


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """A directory on a real disk, where fsync has something to do."""
    kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    for parent in map(Path, (tempfile.gettempdir(), "/var/tmp", Path.cwd())):
        mount = next(str(above) for above in (parent.resolve(), *parent.resolve().parents) if str(above) in kinds)
        if kinds[mount] not in ("tmpfs", "ramfs"):
            with tempfile.TemporaryDirectory(dir=parent) as directory:
                yield Path(directory)
            return
    pytest.skip("every place for temporary files lies in memory")


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Tiny Llamas of four layers: two sets of weights, untied and tied; a reward model with the trunk of `other`."""
    root = tmp_path_factory.mktemp("models")
    models = {
        "plain": write_tiny_llama(root / "plain", seed=0),
        "rope": write_tiny_llama(root / "rope", seed=4, llama3_rope=True),
        "other": write_tiny_llama(root / "other", seed=1),
        "tied": write_tiny_llama(root / "tied", seed=2, tied=True),
        "tied_other": write_tiny_llama(root / "tied_other", seed=3, tied=True),
    }
    return models | {"scorer": write_reward_model(root / "scorer", models["other"])}


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory) -> dict[str, Path]:
    """The same with two layers, for tests in which the depth plays no part: ranks mostly wait for collectives."""
    return _shallow(tmp_path_factory.mktemp("two_layers"), num_layers=2)


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory) -> dict[str, Path]:
    """The same with one, for tests of what a run does around its model, without stages."""
    return _shallow(tmp_path_factory.mktemp("one_layer"), num_layers=1)


def _shallow(root: Path, num_layers: int) -> dict[str, Path]:
    models = {
        "plain": write_tiny_llama(root / "plain", seed=0, num_layers=num_layers),
        "other": write_tiny_llama(root / "other", seed=1, num_layers=num_layers),
        "tied": write_tiny_llama(root / "tied", seed=2, tied=True, num_layers=num_layers),
        "tied_other": write_tiny_llama(root / "tied_other", seed=3, tied=True, num_layers=num_layers),
    }
    return models | {"scorer": write_reward_model(root / "scorer", models["other"])}


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> dict[str, Path]:
    """JSON lines: sft, pairs, prompts."""
    return write_data(tmp_path_factory.mktemp("data"))
