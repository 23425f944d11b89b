"""Reading configuration files: what is accepted, and what each mistake is told.

Not covered: that the documented defaults are good ones; arithmetic over ranks (tests/planning).
"""

import copy
import re
from pathlib import Path
from typing import get_args

import pydantic
import pytest
import yaml

from megarlhf.config import GenerateConfig, KernelsConfig, RLConfig, RMConfig, SFTConfig, dump_config, load_config
from megarlhf.config.load import repeated_overrides
from megarlhf.kernels import Backend

SFT = {
    "run": {"dir": "runs/x"},
    "actor": {"model": {"path": "models/base", "random_init": True}, "optim": {"lr": 0.001}},
    "data": {"train": "data/train.jsonl"},
    "train": {"num_steps": 3, "mini_batch_samples": 8, "micro_batch_samples": 2},
    "checkpoint": {"keep": 5},
}
RM = {"reward_model" if key == "actor" else key: value for key, value in SFT.items()}
RL = {
    "run": {"dir": "runs/x"},
    "actor": {"model": {"path": "models/sft"}},
    "critic": {"model": {"path": "models/sft"}},
    "reward_model": {"model": {"path": "models/rm"}},
    "rewards": [{"kind": "model", "shift": 0.5}, {"kind": "rule", "rule": "exact_match", "weight": 2}],
    "data": {"train": "data/prompts.jsonl", "heldout": "data/heldout.jsonl"},
    "train": {"num_steps": 3, "prompts_per_step": 8, "mini_batch_samples": 8, "micro_batch_samples": 2},
}
GENERATE = {"run": RL["run"], "actor": RL["actor"], "data": {"train": "data/prompts.jsonl"}}
KINDS = {"sft": (SFTConfig, SFT), "rm": (RMConfig, RM), "rl": (RLConfig, RL), "generate": (GenerateConfig, GENERATE)}


@pytest.fixture
def load(tmp_path):
    """Write a command's valid file, changed by `change`, and load it with overrides."""

    def call(command, *overrides, change=lambda tree: None):
        kind, tree = KINDS[command]
        tree = copy.deepcopy(tree)
        change(tree)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tree))
        return load_config(kind, path, overrides)

    return call


@pytest.fixture
def refusal(load):
    """The message of a configuration that is refused."""

    def call(command, *overrides, change=lambda tree: None):
        with pytest.raises(ValueError, match=r".") as raised:
            load(command, *overrides, change=change)
        assert not isinstance(raised.value, pydantic.ValidationError), "pydantic's own text reached the user"
        return str(raised.value)

    return call


@pytest.mark.parametrize("command", KINDS)
def test_the_valid_files_load_and_dumping_them_loads_the_same_object(command, load, tmp_path):
    cfg = load(command)
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_config(cfg))
    assert load_config(KINDS[command][0], path) == cfg
    assert cfg.run.seed == 0
    assert "seed: 0" in path.read_text(), "defaults stand in the resolved file"


def test_values_arrive_with_their_types(load):
    cfg = load("rl")
    assert cfg.run.dir == Path("runs/x")
    assert [(r.kind, r.rule, r.weight, r.shift) for r in cfg.rewards] == [
        ("model", None, 1.0, 0.5),
        ("rule", "exact_match", 2.0, 0.0),
    ]
    assert list(cfg.roles()) == ["actor", "reference", "critic", "reward_model"]
    assert cfg.roles()["reference"] == cfg.actor


def test_roles_that_nothing_needs_are_not_built(load):
    cfg = load(
        "rl", "algo.advantage=leave_one_out", "rollout.num_samples_per_prompt=2", "rewards=[{kind: rule, rule: x}]"
    )
    assert list(cfg.roles()) == ["actor", "reference"]


@pytest.mark.parametrize(
    "override, read, expected",
    [
        ("actor.optim.lr=2e-3", lambda c: c.actor.optim.lr, 0.002),
        ("actor.optim.lr=.5E+2", lambda c: c.actor.optim.lr, 50.0),
        ("train.num_steps=1e3", lambda c: c.train.num_steps, 1000),
        ("train.num_steps=12", lambda c: c.train.num_steps, 12),
        ("actor.model.random_init=false", lambda c: c.actor.model.random_init, False),
        ("actor.parallel={tp: 2, sequence_parallel: true}", lambda c: c.actor.parallel.sequence_parallel, True),
        ("actor.parallel={pp: 2, layers_per_stage: [3, 1]}", lambda c: c.actor.parallel.layers_per_stage, (3, 1)),
        ("eval.every=5", lambda c: c.eval.every, 5),
        ("checkpoint.keep=", lambda c: c.checkpoint.keep, None),
        ("data.heldout=a=b.jsonl", lambda c: c.data.heldout, Path("a=b.jsonl")),
        ("run.dir=nan", lambda c: c.run.dir, Path("nan")),
        ("actor.optim.schedule=cosine", lambda c: c.actor.optim.schedule, "cosine"),
    ],
)
def test_an_override_wins_over_the_file(load, override, read, expected):
    """`eval` is absent in the file; YAML 1.1 alone reads 2e-3 as a string."""
    found = read(load("sft", override))
    assert found == expected
    assert type(found) is type(expected)
    assert read(load("sft")) != expected


