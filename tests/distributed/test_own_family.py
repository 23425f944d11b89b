"""A model family of the user's own, by import path: examples/own_family.py, a family that megarlhf does not have.

Not covered: the weight sync to vLLM, whose StableLM has the same names; more than two ranks; mixtures of experts.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megarlhf.architectures import families
from megarlhf.architectures.architecture import ACTIVATIONS
from megarlhf.architectures.hf_config import architecture_from_hf
from megarlhf.architectures.own_families import register_families
from megarlhf.commands.cli import main
from tests.command import argv_of
from tests.distributed.interrupted_jobs import command_until
from tests.distributed.jobs import command_status, outputs_and_greedy
from tests.refuses import missing_names
from tools.demo.make_data import base_files

EXAMPLE = "examples.own_family"
ROWS = [[5, 9, 31, 7, 64, 12, 3], [8, 2, 90, 44]]
TOLERANCE = 2e-5


@contextmanager
def forgotten_after() -> Iterator[None]:
    """Scope after which this process, which other tests share, does not know the families that it has registered."""
    known = families.FAMILIES, families._MODULES
    before = [dict(table) for table in known]
    try:
        yield
    finally:
        for table, entries in zip(known, before, strict=True):
            table.clear()
            table.update(entries)


@pytest.fixture(autouse=True)
def families_of_this_test() -> Iterator[None]:
    with forgotten_after():
        yield


def write_model(directory: Path, *, scalar: bool = False) -> Path:
    """A random StableLM. Norms and biases are random too: ones and zeros hide mistakes."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "stablelm", vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=64, use_qkv_bias=True, partial_rotary_factor=0.5,
        rope_theta=100.0, bos_token_id=1, eos_token_id=2, pad_token_id=3, **({"num_labels": 1} if scalar else {}),
    )  # fmt: skip
    model = (AutoModelForSequenceClassification if scalar else AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    (directory / "tokenizer.model").write_bytes(base_files()["tokenizer.model"])
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("family") / "model")


