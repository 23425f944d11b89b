"""Each key is neutral or mathematics, and each change of a configuration is told as one of the two.

Not covered: that what is called neutral leaves the numbers alone, which the tests of the layouts show.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from megarlhf.config import ROLES, DPOConfig, RLConfig, RMConfig, SFTConfig, load_config, translate
from megarlhf.config.load import _apply_override, _model_in
from megarlhf.resume.claim.config_changes import CONDITIONAL, KINDS, compare, kind_of, mathematics_of
from megarlhf.resume.claim.identity import History
from megarlhf.resume.points.restore import Identity
from tests.config.examples import KINDS as EXAMPLES
from tests.refuses import missing_names, refuses

TRAINING = {name: EXAMPLES[name] for name in ("sft", "rm", "dpo", "rl")}


def keys_of(model: type[BaseModel]) -> Iterator[str]:
    """Every key of a configuration by its sections; a list of sections is one key, and a mapping has any."""
    for name, field in model.model_fields.items():
        if "Mapping" in str(field.annotation):
            yield f"{name}.any"
            continue
        if name == "rewards" and model is RLConfig:
            yield "rewards.calls.any"
        section = None if "tuple" in str(field.annotation) else _model_in(field.annotation)
        yield from [name] if section is None else (f"{name}.{key}" for key in keys_of(section))


def loaded(name: str, *overrides: str) -> Any:
    kind, tree = TRAINING[name]
    tree = deepcopy(tree)
    for override in overrides:
        _apply_override(tree, override, kind)
    return kind.model_validate(tree)


@pytest.mark.parametrize("name", TRAINING)
def test_every_key_is_classified(name) -> None:
    cfg = loaded(name)
    unclassified = []
    for key in keys_of(type(cfg)):
        try:
            kind_of(key, cfg, cfg)
        except KeyError:
            unclassified.append(key)
    assert unclassified == [], "say in resume/claim/config_changes.py whether another value changes what is computed"


def test_no_entry_is_about_a_key_that_there_is_not() -> None:
    """But vLLM's own arguments, which are free."""
    keys = {key for kind in (SFTConfig, RMConfig, DPOConfig, RLConfig) for key in keys_of(kind)}
    general = {f"ROLE.{key.partition('.')[2]}" if key.partition(".")[0] in ROLES else key for key in keys}
    free = {"rollout.vllm.args.*", "rollout.vllm.args.kv_cache_dtype"}
    for entry in {*KINDS, *CONDITIONAL} - free:
        section = entry.removesuffix("*")
        assert any(key == entry or (section != entry and key.startswith(section)) for key in general), entry