def test_the_last_override_wins_and_the_rest_of_a_section_stays(load):
    cfg = load("sft", "actor.optim.clip_grad=2", "actor.optim.clip_grad=3")
    assert (cfg.actor.optim.clip_grad, cfg.actor.optim.lr) == (3.0, 0.001)


def test_repeated_overrides_are_said():
    overrides = ["run.seed=1", "run.seed=2", "actor.optim.lr=1", "run.seed=3"]
    assert repeated_overrides(overrides) == ["run.seed is overridden 3 times: run.seed=3, the last, counts"]


def test_an_override_of_a_section_does_not_undo_an_earlier_one_of_its_keys(load, refusal):
    key, section = "actor.parallel.tp=2", "actor.parallel={sequence_parallel: true}"
    assert f"override {section!r} replaces the whole section, and with it {key!r}" in refusal("sft", key, section)
    assert load("sft", section.replace("}", ", tp: 4}"), key).actor.parallel.tp == 2


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path, refusal):
    """Merge keys may be set again beside what they bring, and anchors may be used twice."""
    path = tmp_path / "config.yaml"
    good = yaml.safe_dump({key: value for key, value in RL.items() if key not in ("actor", "critic", "reward_model")})
    roles = (
        "actor: &base\n  model: {path: m}\n  optim: &o {lr: 0.25}\ncritic:\n  <<: *base\n  optim: {<<: *o, eps: 1.0}\n"
    )
    path.write_text(roles + "reward_model: *base\n" + good)
    cfg = load_config(RLConfig, path)
    assert (cfg.critic.model.path, cfg.critic.optim.lr, cfg.critic.optim.eps) == (Path("m"), 0.25, 1.0)
    for text, words in (
        (roles + "actor:\n  model: {path: n}\n" + good, "the key 'actor' stands in line 1 and again in line 7"),
        (roles.replace("eps: 1.0", "eps: 1.0, eps: 2.0") + good, "the key 'eps' stands in line 6 and again in line 6"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(f"{path}: {words}, and only one of them would count")):
            load_config(RLConfig, path)
    assert "the key 'tp' stands in line 1 and again in line 1" in refusal("sft", "actor.parallel={tp: 1, tp: 2}")


def test_an_override_fills_a_section_that_stands_empty_in_the_file(load):
    assert load("sft", "eval.every=2", change=lambda tree: tree.update(eval=None)).eval.every == 2


def test_an_override_of_one_role_leaves_a_role_with_the_same_anchor_alone(tmp_path):
    path = tmp_path / "config.yaml"
    text = yaml.safe_dump({key: value for key, value in RL.items() if key not in ("actor", "critic")})
    path.write_text("actor: &base\n  model: {path: models/sft}\n  optim: {lr: 0.25}\ncritic: *base\n" + text)
    cfg = load_config(RLConfig, path, ["critic.optim.lr=0.5"])
    assert (cfg.actor.optim.lr, cfg.critic.optim.lr) == (0.25, 0.5)


@pytest.mark.parametrize(
    "override, words",
    [
        ("train.num_steps", "'train.num_steps' is not of the form section.key=value"),
        ("=3", "'=3' is not of the form section.key=value"),
        ("run.dir.name=3", "dir is a value ('runs/x'), not a section"),
        ("actor.optim=[1, 2", "'[1, 2' is not valid YAML"),
    ],
)
def test_an_override_of_another_form_is_refused(refusal, override, words):
    assert words in refusal("sft", override)


@pytest.mark.parametrize(
    "command, override, unknown, hint",
    [
        ("sft", "trian.num_steps=3", "trian", "did you mean 'train'?"),
        (
            "sft",
            "actor.optim.learning_rte=3",
            "actor.optim.learning_rte",
            "known here: beta1, beta2, clip_grad, eps, lr,",
        ),
        ("sft", "actor.optim.warmup_step=3", "actor.optim.warmup_step", "did you mean 'warmup_steps'?"),
        ("sft", "train.micro_batch_sample=3", "train.micro_batch_sample", "did you mean 'micro_batch_samples'?"),
        ("rl", "algo.kl.coeff=3", "algo.kl.coeff", "did you mean 'coef'?"),
        ("rl", "critic.parallel.tpp=3", "critic.parallel.tpp", "did you mean 'tp'?"),
        ("rl", "rewards=[{kind: rule, rule: x, wieght: 2}]", "rewards.0.wieght", "did you mean 'weight'?"),
        ("generate", "gredy=true", "gredy", "did you mean 'greedy'?"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one_of_its_section(refusal, command, override, unknown, hint):
    message = refusal(command, override)
    assert f"unknown key '{unknown}'; {hint}" in message


@pytest.mark.parametrize(
    "command, section, key, words",
    [
        ("sft", None, "run", "missing key 'run'"),
        ("sft", "train", "num_steps", "missing key 'train.num_steps'"),
        ("rm", None, "reward_model", "missing key 'reward_model'"),
        ("rl", None, "rewards", "missing key 'rewards'"),
        ("rl", "critic", "model", "missing key 'critic.model'"),
    ],
)
def test_a_missing_key_is_named(refusal, command, section, key, words):
    message = refusal(command, change=lambda tree: (tree[section] if section else tree).pop(key))
    assert message.endswith(": " + words), message


@pytest.mark.parametrize(
    "override, words",
    [
        ("train.num_steps=many", ["train.num_steps: ", "valid integer", "got 'many'"]),
        ("train.num_steps=2.5", ["train.num_steps: ", "valid integer", "got 2.5"]),
        ("train.mini_batch_samples=0", ["train.mini_batch_samples: ", "greater than 0", "got 0"]),
        ("actor.parallel.sequence_parallel=perhaps", ["actor.parallel.sequence_parallel: ", "got 'perhaps'"]),
        ("actor.parallel.tp=[1]", ["actor.parallel.tp: ", "got [1]"]),
        ("actor.model.dtype=fp8", ["actor.model.dtype: ", "'fp32' or 'bf16'", "got 'fp8'"]),
        ("actor.optim.beta1=1.5", ["actor.optim.beta1: ", "less than 1", "got 1.5"]),
        ("actor.optim.beta2=1", ["actor.optim.beta2: ", "less than 1", "got 1"]),
        ("run.on_existing=ignore", ["run.on_existing: ", "'refuse', 'resume' or 'overwrite'", "got 'ignore'"]),
        ("actor.optim.lr=.nan", ["actor.optim.lr: ", "finite number", "got nan"]),
        ("actor.optim.lr=.inf", ["actor.optim.lr: ", "finite number", "got inf"]),
        ("train=3", ["train: ", "got 3"]),
        ("run=", ["run: ", "got None"]),
    ],
)
def test_a_value_of_the_wrong_type_or_range_says_key_rule_and_value(refusal, override, words):
    message = refusal("sft", override)
    assert [word for word in words if word not in message] == [], message


def test_every_mistake_is_said_at_once_one_a_line(refusal):
    lines = refusal("sft", "trian.x=1", "train.num_steps=many", "actor.optim.lr=0").splitlines()
    assert len(lines) == 3
    assert sum("unknown key 'trian'" in line for line in lines) == 1


def test_loaded_objects_are_frozen(load):
    cfg = load("rl")
    for section, name in (
        (cfg, "run"),
        (cfg.actor.optim, "lr"),
        (cfg.rewards[0], "weight"),
        (cfg.train.stop, "max_kl"),
    ):
        before = getattr(section, name)
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(section, name, 1)
        assert getattr(section, name) == before


PACKED = ("train.micro_batch_samples=", "train.max_tokens_per_micro_batch=128")
VLLM_TP = ("actor.parallel.tp=2", "rollout.parallel.tp=2")


@pytest.mark.parametrize(
    "command, overrides, words",
    [
        (
            "sft",
            ["actor.parallel.sequence_parallel=true"],
            ["actor.parallel: ", "sequence_parallel needs tp > 1", "got tp = 1", "set sequence_parallel to false"],
        ),
        (
            "sft",
            ["actor.parallel={pp: 3, layers_per_stage: [2, 2]}"],
            ["actor.parallel: ", "layers_per_stage has 2 numbers for pp = 3 stages; give 3"],
        ),
        (
            "sft",
            ["actor.optim={lr: 1e-5, min_lr: 1e-4, schedule: cosine}"],
            ["actor.optim: ", "min_lr = 0.0001 is above lr = 1e-05", "lower min_lr or raise lr"],
        ),
        ("sft", ["actor.optim.min_lr=1e-4"], ["min_lr = 0.0001, but with schedule 'constant'", "to 'linear' or"]),
        (
            "sft",
            ["run.on_existing=resume"],
            ["run: ", "an exact resume does not exist yet", "in rl set reference.model.path as well"],
        ),
        ("rl", ["reward_model.model.fresh_head=true"], ["reward_model.model.fresh_head: only a critic", "random rew"]),
        ("rl", ["actor.model.fresh_head=true"], ["actor.model.fresh_head: only a critic may"]),
        ("rm", ["unit_variance=true"], ["unit_variance measures the scores of held-out pairs", "set data.heldout"]),
        ("rl", ["rewards=[{kind: rule}]"], ["rewards.0: ", "'rule' got rule = None", "kind 'rule' needs a rule"]),
        ("rl", ["rewards=[{kind: model, rule: x}]"], ["'model' got rule = 'x'", "kind 'model' takes none"]),
        ("rl", ["rewards=[]"], ["rewards is empty", "[{kind: rule, rule: exact_match}]"]),
        ("rl", ["critic="], ["algo.advantage = 'gae' needs values", "give a critic section"]),
        ("rl", ["reward_model="], ["rewards names the reward model", "give a reward_model section"]),
        (
            "rl",
            ["algo.advantage=group_relative"],
            ["'group_relative' compares the samples", "rollout.num_samples_per_prompt >= 2; got 1"],
        ),
        (
            "rl",
            ["algo.advantage=leave_one_out"],
            ["'leave_one_out' compares the samples", "rollout.num_samples_per_prompt >= 2; got 1"],
        ),
        (
            "rl",
            ["train.stop.heldout_reward_patience=2"],
            ["train.stop.heldout_reward_patience counts evaluations", "set eval.every and data.heldout"],
        ),
        (
            "rl",
            ["train.stop.heldout_reward_patience=2", "eval.every=1", "data.heldout="],
            ["set eval.every and data.heldout"],
        ),
        ("generate", ["data.heldout=h.jsonl"], ["would leave data.heldout = h.jsonl unread", "set data.train to"]),
        ("generate", ["rewards=[{kind: model}]"], ["score by rules only", "got a reward of kind 'model'"]),
        (
            "generate",
            ["rewards=[{kind: rule, rule: exact_match, weight: 2, clip: 1}]"],
            ["what a rule says, unchanged; remove rewards[0].weight = 2.0, rewards[0].clip = 1.0"],
        ),
        ("generate", ["rollout.num_samples_per_prompt=4"], ["would write 4 equal responses", "set greedy to false"]),
        (
            "sft",
            ["train.max_tokens_per_micro_batch=64"],
            ["train: ", "max_tokens_per_micro_batch = 64 and micro_batch_samples = 2; give one of them"],
        ),
        ("rm", ["train.micro_batch_samples="], ["train: ", "= None and micro_batch_samples = None; give one"]),
        (
            "rl",
            [*PACKED, "data.max_prompt_tokens=100", "rollout.max_response_tokens=29"],
            ["max_prompt_tokens + rollout.max_response_tokens = 129 tokens", "= 128", "never split", "raise it to 129"],
        ),
    ],
)
def test_every_check_across_keys_says_what_to_do(refusal, command, overrides, words):
    message = refusal(command, *overrides)
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    "command, overrides",
    [
        ("sft", ["actor.parallel.sequence_parallel=true", "actor.parallel.tp=2"]),
        ("sft", ["actor.parallel={pp: 3, layers_per_stage: [2, 2, 1]}"]),
        ("rm", ["unit_variance=true", "data.heldout=data/heldout.jsonl"]),
        ("rl", ["rewards=[{kind: rule, rule: x}]", "reward_model="]),
        ("rl", ["algo.advantage=group_relative", "rollout.num_samples_per_prompt=2", "critic="]),
        ("rl", VLLM_TP),
        ("rl", ["critic.model.fresh_head=true"]),
        ("sft", ["actor.optim={lr: 1e-4, min_lr: 1e-4, schedule: linear}"]),
        ("rl", ["rollout.parallel.tp=2", "rollout.engine=megatron"]),
        ("rl", ["train.stop.heldout_reward_patience=2", "eval.every=1"]),
        ("generate", ["rewards=[{kind: rule, rule: exact_match}]"]),
        ("sft", PACKED),
        ("rl", [*PACKED, "data.max_prompt_tokens=100", "rollout.max_response_tokens=28"]),
    ],
)
def test_following_the_advice_is_accepted(load, command, overrides):
    """The neighbours of the refused cases, so that no check refuses everything."""
    assert isinstance(load(command, *overrides), KINDS[command][0])


def test_the_layout_of_a_world_that_does_not_divide_names_the_near_ones(load):
    parallel = load("sft", "actor.parallel={tp: 2, pp: 2}").actor.parallel
    assert (parallel.layout(12).dp, parallel.layout(12).world_size) == (3, 12)
    with pytest.raises(
        ValueError, match=r"actor\.parallel: world size 6 .* 2 x 2 = 4; use 4 or 8 ranks \(run\.nproc\)"
    ):
        parallel.layout(6)
    with pytest.raises(ValueError, match=r"critic\.parallel: world size 2 .*use 4 ranks \(run"):
        parallel.layout(2, "critic")


def test_a_file_that_does_not_exist_names_its_neighbour(tmp_path):
    (tmp_path / "ppo_70b.yaml").write_text("run: {}")
    with pytest.raises(ValueError, match=r"no configuration file .*ppo_7b\.yaml; did you mean .*ppo_70b\.yaml\?"):
        load_config(SFTConfig, tmp_path / "ppo_7b.yaml")
    with pytest.raises(ValueError, match=r"no configuration file .*absent/ppo\.yaml$"):
        load_config(SFTConfig, tmp_path / "absent" / "ppo.yaml")


@pytest.mark.parametrize(
    "text, words",
    [
        ("run: [1, 2\ntrain: 3", "is not valid YAML: .*line 2"),
        ("run: !!python/object/apply:os.getcwd []", "is not valid YAML: "),
        ("- run", "must be a mapping of sections, got list"),
        ("just words", "must be a mapping of sections, got str"),
    ],
)
def test_a_file_that_is_no_mapping_of_sections(tmp_path, text, words):
    """The safe loader: a tag that would call Python is refused."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"(?s)config\.yaml {words}"):
        load_config(SFTConfig, path)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"PK\x03\x04 a checkpoint \x80\x02", "is not text in UTF-8 (byte 18 is 0x80); a configuration is a YAML file"),
        ("run: {dir: Köln}".encode("latin-1"), "is not text in UTF-8 (byte 12 is 0xf6)"),
        ("run: 1".encode("utf-16"), "is not text in UTF-8 (byte 0 is 0xff)"),
        (b"run: \x00", "is not valid YAML: "),
    ],
)
def test_a_file_that_is_no_text(tmp_path, content, words):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path} {words}")):
        load_config(SFTConfig, path)


def test_a_file_is_read_as_utf_8_whatever_the_locale(tmp_path, monkeypatch):
    """A container's locale may be ASCII: here a file that is read without naming an encoding is read so."""
    path = tmp_path / "config.yaml"
    path.write_text("run: Köln", encoding="utf-8")
    read, seen = Path.read_text, []

    def recorded(self, encoding=None, errors=None):
        seen.append(encoding)
        return read(self, encoding or "ascii", errors)

    monkeypatch.setattr(Path, "read_text", recorded)
    with pytest.raises(ValueError, match="Köln"):
        load_config(SFTConfig, path)
    assert seen == ["utf-8"]


def test_an_empty_file_lacks_every_section(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("")
    with pytest.raises(ValueError, match="missing key 'run'") as raised:
        load_config(SFTConfig, path)
    assert str(raised.value).count("missing key") == 4


def test_the_kernels_section(load, refusal):
    """Its defaults, an override from the command line, one role's apart from another's, and what is refused. The names
    are those that the kernels know: config/ stands below them and cannot ask."""
    cfg = load("rl", "actor.kernels={logprobs: reference, save_mib: 0}")
    assert (cfg.actor.kernels.logprobs, cfg.actor.kernels.save_mib) == ("reference", 0)
    assert cfg.critic.kernels == KernelsConfig() == load("sft").actor.kernels
    assert (cfg.critic.kernels.logprobs, cfg.critic.kernels.save_mib) == ("auto", 256)
    assert get_args(KernelsConfig.model_fields["logprobs"].annotation) == get_args(Backend)
    assert "actor.kernels.save_mib" in refusal("sft", "actor.kernels.save_mib=-1")
    assert all(name in refusal("sft", "actor.kernels.logprobs=cuda") for name in get_args(Backend))
