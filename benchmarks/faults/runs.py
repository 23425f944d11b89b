"""The runs that are hurt: small models, their data and configurations, and what a run gives that nothing happens to."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.faults.processes import Command
from megarlhf.observe.records.cost_metrics import reproducible
from tools.demo.make_data import Recipe, write_all

STEPS = {"sft": 24, "rl": 5}
Difference = str
"""What is not equal, in words; empty when all is."""


@dataclass(frozen=True)
class Case:
    """A command with its configuration, but for the run directory."""

    name: str
    command: str
    ranks: int
    tree: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return int(self.tree["train"]["num_steps"])

    def argv(self, run: Path, file: Path) -> list[str]:
        """The command line; the configuration is written to `file`."""
        tree = {**self.tree, "run": {"dir": str(run), "nproc": self.ranks}}
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return [self.command, "-c", str(file)]


@dataclass(frozen=True)
class Reference:
    """The run that nothing happens to."""

    results: Mapping[str, Any]
    seconds_to_first_step: float
    """From the lock to the first step."""
    seconds_of_a_step: float


@dataclass(frozen=True)
class Site:
    """Models and data, and the runs made of them."""

    root: Path
    sources: str
    """Digest of megarlhf's sources: a run of others is no reference."""

    def prepare(self) -> None:
        """Data, a supervised model and a reward model, by the commands that users give; once."""
        models = self.root / "models"
        if (models / "rm/FINISHED").exists():
            return
        recipe = Recipe(validation=24, test=8, sft_train=400, pairs_train=200, prompts_train=120)
        write_all(self.root / "data", recipe, seed=0)
        base = self.root / "data/base"
        for name, tree in {
            "sft": {**self._data("sft"), "actor": {"model": {"path": str(base), "random_init": True}}},
            "rm": {**self._data("pairs"), "reward_model": {"model": {"path": str(self._model("sft", "actor"))}}},
        }.items():
            tree["train"] = {"num_steps": 12, "mini_batch_samples": 64, "max_tokens_per_micro_batch": 1024}
            case = Case(name, name, 1, tree)
            models.mkdir(exist_ok=True)
            command = Command(case.argv(models / name, models / f"{name}.yaml"), models / f"{name}.log")
            assert command.wait() == 0, command.said[-3000:]

    def _model(self, stage: str, role: str) -> Path:
        return self.root / "models" / stage / "checkpoints/latest" / role

    def _data(self, name: str) -> dict[str, Any]:
        files = {"train": f"{name}_train.jsonl", "validation": f"{name}_validation.jsonl"}
        paths = {key: str(self.root / "data" / file) for key, file in files.items()}
        return {"data": {**paths, "max_prompt_tokens": 16, **({} if name == "prompts" else {"max_response_tokens": 8})}}

    def case(self, name: str) -> Case:
        """`sft`, `sft_tp2`, `sft_keep`, `sft_nan`, `ppo`, `ppo_vllm`, `grpo`, `slices`, `slices_vllm`, `slices_ahead`,
        `talks`, `talks_two` or `talks_slices`."""
        return getattr(self, f"_{name.partition('_')[0]}")(name)

    def _sft(self, name: str) -> Case:
        optim = {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 3}
        parallel = {"tp": 2} if name == "sft_tp2" else {}
        often = {"every": 2, "keep": 4} if name == "sft_keep" else {"every": 3}
        tree = {
            **self._data("sft"),
            "actor": {"model": {"path": str(self._model("sft", "actor"))}, "parallel": parallel, "optim": optim},
            # 400 records are not a multiple of the batch: epochs end inside a batch.
            "train": {"num_steps": STEPS["sft"], "mini_batch_samples": 64, "max_tokens_per_micro_batch": 256},
            "checkpoint": {**often, "every_minutes": 0, "export_every": 8},
            "eval": {"every": 6},
            "watchdog": {"train": 12, "optimizer": 12, "checkpoint": 12, "eval": 12, "grace": 6},
        }
        nan = plant("megarlhf.parallel.step:Trainer.gradient_norm:6:nan:0") if name == "sft_nan" else {}
        return Case(name, "sft", 2 if name == "sft_tp2" else 1, tree, nan)

    def _rl(self, name: str, roles: Mapping[str, Any], **more: Any) -> Case:
        tree = {
            **self._data("prompts"),
            "actor": {"model": {"path": str(self._model("sft", "actor"))}, "optim": {"lr": 1e-4}},
            **roles,
            "train": {
                "num_steps": STEPS["rl"],
                "prompts_per_step": 16,
                "mini_batch_samples": 16,
                "epochs_per_step": 2,
                "max_tokens_per_micro_batch": 256,
            },
            "rollout": {"engine": "megatron", "num_samples_per_prompt": 2, "max_response_tokens": 6},
            "algo": {"kl": {"coef": 0.1}},
            "eval": {"every": 2},
        }
        for section, values in more.items():
            tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
        return Case(name, "rl", 2 if name in ("ppo", "talks_two") else 1, tree)

    def _ppo(self, name: str) -> Case:
        scorer = {"model": {"path": str(self._model("rm", "reward_model"))}}
        roles = {"critic": {**scorer, "optim": {"lr": 5e-4}}, "reward_model": scorer}
        vllm = name == "ppo_vllm"
        often = {"every": 2} if vllm else {"every_updates": 1, "keep": 3}
        checkpoint = {**often, "every_minutes": 0, "export_every": 2}
        rewards = [{"kind": "model", "clip": 1.0}]
        return self._rl(name, roles, rewards=rewards, checkpoint=checkpoint, rollout={"engine": "vllm"} if vllm else {})

    def _grpo(self, name: str) -> Case:
        return self._rl(
            name,
            {},
            rewards=[{"kind": "rule", "rule": "benchmarks.faults.rules:hang_once", "check": "none"}],
            algo={"advantage": "group_relative", "kl": {"coef": 0.05, "placement": "loss", "estimator": "k3"}},
            checkpoint={"every": 1, "every_minutes": 0, "export_every": 2},
            watchdog={"reward": 10, "grace": 6},
        )

    def _slices(self, name: str) -> Case:
        """Responses in three slices, or in two with a step ahead; resume points are rare."""
        ahead = name == "slices_ahead"
        engine = {"engine": "vllm"} if name == "slices_vllm" else {}
        return self._rl(
            name,
            {},
            rewards=[{"kind": "rule", "rule": "exact_match"}],
            train={"num_steps": 14},
            rollout={"slices": 2 if ahead else 3, "steps_ahead": int(ahead), **engine},
            algo={"advantage": "group_relative", "kl": {"log": True}},
            checkpoint={"every": 5, "keep": 2, "every_minutes": 0, "export_every": 7},
            eval={"every": 7},
        )

    def _talks(self, name: str) -> Case:
        """Conversations of mostly three to five turns, whole or in three slices, on one engine or on two.

        A turn and its answer have at most 12 tokens, in slices 10: two slices have room for two turns.
        """
        sliced = name == "talks_slices"
        limits = {"max_turns": 5, "max_turn_tokens": 6 if sliced else 8}
        case = self._rl(
            name,
            {},
            environment={"function": "benchmarks.faults.environments:Hints", **limits},
            rewards=[{"kind": "environment"}],
            train={"num_steps": 8},
            rollout={
                "engine": "vllm",
                "num_samples_per_prompt": 4,
                # Digits end a turn too: this model's own end token comes too seldom for several turns.
                "stop_token_ids": [4, 5, 6, 7, 8],
                **({"slices": 3, "max_response_tokens": 30} if sliced else {"max_response_tokens": 42}),
            },
            algo={"advantage": "group_relative", "kl": {"log": True}},
            checkpoint={"every": 4, "keep": 2, "every_minutes": 0, "export_every": 8},
        )
        # Without an evaluation every conversation is of a step, whose metrics count it.
        data = {key: value for key, value in case.tree["data"].items() if key != "validation"}
        return replace(case, tree={**{key: case.tree[key] for key in case.tree if key != "eval"}, "data": data})

    def reference(self, case: Case) -> Reference:
        """The run without a fault; made twice, which has to give the same, and then kept."""
        file = self.root / "references" / f"{case.name}-{self.sources}.json"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            made = [self._run_undisturbed(case, file.with_name(f"{case.name}{time}")) for time in (1, 2)]
            if problem := differences(made[0].results, made[1].results):
                raise RuntimeError(f"{case.name}: two undisturbed runs differ, nothing can be compared: {problem}")
            file.write_text(json.dumps(vars(made[0])), encoding="utf-8")
        return Reference(**json.loads(file.read_text(encoding="utf-8")))

    def _run_undisturbed(self, case: Case, run: Path) -> Reference:
        mark = run.with_suffix(".planted")
        shutil.rmtree(run, ignore_errors=True)  # of other sources
        mark.unlink(missing_ok=True)
        planted = {**case.environment, "FAULTS_PLANTED": str(mark)}
        command = Command(case.argv(run, run.with_suffix(".yaml")), run.with_suffix(".log"), planted)
        command.wait_until((run / "lock").exists)
        locked = time.monotonic()
        command.wait_until(partial(has_step, run, 1))
        first = time.monotonic()
        assert command.wait() == 0, command.said[-3000:]
        return Reference(results(run), first - locked, (time.monotonic() - first) / case.steps)


