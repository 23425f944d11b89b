"""Reading configuration files and overrides: what arrives, and which files and overrides are refused. Not covered: that
the documented defaults are good ones; what their keys may say (test_refusals.py)."""

from pathlib import Path

import pydantic
import pytest
import yaml

from megarlhf.config import RLConfig, SFTConfig, describe_sources, dump_config, load_config
from megarlhf.config.load import repeated_overrides
from tests.config.examples import KINDS, RL, SFT
from tests.refuses import missing_names, refuses


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
        ("model", None, 1.0, 0.5), ("rule", "exact_match", 2.0, 0.0),
    ]  # fmt: skip
    assert list(cfg.roles()) == ["actor", "critic", "reward_model"]
    for key in ("algo.kl.coef=0.1", "algo.kl.log=true", "train.stop.max_kl=1.0"):
        assert load("rl", key).roles()["reference"] == cfg.actor, key


def test_roles_that_nothing_needs_are_not_built(load):
    cfg = load(
        "rl", "algo.advantage=leave_one_out", "rollout.num_samples_per_prompt=2", "rewards=[{kind: rule, rule: x}]"
    )
    assert list(cfg.roles()) == ["actor"]


@pytest.mark.parametrize("override, read, expected", [
    ("actor.optim.lr=2e-3", lambda c: c.actor.optim.lr, 0.002),
    ("actor.optim.lr=.5E+2", lambda c: c.actor.optim.lr, 50.0),
    ("train.num_steps=1e3", lambda c: c.train.num_steps, 1000),
    ("train.num_steps=12", lambda c: c.train.num_steps, 12),
    ("actor.model.random_init=false", lambda c: c.actor.model.random_init, False),
    ("actor.parallel={tp: 2, sequence_parallel: true}", lambda c: c.actor.parallel.sequence_parallel, True),
    ("actor.parallel={pp: 2, layers_per_stage: [3, 1]}", lambda c: c.actor.parallel.layers_per_stage, (3, 1)),
    ("eval.every=5", lambda c: c.eval.every, 5),
    ("checkpoint.export_keep=", lambda c: c.checkpoint.export_keep, None),
    ("data.validation=a=b.jsonl", lambda c: describe_sources(c.data.validation or ()), "a=b.jsonl"),
    ("run.dir=nan", lambda c: c.run.dir, Path("nan")),
    ("run.dir=2026-01-31", lambda c: c.run.dir, Path("2026-01-31")),
    ("run.dir=no", lambda c: c.run.dir, Path("no")), ("run.dir=~/x", lambda c: c.run.dir, Path.home() / "x"),
    ("actor.model.path=~/x", lambda c: c.actor.model.path, Path.home() / "x"),
    ("data.validation=~/x", lambda c: describe_sources(c.data.validation or ()), str(Path.home() / "x")),
    ("train.num_steps=010", lambda c: c.train.num_steps, 10),
    ("train.num_steps=0x10", lambda c: c.train.num_steps, 16),
    ("actor.model.fresh_head=yes", lambda c: c.actor.model.fresh_head, True),
    ("actor.optim.schedule=cosine", lambda c: c.actor.optim.schedule, "cosine"),
])  # fmt: skip
def test_an_override_wins_over_the_file(load, override, read, expected):
    """`eval` is absent in the file; YAML 1.1 alone reads 2e-3 as a string."""
    actual = read(load("sft", override))
    assert actual == expected
    assert type(actual) is type(expected)
    assert read(load("sft")) != expected


def test_a_file_is_read_as_yaml_1_2_and_a_text_that_looks_like_a_number_stays_one(tmp_path):
    path = tmp_path / "config.yaml"
    text = yaml.safe_dump({key: value for key, value in SFT.items() if key not in ("run", "train", "data")})
    text += "train: {num_steps: 010, mini_batch_samples: 8, micro_batch_samples: 2}\n"
    path.write_text(text + "run: {dir: 1:30}\ndata: {train: ~/a, validation: {path: '1e3', split: on}}\n")
    cfg = load_config(SFTConfig, path)
    assert (cfg.train.num_steps, cfg.run.dir, cfg.data.validation[0].split) == (10, Path("1:30"), "on")
    assert (cfg.data.train[0].path, cfg.data.validation[0].path) == (Path.home() / "a", Path("1e3"))
    path.write_text(dump_config(cfg))
    assert load_config(SFTConfig, path) == cfg
    assert yaml.safe_load(path.read_text())["data"]["validation"]["split"] == "on", "readers of YAML 1.1 see the same"


