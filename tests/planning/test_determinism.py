"""`run.deterministic`: what is set, for whom and when, and what is refused. Not covered: GPUs, on which it matters.
What is stated about vLLM is compared with its sources; what is stated about others is in docs/determinism.md with its
sources."""

from __future__ import annotations

import ast
import os
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megarlhf import runtime
from megarlhf.commands import checked, cli, launch
from megarlhf.config import roles
from megarlhf.planning import preflight
from megarlhf.planning.machine import determinism
from megarlhf.planning.machine.determinism import (
    DeviceTraits,
    device_problems,
    environment,
)
from megarlhf.rollout.vllm.spec import ENGINE_NCCL, INVARIANT_ATTENTION
from megarlhf.runtime import RankInfo, Runtime, without_torch_determinism
from tests.config.examples import KINDS
from tests.refuses import missing_names, refuses

TRAINER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def config(name: str, rollout: dict[str, Any] | None = None, *, deterministic: bool = True) -> Any:
    kind, tree = KINDS[name]
    tree: Any = deepcopy(tree)
    tree["run"]["deterministic"] = deterministic
    if rollout is not None:
        tree["rollout"] = rollout
    return kind.model_validate(tree)


def vllm_source(path: str) -> Path:
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / path


@pytest.mark.parametrize("name", KINDS)
def test_without_the_key_nothing_is_set(name: str) -> None:
    assert environment(config(name, deterministic=False), {"NCCL_ALGO": "NVLS"}, on_gpu=True) == {}


def test_each_run_gets_the_variables_of_what_it_runs() -> None:
    """vLLM's batch invariance has no kernels for a CPU, where this project's patches do the same."""
    for name in KINDS:
        assert environment(config(name), {}, on_gpu=False) == TRAINER
    assert environment(config("sft"), {}, on_gpu=True) == TRAINER
    assert environment(config("rl", {"engine": "megatron"}), {}, on_gpu=True) == TRAINER
    for name in ("rl", "generate"):
        with_engine = {**TRAINER, "VLLM_BATCH_INVARIANT": "1"}
        assert environment(config(name), {}, on_gpu=True) == with_engine
        several = config(name, {"parallel": {"tp": 2}})
        assert environment(several, {}, on_gpu=True) == {**with_engine, **ENGINE_NCCL}