def plant(fault: str) -> dict[str, str]:
    """The environment that plants a fault: benchmarks/faults/inject."""
    return {"FAULTS_PLANT": fault, "PYTHONPATH": str(Path(__file__).parent / "inject")}


def rows(run: Path) -> list[dict[str, Any]]:
    """All complete lines of metrics, without those that are not compared."""
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [{name: value for name, value in json.loads(line).items() if compared(name)} for line in lines]


def compared(name: str) -> bool:
    """Whether a metric is the same in every run."""
    return bool(reproducible({name.rpartition("/")[2]: None}))


def has_step(run: Path, step: int) -> bool:
    """Whether this step has been written down."""
    file = run / "metrics.jsonl"
    return step == 0 or (file.exists() and b'{"step": %d,' % step in file.read_bytes())


def results(run: Path) -> dict[str, Any]:
    """What two equal runs agree in: metrics, TensorBoard's scalars, every exported file of weights, how it ended."""
    weights = sorted((run / "checkpoints").glob("step_*/*/*.safetensors"))
    finished = run / "FINISHED"
    return {
        "metrics": rows(run),
        "scalars": _scalars(run / "tensorboard"),
        "weights": {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in weights},
        "finished": {k: v for k, v in json.loads(finished.read_text()).items() if k in ("step", "reason")}
        if finished.exists()
        else None,
    }