RULE = "rewards=[{kind: rule, rule: 'a.b:c'}]"
RULE_CALLED = "rewards=[{kind: rule, rule: 'a.b:c', timeout_seconds: 5, workers: 2}]"
RULE_DROPS = "rewards=[{kind: rule, rule: 'a.b:c', on_failure: drop}]"
RULE_WEIGHTED = "rewards=[{kind: rule, rule: 'a.b:c', weight: 2}]"
CASES = [
    ("sft", [], [], [], []),
    (
        "sft",
        [],
        ["run.dir=y", "run.nproc=2", "actor.parallel.tp=2"],
        ["run.dir", "run.nproc", "actor.parallel.tp: ", "actor.parallel.sequence_parallel: "],
        [],
    ),
    ("sft", [], ["actor.optim.lr=0.5"], [], ["actor.optim.lr: 0.001 -> 0.5"]),
    ("sft", [], ["train.num_steps=9"], ["train.num_steps: 3 -> 9"], []),
    ("sft", ["actor.optim.schedule=cosine"], ["train.num_steps=9"], [], ["train.num_steps: 3 -> 9"]),
    ("sft", ["data.validation=h.jsonl"], ["eval.every=2"], ["eval.every"], []),
    ("rm", ["data.validation=h", "unit_variance=true"], ["eval.max_samples=2"], [], ["eval.max_samples: not set -> 2"]),
    ("rm", ["data.validation=h", "unit_variance=true"], ["eval.every=2"], ["eval.every: 0 -> 2"], []),
    ("rm", ["data.validation=h", "unit_variance=true"], ["train.num_steps=9"], [], ["train.num_steps"]),
    ("dpo", [], ["eval.every=2", "run.nproc=2"], ["eval.every", "run.nproc"], []),
    ("dpo", [], ["loss=ipo", "beta=0.5"], [], ["loss: dpo -> ipo", "beta: not set -> 0.5"]),
    ("dpo", ["loss=kto"], ["kto_desirable_weight=2"], [], ["kto_desirable_weight: 1.0 -> 2.0"]),
    ("rl", ["data.validation=h"], ["eval.every=1"], ["eval.every"], []),
    ("rl", ["train.stop.validation_reward_patience=2", "eval.every=1"], ["eval.every=2"], [], ["eval.every: 1 -> 2"]),
    ("sft", ["data.validation=h", "eval.every=1"], ["checkpoint.best={metric: eval_loss}"], [], []),
    ("sft", ["data.validation=h", "eval.every=1", "train.stop.patience=1"], ["eval.every=2"], [], ["eval.every"]),
    ("dpo", ["eval.every=1"], ["train.stop.patience=1"], [], ["train.stop.patience: not set -> 1"]),
    ("rl", [], ["reference.model.path=models/sft"], [], []),
    ("rl", [], ["actor.optim.lr=0.5"], [], ["actor.optim.lr"]),
    ("rl", [], ["reward_model.optim.lr=0.5"], [], []),
    ("rl", [], ["critic.optim.schedule=linear"], [], ["critic.optim.schedule"]),
    ("rl", ["critic.optim.schedule=linear"], ["train.num_steps=9"], [], ["train.num_steps"]),
    ("rl", ["algo.entropy_coef_end=0.1"], ["train.num_steps=9"], [], ["train.num_steps"]),
    ("rl", ["algo.entropy_coef=0.1", "algo.entropy_coef_end=0.1"], ["train.num_steps=9"], ["train.num_steps"], []),
    ("rl", ["reward_model.optim.schedule=linear"], ["train.num_steps=9"], ["train.num_steps"], []),
    ("rl", [], ["rollout.vllm.args={max_num_seqs: 4}"], ["rollout.vllm.args.max_num_seqs: not set -> 4"], []),
    ("rl", ["rollout.parallel.tp=1"], ["rollout.parallel.tp=2"], ["rollout.parallel.tp: 1 -> 2"], []),
    ("rl", [], ["rollout.vllm.args={kv_cache_dtype: fp8}"], [], ["rollout.vllm.args.kv_cache_dtype"]),
    ("rl", [], ["rollout.temperature=0.5", "algo.kl.coef=0.1"], [], ["rollout.temperature", "algo.kl.coef"]),
    ("rl", [], ["algo.kl.log=true"], ["algo.kl.log: False -> True"], []),
    ("rl", [], ["actor.recompute=full", "actor.offload.optimizer=stream"], ["actor.recompute", "actor.offload"], []),
    ("rl", [], ["rewards=[{kind: model}]"], [], ["rewards: "]),
    ("rl", [RULE], [RULE_CALLED], ["rewards.calls.0.timeout_seconds: not set -> 5.0", "rewards.calls.0.workers"], []),
    ("rl", [RULE], [RULE_DROPS], ["rewards.calls.0.on_failure: not set -> drop"], []),
    ("rl", [], ["algo.unrewarded=drop"], ["algo.unrewarded: stop -> drop"], []),
    ("rl", [RULE], [RULE_WEIGHTED], [], ["rewards: "]),
]


@pytest.mark.parametrize("name, both, changed, neutral, mathematics", CASES)
def test_changes_are_told(name, both, changed, neutral, mathematics) -> None:
    """The start of each line in words; the order is that of the sections."""
    changes = compare(loaded(name, *both), loaded(name, *both, *changed))
    for found, expected in ((changes.neutral, neutral), (changes.mathematics, mathematics)):
        lines = [str(change) for change in found]
        assert len(lines) == len(expected), lines
        for start in expected:
            assert any(line.startswith(start) for line in lines), (start, lines)


def test_a_place_is_told_apart_from_what_is_computed() -> None:
    """What lies there is compared by digests."""
    places = ["data.train=/scratch/1/train.jsonl", "data.validation=h.jsonl", "reference.model.path=/scratch/1/sft"]
    changes = compare(loaded("rl", "algo.kl.log=true"), loaded("rl", "algo.kl.log=true", *places))
    assert changes.neutral == changes.mathematics == []
    keys = sorted(str(change).partition(":")[0] for change in changes.places)
    assert keys == ["data.train", "data.validation", "reference.model.path"]


def test_what_the_bank_holds_is_used_at_another_layout_with_another_engine_size() -> None:
    at_home = loaded("rl")
    elsewhere = loaded("rl", "actor.parallel.tp=2", "rollout.parallel.tp=2", "run.nproc=4")
    fingerprints = [
        History().fingerprint(mathematics_of(cfg), {"base/actor": digest})
        for cfg, digest in ((at_home, "a"), (elsewhere, "a"), (loaded("rl", "run.seed=9"), "a"), (at_home, "b"))
    ]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


