"""The model to which `rl` measures the KL does not change without a word, wherever an actor is taken from."""

import json
from dataclasses import replace

import pytest

from megarlhf.config import RLConfig, RMConfig
from megarlhf.planning.kl_reference import check_reference, reference_notes
from megarlhf.provenance import FILE, Provenance, Weights
from tests.refuses import missing_names, refuses
from tests.resume.earlier_run import begin

REFERENCE = Weights(path="/models/sft", digest="00c0ffee", dtype="bfloat16")
STATED = Provenance(
    command="rl", role="actor", run="/runs/first", step=7, base=replace(REFERENCE, digest="0"), reference=REFERENCE
)


def rl_from(path, directory, **others):
    tree = {
        "run": {"dir": directory}, "actor": {"model": {"path": path}},
        "rewards": [{"kind": "rule", "rule": "exact_match"}], "data": {"train": "t.jsonl"},
        "train": {"num_steps": 1, "mini_batch_samples": 2, "prompts_per_step": 1, "micro_batch_samples": 1},
        "rollout": {"num_samples_per_prompt": 2},
        "algo": {"advantage": "leave_one_out", "kl": {"coef": 0.1}},
    }  # fmt: skip
    return RLConfig.model_validate(tree | others)


def checkpoint_of(cfg, command="rl"):
    begin(cfg, command)
    actor = cfg.run.dir / "checkpoints" / "step_000001" / "actor"
    actor.mkdir(parents=True)
    (cfg.run.dir / "checkpoints" / "latest").symlink_to("step_000001")
    return actor


def test_the_kl_is_not_taken_to_a_checkpoint_of_an_rl_run_unless_that_is_said(tmp_path, monkeypatch):
    """The header is the one that a run writes. As before `megarlhf.json` was written."""
    first = checkpoint_of(rl_from("/models/sft", tmp_path / "first"))
    second = checkpoint_of(rl_from(first, tmp_path / "second", reference={"model": {"path": "/models/base"}}))
    (tmp_path / "link").symlink_to(first)
    monkeypatch.chdir(tmp_path)
    for path, was in (
        (first, "/models/sft"), ("first/checkpoints/latest/actor", "/models/sft"), ("link", "/models/sft"),
        (second, "/models/base"),
    ):  # fmt: skip
        with refuses("checkpoint of the rl run", "algo.kl.coef = 0.1", "reference.model.path", was, str(path)):
            check_reference(rl_from(path, "new"))
        check_reference(rl_from(path, "new", reference={"model": {"path": was}}))
        check_reference(rl_from(path, "new", algo={"advantage": "leave_one_out"}))  # only measured
    brake = {"num_steps": 1, "mini_batch_samples": 2, "prompts_per_step": 1, "micro_batch_samples": 1}
    brake["stop"] = {"max_kl": 1.0}
    with refuses("train.stop.max_kl", "reference.model.path"):
        check_reference(rl_from(first, "new", train=brake, algo={"advantage": "leave_one_out"}))
    (tmp_path / "first" / "config.yaml").write_text("# megarlhf rl: the resolved configuration\n[")
    with refuses("first/config.yaml", "reference.model.path"):
        check_reference(rl_from(first, "new"))


def test_other_models_are_a_reference_as_they_stand(tmp_path):
    """A checkpoint of sft, also inside an rl run's directory, and a base model that lies beside checkpoints."""
    outer = checkpoint_of(rl_from("/models/sft", tmp_path / "run"))
    inner = tmp_path / "run" / "checkpoints" / "sft"
    tree = {"run": {"dir": inner}, "reward_model": {"model": {"path": "m"}}, "data": {"train": "t.jsonl"}}
    tree["train"] = {"num_steps": 1, "mini_batch_samples": 1, "micro_batch_samples": 1}
    sft = RMConfig.model_validate(tree)
    for path in (checkpoint_of(sft, "sft"), tmp_path / "run" / "models" / "base", tmp_path / "elsewhere"):
        check_reference(rl_from(path, "new"))
    with refuses("checkpoint of the rl run"):
        check_reference(rl_from(outer, "new"))


