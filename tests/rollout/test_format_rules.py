"""Rules for the form of a response, by hand, and their arguments."""

import pytest

from megarlhf.config import RewardConfig
from megarlhf.rollout.rewards.rules import bind_rule
from tests.rollout.test_classifier import CPU, batch


@pytest.mark.parametrize(
    ("rule", "args", "response", "expected"),
    [
        ("tags", {}, "<think>so\nit is</think>\n<answer>4</answer>", 1),
        ("tags", {}, " <think></think><answer></answer> ", 1),
        ("tags", {}, "<answer>4</answer><think>late</think>", 0),
        ("tags", {}, "<think>a</think><answer>4</answer> and more", 0),
        ("tags", {}, "<think>a<answer>3</answer></think><answer>4</answer>", 0),
        ("tags", {}, "<think>a</think><answer>4</answer><answer>5</answer>", 0),
        ("tags", {"names": ["b.c"]}, "<b.c>x</b.c>", 1),
        ("tags", {"names": ["b.c"]}, "<bxc>x</bxc>", 0),
        ("regex", {"pattern": r"\d+"}, "it is 42", 1),
        ("regex", {"pattern": r"\d+", "full": True}, "it is 42", 0),
        ("regex", {"pattern": r"\d+", "full": True}, "42", 1),
        ("length_window", {"least": 2, "most": 4}, "abcd", 1),
        ("length_window", {"least": 2, "most": 4}, "abcde", 0),
        ("length_window", {"least": 2}, "a", 0),
        ("length_window", {"most": 2, "unit": "words"}, "two  words", 1),
        ("length_window", {"most": 2, "unit": "words"}, "now three words", 0),
        ("json_object", {}, '{"a": 1}', 1),
        ("json_object", {"required": ["a", "b"]}, '{"a": 1}', 0),
        ("json_object", {}, "[1]", 0),
        ("json_object", {}, "{", 0),
        ("json_object", {}, '{"a": NaN}', 0),
        ("json_object", {}, "[" * 100000, 0),
    ],
)
def test_a_form_is_there_or_not(rule, args, response, expected):
    assert bind_rule(rule, args)("prompt", response, {}) == expected


@pytest.mark.parametrize(
    ("prompt", "names", "response", "expected"),
    [
        ("<model>\n<think>\n", ["think", "answer"], "a</think>\n<answer>4</answer>", 1),
        ("<model>\n<think>\n", ["think", "answer"], "<think>a</think>\n<answer>4</answer>", 1),
        ("<model>\n<think>\n", ["think", "answer"], "a</think> and <answer>4</answer>", 0),
        ("<model>\n<think>\n", ["answer"], "a</think>\n<answer>4</answer>", 1),
        ("<model>\n<think>\n", ["answer"], "a <answer>4</answer>", 0),
        ("<model>\n<think>\n\n</think>\n\n", ["think", "answer"], "<answer>4</answer>", 1),
        ("<model>\n<think>\n\n</think>\n\n", ["answer"], "<answer>4</answer>", 1),
        ("<model><think></think><answer>", ["think", "answer"], "4</answer>", 1),
        ("<model>", ["think", "answer"], "a</think><answer>4</answer>", 0),
        ("write <answer></answer>", ["answer"], "<answer>4</answer>", 1),
        ("write <answer></answer>", ["answer"], "4", 0),
    ],
)
def test_tags_with_which_the_prompt_ends(prompt, names, response, expected):
    """Those of the template's generation prompt; an example of the form in a question counts for nothing."""
    assert bind_rule("tags", {"names": names})(prompt, response, {}) == expected


@pytest.mark.parametrize(
    ("rule", "args", "message"),
    [
        ("tags", {"name": ["a"]}, "'tags' has no argument 'name'; did you mean 'names'?"),
        ("exact_match", {"strip": True}, "'exact_match' has no argument 'strip'; it has none"),
        ("tags", {"names": "think"}, r"names = 'think', expected a list of different names"),
        ("regex", {}, "missing 1 required keyword-only argument: 'pattern'"),
        ("regex", {"pattern": "("}, r"pattern = '\(' is no regular expression"),
        ("length_window", {"unit": "lines"}, "unit = 'lines', expected characters or words"),
        ("length_window", {"least": 5, "most": 3}, "least = 5 and most = 3"),
        ("json_object", {"required": "a"}, "required = 'a', expected a list of keys"),
        ("tests.rollout.served_rules:short", {"a": 1}, r"got args; they are of built-in rules\. .* functools\.partial"),
        ("exakt_match", {}, "'exakt_match' is not known; did you mean 'exact_match'?"),
    ],
)
def test_arguments_that_a_rule_cannot_take_are_refused(rule, args, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        bind_rule(rule, args)


def test_arguments_reach_the_rule_from_the_configuration():
    from megarlhf.rollout.rewards.score import make_source

    reward = RewardConfig(kind="rule", rule="length_window", args={"most": 1})
    found = make_source(reward, CPU).start(batch(["p", "p"], ["1", "22"])).wait()
    assert [result.value for result in found] == [1.0, 0.0]
