"""Reward functions in the shapes of other frameworks, called by the names of their parameters.

Each is written as those frameworks' own pages have them, for records as their users have them. Not covered: worker
processes, which call the same (test_reward_pool.py); what a start makes of the scores (tests/planning/test_rewards.py).
"""

import functools
import json
import re
from dataclasses import replace

import pytest
import torch

from megarlhf.rollout.rewards.batch import MissingColumn, RewardBatch, WrongValue
from megarlhf.rollout.rewards.calls import call
from megarlhf.rollout.rewards.forms import Form, form_of, truth_of

VERL = {
    "data_source": "openai/gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 7},
    "keywords": ["b"],
}


def rows(*fields, responses=("#### 42", "#### 41"), messages=None):
    count = len(responses)
    return RewardBatch(
        prompts=[f"<user>q{n}<model>" for n in range(count)],
        responses=list(responses),
        prompt_tokens=[[1]] * count,
        response_tokens=[[5] * (n + 1) for n in range(count)],
        finished=[True] * count,
        fields=list(fields) if len(fields) > 1 else list(fields or [{}]) * count,
        messages=[messages] * count,
        samples=list(range(count)),
    )


def said(function, batch):
    found = call(function, form_of(function), batch)
    return [result.error or result.value for result in found]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("openai/gsm8k", {"index": 7})
    found = re.search(r"#### (\S+)", solution_str)
    right = found is not None and found.group(1) == ground_truth
    return {"score": 1.0 if right else 0.1, "acc": right, "pred": found and found.group(1), "parts": [1, 2]}


def test_verl_by_name():
    """The nested answer; what is no number beside the score is kept out, and no error."""
    found = call(compute_score, form_of(compute_score), rows(VERL))
    assert [result.value for result in found] == [1.0, 0.1]
    assert [dict(result.components) for result in found] == [{"score": 1.0, "acc": 1.0}, {"score": 0.1, "acc": 0.0}]


@pytest.mark.parametrize(
    ("fields", "truth"),
    [
        ({"ground_truth": "1", "answer": "2", "reward_model": {"ground_truth": "3"}}, "1"),
        ({"answer": "2", "reward_model": {"ground_truth": "3"}}, "3"),
        ({"answer": 2, "reward_model": None}, 2),
    ],
)
def test_where_a_ground_truth_is_from(fields, truth):
    def score(ground_truth, solution_str, method="strict", score=5.0, **kwargs):
        assert ground_truth == truth
        others = {name: fields[name] for name in fields.keys() - {"ground_truth"}}
        assert (method, kwargs) == ("strict", others | {"data_source": None, "extra_info": {}})
        return score

    assert said(score, rows(fields | {"method": "other"})) == [5.0, 5.0]


@pytest.mark.parametrize("with_environment", [True, False])
def test_turns_of_a_conversation(with_environment):
    """Each form gets them by name, or with all columns. Without an environment a column of the records may have the
    name."""
    turns = [["a", "#### 42"], ["#### 41"]]
    fields = [dict(VERL, answer="42", turns=column) for column in ([1], [2])]
    batch = replace(
        rows(*fields, messages=[{"role": "user", "content": "q"}]), turns=turns if with_environment else None
    )
    given = turns if with_environment else [[1], [2]]

    def ours(response, turns):
        return len(turns) if [turns] == given[:1] or [turns] == given[1:] else -1

    def trl(completions, turns):
        return [len(row) for row in turns] if turns == given else [-1, -1]

    def trl_with_all(completions, **kwargs):
        return trl(completions, kwargs["turns"])

    def openrlhf(queries, prompts, labels, turns):
        return trl(queries, turns)

    def openrlhf_with_all(queries, prompts, labels, **kwargs):
        return trl(queries, kwargs["turns"])

    def verl(data_source, solution_str, ground_truth, extra_info):
        assert extra_info["index"] == 7
        assert extra_info.get("messages", batch.messages[0]) == batch.messages[0]
        return len(extra_info.get("turns", "1"))

    def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
        return [verl("", "", "", info) for info in extra_infos]

    for function in (ours, trl, trl_with_all, openrlhf, openrlhf_with_all, verl, verl_batch):
        assert said(function, batch) == ([2.0, 1.0] if with_environment else [1.0, 1.0]), function.__name__