def test_a_step_in_progress_is_completed_only_with_its_own_mini_batches() -> None:
    """Others would leave samples out or use them twice. Between steps and for sft there is nothing to split."""

    def splits(command: str, *overrides: str) -> list[str]:
        config = loaded(command, *overrides).model_dump(mode="json")
        identity = Identity(command, "", {}, config, {}, {}, {}, {}, lambda config: [], allow_changes=True)
        return identity.splits_otherwise({"config": loaded(command).model_dump(mode="json")})

    assert splits("rl") == splits("rl", "rollout.temperature=0.5") == splits("sft", "train.mini_batch_samples=1") == []
    (reason,) = splits("rl", "train.epochs_per_step=7")
    assert not missing_names(reason, "inside a step", "train.epochs_per_step")


def test_responses_that_were_begun_are_finished_as_they_were_begun() -> None:
    """A point of a version without the key has surplus 0. Where nothing is in flight a surplus may change, and
    a number of slices may not."""
    before = loaded("rl").model_dump(mode="json")
    del before["algo"]["dynamic_sampling"]["surplus"], before["rollout"]["slices"]

    def otherwise(*overrides: str, files: tuple[str, ...] = ("state/slices.pt",)) -> list[str]:
        config = loaded("rl", "rollout.num_samples_per_prompt=2", *overrides).model_dump(mode="json")
        identity = Identity("rl", "", {}, config, {}, {}, {}, {}, lambda config: [], allow_changes=True)
        before["rollout"]["num_samples_per_prompt"] = 2
        return identity.draws_otherwise({"config": before, "files": files, "data": ""})

    surplus = "algo.dynamic_sampling.surplus"
    assert otherwise() == otherwise(f"{surplus}=2", files=()) == []
    (reason,) = otherwise(f"{surplus}=2")
    assert not missing_names(reason, f"{surplus} 0 -> 2", "begun")
    (reason,) = otherwise("rollout.slices=3", files=())
    assert not missing_names(reason, "rollout.slices 1 -> 3")


def test_another_rule_of_the_best_is_no_matter_of_rounding() -> None:
    """It computes nothing else, and takes another checkpoint."""
    both = ["data.validation=h", "eval.every=1"]
    changes = compare(
        *(loaded("sft", *both, f"checkpoint.best={{metric: eval_loss, mode: {mode}}}") for mode in ("min", "max"))
    )
    assert (changes.neutral, changes.mathematics, changes.places) == ([], [], [])
    assert list(map(str, changes.choices)) == ["checkpoint.best.mode: min -> max"]


@pytest.mark.parametrize("old, now", [(True, "samples"), (False, "none")])
def test_a_run_that_was_begun_when_shuffle_was_a_switch_goes_on(tmp_path, old, now) -> None:
    """What it has written says true or false; its mini-batches are those of the word that stands for it now."""
    before = loaded("rl", f"run.dir={tmp_path}", f"train.shuffle={now}")
    written = before.model_dump(mode="json")
    written["train"]["shuffle"] = old
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    assert load_config(RLConfig, tmp_path / "config.yaml", of_a_run=True) == before
    assert translate(written) == before.model_dump(mode="json")
    with refuses(f"train.shuffle: {str(old).lower()}", f"write {now}"):
        load_config(RLConfig, tmp_path / "config.yaml")
    other = loaded("rl", f"run.dir={tmp_path}", "train.shuffle=groups")
    (change,) = compare(load_config(RLConfig, tmp_path / "config.yaml", of_a_run=True), other).mathematics
    assert str(change) == f"train.shuffle: {now} -> groups"


def test_a_run_with_the_old_keys_of_vllm_goes_on_and_a_new_start_is_told_the_new_ones(tmp_path):
    settings = {"gpu_memory_utilization": 0.5, "cpu_cache_gib": 2, "sleep_level": 1, "args": {"max_num_seqs": 4}}
    before = loaded("rl", f"run.dir={tmp_path}", f"rollout={{engine: vllm, vllm: {settings}}}")
    written = before.model_dump(mode="json")
    vllm = written["rollout"].pop("vllm")
    written["rollout"] |= {"engine_args": vllm.pop("args"), **vllm}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(written))
    assert load_config(RLConfig, tmp_path / "config.yaml", of_a_run=True) == before
    assert translate(written) == before.model_dump(mode="json")
    with refuses(
        "rollout.engine_args is now rollout.vllm.args",
        "sleep_level: 1",
        "args: {'max_num_seqs': 4}",
        "rollout.vllm.sleep_level=1",
    ):
        load_config(RLConfig, tmp_path / "config.yaml")


def test_what_has_no_switch_is_left_as_it_is() -> None:
    """Other commands, what is no section, and today's words."""
    for config in ({}, {"train": None}, {"train": {"num_steps": 3}}, {"train": {"shuffle": "groups"}}):
        assert translate(config) == config
