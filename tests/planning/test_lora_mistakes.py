"""What is said of mistakes with adapters and frozen tensors: found by --dry-run, one line, exit status 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from megarlhf.commands.cli import main
from tests.distributed.lora import write_adapter
from tests.distributed.tiny import write_family
from tests.refuses import missing_names

DryRun = Callable[..., tuple[int, str]]
Models = dict[str, Path]


@pytest.fixture(scope="module")
def adapter(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "adapter", models["plain"], targets=("q_proj", "v_proj"))


@pytest.fixture
def dry_run(tmp_path: Path, models: Models, data: Models, capsys: pytest.CaptureFixture[str]) -> DryRun:
    def run(command: str, *overrides: str) -> tuple[int, str]:
        tree: dict[str, Any] = {
            "run": {"dir": str(tmp_path / "run"), "nproc": 1},
            "actor": {"model": {"path": str(models["plain"])}},
            "data": {"train": str(data["prompts" if command == "rl" else "sft"])},
            "train": {"num_steps": 2, "mini_batch_samples": 8, "micro_batch_samples": 2},
        }
        if command == "rl":
            tree["data"]["max_prompt_tokens"] = 16
            tree["train"]["prompts_per_step"] = 4
            tree |= {
                "rewards": [{"kind": "rule", "rule": "exact_match"}],
                "rollout": {"engine": "megatron", "num_samples_per_prompt": 2, "max_response_tokens": 6},
                "algo": {"advantage": "grpo"},
            }
        (tmp_path / "cfg.yaml").write_text(yaml.safe_dump(tree))
        status = main([command, "-c", str(tmp_path / "cfg.yaml"), "--dry-run", *overrides])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return status, captured.err if status else captured.out

    return run


MISTAKES: dict[str, tuple[str, list[str], str]] = {
    "a target that matches nothing": ("sft", ["actor.lora={targets: [q_porj]}"],
     "actor.lora|'q_porj'|q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
    "one of several": ("sft", ["actor.lora={targets: [q_proj, query_key_value]}"], "'query_key_value'|linear layer"),
    "the head": ("sft", ["actor.lora={targets: [lm_head]}"], "'lm_head'|Embedding, head, router and norms"),
    "a layer that is not there": ("sft", ["actor.lora={targets: ['model.layers.4.*']}"],
     "'model.layers.4.*'|linear layer"),
    "no target": ("sft", ["actor.lora={targets: []}"], "targets is empty|all-linear"),
    "another word for all": ("sft", ["actor.lora={targets: all_linear}"], "'all_linear'|'all-linear'"),
    "rank 0": ("sft", ["actor.lora={rank: 0}"], "actor.lora.rank"),
    "a rank in words": ("sft", ["actor.lora={rank: sixteen}"], "actor.lora.rank|'sixteen'"),
    "negative alpha": ("sft", ["actor.lora={alpha: -1}"], "actor.lora.alpha|-1"),
    "dropout": ("sft", ["actor.lora={dropout: 0.05}"], "dropout = 0.05"),
    "PEFT's name of a key": ("sft", ["actor.lora={target_modules: [q_proj]}"], "'actor.lora.target_modules'"),
    "PEFT's name of the rank": ("sft", ["actor.lora={r: 8}"], "'actor.lora.r'"),
    "an export that is none": ("sft", ["actor.lora={export: gguf}"], "actor.lora.export|'gguf'"),
    "lora and freeze": ("sft", ["actor.lora={}", "actor.freeze=[embed_tokens]"], "leave freeze out|leave lora out"),
    "lora and train_only": ("sft", ["actor.lora={}", "actor.train_only=[norm]"], "leave train_only out"),
    "freeze and train_only": ("sft", ["actor.freeze=[norm]", "actor.train_only=[norm]"],
     "freeze|train_only|one of them"),
    "a frozen name that is none": ("sft", ["actor.freeze=[embeddings]"],
     "actor.freeze|'embeddings'|model.embed_tokens.weight, model.layers.*.input_layernorm.weight"),
    "a trained name that is none": ("sft", ["actor.train_only=['model.layers.9.*']"], "train_only|'model.layers.9.*'"),
    "everything frozen": ("sft", ["actor.freeze=['*']"], "freezes every tensor"),
    "a part of a parameter": ("sft", ["actor.freeze=[q_proj]"],
     "k_proj.weight|model.layers.0.self_attn.q_proj.weight|one parameter"),
    "words in another order": ("sft", ["actor.optim.grad_clip=1"], "'actor.optim.grad_clip'|'clip_grad'"),
    "no adapter there": ("sft", ["actor.lora={path: nowhere}"], "lora.path = nowhere|adapter_config.json"),
    "an adapter of a random model": ("sft", ["actor.lora={export: adapter}", "actor.model.random_init=true"],
     "export merged"),
    "vLLM's adapter without one": ("rl", ["rollout.lora=adapter"], "no adapter|actor.lora"),
    "vLLM's adapter without vLLM": ("rl", ["rollout.lora=adapter", "actor.lora={}"], "vllm|rollout.engine = megatron"),
    "an adapter too large for vLLM": ("rl", ["rollout.lora=adapter", "rollout.engine=vllm", "actor.lora={rank: 1024}"],
     "rank 512"),
    "a reference that moves half way": ("rl",
     ["actor.lora={}", "algo.kl.coef=0.1", "reference_update={every: 1, mixup: 0.5}"], "A and B of two adapters"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_before_ranks_start(case: str, dry_run: DryRun) -> None:
    command, overrides, names = MISTAKES[case]
    status, error = dry_run(command, *overrides)
    assert (status, missing_names(error, *names.split("|"))) == (2, []), error


def test_an_export_of_experts_that_peft_would_not_read_is_refused(dry_run: DryRun, tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", "qwen3_moe", vocab_size=16, num_hidden_layers=2)
    experts, gate = f"actor.model.path={model}", "targets: [q_proj, gate_proj]"
    status, error = dry_run("sft", experts, f"actor.lora={{{gate}, export: both}}")
    assert (status, missing_names(error, "actor.lora.export = both", "gate_proj", "PEFT")) == (2, [])
    assert dry_run("sft", experts, f"actor.lora={{{gate}}}")[0] == 0


def test_a_head_that_is_tied_is_said_to_be_the_embedding(dry_run: DryRun, models: Models) -> None:
    status, error = dry_run("sft", f"actor.model.path={models['tied']}", "actor.freeze=[lm_head]")
    assert (status, missing_names(error, "tied", "model.embed_tokens.weight")) == (2, [])


@pytest.mark.parametrize("command, rate, told", [
    ("sft", "1e-5", True), ("sft", "1e-4", False), ("rl", "1e-6", True), ("rl", "1e-5", False),
])  # fmt: skip
def test_a_learning_rate_of_full_training_is_remarked_on(command: str, rate: str, told: bool, dry_run: DryRun) -> None:
    """As `init` writes it, and the default; without an adapter nothing is said."""
    for adapter, expected in (("actor.lora={}", told), ("actor.freeze=[lm_head]", False)):
        status, output = dry_run(command, adapter, f"actor.optim.lr={rate}")
        names = (f"actor.optim.lr = {float(rate):g}", "ten times", "docs/lora.md")
        assert (status, not missing_names(output, *names)) == (0, expected), output


def test_a_list_without_a_value_is_as_if_left_out(dry_run: DryRun) -> None:
    assert dry_run("sft", "actor.train_only=", "actor.freeze=[lm_head]")[0] == 0


def stated(adapter: Path, into: Path, **config: object) -> Path:
    into.mkdir()
    (into / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    known = json.loads((adapter / "adapter_config.json").read_text())
    (into / "adapter_config.json").write_text(json.dumps({**known, **config}))
    return into


def with_tensors(adapter: Path, into: Path, change: Callable[[dict], object]) -> Path:
    stated(adapter, into)
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, into / "adapter_model.safetensors")
    return into


WEIGHTS = "adapter_model.safetensors"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
WRONG: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "of another rank: {path: PATH, rank: 8}": (lambda a, to: stated(a, to), "rank = 8|the adapter at"),
    "of another alpha: {path: PATH, alpha: 1}": (lambda a, to: stated(a, to), "alpha = 1.0|the adapter at"),
    "of other targets: {path: PATH, targets: [q_proj]}": (lambda a, to: stated(a, to), "targets|linear layers"),
    "not LoRA": (lambda a, to: stated(a, to, peft_type="IA3"), "peft_type 'IA3'|LORA"),
    "DoRA": (lambda a, to: stated(a, to, use_dora=True), "use_dora = True"),
    "several ranks": (lambda a, to: stated(a, to, rank_pattern={"q_proj": 2}), "rank_pattern"),
    "with biases": (lambda a, to: stated(a, to, bias="all"), "bias = 'all'"),
    "no rank": (lambda a, to: stated(a, to, r=None), "r = None"),
    "a damaged config": (lambda a, to: (stated(a, to), (to / "adapter_config.json").write_text("{"))[0],
     "adapter_config.json|damaged"),
    "truncated": (lambda a, to: (stated(a, to), (to / WEIGHTS).write_bytes((a / WEIGHTS).read_bytes()[:-9]))[0],
     f"{WEIGHTS}|truncated"),
    "no weights": (lambda a, to: (stated(a, to), (to / WEIGHTS).unlink())[0], WEIGHTS),
    "a tensor less": (lambda a, to: with_tensors(a, to, lambda t: t.pop(FIRST.replace("_A", "_B"))),
     "model.layers.0.self_attn.q_proj.lora_B.weight is missing"),
    "of a wider model": (lambda a, to: with_tensors(a, to, lambda t: t.update({FIRST: t[FIRST].repeat(1, 2)})),
     "model.layers.0.self_attn.q_proj.lora_A.weight|(4, 128)|(4, 64)|another base"),
    "of other layers": (lambda a, to: with_tensors(
        a, to, lambda t: t.update({FIRST.replace("layers.0", "layers.9"): t[FIRST].clone()})),
     "no linear layer|model.layers.9.self_attn.q_proj.lora_A.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_does_not_fit_is_refused(case: str, adapter: Path, dry_run: DryRun, tmp_path: Path) -> None:
    make, names = WRONG[case]
    section = case.partition(": ")[2] or "{path: PATH}"
    path = make(adapter, tmp_path / "adapter")
    status, error = dry_run("sft", f"actor.lora={section.replace('PATH', str(path))}")
    assert (status, missing_names(error, *names.split("|"))) == (2, []), error


def test_an_adapter_is_no_model(adapter: Path, dry_run: DryRun) -> None:
    status, error = dry_run("sft", f"actor.model.path={adapter}")
    assert (status, missing_names(error, "PEFT adapter", "model.path")) == (2, [])


def test_what_is_no_mistake_is_said(adapter: Path, dry_run: DryRun, models: Models, tmp_path: Path) -> None:
    other = stated(adapter, tmp_path / "adapter", base_model_name_or_path="org/other", lora_dropout=0.1)
    status, notes = dry_run("sft", f"actor.lora={{path: {other}}}")
    names = ("org/other", f"actor.model.path is {models['plain']}", "dropout 0.1", "actor: trains 5,120")
    assert (status, missing_names(notes, *names)) == (0, [])
    reference = f"reference={{model: {{path: {models['plain']}}}, lora: {{}}}}"
    status, notes = dry_run("rl", "actor.lora={}", "algo.kl.coef=0.1", reference)
    assert (status, missing_names(notes, "reference.lora", "reference: a model of its own")) == (0, [])