@torch.no_grad()
def by_transformers(directory: Path) -> list[np.ndarray]:
    """Logits, or scores, of each row by itself."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    if "CausalLM" in AutoConfig.from_pretrained(directory).architectures[0]:
        lm = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        return [lm(torch.tensor([row])).logits[0].numpy() for row in ROWS]
    scorer = AutoModelForSequenceClassification.from_pretrained(directory, attn_implementation="eager")
    return [scorer.score(scorer.base_model(torch.tensor([row])).last_hidden_state)[0].numpy() for row in ROWS]


def outputs_of_own(runtime: Any, models: list[str], parallel: dict[str, Any], head: Any) -> Any:
    """On a rank, which has read a configuration with the family."""
    with forgotten_after():
        register_families([EXAMPLE])
        return outputs_and_greedy(runtime, models, parallel, head, ROWS, 0)


@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}], ids=["tp2", "pp2"])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_outputs_equal_transformers(layout, head, ranks, model, tmp_path) -> None:
    path = model if head == "lm" else write_model(tmp_path / "scorer", scalar=True)
    answers = ranks.run(2, outputs_of_own, [str(path)], layout, head)
    ((outputs_BSV, _),) = next(answer for answer in answers if answer != [None])
    for outputs_SV, expected_SV in zip(outputs_BSV, by_transformers(path), strict=True):
        assert np.abs(expected_SV).mean() > 0.03, "outputs next to nothing would agree anyhow"
        np.testing.assert_allclose(outputs_SV[: len(expected_SV)], expected_SV, atol=TOLERANCE)


def test_convert_there_and_back(model, tmp_path, capsys) -> None:
    """Every byte of the tensors comes back; the Megatron checkpoint is of another layout. Without the option the
    refusal names it."""
    there, back = tmp_path / "megatron", tmp_path / "hf"
    assert main(["convert", "inspect", str(model)]) == 2
    assert not missing_names(capsys.readouterr().err, "stablelm", "model.families", "--family")
    family = ["--family", EXAMPLE]
    assert main(["convert", "hf-to-megatron", *family, "--hf", str(model), "--out", str(there), "--tp", "2"]) == 0
    assert main(["convert", "megatron-to-hf", *family, "--megatron", str(there), "--out", str(back)]) == 0
    from safetensors.torch import load_file

    tensors, original = (load_file(path / "model.safetensors") for path in (back, model))
    assert tensors.keys() == original.keys()
    assert all(torch.equal(tensors[name], value) for name, value in original.items())
    assert json.loads((back / "config.json").read_text())["model_type"] == "stablelm"


def test_an_absent_share_is_the_family_s_own(model) -> None:
    """transformers turns a quarter of a head where config.json does not say how much."""
    register_families([EXAMPLE])
    config = json.loads((model / "config.json").read_text())
    assert architecture_from_hf(config).rotary_share == 0.5
    del config["partial_rotary_factor"], config["rope_parameters"]
    assert architecture_from_hf(config).rotary_share == 0.25


def command_with(runtime: Any, folder: str, killed_at: int, *argv: str) -> tuple[int, str]:
    """A command on a rank that has the user's folder on its path; killed at a boundary of its steps, or not (0)."""
    with forgotten_after(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        if not killed_at:
            return command_status(runtime, *argv)
        at = ("megarlhf.resume.points.checkpointer:Checkpointer", "boundary_reached")
        outcome, written = command_until(runtime, killed_at, *at, *argv)
        return int(outcome != "killed"), written


def sft(directory: Path, model: Path, family: str) -> list[str]:
    """A command that trains for two steps."""
    data = directory / "data.jsonl"
    data.write_text("".join(f'{{"prompt": "{n}+1=", "response": "{n + 1}"}}\n' for n in range(8)))
    configuration = {
        "run": {"dir": str(directory / "run"), "on_existing": "resume"},
        "actor": {"model": {"path": str(model), "families": [family]}, "optim": {"lr": 1e-2}},
        "data": {"train": str(data)},
        "train": {"num_steps": 2, "mini_batch_samples": 4, "max_tokens_per_micro_batch": 64},
        "checkpoint": {"every": 1, "background": False},
    }
    return argv_of("sft", configuration, directory / "sft.yaml")


def test_a_run_that_goes_on_with_a_changed_family(ranks, model, tmp_path) -> None:
    """sft is killed after its first step. A start with another source of the family goes on, and says so; it exports
    what transformers loads."""
    module = tmp_path / "tests_own_stablelm.py"
    module.write_text("from examples.own_family import FAMILY\n")
    argv = sft(tmp_path, model, "tests_own_stablelm")
    ((status, said),) = ranks.run(1, command_with, str(tmp_path), 4, *argv)
    assert (status, missing_names(said, "stablelm")) == (0, []), said
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    module.write_text(module.read_text() + "# looked over\n")
    ((status, said),) = ranks.run(1, command_with, str(tmp_path), 0, *argv)
    assert (status, missing_names(said, "model family tests_own_stablelm", "another source")) == (0, []), said
    (export,) = (tmp_path / "run/checkpoints").glob("*2/actor")
    before, after = by_transformers(model), by_transformers(export)
    changes = [np.abs(after_SV - before_SV).max() for after_SV, before_SV in zip(after, before, strict=True)]
    assert all(1e-3 < change < 10 for change in changes), changes


def test_an_activation_that_is_not_computed_is_refused_by_the_check(ranks, model, tmp_path) -> None:
    """Only a family's own reader lets it through. The list of activations is that of the models."""
    from megarlhf.models import settings

    assert tuple(settings.ACTIVATIONS) == ACTIVATIONS
    read = "parts.ConfigField(name='hidden_act', read=lambda key, value: 'swish')"
    (tmp_path / "tests_own_swish.py").write_text(WITH_TABLE + f"FAMILY = facts(activation={read})")
    argv = sft(tmp_path, model, "tests_own_swish")
    ((status, said),) = ranks.run(1, command_with, str(tmp_path), 0, *argv, "--dry-run")
    assert (status, missing_names(said, "swish", "stablelm", "silu")) == (2, []), said


def test_init_writes_the_family(model, tmp_path, capsys) -> None:
    """And checks what it writes, as a dry run does."""
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 4)
    out = tmp_path / "sft.yaml"
    argv = ["init", "--model", str(model), "--family", EXAMPLE, "--data", str(tmp_path / "data.jsonl"), "-o", str(out)]
    assert main(argv) == 0, capsys.readouterr().err
    assert yaml.safe_load(out.read_text())["actor"]["model"]["families"] == [EXAMPLE]


WITH_TABLE = """
from dataclasses import replace
from megarlhf import family_parts as parts
from examples.own_family import FAMILY as F
def facts(**changed): return replace(F, config=replace(F.config, facts={**F.config.facts, **changed}))
def layer(*entries): return replace(F, table=replace(F.table, layer=(*F.table.layer, *entries)))
"""
"""Beginning of modules whose family is the example's but for one thing."""

