"""Data as others have written it, through the configurations of `sft`, `rm` and `rl` alone: the same samples each time,
after the check that a start makes. Not covered: conversations (test_conversations.py); names of the hub, which need a
network."""

import json

import pytest

from megarlhf.config import RLConfig, RMConfig, SFTConfig
from megarlhf.planning.preflight import preflight
from megarlhf.trainers.experience.prompts import load_prompts
from megarlhf.trainers.supervised.loop import load_samples
from megarlhf.trainers.supervised.rm import RewardModelling
from megarlhf.trainers.supervised.sft import SupervisedFineTuning
from tests.data.strangers import ROWS, STRANGERS, lines, written
from tests.planning.configs import MODEL
from tests.refuses import missing_names
from tools.demo.make_data import train_tokenizer

RUN = {"num_steps": 2, "mini_batch_samples": 8, "micro_batch_samples": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "tokenizer.model").write_bytes(train_tokenizer())
    return directory


def samples_of(model, folder, train, **data):
    role = {"model": {"path": str(model), "random_init": True}}
    data = {"train": train, "max_prompt_tokens": 32, **data}
    tree = {"run": {"dir": str(folder / "run")}, "data": data, "train": RUN}
    of_rl = {
        "rewards": [{"kind": "rule", "rule": "exact_match"}], "algo": {"advantage": "group_relative"},
        "rollout": {"engine": "megatron", "num_samples_per_prompt": 2, "max_response_tokens": 8},
        "train": {**RUN, "prompts_per_step": 4},
    }  # fmt: skip
    sft = SFTConfig.model_validate({**tree, "actor": role})
    rm = RMConfig.model_validate({**tree, "reward_model": role})
    rl = RLConfig.model_validate({**tree, "actor": role, **of_rl})
    for command, cfg in (("sft", sft), ("rm", rm), ("rl", rl)):
        preflight(command, cfg, 1)
    prompts = load_prompts(rl.data, model, rl.rewards)
    return load_samples(SupervisedFineTuning(sft)), load_samples(RewardModelling(rm)), (prompts.train, prompts.notes)


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    (folder / "rows.jsonl").write_bytes(lines(ROWS))
    return [list(loaded[0]) for loaded in samples_of(model, folder, str(folder / "rows.jsonl"))]


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_data_gives_the_same_samples(model, expected, tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(tmp_path)  # for an adapter of the user's
    sft, rm, rl = samples_of(model, tmp_path, written(name, tmp_path))
    assert list(sft[0]) == expected[0]
    assert list(rm[0]) == expected[1]
    assert [(each.tokens, each.text, each.fields["answer"]) for each in rl[0]] == [
        (each.tokens, each.text, each.fields["answer"]) for each in expected[2]
    ]
    assert [each.index for each in rl[0]] == list(range(24))
    assert len(sft[0]) == 24
    if name == "own_adapter":
        assert "(left out by the adapter my_sums:sums: 1)" in sft[2][0]


def test_two_sets_with_weights(model, tmp_path):
    first, second = (written(name, tmp_path / name) for name in ("table", "gz"))
    sft, rm, rl = samples_of(model, tmp_path, [{**first, "weight": 3}, {**second, "weight": 1}])
    for samples in (sft[0], rm[0], rl[0]):
        assert (len(samples), samples.weights) == (48, [3.0, 1.0])
        assert samples[0] == (samples[24] if samples is not rl[0] else samples[0])
    assert [each.index for each in rl[0]] == list(range(48))


def test_a_response_that_is_too_long_is_dropped_or_cut(model, tmp_path):
    """Both are counted. Nothing ends where a response was cut; a prompt is never cut."""
    rows = [{"prompt": "1+1=", "response": "123456789"}, {"prompt": "1+1=", "response": "2"}]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(lines([*rows, {"prompt": "1+" * 40, "response": "2"}] * 8))
    role = {"model": {"path": str(model), "random_init": True}}

    def loaded(**data):
        data = {"train": str(file), "max_prompt_tokens": 16, "max_response_tokens": 4, "max_skipped": 1, **data}
        tree = {"run": {"dir": str(tmp_path / "run")}, "actor": role, "data": data, "train": RUN}
        return load_samples(SupervisedFineTuning(SFTConfig.model_validate(tree)))

    whole, _, _ = loaded(max_response_tokens=20)
    dropped, _, said = loaded()
    cut, _, said_cut = loaded(over_long="cut")
    assert not missing_names(said[0], "longer than 16 tokens: 8", "longer than 4 tokens: 8", "67 %")
    assert not missing_names(said_cut[0], "8 of 24 records", "longer than 16 tokens: 8", "33 %", "cut at 4 tokens: 8")
    assert (len(whole), len(dropped), len(cut)) == (16, 8, 16)
    long, short = whole[0], whole[1]
    assert cut[1] == dropped[0] == short
    assert cut[0].tokens == long.tokens[: long.prompt_length + 4] != long.tokens
    assert cut[0].stretches == [long.prompt_length, long.prompt_length + 4]
    assert cut[0].tokens[-1] != long.tokens[-1], "no end"
