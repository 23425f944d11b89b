"""Whole runs with an adapter: `rl` with vLLM, a kill and a resume at other layouts, exports.

Not covered: GPUs; a mixture of experts in vLLM, whose weights travel as those of any other model.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from megarlhf.observe.records.metrics import read_metrics
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from tests.command import argv_of
from tests.distributed.lora import read_adapter, write_adapter
from tests.distributed.test_resume import command_line, rows, weights
from tests.distributed.test_resume_elsewhere import TP, sft, started, wander
from tests.distributed.test_rl_layouts import config
from tests.refuses import command_refuses, lines_naming, missing_names, refuses

LIMIT = 1e-4
"""Nats by which trainer and vLLM may differ on a token in fp32."""


def merged_by_hand(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """W + alpha / r x B A, and what has no adapter as it is."""
    stated, tensors = json.loads((adapter / "adapter_config.json").read_text()), read_adapter(adapter)
    whole = load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        a, b = (tensors[f"{module}.lora_{letter}.weight"].double() for letter in "AB")
        whole[f"{module}.weight"] = whole[f"{module}.weight"].double() + stated["lora_alpha"] / stated["r"] * b @ a
    return whole


@pytest.mark.parametrize("how", ["merged", pytest.param("adapter", marks=pytest.mark.slow)])
def test_rl_samples_with_the_adapter_and_measures_the_kl_to_its_base(how, vllm_ranks, models, data, tmp_path) -> None:
    """TP2 x PP2 into two engines of TP2. vLLM has what is trained: the gap stays within rounding in every step, and the
    weights of the start would not pass. No second model is built; the export is the base with the adapter."""
    scored = {**models, "other": models["scorer"]}
    cfg = config(scored, data["prompts"], {"tp": 2, "pp": 2}, micro_batch_samples=2, advantage="grpo")
    del cfg["critic"], cfg["reference"]
    cfg["actor"] |= {"lora": {"rank": 4, "targets": ["q_proj", "v_proj", "mlp.*"], "export": "both"}}
    cfg["actor"]["optim"]["lr"] = 1e-2
    cfg["run"] = {"dir": str(tmp_path / "run"), "nproc": 4}
    cfg["train"] |= {"num_steps": 3, "epochs_per_step": 1}
    cfg["rollout"] |= {"engine": "vllm", "parallel": {"tp": 2}, "verify_weights_every": 1, "lora": how}
    cfg["rollout"]["vllm"] = {"sleep_level": 2 if how == "adapter" else 0}
    written = "".join(vllm_ranks.run(4, "command", *argv_of("rl", cfg, tmp_path / "cfg.yaml")))

    assert lines_naming(written, "reference", "actor without its adapter")
    assert lines_naming(written, "actor", "12,800 of")
    steps = read_metrics(tmp_path / "run")[1:]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert 0 < row["rollout_logprob_gap_max"] < LIMIT
        assert row["actor_grad_norm"] > 0
    assert steps[0]["kl"] == 0.0
    assert min(abs(row["kl"]) for row in steps[1:]) > 10 * LIMIT, "the weights of the start could pass"
    assert len(set(re.findall(r"certified: digest (\w+)", written))) == 4, "the weights were the same twice"

    latest = tmp_path / "run/checkpoints/latest"
    found, expected = (
        load_file(latest / "actor/model.safetensors"),
        merged_by_hand(models["plain"], latest / "actor_adapter"),
    )
    assert found.keys() == expected.keys()
    start, changed = load_file(models["plain"] / "model.safetensors"), set()
    for name, tensor in expected.items():
        if tensor.dtype == torch.float64:
            changed.add(name.split(".")[-2])
            torch.testing.assert_close(found[name].double(), tensor, rtol=0, atol=3e-7)
            assert float((found[name] - start[name]).abs().max()) > 1e-4, f"{name} was not trained"
        else:
            assert torch.equal(found[name], tensor), name
    assert changed == {"q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_killed_run_goes_on_at_other_layouts(ranks, models, data, tmp_path) -> None:
    """A step at each of four layouts: metrics are those of a run that stays at one, up to the rounding of its sums. A
    point holds the adapter and no base."""
    case = sft(models, data)
    case.config["actor"]["lora"] = {"path": str(write_adapter(tmp_path / "adapter", models["plain"]))}

    def look(point: Path) -> None:
        keys, names = set(FileSystemReader(point / "actor").read_metadata().state_dict_metadata), set(adapter)
        assert keys == names | {f"optimizer.state.{kind}.{n}" for kind in ("exp_avg", "exp_avg_sq") for n in names}

    adapter = read_adapter(tmp_path / "adapter")
    wander(ranks, case, tmp_path, look)


def test_a_killed_run_goes_on_bit_for_bit(ranks, models, data, tmp_path) -> None:
    """A new adapter, whose A follows from the seed. A run whose base has changed since is refused, and so is its
    exported adapter on another base of the same shapes; on its own it is where the run has ended."""
    case, whole, run = sft(models, data), tmp_path / "whole", tmp_path / "run"
    case.config["actor"]["lora"] = {"rank": 4, "targets": ["q_proj", "down_proj"], "export": "both"}
    case.config["data"]["validation"] = str(data["sft"])
    started(ranks, command_line(case, whole), TP)
    argv = command_line(case, run)
    started(ranks, argv, TP, cut_at=3)
    status, said = ranks.run(2, "command_status", *argv, "actor.parallel.tp=2", f"actor.model.path={models['other']}")[
        0
    ]
    assert status == 2
    assert lines_naming(said, "adapter of actor", "(actor.model.path)", "changed since")
    assert "from resume/step_000002" in started(ranks, argv, TP)
    assert rows(run) == rows(whole)
    assert weights(run) == weights(whole)
    assert len(weights(run)) == 2, "merged and by itself"
    with refuses("resume point", "adapter", "without the model"):
        open_checkpoint(run / "resume/step_000004/actor")
    exported = run / "checkpoints/latest/actor_adapter"
    then = [
        *command_line(case, tmp_path / "then"), f"actor.lora={{path: {exported}, export: merged}}", "train.num_steps=2",
    ]  # fmt: skip
    other = [*then, f"actor.model.path={models['other']}"]
    command_refuses(ranks, other, f"lora.path = {exported}", "another base", "megarlhf.json", world=2)
    started(ranks, then, TP)
    assert rows(tmp_path / "then")[0]["eval_loss"] == pytest.approx(rows(run)[-1]["eval_loss"], rel=1e-6)


def test_an_exported_reward_models_adapter_is_that_reward_model(ranks, one_layer, data, tmp_path) -> None:
    """Trained on a language model, with its scalar head: on that language model it ranks pairs as the merged export
    does, in `eval` as at the start of another run. On another base it is refused."""
    base, tree = str(one_layer["plain"]), {"data": {"train": str(data["pairs"])}}
    section = {"model": {"path": base}, "lora": {"rank": 2, "export": "both"}, "optim": {"lr": 0.05}}
    limits = {"num_steps": 2, "mini_batch_samples": 8, "micro_batch_samples": 4}

    def run(command: str, name: str, role: dict[str, Any], **more: Any) -> tuple[int, str]:
        config = {"run": {"dir": str(tmp_path / name)}, "reward_model": role, **tree, **more}
        status, said = ranks.run(1, "command_status", *argv_of(command, config, tmp_path / f"{name}.yaml"))[0]
        return status, " ".join(said.split())

    assert run("rm", "rm", section, train=limits)[0] == 0
    latest = tmp_path / "rm/checkpoints/latest"
    adapter = {"path": str(latest / "reward_model_adapter")}
    status, said = run("eval", "adapter", {"model": {"path": base}, "lora": adapter})
    assert status == 0, said
    assert not missing_names(said, "reward_model", f"scalar head is loaded from {adapter['path']}")
    assert run("eval", "merged", {"model": {"path": str(latest / "reward_model")}})[0] == 0
    found, expected = (json.loads((tmp_path / f"{n}/eval.json").read_text())["figures"] for n in ("adapter", "merged"))
    (stated,) = (json.loads((tmp_path / "adapter/eval.json").read_text())["models"]).values()
    assert (stated["path"], stated["adapter"]["path"]) == (base, adapter["path"])
    assert f"with the adapter {adapter['path']} ({stated['adapter']['digest']})" in said
    assert abs(expected["eval_chosen_score"]["value"]) > 1e-3
    for name, figure in expected.items():
        assert found[name]["value"] == pytest.approx(figure["value"], rel=1e-4, abs=1e-6), name
    later = {**tree["data"], "validation": str(data["pairs"])}
    status, said = run("rm", "later", section | {"lora": adapter}, train=limits | {"num_steps": 1}, data=later)
    assert status == 0, said
    first = read_metrics(tmp_path / "later")[0]
    assert first["eval_loss"] == pytest.approx(expected["eval_loss"]["value"], rel=1e-4)
    status, said = run("eval", "other", {"model": {"path": str(one_layer["other"])}, "lora": adapter})
    assert status == 2
    assert not missing_names(said, adapter["path"], "another base", "megarlhf.json")