def _scalars(folder: Path) -> dict[str, list[list[float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    names = sorted(name for name in board.Tags()["scalars"] if compared(name))
    return {name: [[event.step, event.value] for event in board.Scalars(name)] for name in names}


def differences(got: Mapping[str, Any], expected: Mapping[str, Any], not_compared: Sequence[str] = ()) -> Difference:
    """Of two results. Numbers are compared bit for bit, as JSON writes them.

    not_compared: parts of names of metrics that may differ
    """
    got, expected = (_without(json.loads(json.dumps(each)), not_compared) for each in (got, expected))
    for number, (mine, theirs) in enumerate(zip(got["metrics"], expected["metrics"], strict=False)):
        if mine != theirs:
            names = [name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)]
            return f"line {number + 1} of metrics.jsonl: {sorted(names)}"
    if len(got["metrics"]) != len(expected["metrics"]):
        return f"{len(got['metrics'])} lines of metrics, expected {len(expected['metrics'])}"
    for what in ("scalars", "weights", "finished"):
        if got[what] != expected[what]:
            return f"{what} differ"
    return ""


def _without(results: dict[str, Any], not_compared: Sequence[str]) -> dict[str, Any]:
    """Results without the metrics in whose names one of these parts is."""

    def kept(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if not any(part in name for part in not_compared)}

    return {**results, "metrics": [kept(row) for row in results["metrics"]], "scalars": kept(results["scalars"])}


def contents(run: Path) -> dict[str, str]:
    """Every file with its digest, but for a lock that was left behind: what a refused start must leave as it was."""
    files = [
        path for path in sorted(run.rglob("*")) if path.is_file() and not path.is_symlink() and path.name != "lock"
    ]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def generator(fault: str, number: int, attempt: int) -> random.Random:
    """The random choices of a trial."""
    return random.Random(f"{fault}/{number}/{attempt}")