BAD: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "is_not_there": (None, ("PYTHONPATH",)),
    "raises": ("x = {}['key']", ("KeyError", "raises.py:1")),
    "has_none": ("family = 3", ("has_none.py", "FAMILY", "FAMILIES", "docs/new-architecture.md")),
    "calls_it_otherwise": (WITH_TABLE + "MINE = F; del F", ("FAMILY", "MINE")),
    "is_a_dict": ("FAMILY = {'model_type': 'mine'}", ("FAMILY", "expected a Family", "family_parts")),
    "has_a_dict": ("FAMILIES = {'mine': 1}", ("FAMILIES", "expected a list")),
    "is_ours": (WITH_TABLE + "FAMILY = replace(F, model_type='llama')", ("llama", "megarlhf", "model.families")),
    "is_there_twice": (WITH_TABLE + "FAMILIES = [F, replace(F)]", ("FAMILIES[1]", "stablelm")),
    "has_a_list": (
        WITH_TABLE + "FAMILY = replace(F, table=replace(F.table, final=list(F.table.final)))",
        ("FAMILY.table.final", "expected a valid tuple"),
    ),
    "forgets_a_comma": (
        WITH_TABLE + "FAMILY = layer(parts.entry('new.weight', ('hidden'), 'ones', 'new.weight', parts.whole))",
        ("FAMILY.table.layer[9].tensors", "'hidden'", "expected a valid tuple"),
    ),
    "starts_otherwise": (
        WITH_TABLE + "FAMILY = layer(parts.entry('new', ('hidden',), 'xavier', 'new', parts.whole))",
        ("FAMILY.table.layer[9].init", "'xavier'", "'residual'"),
    ),
    "repeats": (
        WITH_TABLE + "FAMILY = layer(parts.OUTPUT)",
        ("layer[4]", "layer[9]", "self_attn.o_proj.weight", "Hugging Face"),
    ),
    "repeats_for_megatron": (
        WITH_TABLE + "FAMILY = layer(parts.rms_norm('other', 'input_layernorm'))",
        ("layer[0]", "layer[9]", "input_layernorm.weight", "Megatron"),
    ),
    "has_another_word": (
        WITH_TABLE + "FAMILY = layer(parts.entry('new', ('width',), 'ones', 'new', parts.whole))",
        ("FAMILY.table.layer[9]", "'width'", "hidden", "gate_up"),
    ),
    "has_experts_without_a_fact": (
        WITH_TABLE + "FAMILY = layer(*parts.experts('moe', gate='g', up='u', down='d')[1:])",
        ("FAMILY.table.layer[9]", "'experts'", "num_experts"),
    ),
    "splits_otherwise": (
        WITH_TABLE + "FAMILY = layer(parts.entry('new', ('q',), 'ones', 'new', parts.split_columns))",
        ("FAMILY.table.layer[9].megatron", "new [24]", "rule"),
    ),
    "loses_a_half": (
        WITH_TABLE + "FAMILY = layer(parts.entry('new', ('gate_up', 'hidden'), 'ones', 'new', lambda t, r: "
        "parts.split_rows([type(t[0])(t[0].name, (10, 24))], r)))",
        ("FAMILY.table.layer[9].megatron", "240 of 480"),
    ),
    "has_another_fact": (WITH_TABLE + "FAMILY = facts(num_head=4)", ("'num_head'", "'num_heads'")),
    "has_a_fact_of_rope": (WITH_TABLE + "FAMILY = facts(rope_theta=4)", ("'rope_theta'", "ConfigSpec.rope_theta")),
    "has_another_norm": (WITH_TABLE + "FAMILY = facts(norm='layernorm')", ("'norm'", "'layernorm'", "'rms'")),
    "has_a_wrong_default": (
        WITH_TABLE + "FAMILY = facts(norm_eps=parts.ConfigField(name='eps', read=parts.number, default='small'))",
        ("'norm_eps'", ".default", "'small'"),
    ),
    "reads_too_early": (
        WITH_TABLE + "FAMILY = replace(F, config=replace(F.config, facts={'head_dim': parts.equal_heads, "
        "**parts.RELATIVES_FACTS}))",
        ("'head_dim'", "KeyError", "hidden_size", "order"),
    ),
    "states_too_little": (
        WITH_TABLE + "FAMILY = replace(F, config=replace(F.config, facts={'num_layers': 2}))",
        ("FAMILY.config.facts", "hidden_size", "vocab_size"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_refused(name, model, tmp_path, monkeypatch, capsys) -> None:
    """In one line, which names the module, the place in it, and what was expected. The example passes by the same
    way."""
    text, named = BAD[name]
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["convert", "inspect", "--family", EXAMPLE, str(model)]) == 0
    assert main(["convert", "inspect", "--family", name, str(model)]) == 2
    said = capsys.readouterr().err
    assert not missing_names(said, f"model family '{name}'" if name != "is_ours" else name, *named), said


def test_two_modules_with_one_model_type(model, tmp_path, monkeypatch, capsys) -> None:
    """And a function in place of a module. The same family by two names is one."""
    (tmp_path / "the_same.py").write_text("from examples.own_family import FAMILY")
    (tmp_path / "the_other.py").write_text(WITH_TABLE + "FAMILY = replace(F)")
    monkeypatch.syspath_prepend(tmp_path)
    inspect = ["convert", "inspect", str(model), "--family", EXAMPLE, "--family"]
    assert main([*inspect, "the_same"]) == 0
    for name, named in (("the_other", ("stablelm", EXAMPLE)), (f"{EXAMPLE}:FAMILY", (EXAMPLE, "module"))):
        assert main([*inspect, name]) == 2
        assert not missing_names(capsys.readouterr().err, name, *named)