def test_without_a_ground_truth_it_is_said_which_columns_there_are():
    def score(solution_str, ground_truth):
        return 1.0

    words = "reads ground_truth, and the record has none of ground_truth, reward_model.ground_truth, answer; its "
    assert said(score, rows({"solution": "1"})) == [f"{words}columns: 'solution'"] * 2


def test_verl_in_batches_and_awaited():
    async def compute(data_sources, solution_strs, ground_truths, extra_infos):
        assert data_sources == ["openai/gsm8k"] * 2
        assert extra_infos == [{"index": 7}] * 2
        return [{"score": float(truth in text)} for text, truth in zip(solution_strs, ground_truths, strict=True)]

    assert said(compute, rows(VERL)) == [1.0, 0.0]


def test_trl_with_texts():
    def longer(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def boxed(completions, ground_truth, **kwargs):
        assert kwargs == {"prompts": ["<user>q0<model>", "<user>q1<model>"], "completion_ids": [[5], [5, 5]]}
        return [1.0 if truth in text else 0.0 for text, truth in zip(completions, ground_truth, strict=True)]

    assert said(longer, rows()) == [1.0, 2.0]
    assert said(boxed, rows({"ground_truth": "42"})) == [1.0, 0.0]


def test_trl_with_conversations_of_several_tasks():
    """Lists of messages, a list for each column (None where a record has none), None where a reward does not apply."""
    asked = [{"role": "user", "content": "q"}]

    async def maths(prompts, completions, task, answer=None, log_metric=None, **kwargs):
        assert prompts == [asked, asked]
        assert [[message["role"] for message in said] for said in completions] == [["assistant"]] * 2
        assert (answer, kwargs["level"], log_metric) == (["42", None], [None, 3], None)
        rows = zip(completions, task, strict=True)
        return [float("42" in said[0]["content"]) if of == "maths" else None for said, of in rows]

    batch = rows({"task": "maths", "answer": "42"}, {"task": "code", "level": 3}, messages=asked)
    assert said(maths, batch) == [1.0, None]


def test_a_truth_in_json_text():
    """As Parquet files may keep verl's column."""
    fields = {"reward_model": json.dumps({"style": "rule", "ground_truth": "42"})}
    assert said(lambda solution_str, ground_truth: float(ground_truth in solution_str), rows(fields)) == [1.0, 0.0]
    with pytest.raises(WrongValue, match="reads ground_truth"):
        truth_of({"reward_model": "rule"})


def test_openrlhf():
    """Prompt and response as one text; its dictionary, whose logs become metrics."""

    def reward_func(queries, prompts, labels):
        assert queries == ["<user>q0<model>#### 42", "<user>q1<model>#### 41"]
        assert prompts == ["<user>q0<model>", "<user>q1<model>"]
        rewards = torch.tensor([float(query.endswith(label)) for query, label in zip(queries, labels, strict=True)])
        return {"rewards": rewards, "scores": 1 - rewards, "extra_logs": {"right": rewards, "name": "x"}}

    found = call(reward_func, form_of(reward_func), rows({"answer": "42"}))
    assert [result.value for result in found] == [1.0, 0.0]
    assert [dict(result.components) for result in found] == [{"right": 1, "score": 1}, {"right": 0, "score": 0}]
    assert said(lambda queries, labels: torch.ones(len(queries), 1), rows()) == [1.0, 1.0]
    assert said(lambda queries: {"scores": [3, 4]}, rows()) == [3.0, 4.0]


def test_our_own_by_name_in_any_order_and_by_place():
    fields = {"answer": "42"}

    def parts(response, fields, prompt="", scale=2.0):
        return scale * (fields["answer"] in response) + len(prompt)

    assert said(parts, rows(fields)) == [17.0, 15.0]
    assert said(lambda response: float(len(response)), rows()) == [7.0, 7.0]
    assert said(parts, rows({**fields, "scale": 3.0})) == [18.0, 15.0], "a column with the name of a default"
    assert form_of(lambda prompt, response, fields: 0.0) == Form()

    def by_name(*, prompt, response, fields):
        return float(len(prompt)) + fields["answer"].count("4")

    assert said(by_name, rows(fields)) == [16.0, 16.0]
    assert said(lambda response, **columns: float(columns["answer"] in response), rows(fields)) == [1.0, 0.0]


def test_a_batch_by_its_name_or_its_annotation():
    def longer(rows: RewardBatch, scale=2.0):
        return [scale * len(text) for text in rows.responses]

    assert form_of(lambda batch: [0.0]) == form_of(longer) == Form("batch", positional=())
    assert said(longer, rows()) == [14.0, 14.0]


@pytest.mark.parametrize(
    "function",
    [
        lambda prompt, response, ground_truth: 0.0,
        lambda question, ground_truth, data_source: 0.0,
        lambda prompts, responses, fields: 0.0,
        lambda completions, queries: 0.0,
        lambda solution_str, completions: 0.0,
        lambda completions, response: 0.0,
        lambda prompts: 0.0,
        lambda prompts, completions, trainer_state: 0.0,
        lambda p, r, f: 0.0,
        lambda rows: [0.0],
        lambda *, batch: [0.0],
        lambda: 0.0,
        lambda predict_str, ground_truth, use_boxed=True: 0.0,  # verl's geo3k
        lambda completion, test_cases, continuous=False: 0.0,  # verl's code rewards
        lambda completion, info, state: 0.0,  # verifiers
        lambda reward_inputs, format_weight=0.1: [0.0],  # EasyR1
        lambda args, sample, **kwargs: 0.0,  # slime
        lambda prompt, completions, prompt_ids, completion_ids, answer, **kwargs: 0.0,  # AReaL
        lambda samples, prompts, outputs, **kwargs: [0.0],  # trlx
    ],
)
def test_mixtures_and_unknown_names_are_refused_with_those_that_are_known(function):
    with pytest.raises(ValueError, match="its parameters are") as error:
        form_of(function)
    for known in ("(prompt, response, fields)", "solution_str", "completions", "queries", "RewardBatch"):
        assert known in str(error.value)


def undecorated(function):
    """A decorator that loses the names."""
    return lambda *args, **kwargs: function(*args, **kwargs)


async def of_verls_loop(data_source, solution_str, ground_truth, reward_router_address, reward_model_tokenizer):
    return 1.0


class Accuracy:
    """ms-swift's plugins are classes."""

    def __call__(self, completions, solution, **kwargs):
        return [float(one == right) for one, right in zip(completions, solution, strict=True)]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            undecorated(compute_score),
            r"\(\*args, \*\*kwargs\): no name says what it reads; .*functools\.wraps.* solution_str",
        ),
        (
            lambda **kwargs: [0.0],
            r"\(\*\*kwargs\): no name says what it reads; name what it takes, such as \(completions",
        ),
        (
            of_verls_loop,
            "verl gives reward_router_address and reward_model_tokenizer, of the reward model .* kind http",
        ),
        (Accuracy, r"is the class Accuracy, of which an object is called; .* \(reward = Accuracy\(\)\), and name that"),
        (lambda prompt, response, answer: 0.0, "answer is none of these; the record's columns are in `fields`"),
        (lambda prompts: [0.0], "prompts alone does not say which of these it is"),
        (max, "it has no signature, .*; call it in a function of yours"),
    ],
)
def test_what_is_said_of_functions_that_cannot_be_called(function, words):
    with pytest.raises(ValueError, match=words):
        form_of(function)


