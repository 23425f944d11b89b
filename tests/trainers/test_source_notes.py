"""What a start says of its data: two splits of one directory are told apart, and what a rule needs is there.

Not covered: what is skipped and why (tests/data/test_encoders.py).
"""

import json

import pytest

from megarlhf.config import PromptDataConfig, RewardConfig, SFTConfig
from megarlhf.trainers.experience.prompts import load_prompts
from megarlhf.trainers.supervised.loop import load_samples
from megarlhf.trainers.supervised.sft import SupervisedFineTuning
from tests.data.counting import Counting, loader
from tests.planning.configs import MODEL
from tools.demo.make_data import train_tokenizer


def test_the_notes_name_the_split(tmp_path):
    """Two training records, one held out."""
    model, data = tmp_path / "model", tmp_path / "data"
    for folder in (model, data):
        folder.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "tokenizer.model").write_bytes(train_tokenizer())
    for split, count in (("train", 2), ("test", 1)):
        (data / f"{split}.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
        (data / f"{split}.jsonl").write_text((data / f"{split}.jsonl").read_text() * count)
    section = {"train": {"path": data, "split": "train"}, "validation": {"path": data, "split": "test"}}
    expected = [
        f"{data}, split {split}: used all {count} records; read 1 file: {split}.jsonl"
        for split, count in (("train", 2), ("test", 1))
    ]
    shared = "1 of 1 held-out prompts are in the training data too, the first as record 1: '1+1='"
    assert load_prompts(PromptDataConfig.model_validate(section), model).notes == [*expected, shared]
    cfg = SFTConfig.model_validate(
        {
            "run": {"dir": tmp_path / "run"},
            "actor": {"model": {"path": model, "random_init": True}},
            "data": {**section, "max_prompt_tokens": 20, "max_response_tokens": 20},
            "train": {"num_steps": 1, "mini_batch_samples": 1, "micro_batch_samples": 1},
        }
    )
    assert load_samples(SupervisedFineTuning(cfg))[2] == [*expected, shared.partition(":")[0]]
    whole = PromptDataConfig(train=data / "train.jsonl")
    assert load_prompts(whole, model).notes == [f"{data / 'train.jsonl'}: used all 2 records"]


def test_a_copy_of_the_training_data_is_said(tmp_path):
    """Of validation and of test, whatever the file is called; prompts decide, not responses. A set that shares no
    prompt is passed without a word."""

    def write(name, prompts, response):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"prompt": each, "response": response}) + "\n" for each in prompts))
        return path

    train, copy = write("train.jsonl", "abcd", "1"), write("copy.jsonl", "abcd", "1")
    partly, other = write("partly.jsonl", "xyd", "2"), write("other.jsonl", "xyz", "1")
    encoder = Counting(tmp_path / "log")

    def said(**sets):
        each = loader({"train": train, "cache": str(tmp_path / "cache"), **sets}, encoder)
        data, _, notes = each.train_and_validation("sft")
        return [note for note in notes + (each.test(data)[1] if "test" in sets else []) if "training data too" in note]

    words = "are in the training data too, the first as record"
    assert said(validation=copy) == [f"4 of 4 held-out prompts {words} 1"]
    assert said(validation=partly, test=copy) == [
        f"1 of 3 held-out prompts {words} 3",
        f"4 of 4 prompts of data.test {words} 1",
    ]
    assert said(train=[other, train], validation=copy) == [f"4 of 4 held-out prompts {words} 1"]
    assert said(validation=other, test=other) == []


MINE = """def by_unit(prompt, response, fields):
    return 1.0

by_unit.required_fields = ("answer", "unit")
"""


@pytest.fixture
def prompts(tmp_path):
    """Three prompts, the second without an answer, the third's is no number; and a model directory."""
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer())
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2="}, {"prompt": "1+3=", "answer": "four"}]
    for n, row in enumerate(rows):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps(row) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "file, rule, words",
    [
        (1, "exact_match", r"reward rule 'exact_match': it needs the field 'answer', found none; add it"),
        (1, "numeric_match", r"reward rule 'numeric_match': it needs the field 'answer'"),
        (2, "numeric_match", r"reward rule 'numeric_match': the record's answer is 'four', expected a number"),
        (0, "my_unit_rules:by_unit", r"reward rule 'my_unit_rules:by_unit': it needs the field 'unit', found 'answer'"),
    ],
)
def test_what_a_rule_needs_is_looked_for_when_prompts_are_read(prompts, monkeypatch, file, rule, words):
    """With file and line, in training and in held-out data; before there is a run directory, since `rl`, `generate`
    and `eval` read prompts first."""
    (prompts / "my_unit_rules.py").write_text(MINE)
    monkeypatch.syspath_prepend(prompts)
    rewards = [RewardConfig(kind="model"), RewardConfig(kind="rule", rule=rule)]
    bad = prompts / f"{file}.jsonl"
    line = 1 if rule.startswith("my_") else 2
    good = prompts / "0.jsonl"
    for data in (PromptDataConfig(train=bad), PromptDataConfig(train=good, validation=bad)):
        with pytest.raises(ValueError, match=rf"{file}\.jsonl, line {line}: {words}"):
            load_prompts(data, prompts, rewards)
    assert len(load_prompts(PromptDataConfig(train=bad), prompts).train) == 2, "without the rule"


def test_a_held_out_prompt_that_the_rule_of_the_accuracy_cannot_judge_is_named(prompts):
    """Of those that are looked at; training prompts need no answer for it."""
    data = PromptDataConfig(train=prompts / "1.jsonl", validation=prompts / "1.jsonl")
    words = r"eval\.accuracy, .*1\.jsonl, record 2: reward rule 'exact_match': it needs the field 'answer'"
    with pytest.raises(ValueError, match=words):
        load_prompts(data, prompts, accuracy="exact_match")
    assert len(load_prompts(data, prompts, max_validation=1, accuracy="exact_match").validation) == 1
    assert len(load_prompts(data, prompts).validation) == 2
