"""Reward functions as users bring them from other frameworks, right and wrong ones, for test_rewards.py."""

import re
import sys
import time
from difflib import SequenceMatcher


def verl(data_source, solution_str, ground_truth, extra_info=None):
    """GSM8K's form: what stands behind ####."""
    found = re.search(r"#### (-?[0-9.,]+)", solution_str)
    return 0.0 if found is None else 1.0 if found.group(1) == ground_truth else 0.1


def verl_compares_types(data_source, solution_str, ground_truth, extra_info=None):
    """Wrong: where the truth is a number, no text equals it; but the form is rewarded."""
    found = re.search(r"#### (-?[0-9.,]+)", solution_str)
    return 0.0 if found is None else 1.0 if found.group(1) == ground_truth else 0.1


def trl_boxed(completions, ground_truth, **kwargs):
    said = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    found = [re.search(r"\\boxed\{(.*?)\}", text) for text in said]
    return [float(f is not None and f.group(1) == truth) for f, truth in zip(found, ground_truth, strict=True)]


def trl_format(completions, **kwargs):
    said = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [
        float(re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", text, re.DOTALL) is not None) for text in said
    ]


def trl_of_code(completions, task, answer, **kwargs):
    return [float(a in c) if t == "code" else None for c, t, a in zip(completions, task, answer, strict=True)]


async def trl_asks(prompts, completions, verdict, **kwargs):
    raise AssertionError("not called before the start")


def openrlhf(queries, prompts, labels):
    return {"rewards": [float(query.endswith(str(label))) for query, label in zip(queries, labels, strict=True)]}


def constant(prompt, response, fields):
    return 0.5


def reads_another_column(prompt, response, fields):
    return float(response == fields["anwser"])


def of_another_column(prompt, response, fields):
    """Wrong: the answer stands elsewhere; but the form is rewarded."""
    return 0.1 * ("<answer>" in response) + float(fields.get("solution", "none") in response)


def trl_of_another_column(completions, **kwargs):
    truths = kwargs.get("solution", [""] * len(completions))
    return [0.1 * ("<answer>" in c) + float(t != "" and t in c) for c, t in zip(completions, truths, strict=True)]


def default_that_stays(solution_str, ground_truth, answer=None):
    return 0.1 * ("<answer>" in solution_str) + float(answer is not None and answer in solution_str)


def distance(prompt, response, fields):
    return 1.0 - SequenceMatcher(None, response, fields["answer"]).ratio()


def columns_by_name(response, **columns):
    return float(columns["answer"] in response)


def answer_by_default(response, answer=None):
    return float(answer in response)


def only_by_name(*, prompt, response, fields):
    return float(fields["answer"] in response)


def not_too_long(prompt, response, fields):
    return -1.0 if len(response) > 400 else 0.0


def hangs(prompt, response, fields):
    time.sleep(600)


def exits(prompt, response, fields):
    sys.exit(0)


def mixture(prompt, response, ground_truth):
    return 1.0


def turns_in_extra_info(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["turns"][-1] == ground_truth)


def turns_of_a_batch(batch):
    return [float(turns[-1] == "2") for turns in batch.turns]


def turns_of_all_columns(completions, **columns):
    return [float(turns[-1] == "2") for turns in columns["turns"]]