def test_what_the_user_has_set_stays_where_it_is_deterministic_and_is_refused_otherwise() -> None:
    kept = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "^NVLS"}
    assert environment(config("sft"), {**kept, "HOME": "/"}, on_gpu=True) == {**TRAINER, **kept}
    wrong = {"NCCL_ALGO": "NVLS", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1", "VLLM_BATCH_INVARIANT": "0"}
    with refuses(
        "run.deterministic = true", "NCCL_ALGO = 'NVLS'", "'Ring'", "'Tree'", "'^NVLS'",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO = '1'", "expected '0'", "VLLM_BATCH_INVARIANT = '0'", "expected '1'",
    ):  # fmt: skip
        environment(config("rl"), wrong, on_gpu=True)
    with refuses("NCCL_PROTO = 'LL'", "'Simple'"):
        environment(config("rl", {"parallel": {"tp": 2}}), {"NCCL_PROTO": "LL"}, on_gpu=True)


BACKENDS = [{"attention_backend": "FLASHINFER"}, {"attention_config": {"backend": "FLASHINFER"}}]


@pytest.mark.parametrize("given", BACKENDS)
def test_an_attention_backend_without_batch_invariance_is_refused(given: dict[str, Any]) -> None:
    with refuses("rollout.vllm.args", "FLASHINFER", "FLASH_ATTN, TRITON_ATTN, FLEX_ATTENTION"):
        environment(config("rl", {"vllm": {"args": given}}), {}, on_gpu=True)
    for accepted in INVARIANT_ATTENTION:
        assert environment(config("rl", {"vllm": {"args": {"attention_backend": accepted.lower()}}}), {}, on_gpu=True)


def test_the_refused_backends_are_those_of_the_installed_vllm() -> None:
    """Of its own backends, without those of MLA, which no family here has."""
    backends = vllm_source("v1/attention/backends")
    able = {path.stem for path in backends.glob("*.py") if "def supports_batch_invariance" in path.read_text()}
    assert able == {"flash_attn", "triton_attn", "flex_attention"}
    assert {name.lower() for name in INVARIANT_ATTENTION} == able


def test_nccl_is_told_what_the_installed_vllm_would_tell_it() -> None:
    """vLLM sets them when it is built, which is after NCCL's first call here."""
    tree = ast.parse(vllm_source("model_executor/determinism/batch_invariant.py").read_text())
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "override_envs_for_invariance")
    pins: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            pins |= ast.literal_eval(node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            pins[ast.literal_eval(node.targets[0].slice)] = ast.literal_eval(node.value)
    assert {name: value for name, value in pins.items() if name.startswith("NCCL_")} == ENGINE_NCCL
    assert pins["CUBLAS_WORKSPACE_CONFIG"] in determinism.ACCEPTED["CUBLAS_WORKSPACE_CONFIG"]


def test_kernels_that_are_not_deterministic_on_a_gpu_are_named() -> None:
    hopper = DeviceTraits((9, 0), True, None)
    ampere, blackwell = DeviceTraits((8, 0), True, (2, 4, 0)), DeviceTraits((10, 0), True, (2, 8, 1))
    assert device_problems(config("rl"), hopper) == []
    assert device_problems(config("rl"), blackwell) == []
    engine, attention = device_problems(config("rl"), ampere)
    assert missing_names(engine, "8.0", "9.0", "rollout.engine=megatron") == []
    assert missing_names(attention, "got 8.0", "older flash-attn", "flash-attn >= 2.4.1", "transformer-engine") == []
    assert device_problems(config("rl", {"engine": "megatron"}), ampere) == [attention]
    assert device_problems(config("sft"), DeviceTraits((8, 0), False, None)) == []
    (missing,) = device_problems(config("sft"), DeviceTraits((12, 0), True, None))
    assert missing_names(missing, "got 12.0", "no flash-attn") == []
    assert device_problems(config("generate"), blackwell) == []


def test_variables_are_set_before_anything_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And what the environment contradicts is refused with status 2, before it. On a machine without a GPU."""
    for name in (*TRAINER, "RANK", "WORLD_SIZE", "SLURM_PROCID", launch.MARK):
        monkeypatch.setenv(name, "")
        del os.environ[name]
    monkeypatch.setattr(determinism, "sees_gpus", lambda: False)
    seen = []

    def look(where: str) -> None:
        seen.append((where, {name: os.environ.get(name) for name in TRAINER}))

    described = preflight.Preflight("sft", "", (), ())
    monkeypatch.setattr(checked, "preflight", lambda *_, **__: look("check") or described)
    monkeypatch.setattr(roles, "with_hub_models", lambda cfg: cfg)  # there is no model
    monkeypatch.setattr(launch, "as_rank", lambda *_, **__: look("rank") or 0)
    config_file = tmp_path / "sft.yaml"
    config_file.write_text(config("sft").model_dump_json())
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    assert cli.main(["sft", "-c", str(config_file)]) == 2
    assert seen == []
    del os.environ["NCCL_ALGO"]
    assert cli.main(["sft", "-c", str(config_file)]) == 0
    assert seen == [("check", TRAINER), ("rank", TRAINER)]


def test_torch_is_told_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's groups in torch look at it when they are made. Not covered: NCCL."""
    told = []

    def join(*_: Any, **__: Any) -> None:
        told.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic))

    monkeypatch.setattr(runtime.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(runtime.dist, "init_process_group", join)
    monkeypatch.setattr(runtime, "_ranks_per_block", lambda info: 1)
    with mock.patch.dict(os.environ, {"MASTER_PORT": "1"}):
        assert not runtime.initialize(RankInfo(), seed=0).deterministic
        with without_torch_determinism():
            assert not torch.are_deterministic_algorithms_enabled()
        assert told == [(False, False)]
        try:
            assert runtime.initialize(RankInfo(), seed=0, deterministic=True).deterministic
            assert told[1:] == [(True, True)]
            with without_torch_determinism():
                assert not torch.are_deterministic_algorithms_enabled()
                assert torch._inductor.config.deterministic
            assert torch.are_deterministic_algorithms_enabled()
        finally:
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.deterministic = False


def test_a_rank_whose_gpu_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not covered: several ranks, of which one differs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(determinism, "has_transformer_engine", lambda: False)
    on_gpu = Runtime(device=torch.device("cuda", 0), backend="nccl", deterministic=True)
    errors: list[Any] = []

    class Alone:
        def __init__(self, error: Any) -> None:
            self.error = error

        def __enter__(self) -> list[str]:
            return errors

        def __exit__(self, *_: object) -> None:
            if errors:
                raise self.error(errors)

    monkeypatch.setattr(determinism, "raise_on_all_ranks", Alone)
    with refuses("run.deterministic = true", "vLLM", "8.0"):
        determinism.require_deterministic_device(config("rl"), on_gpu)
    determinism.require_deterministic_device(config("rl", deterministic=False), on_gpu)
    errors.clear()
    determinism.require_deterministic_device(config("rl"), Runtime(device=torch.device("cpu"), backend="gloo"))