def test_decorators_partials_and_objects_that_keep_the_names():
    kept = functools.wraps(compute_score)(undecorated(compute_score))
    assert said(kept, rows(VERL)) == [1.0, 0.1]
    assert said(Accuracy(), rows({"solution": "#### 42"})) == [1.0, 0.0]
    given = functools.partial(of_verls_loop, reward_router_address="judge:80", reward_model_tokenizer=None)
    assert said(given, rows({"answer": "42"})) == [1.0, 1.0]


def test_what_a_request_says_nothing_of():
    """A function of messages gets texts; one that reads tokens has failed."""
    batch = rows({"answer": "42"})
    served = RewardBatch(
        batch.prompts,
        batch.responses,
        *(MissingColumn(name) for name in ("prompt_tokens", "response_tokens", "finished")),
        batch.fields,
        MissingColumn("messages"),
        [0, 1],
    )
    assert said(lambda completions, answer, **kw: [float(answer[0] in text) for text in completions], served) == [1, 0]
    (first, _) = said(lambda completion_ids, **kw: [len(ids) for ids in completion_ids], served)
    assert "reads response_tokens, of which a request says nothing" in first


def test_a_text_without_a_score_is_said_with_its_key():
    (first, _) = said(lambda prompt, response, fields: {"value": 1.0, "why": "text"}, rows())
    assert first == "returned 'text' as 'why', expected a number; return a float for every response"
