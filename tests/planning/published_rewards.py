"""Reward functions in the shapes in which people publish them, for test_rewards.py: of TRL's and unsloth's pages, verl,
OpenRLHF, ms-swift, and of recipes built on them. Written anew, short."""

import functools
import re
from concurrent.futures import ThreadPoolExecutor


def unsloth_correct(prompts, completions, answer, **kwargs):
    said = [completion[0]["content"].split("<answer>")[-1].split("</answer>")[0].strip() for completion in completions]
    return [2.0 if one == right else 0.0 for one, right in zip(said, answer, strict=True)]


def unsloth_whole_number(completions, **kwargs):
    said = [completion[0]["content"].split("<answer>")[-1].split("</answer>")[0].strip() for completion in completions]
    return [0.5 if one.isdigit() else 0.0 for one in said]


def unsloth_strict_form(completions, **kwargs):
    form = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
    return [0.5 if re.match(form, completion[0]["content"]) else 0.0 for completion in completions]


def trl_form(completions, **kwargs):
    form = r"^<think>.*?</think><answer>.*?</answer>$"
    return [1.0 if re.match(form, completion[0]["content"]) else 0.0 for completion in completions]


def trl_boxed(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if one and one[1] == right else 0.0 for one, right in zip(found, ground_truth, strict=True)]


def trl_length(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]


def trl_too_long(longest, room):
    """TRL's get_soft_overlong_punishment."""

    def punish(completion_ids, **kwargs):
        return [min(0.0, max(-1.0, (longest - room - len(ids)) / room)) for ids in completion_ids]

    return punish


too_long = trl_too_long(20480, 4096)


def r1_zero_prefilled(completions, **kwargs):
    """The template ends with <think>."""
    form = r"^<think>([^<]*(?:<(?!/?think>)[^<]*)*)<\/think>\n<answer>([\s\S]*?)<\/answer>$"
    return [1.0 if re.search(form, "<think>" + completion) else 0.0 for completion in completions]


def verl_gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    found = re.findall("#### (\\-?[0-9\\.\\,]+)", solution_str[-300:])
    return format_score if not found else score if found[-1].replace(",", "") == ground_truth else format_score


def verl_dapo(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", solution_str[-300:])
    right = bool(found) and found[-1].strip() == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": found[-1] if found else "[INVALID]"}


def verl_shorter(data_source, solution_str, ground_truth, extra_info=None):
    """Reads no truth, though verl gives it."""
    return -float(len(solution_str) > 4000)


def openrlhf_math(queries, prompts, labels, **kwargs):
    said = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    right = [re.findall(r"-?\d+", text)[-1:] == [label] for text, label in zip(said, labels, strict=True)]
    return {"rewards": [float(one) for one in right], "scores": [float(one) for one in right]}


class SwiftAccuracy:
    """ms-swift registers the class; completions are texts."""

    def __call__(self, completions, solution, **kwargs):
        return [float(str(right) == text.rsplit("\\boxed{", 1)[-1].split("}")[0]) for text, right in
                zip(completions, solution, strict=True)]  # fmt: skip


swift_accuracy = SwiftAccuracy()


def in_threads(function):
    """A decorator that loses the names."""

    def inner(*args, **kwargs):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args, **kwargs).result()

    return inner


kept = functools.wraps(verl_gsm8k)(in_threads(verl_gsm8k))


def whole_only(prompt, response, fields):
    return float(response.strip() == fields["answer"])