def with_provenance(folder, stated=STATED):
    folder.mkdir(parents=True)
    (folder / FILE).write_text(stated.to_json())
    return folder


def test_a_resume_point_of_an_rl_run_is_a_checkpoint_of_it_too(tmp_path):
    first = rl_from("/models/sft", tmp_path / "first")
    begin(first, "rl")
    for name in ("step_000003", "step_000003_update_0002"):
        actor = tmp_path / "first" / "resume" / name / "actor"
        actor.mkdir(parents=True)
        with refuses("checkpoint of the rl run", "first", "/models/sft"):
            check_reference(rl_from(actor, "new"))


def test_a_copy_is_recognised_by_what_it_carries(tmp_path):
    """Far from its run: a Hugging Face directory, and a Megatron checkpoint with its companion folder."""
    copy = with_provenance(tmp_path / "copy")
    megatron = tmp_path / "megatron"
    with_provenance(megatron / "hf")
    (megatron / "hf" / "config.json").write_text("{}")
    (megatron / "iter_0000007").mkdir()
    for path in (copy, megatron, megatron / "iter_0000007"):
        with refuses("rl run /runs/first, step 7", "algo.kl.coef", "reference.model.path", "/models/sft", "00c0ffee"):
            check_reference(rl_from(path, "new"))
        (note,) = check_reference(rl_from(path, "new", algo={"advantage": "leave_one_out", "kl": {"log": True}}))
        assert missing_names(note, "metric kl", "/models/sft") == []
        assert check_reference(rl_from(path, "new", algo={"advantage": "leave_one_out"})) == []
        assert check_reference(rl_from(path, "new", reference={"model": {"path": "/models/sft"}})) == []


def test_what_sft_has_trained_is_a_reference_as_it_stands(tmp_path):
    first = checkpoint_of(rl_from("/models/sft", tmp_path / "first"))
    (first / FILE).write_text(replace(STATED, command="sft", reference=None).to_json())
    assert check_reference(rl_from(first, "new")) == []


def test_what_dpo_has_trained_is_a_reference_as_it_stands(tmp_path):
    """Its own reference is that of its log-ratios: no KL was measured to it."""
    cfg = rl_from(with_provenance(tmp_path / "copy", replace(STATED, command="dpo")), "new")
    assert check_reference(cfg) == []
    assert reference_notes(cfg.actor.model, Weights(path=str(tmp_path / "copy"), digest="0bad", dtype="bfloat16")) == []


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"command": "rl"}), STATED.to_json().replace("digest", "sum")])
def test_a_damaged_statement_is_refused_and_not_passed_over(tmp_path, text):
    copy = with_provenance(tmp_path / "copy")
    (copy / FILE).write_text(text)
    for others in ({}, {"reference": {"model": {"path": "/models/sft"}}}):
        with refuses("copy/megarlhf.json"):
            check_reference(rl_from(copy, "new", **others))


def test_another_reference_than_the_earlier_run_s_is_told(tmp_path):
    cfg = rl_from(with_provenance(tmp_path / "copy"), "new", reference={"model": {"path": "/models/other"}})
    assert reference_notes(cfg.actor.model, replace(REFERENCE, path="/moved/elsewhere")) == []
    (note,) = reference_notes(cfg.actor.model, Weights(path="/models/other", digest="0bad", dtype="bfloat16"))
    digests = ("/models/other (digest 0bad)", "/models/sft (digest 00c0ffee)")
    assert missing_names(note, "WARNING", "/runs/first", *digests) == []
    (note,) = reference_notes(cfg.actor.model, replace(REFERENCE, dtype="float32"))
    assert missing_names(note, "could not be compared", "float32", "/models/sft in bfloat16") == []
    assert reference_notes(rl_from(tmp_path / "elsewhere", "new").actor.model, REFERENCE) == []


def test_a_statement_reads_as_it_was_written():
    assert Provenance.from_json(STATED.to_json()) == STATED
    alone = replace(STATED, command="sft", reference=None, update=2)
    assert Provenance.from_json(alone.to_json()) == alone