def test_the_last_override_wins_and_the_rest_of_a_section_stays(load):
    cfg = load("sft", "actor.optim.clip_grad=2", "actor.optim.clip_grad=3")
    assert (cfg.actor.optim.clip_grad, cfg.actor.optim.lr) == (3.0, 0.001)


def test_repeated_overrides_are_said():
    overrides = ["run.seed=1", "run.seed=2", "actor.optim.lr=1", "run.seed=3"]
    assert repeated_overrides(overrides) == ["run.seed is overridden 3 times: run.seed=3, the last, counts"]


def test_an_override_of_a_section_does_not_undo_an_earlier_one_of_its_keys(load, refusal):
    key, section = "actor.parallel.tp=2", "actor.parallel={sequence_parallel: true}"
    assert not missing_names(refusal("sft", key, section), f"override {section!r}", f"earlier {key!r}")
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
    for text, names in (
        (roles + "actor:\n  model: {path: n}\n" + good, ("'actor'", "line 1", "line 7")),
        (roles.replace("eps: 1.0", "eps: 1.0, eps: 2.0") + good, ("'eps'", "line 6")),
    ):
        path.write_text(text)
        with refuses(str(path), *names):
            load_config(RLConfig, path)
    assert not missing_names(refusal("sft", "actor.parallel={tp: 1, tp: 2}"), "'tp'", "line 1")


def test_an_override_fills_a_section_that_stands_empty_in_the_file(load):
    assert load("sft", "eval.every=2", change=lambda tree: tree.update(eval=None)).eval.every == 2


def test_an_override_of_one_role_leaves_a_role_with_the_same_anchor_alone(tmp_path):
    path = tmp_path / "config.yaml"
    text = yaml.safe_dump({key: value for key, value in RL.items() if key not in ("actor", "critic")})
    path.write_text("actor: &base\n  model: {path: models/sft}\n  optim: {lr: 0.25}\ncritic: *base\n" + text)
    cfg = load_config(RLConfig, path, ["critic.optim.lr=0.5"])
    assert (cfg.actor.optim.lr, cfg.critic.optim.lr) == (0.25, 0.5)


@pytest.mark.parametrize("override, names", [
    ("train.num_steps", "'train.num_steps'|section.key=value"), ("=3", "'=3'|section.key=value"),
    ("run.dir.name=3", "dir is a value|'runs/x'"), ("actor.optim=[1, 2", "'[1, 2'|not valid YAML"),
])  # fmt: skip
def test_an_override_of_another_form_is_refused(refusal, override, names):
    assert not missing_names(refusal("sft", override), *names.split("|"))


def test_an_override_of_an_entry_of_a_list(load, refusal):
    """By its number; an entry in short form, a path alone, gets the keys of its section."""
    rewards = load("rl", "rewards.1.clip=2", "rewards.0.weight=3").rewards
    assert [(reward.kind, reward.weight, reward.clip, reward.shift) for reward in rewards] == [
        ("model", 3.0, None, 0.5), ("rule", 2.0, 2.0, 0.0),
    ]  # fmt: skip
    sets = load(
        "sft", "data.train.1.weight=3", "data.train.0=c.jsonl", "data.train.0.weight=1",
        change=lambda tree: tree["data"].update(train=["a.jsonl", "b.jsonl"]),
    ).data.train  # fmt: skip
    assert [(str(found.path), found.weight) for found in sets] == [("c.jsonl", 1.0), ("b.jsonl", 3.0)]
    for override, names in {
        "rewards.2.clip=2": "rewards is a list of 2|'2'|0 to 1|whole list",
        "rewards.clip=2": "rewards is a list of 2|'clip'|number",
        "rewards.0.clap=2": "unknown key 'rewards.0.clap'|'clip'",
        "critic.0.lora={}": "critic is no list|entry 0",
        "data.train.0.weight=2": "data.train is no list|entry 0",
    }.items():
        assert not missing_names(refusal("rl", override), f"override {override!r}", *names.split("|"))
    refused = refusal("rl", "rewards.0.clip=2", change=lambda tree: tree.pop("rewards"))
    assert not missing_names(refused, "rewards is no list in the file", "whole list")


