"""Rewards are called on a real record before a run: what tells nothing apart, fails or cannot be called is refused.
Published functions are called in this process, to be quick. Not covered: classifiers and servers, which are not asked;
how functions of each form are called (tests/rollout/test_reward_forms.py)."""

import json

import pytest

from megarlhf.config import SourceConfig
from megarlhf.config.rewards import RewardConfig
from megarlhf.planning.data import rewards as checks
from megarlhf.planning.data.rewards import rule_for_answers, try_rewards
from megarlhf.planning.data.unread_fields import check_unread_fields
from megarlhf.planning.preflight import preflight
from megarlhf.rollout.rewards.rules import field_check, load_rule, rule_form
from megarlhf.rollout.rewards.score import InThisProcess
from tests.data.chat_styles import CHATML, write_chat_tokenizer
from tests.planning.configs import rl
from tests.refuses import missing_names, refuses

OURS = "tests.planning.users_rewards:"
PUBLISHED = "tests.planning.published_rewards:"
SOLUTION = "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether.\n#### 72"
PLAIN = {"prompt": "1+1=", "answer": "2"}
VERL = {"prompt": "1+1=", "data_source": "a", "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 0}}


def tried(paths, reward, *records):
    if isinstance(reward, str):
        reward = {"rule": OURS + reward}
    paths["train"].write_text("".join(json.dumps(record) + "\n" for record in records or (PLAIN,) * 24))
    return try_rewards(rl(paths, rewards=[{"kind": "rule", **reward}]))


@pytest.mark.parametrize("reward, record", [
    ("verl", VERL), ("verl", PLAIN), ("trl_boxed", {"prompt": "1+1=", "ground_truth": "2"}),
    ("openrlhf", PLAIN), ("columns_by_name", PLAIN), ("answer_by_default", PLAIN), ("only_by_name", PLAIN),
    ({"rule": OURS + "distance", "weight": -1.0}, PLAIN),
    ({"rule": "exact_match"}, {"prompt": "1+1=", "answer": "\N{MINUS SIGN}2"}),
    ({"rule": "exact_match"}, {"prompt": "1+1=", "answer": [2.0, None]}),
    ({"rule": "numeric_match"}, {"prompt": "1+1=", "answer": "\N{MINUS SIGN}2"}),
    ({"rule": OURS + "constant", "check": "call"}, PLAIN), ({"rule": OURS + "hangs", "check": "none"}, PLAIN),
    ({"rule": "tags"}, PLAIN),
])  # fmt: skip
def test_what_is_right_says_nothing(paths, reward, record):
    assert tried(paths, reward, record) == []


@pytest.mark.parametrize("reward, record, names", [
    ("constant", PLAIN, "0.5|8 texts|'2' and '3'|check: call"),
    ("verl_compares_types", {**VERL, "reward_model": {"ground_truth": 2}},
     "the same for either|'2' as the right answer"),
    ("reads_another_column", PLAIN, "KeyError: 'anwser'|users_rewards.py|check: none"),
    ("verl", {"prompt": "1+1=", "solution": "2"}, "reads ground_truth|none of ground_truth"),
    ("trl_boxed", PLAIN, "'ground_truth'|data.train|'answer'"), ("trl_asks", PLAIN, "'verdict'|data.train|'answer'"),
    ({"rule": OURS + "hangs", "timeout_seconds": 0.5}, PLAIN, "longer than 0.5 s"),
    ("exits", PLAIN, "SystemExit: 0|return"),
])  # fmt: skip
def test_what_tells_nothing_apart_or_fails_is_refused(paths, reward, record, names):
    with refuses(*names.split("|")) as error:
        tried(paths, reward, record)
    assert str(error.value).startswith(f"reward '{OURS}")


@pytest.mark.parametrize("name", ["of_another_column", "trl_of_another_column", "default_that_stays"])
def test_a_bonus_for_the_form_hides_no_column_that_is_not_read(paths, name):
    """Scores differ between texts, and never between a right answer and a wrong one."""
    with refuses("a right answer from a wrong one"):
        tried(paths, name)


def test_a_reward_that_prefers_wrong_answers_is_said(paths):
    (note,) = tried(paths, "distance")
    assert not missing_names(note, "WARNING", f"reward '{OURS}distance'", "weight 1", "prefers wrong answers", "'2'")


PARTS = [{"context": "The sky is blue."}, {"choices": {"text": ["one", "two"]}}, {"input": "in words"}]


@pytest.mark.parametrize("beside", PARTS, ids=lambda beside: next(iter(beside)))
def test_columns_of_prompts_that_no_reward_reads(paths, beside):
    """A part of the prompt is refused, unless it stands there or a function of the user's may read it."""
    (name,) = beside

    def notes(record, **rewards):
        paths["train"].write_text("".join(json.dumps(record) + "\n" for _ in range(24)))
        return check_unread_fields(rl(paths, rewards=[{"kind": "rule", "rule": "exact_match", **rewards}]))

    with refuses("data.train", f"'{name}'", "adapter", f"columns: {{not_read: {name}}}"):
        notes({**PLAIN, **beside})
    within = {**PLAIN, **beside, "prompt": "The sky is blue. one two in words. 1+1="}
    assert notes(within) == [f"data.train: columns that no reward reads: {name}"]
    assert notes({**PLAIN, **beside}, rule=OURS + "verl") == []
    (note,) = notes({**PLAIN, "id": 0, "source": ""})
    assert note.endswith(": id")


def test_an_answer_that_is_missing_in_a_later_record():
    check = field_check(OURS + "verl")
    check({"answer": "2"})
    with refuses("reads ground_truth", "none of"):
        check({"answer": None})


def test_formulas_are_compared_as_mathematics(paths):
    paths["train"].write_text(json.dumps({"prompt": "q", "answer": r"\frac{1}{2}"}) + "\n")
    rule, why = rule_for_answers(SourceConfig(path=paths["train"]))
    assert (rule, missing_names(why, "formulas", "math_verify")) == ("math_verify", [])


def test_another_records_answer_is_the_wrong_one(paths):
    records = [{"prompt": "1+1=", "answer": word} for word in ("cat", "dog")]
    with refuses("'cat' and 'dog'"):
        tried(paths, "constant", *records)


def test_a_reward_of_some_records_is_called_on_one_of_them(paths):
    other, code = {**PLAIN, "task": "maths"}, {"prompt": "1+1=", "task": "code", "answer": "print(2)"}
    assert tried(paths, "trl_of_code", other, code) == []
    (note,) = tried(paths, "trl_of_code", other, other)
    assert not missing_names(note, "does not apply", "first 2 records", "data.train")


def test_what_is_not_compared_is_said(paths):
    (note,) = tried(paths, "trl_asks", {**PLAIN, "verdict": "x"})
    assert not missing_names(note, "async", "not called", "check: scores")
    (note,) = tried(paths, "constant", {"prompt": "1+1="})
    assert not missing_names(note, "0.5 for two texts", "no answer")
    (note,) = try_rewards(rl(paths, rewards=[{"kind": "http", "url": "http://judge", "name": "judge"}]))
    assert not missing_names(note, "reward 'judge'", "server", "not called", "check: scores")


def test_a_mistake_in_rewards_is_said_before_models_and_data_are_read(paths):
    for rule, names in (("exactmatch", ("'exactmatch'",)), (OURS + "mixture", (f"'{OURS}mixture'", "parameters"))):
        cfg = rl(paths, rewards=[{"kind": "rule", "rule": rule}], data={"train": paths["root"] / "none"})
        with refuses(*names) as error:
            preflight("rl", cfg, 1)
        assert "data.train" not in str(error.value)


def test_the_start_tries_rewards(paths):
    with refuses(f"reward '{OURS}constant'", "8 texts"):
        preflight("rl", rl(paths, rewards=[{"kind": "rule", "rule": OURS + "constant"}]), 1)


@pytest.mark.parametrize("reward", ["turns_in_extra_info", "turns_of_a_batch", "turns_of_all_columns"])
def test_functions_that_read_turns_pass_where_there_is_an_environment(paths, reward):
    paths["train"].write_text(json.dumps(VERL) + "\n")
    cfg = rl(paths, rewards=[{"kind": "rule", "rule": OURS + reward}], environment={"function": "mine:Guess"})
    assert try_rewards(cfg) == []


@pytest.fixture
def calls(monkeypatch):
    """How many responses each call of a function is for; it runs in this process."""
    sizes = []

    class Counted(InThisProcess):
        def start(self, batch):
            sizes.append(len(batch))
            return super().start(batch)

    made = lambda reward, device: Counted(load_rule(reward.rule), rule_form(reward.rule))  # noqa: E731
    monkeypatch.setattr(checks, "make_source", made)
    return sizes


OF_THE_FORM = ("unsloth_whole_number", "trl_form", "trl_length", "r1_zero_prefilled")
OF_MESSAGES = ("unsloth_correct", "unsloth_whole_number", "unsloth_strict_form", "trl_form")
"""They read completion[0]["content"]."""


@pytest.mark.parametrize("name, sizes", [
    ("unsloth_correct", [2]), ("unsloth_whole_number", [2, 6]), ("trl_form", [2, 6]), ("trl_boxed", [2]),
    ("trl_length", [2, 6]), ("r1_zero_prefilled", [2, 6]), ("verl_gsm8k", [2]), ("verl_dapo", [2]),
    ("openrlhf_math", [2]), ("swift_accuracy", [2]), ("kept", [2]), ("whole_only", [2, 6]),
])  # fmt: skip
def test_published_functions_pass_after_few_calls(paths, calls, name, sizes):
    """Two where the first pair tells; never more than eleven."""
    prompt = "1+1="
    if name in OF_MESSAGES:
        (paths["model"] / "tokenizer.model").unlink()
        write_chat_tokenizer(paths["model"], CHATML)
        prompt = [{"role": "user", "content": prompt}]
    record = {"prompt": prompt} | dict.fromkeys(("answer", "ground_truth", "solution"), "2")
    notes = tried(paths, {"rule": PUBLISHED + name}, record)
    if name in OF_THE_FORM:
        assert [missing_names(note, "'2' and '3' the same", "something else") for note in notes] == [[]]
    else:
        assert notes == []
    assert calls == sizes


@pytest.mark.parametrize("name, names", [
    ("too_long", "0 for all of 8 texts|a long one"),
    ("verl_shorter", "0 for all texts|'2' as the right answer|check: call"),
    ("trl_form", "string indices must be integers|data.train|completions are texts"),
])  # fmt: skip
def test_published_functions_that_are_stopped(paths, calls, name, names):
    with refuses(*names.split("|")):
        tried(paths, {"rule": PUBLISHED + name})
    assert sum(calls) in (2, 8)


def test_a_confirmed_reward_is_called_once(paths, calls):
    assert tried(paths, {"rule": PUBLISHED + "too_long", "check": "call"}) == []
    assert calls == [2]


@pytest.mark.parametrize("answer", [SOLUTION, SOLUTION.replace("\n", " ")])
def test_whole_solutions_as_answers(paths, calls, answer):
    record = {"prompt": "q", "answer": answer}
    for rule in ("numeric_match", "math_verify"):
        assert tried(paths, {"rule": rule}, record) == []
    assert tried(paths, {"rule": "exact_match", "check": "call"}, record) == []
    for rule, mend in (("exact_match", "numeric_match"), (PUBLISHED + "whole_only", "compare with")):
        with refuses("whole solution", "'72' the same as '73'", mend):
            tried(paths, {"rule": rule}, record)
    assert max(calls) == 9
    with refuses("'72' as the right answer", "behind ####"):
        tried(paths, {"rule": PUBLISHED + "verl_gsm8k"}, record)


NUMBERS = [["72", "73"], [SOLUTION, "It is so.\n#### 1,000"]]


@pytest.mark.parametrize("answers, rule", [
    ([SOLUTION, "It is so.\n#### 1,000"], "numeric_match"), ([SOLUTION, "So.\n#### x + 1"], "math_verify"),
    ([SOLUTION, "72"], "exact_match"), (["72", "73"], "exact_match"), ([None, {"a": 1}], "exact_match"),
])  # fmt: skip
def test_the_rule_for_answers_as_they_are_written(paths, answers, rule):
    paths["train"].write_text("".join(json.dumps({"prompt": "q", "answer": each}) + "\n" for each in answers))
    source = SourceConfig(path=paths["train"])
    found, why = rule_for_answers(source)
    assert (found, bool(why)) == (rule, rule != "exact_match")
    assert (rule_for_answers(source, talks=True)[0] == "numeric_match") == (answers in NUMBERS)


def test_lists_in_json_text_are_said(paths, calls):
    for rule in ("exact_match", "numeric_match", "math_verify"):
        (note,) = tried(paths, {"rule": rule}, {"prompt": "q", "answer": '["7", "seven"]'})
        assert not missing_names(note, """'["7", "seven"]'""", "a list", "right answer")
    assert tried(paths, {"rule": "exact_match"}, {"prompt": "q", "answer": "[7]"}) == []
    assert tried(paths, {"rule": PUBLISHED + "whole_only"}, {"prompt": "q", "answer": '["7"]'}) == []


def test_only_what_can_be_called_has_the_key():
    with refuses("'classifier'", "check"):
        RewardConfig(kind="classifier", path="x", check="call")
