"""Check of rewards before a run: each rule can be called, and tells a right answer to a real record from a wrong one.

A user's function runs in a process of its own, as in a run. An async function probably asks a server: like a reward of
kind http, it is called only if `check` asks for it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from megarlhf.config import EvaluateConfig, GenerateConfig, RewardConfig, RLConfig, SourceConfig
from megarlhf.config.rewards import unique_labels
from megarlhf.data.sample_types import PromptSample, Unusable, sample_of
from megarlhf.data.sources.fields import LeftOut, Reader
from megarlhf.data.sources.find import find
from megarlhf.data.sources.reasoning_gym import is_task
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.own_code.failures import short, without_partials
from megarlhf.planning.data.encoders import prompt_encoder
from megarlhf.rollout.rewards.answers import answers_of, end_of_solution, listed_in, texts_of_answer
from megarlhf.rollout.rewards.batch import RewardBatch
from megarlhf.rollout.rewards.format_rules import FORMAT_RULES
from megarlhf.rollout.rewards.forms import Form, first_of
from megarlhf.rollout.rewards.numerals import number_of
from megarlhf.rollout.rewards.rules import RULES, bind_rule, load_rule, rule_form
from megarlhf.rollout.rewards.score import RewardSource, make_source

_RECORDS = 8
"""Number of records that are read. A reward is called on the first one to which it applies."""
_MOST_ANSWERS = 2
_TRUTHS = ("ground_truth", "answer", "answers", "solution", "final_answer", "label", "labels", "target", "reference")
"""Columns that may hold the right answer."""
_EVERY_FORM = (
    "<think>\nA thought.\n</think>\nThe answer is {0}.\nFinal Answer: {0}\n\\boxed{{{0}}}\n<{tag}>{0}</{tag}>\n#### {0}"
)
"""A response in which most functions find the answer, wherever they look for it."""
_STRICT_FORMS = ("{0}", "<think>\nA thought.\n</think>\n<{tag}>\n{0}\n</{tag}>")
"""Forms of responses that some functions accept only without further text."""
_OTHER_TEXTS = (
    "<think>A thought.</think><answer>No idea.</answer>",
    "No idea. " * 200 + "\n</think>\n<answer>No idea.</answer>",
)
"""Texts for functions that read no answer: a short and a long one, in the forms of TRL's examples and of prompts that
end with <think>."""
_CONFIRM = "set check: call in its entry of `rewards`"


def check_rules(rewards: Sequence[RewardConfig]) -> None:
    """Check rules before data is read. Raises: ValueError for a rule that cannot be loaded or called, or a missing
    classifier."""
    for reward in rewards:
        if reward.rule is not None:
            bind_rule(reward.rule, reward.args)
            rule_form(reward.rule)
        if reward.path is not None and not (reward.path / "config.json").is_file():
            raise ValueError(
                f"reward {reward.label!r}: {reward.path} has no config.json; working directory: {Path.cwd()}"
            )


def try_rewards(cfg: RLConfig | GenerateConfig | EvaluateConfig) -> list[str]:
    """Call the rewards on the first records. Returns notes, for example on rewards that were not called.

    Raises: ValueError for a reward that fails, or that scores everything alike although the records have answers.
    """
    notes, named = [], list(zip(unique_labels(cfg.rewards), cfg.rewards, strict=True))
    tried = [(label, reward) for label, reward in named if _how(reward) != "none" or _form(reward).needed_columns]
    for label, reward in named:
        if reward.check == "auto" and (reward.kind == "http" or _form(reward).is_async):
            what = "is async" if reward.kind == "rule" else "asks a server"
            notes.append(f"reward {label!r} {what}, and is not called before the start (check: scores does it)")
    if not tried:
        return notes
    key, tokenizer, samples = first_samples(cfg)
    if not samples:
        return [*notes, f"{', '.join(label for label, _ in tried)}: not called before the start, as no record was read"]
    for label, reward in tried:
        attempt = _Try(label, reward, key, tokenizer, samples, cfg.environment is not None)
        attempt.require_columns()
        notes += attempt.notes() if _how(reward) != "none" else []
    return notes


def _form(reward: RewardConfig) -> Form:
    return Form() if reward.rule is None else rule_form(reward.rule)


def _how(reward: RewardConfig) -> str:
    """The kind of check: `scores`, `call` or `none`."""
    if reward.kind not in ("rule", "http") or reward.rule in FORMAT_RULES:
        return "none"
    if reward.check != "auto":
        return reward.check
    return "none" if reward.rule is None or _form(reward).is_async else "scores"


def first_samples(cfg: RLConfig | GenerateConfig | EvaluateConfig) -> tuple[str, Tokenizer, list[PromptSample]]:
    """The key of the first set with usable records, the tokenizer, and its first samples."""
    assert cfg.actor is not None, "it draws responses"
    encoder = prompt_encoder(cfg.data, cfg.actor.model.tokenizer_place(), environment=cfg.environment)
    tokenizer = encoder.load()
    encode = encoder.by(tokenizer)
    samples: list[PromptSample] = []
    key, sources = next(iter(cfg.data.sources().items()))
    for source in sources:
        reader = Reader(source)
        for where, row in _first_rows(source):
            with contextlib.suppress(Unusable, LeftOut):
                samples.append(sample_of(encode(len(samples), reader.record(row, where))))
        if samples:
            break
    return key, tokenizer, samples


def _first_rows(source: SourceConfig) -> list[tuple[str, Any]]:
    found_source = find(source)
    rows = found_source.first_rows(_RECORDS)
    if is_task(source.path):
        rows = list(itertools.islice((row for chunk in found_source.chunks() for row in chunk.located()), _RECORDS))
    return rows[:_RECORDS]


def rule_for_answers(source: SourceConfig, *, talks: bool = False) -> tuple[str, str]:
    """The built-in rule for the answers of the first records, and the reason where it is not `exact_match`. For whole
    solutions it reads their end; for numbers in an answer to a message (`talks`: texts are written as messages), the
    last number."""
    reader, answers = Reader(source), list[str]()
    for where, row in _first_rows(source):
        with contextlib.suppress(ValueError, LeftOut):
            record = reader.record(row, where)
            answers += answers_of(record)
            talks |= isinstance(record.get("prompt"), list) or "messages" in record
    ends = [end_of_solution(answer) for answer in answers]
    if answers and None not in ends:
        why = "whole solutions, which no response equals; {} compares with what is behind #### in them"
        return (rule := _rule_for_ends(ends)), why.format(rule)
    if any("\\" in answer for answer in answers) and find_spec("math_verify"):
        return "math_verify", "formulas; math_verify compares as mathematics"
    if answers and talks and all(number_of(answer) is not None for answer in answers):
        return "numeric_match", "numbers; numeric_match compares with the last number of a response"
    return "exact_match", ""


def _rule_for_ends(ends: Iterable[str | None]) -> str:
    return "numeric_match" if all(end and number_of(end) is not None for end in ends) else "math_verify"


@dataclass(frozen=True)
class _Try:
    """Calls one reward on the first samples."""

    label: str
    reward: RewardConfig
    key: str
    tokenizer: Tokenizer
    samples: Sequence[PromptSample]
    has_turns: bool
    """Whether responses are the last turns of conversations with an environment."""

    def notes(self) -> list[str]:
        """Call the reward. Returns notes. Raises: ValueError."""
        form = _form(self.reward)
        source = make_source(self.reward.model_copy(update={"workers": 1}), torch.device("cpu"))
        with contextlib.closing(source):
            for sample in self.samples:
                rights = self._rights(sample, form)
                wrong = self._wrong(sample, rights, form)
                pairs = [
                    (right, self._written(shape, right), self._written(shape, wrong))
                    for shape in (_EVERY_FORM, *_STRICT_FORMS)
                    for right in rights
                ]
                # The first pair is mostly enough; the others are called where it is not.
                scores = self._scores(source, sample, pairs[0][1:] if pairs else _OTHER_TEXTS)
                if set(scores.values()) == {None}:
                    continue
                if pairs and len(set(scores.values())) == 1 and self.reward.check != "call":
                    others = [text for _, *both in pairs for text in both] + list(_OTHER_TEXTS)
                    scores |= self._scores(
                        source, sample, [text for text in dict.fromkeys(others) if text not in scores]
                    )
                return self._judged(sample, rights, wrong, pairs, scores, form)
        missing = "" if self.reward.rule is None else " (its function returned None; a `return` may be missing)"
        return [f"reward {self.label!r} does not apply to the first {len(self.samples)} records of {self.key}{missing}"]

    def _written(self, shape: str, answer: str) -> str:
        return shape.format(answer, tag=self.reward.args.get("tag", "answer"))

    def require_columns(self) -> None:
        """Raises: ValueError for a column that the function needs and no record has."""
        for name in _form(self.reward).needed_columns:
            if not any(name in sample.fields for sample in self.samples):
                columns = ", ".join(map(repr, self.samples[0].fields)) or "none"
                raise ValueError(
                    f"reward {self.label!r}: its function takes {name!r}, and the records of {self.key} have {columns}"
                    f"; name the column that is meant under data: columns: {{{name}: ...}}, or give it a default"
                )

    def _rights(self, sample: PromptSample, form: Form) -> list[str]:
        """Right answers of a record, at most two. The end of a solution comes before the whole solution."""
        fields = sample.fields
        names = [name for name in form.needed_columns if name in _TRUTHS] + ["ground_truth"]
        values = [fields.get(name) for name in names]
        values.append(first_of(fields, ("reward_model.ground_truth",)))
        values += [fields.get(name) for name in (*_TRUTHS, *form.needed_columns)]
        answers: dict[str, None] = {}
        for value in [fields.get("answer"), *values] if self.reward.rule in RULES else values:
            with contextlib.suppress(ValueError):  # a mapping of which nothing is known
                texts = list(itertools.islice(texts_of_answer(value), 2))
                for text in [*texts[:1], str(value).strip()] if listed_in(value) else texts:
                    answers |= dict.fromkeys([end_of_solution(text) or text, text])
        return list(answers)[:_MOST_ANSWERS]

    def _wrong(self, sample: PromptSample, rights: Sequence[str], form: Form) -> str:
        """A wrong answer: another number, or another record's answer."""
        numbers = {number_of(text) for text in rights}
        if rights and (number := number_of(rights[0])) is not None:
            return next(
                str(other) for other in (number + 1, number + 2, 2 * number + 7, -number) if other not in numbers
            )
        others = (text for other in self.samples for text in self._rights(other, form))
        return next((text for text in others if text not in rights), "No idea")

    def _batch(self, sample: PromptSample, texts: Sequence[str]) -> RewardBatch:
        count = len(texts)
        return RewardBatch(
            prompts=[sample.text] * count,
            responses=list(texts),
            prompt_tokens=[sample.tokens] * count,
            response_tokens=[
                [*self.tokenizer.encode(text, continuation=True), self.tokenizer.eos_id] for text in texts
            ],
            finished=[True] * count,
            fields=[dict(sample.fields) for _ in texts],
            messages=[sample.messages] * count,
            samples=list(range(count)),
            turns=[[text] for text in texts] if self.has_turns else None,
        )

    def _scores(self, source: RewardSource, sample: PromptSample, texts: Sequence[str]) -> dict[str, float | None]:
        """The score of each text. Raises: ValueError for a failure that would end the run, or if all calls have
        failed."""
        outcomes = source.start(self._batch(sample, texts)).wait() or []
        failed = [(text, outcome.error) for text, outcome in zip(texts, outcomes, strict=True) if outcome.error]
        if failed and (self.reward.on_failure == "stop" or len(failed) == len(outcomes)):
            text, error = failed[0]
            completions = ""
            if _form(self.reward).style == "trl" and error.startswith("raised"):
                completions = (
                    ", completions are texts" if sample.messages is None else ", completions are lists of messages"
                )
            raise ValueError(
                f"reward {self.label!r} {error} (called before the start, which check: none leaves out; response "
                f"{short(text)} to a record of {self.key}{completions}, {_describe(sample)})"
            )
        return {text: outcome.value for text, outcome in zip(texts, outcomes, strict=True)}

    def _judged(
        self,
        sample: PromptSample,
        rights: Sequence[str],
        wrong: str,
        pairs: Sequence[tuple[str, str, str]],
        scores: Mapping[str, float | None],
        form: Form,
    ) -> list[str]:
        """Notes on the scores. `pairs`: a right answer, a text with it, and the same text with the wrong answer.

        Raises: ValueError where the reward recognizes no right answer, or only a whole solution.
        """
        if self.reward.check == "call":
            return []
        distinguished = {right for right, this, other in pairs if scores.get(this) != scores.get(other)}
        seen = sorted({value + 0.0 for value in scores.values() if value is not None})  # no -0
        if not rights:
            what = "the records have no answer, so that it was only called"
            return [f"reward {self.label!r} gives {seen[0]:g} for two texts; {what}"] if len(seen) == 1 else []
        record = f"a record of {self.key} ({_describe(sample)})"
        if distinguished and all(end_of_solution(right) for right in distinguished):
            end, rule = rights[0], _rule_for_ends(rights[:1])
            mend = f"use the rule {rule}, which reads" if self.reward.rule in RULES else "let it compare with"
            raise ValueError(
                f"reward {self.label!r} takes only a repetition of the whole solution for right: to {record}, whose "
                f"answer ends with #### {end}, it gives {short(end)} the same as {short(wrong)}; {mend} what stands "
                f"behind ####, or where that is meant {_CONFIRM}"
            )
        if distinguished:
            answer = sample.fields.get("answer")
            is_list = self.reward.rule in RULES and listed_in(answer)
            listed = f"reward {self.label!r}: {short(answer)} is read as a list, of which any entry is a right answer"
            return [*[listed] * bool(is_list), *self._warn_of_order(sample, rights, pairs, scores)]
        if len(seen) > 1 and not _reads_truth(self.reward, form):
            what = f"{short(rights[0])} and {short(wrong)} the same, in every form that was tried"
            return [f"reward {self.label!r} gives {what}: it judges something else than the answer of {record}"]
        tried = "as they stand, in \\boxed{}, behind ####, in <answer> and so on"
        if _reads_truth(self.reward, form):
            behind = " (it is behind #### in the record's)" if end_of_solution(rights[-1]) else ""
            how = (
                f"{seen[0]:g} for all texts" if len(seen) == 1 else "the same for either, in every form that was tried"
            )
            raise ValueError(
                f"reward {self.label!r} does not tell a right answer from a wrong one: to {record} it gives {how}, "
                f"with {short(rights[0])} as the right answer{behind} and {short(wrong)} as a wrong one, {tried}. "
                "Nothing could be learnt. Look at what it compares and returns; where that is meant, or no such text "
                f"can be right, {_CONFIRM}"
            )
        raise ValueError(
            f"reward {self.label!r} gives {seen[0]:g} for all of {len(scores)} texts to {record}: {short(rights[0])} "
            f"and {short(wrong)} {tried}, short texts and a long one. Nothing could be learnt. If it compares with the "
            "record's answer, look at what it reads and returns; if it judges something that these texts do not have, "
            f"such as a form of your own, {_CONFIRM}"
        )

    def _warn_of_order(
        self,
        sample: PromptSample,
        rights: Sequence[str],
        pairs: Sequence[tuple[str, str, str]],
        scores: Mapping[str, float | None],
    ) -> list[str]:
        """A warning where right answers get less than wrong ones, as from a distance."""
        both = [(scores.get(this), scores.get(other)) for right, this, other in pairs if right == rights[0]]
        known = [(this, other) for this, other in both if this is not None and other is not None and this != other]
        if not known or any((this - other) * self.reward.weight > 0 for this, other in known):
            return []
        values = f"{known[0][0]:g} for {short(rights[0])}, which is right, and {known[0][1]:g} for a wrong one"
        note = (
            f"WARNING: reward {self.label!r}, of weight {self.reward.weight:g}, prefers wrong answers: {values}, to a "
            f"record of {self.key} ({_describe(sample)})"
        )
        return [note]


def _describe(sample: PromptSample) -> str:
    return f"prompt {short(sample.text)}, fields {short(sample.fields)}"


def _reads_truth(reward: RewardConfig, form: Form) -> bool:
    """Tell whether the function names the right answer, among its parameters or as a key in its code."""
    truths = {*_TRUTHS, "ground_truths"}
    named = {*form.keywords, *form.positional, *form.kept_defaults, *form.optional}
    code = None if reward.rule is None or reward.rule in RULES else _code_of(load_rule(reward.rule))
    return not named.isdisjoint(truths) or (code is not None and not _texts_in(code).isdisjoint(truths))


def _code_of(function: Any) -> CodeType | None:
    function = inspect.unwrap(without_partials(function))
    if not inspect.isroutine(function):
        function = without_partials(type(function).__call__)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _texts_in(code: CodeType) -> set[str]:
    """Text constants in a function's code, and in functions within it."""
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    return texts.union(*(_texts_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)))