@pytest.mark.parametrize("override, names", [
    ("actor.lora=true", "actor.lora: got 'true'|{}|actor.lora='{}'"), ("actor.optim=fast", "'fast'|actor.optim='{}'"),
    ("actor=true", "'true'|model and others"), ("data.train=3", "data.train: got 3|path and others"),
    ("run.dir=${HOME}/x", "run.dir|${HOME}/x|environment variables|not expanded|command line"),
    ("data.train=$DATA/x.jsonl", "data.train.path|$DATA|environment variables"),
])  # fmt: skip
def test_a_value_that_shells_and_other_programs_take_says_what_to_write(refusal, override, names):
    assert not missing_names(refusal("sft", override), f"override {override!r}", *names.split("|"))


def test_a_path_with_a_dollar_that_is_there(load, tmp_path):
    (tmp_path / "$x").touch()
    assert load("sft", f"data.train={tmp_path}/$x").data.train[0].path == tmp_path / "$x"


def test_loaded_objects_are_frozen(load):
    cfg = load("rl")
    for section, name in (
        (cfg, "run"), (cfg.actor.optim, "lr"), (cfg.rewards[0], "weight"), (cfg.train.stop, "max_kl"),
    ):  # fmt: skip
        before = getattr(section, name)
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(section, name, 1)
        assert getattr(section, name) == before


def test_a_file_that_does_not_exist_names_its_neighbour(tmp_path):
    (tmp_path / "ppo_70b.yaml").write_text("run: {}")
    with refuses("ppo_7b.yaml", "did you mean", "ppo_70b.yaml"):
        load_config(SFTConfig, tmp_path / "ppo_7b.yaml")
    with refuses("no configuration file", "absent/ppo.yaml") as error:
        load_config(SFTConfig, tmp_path / "absent" / "ppo.yaml")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("content, names", [
    (b"run: [1, 2\ntrain: 3", "not valid YAML|line 2"), (b"- run", "mapping|list"), (b"just words", "mapping|str"),
    (b"run: !!python/object/apply:os.getcwd []", "not valid YAML|python/object/apply"),
    (b"PK\x03\x04 a checkpoint \x80\x02", "UTF-8|byte 18|0x80|YAML"),
    ("run: {dir: Köln}".encode("latin-1"), "UTF-8|byte 12|0xf6"), ("run: 1".encode("utf-16"), "UTF-8|byte 0|0xff"),
    (b"run: \x00", "not valid YAML"),
])  # fmt: skip
def test_a_file_that_is_no_mapping_of_sections_or_no_text(tmp_path, content, names):
    """The safe loader: a tag that would call Python is refused."""
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with refuses(str(path), *names.split("|")):
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
    with refuses("missing key 'run'") as raised:
        load_config(SFTConfig, path)
    assert str(raised.value).count("missing key") == 4


@pytest.mark.parametrize(("override", "key"), [
    ("train.learning_rate=1", "actor.optim.lr"), ("epochs=3", "train.num_epochs"),
    ("train.total_epochs=3", "num_epochs"), ("train.gradient_accumulation_steps=2", "mini_batch_samples"),
])  # fmt: skip
def test_names_of_other_frameworks_lead_to_ours(tmp_path, override, key):
    (tmp_path / "sft.yaml").write_text("{}")
    with refuses(f"did you mean '{key}'?"):
        load_config(SFTConfig, tmp_path / "sft.yaml", [override])
