"""Rewards before a run: each rule can be called, and tells a right answer to one real record from a wrong one.

A function of the user's runs in a process of its own, as in a run. One that is async is taken to ask a server, and is
called only where `check` says so, as is a reward of kind http.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megarlhf.config import EvaluateConfig, GenerateConfig, RewardConfig, RLConfig
from megarlhf.config.rewards import labels_of
from megarlhf.data.fields import LeftOut, Reader
from megarlhf.data.sample_kinds import PromptSample, Unusable, sample_of
from megarlhf.data.sources import find
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.planning.encoders import prompt_encoder
from megarlhf.rollout.rewards.answers import texts_of_answer
from megarlhf.rollout.rewards.batch import RewardBatch, short
from megarlhf.rollout.rewards.format_rules import FORMAT_RULES
from megarlhf.rollout.rewards.forms import Form
from megarlhf.rollout.rewards.numerals import number_of
from megarlhf.rollout.rewards.rules import RULES, form_of_rule, rule_with
from megarlhf.rollout.rewards.score import RewardSource, make_source

_RECORDS = 8
"""That are read; a reward is called on the first to which it applies."""
_MOST_ANSWERS = 4
_TRUTHS = ("ground_truth", "answer", "answers", "solution", "final_answer", "label", "labels", "target", "reference")
"""Columns that may hold the right answer, beside those that a function names."""
_WRITTEN = (
    "{}",
    "#### {}",
    "\\boxed{{{}}}",
    "The answer is {}.",
    "Answer: {}",
    "Final Answer: {}",
    "<answer>{}</answer>",
    "<think>\nA thought.\n</think>\n<answer>\n{}\n</answer>",
    "<think>\nA thought.\n</think>\n\n\\boxed{{{}}}",
    "A thought.\n</think>\n<answer>{}</answer>",
    "```\n{}\n```",
)
"""Forms in which functions look for an answer."""
_OTHER_TEXTS = ("No idea.", "No idea. " * 200)


def check_rules(rewards: Sequence[RewardConfig]) -> None:
    """Before anything is read. Raises: ValueError for a rule that cannot be had or called, or a missing classifier."""
    for reward in rewards:
        if reward.rule is not None:
            rule_with(reward.rule, reward.args)
            form_of_rule(reward.rule)
        if reward.path is not None and not (reward.path / "config.json").is_file():
            raise ValueError(
                f"reward {reward.label!r}: {reward.path} has no config.json; working directory: {Path.cwd()}"
            )


def try_rewards(cfg: RLConfig | GenerateConfig | EvaluateConfig) -> list[str]:
    """Call the rewards on the first records. Returns what was not tried, and the like, in sentences.

    Raises: ValueError for a reward that fails there, or scores everything alike where the records have answers.
    """
    notes, named = [], list(zip(labels_of(cfg.rewards), cfg.rewards, strict=True))
    tried = [(label, reward) for label, reward in named if _how(reward) != "none" or _form(reward).needed_columns]
    for label, reward in named:
        if reward.check == "auto" and (reward.kind == "http" or _form(reward).waits):
            what = "is async" if reward.kind == "rule" else "asks a server"
            notes.append(f"reward {label!r} {what}, and is not called before the start (check: scores does it)")
    if not tried:
        return notes
    key, tokenizer, samples = _first_samples(cfg)
    if not samples:
        return [*notes, f"{', '.join(label for label, _ in tried)}: not called before the start, as no record was read"]
    for label, reward in tried:
        attempt = _Try(label, reward, key, tokenizer, samples)
        attempt.require_columns()
        notes += attempt.notes() if _how(reward) != "none" else []
    return notes


def _form(reward: RewardConfig) -> Form:
    return Form() if reward.rule is None else form_of_rule(reward.rule)


def _how(reward: RewardConfig) -> str:
    """`scores`, `call` or `none`."""
    if reward.kind not in ("rule", "http") or reward.rule in FORMAT_RULES:
        return "none"
    if reward.check != "auto":
        return reward.check
    return "none" if reward.rule is None or _form(reward).waits else "scores"


def _first_samples(cfg: RLConfig | GenerateConfig | EvaluateConfig) -> tuple[str, Tokenizer, list[PromptSample]]:
    """The key of the first set that has usable records, the tokenizer, and the first of these."""
    assert cfg.actor is not None, "it draws responses"
    encoder = prompt_encoder(cfg.data, cfg.actor.model.tokenizer_place())
    tokenizer = encoder.load()
    encode = encoder.by(tokenizer)
    samples: list[PromptSample] = []
    key, sources = next(iter(cfg.data.sources().items()))
    for source in sources:
        place = find(source)
        rows = place.first_rows(_RECORDS)
        if place.kind == "generated":
            rows = list(itertools.islice((row for chunk in place.chunks() for row in chunk.located()), _RECORDS))
        reader = Reader(source, ())
        for where, row in rows[:_RECORDS]:
            with contextlib.suppress(Unusable, LeftOut):
                samples.append(sample_of(encode(len(samples), reader.record(row, where))))
        if samples:
            break
    return key, tokenizer, samples


@dataclass(frozen=True)
class _Try:
    """Calls of one reward."""

    label: str
    reward: RewardConfig
    key: str
    tokenizer: Tokenizer
    samples: Sequence[PromptSample]

    def notes(self) -> list[str]:
        """What to tell the user. Raises: ValueError."""
        form = _form(self.reward)
        source = make_source(self.reward.model_copy(update={"workers": 1}), torch.device("cpu"))
        with contextlib.closing(source):
            for sample in self.samples:
                rights = self._rights(sample, form)
                wrong = self._wrong(sample, rights, form)
                pairs = [(shape.format(right), shape.format(wrong)) for shape in self._shapes() for right in rights]
                seen: list[float] = []
                # The first pair mostly tells; all others are called where it does not.
                for some, others in ((pairs[:1], ()), (pairs[1:], _OTHER_TEXTS)):
                    values = self._values(source, sample, [text for pair in some for text in pair] + list(others))
                    paired = values[: 2 * len(some)]
                    if paired[::2] != paired[1::2]:
                        return []
                    seen += [value for value in values if value is not None]
                if seen:
                    return self._judged(sample, rights, wrong, seen, form)
        return [f"reward {self.label!r} does not apply to the first {len(self.samples)} records of {self.key}"]

    def _shapes(self) -> tuple[str, ...]:
        tag = self.reward.args.get("tag")
        return _WRITTEN if tag is None else (f"<{tag}>{{}}</{tag}>", *_WRITTEN)

    def require_columns(self) -> None:
        """Raises: ValueError for a column that the function needs and no record has."""
        for name in _form(self.reward).needed_columns:
            if not any(name in sample.fields for sample in self.samples):
                there = ", ".join(map(repr, self.samples[0].fields)) or "none"
                raise ValueError(
                    f"reward {self.label!r}: its function takes {name!r}, and the records of {self.key} have {there}; "
                    f"name the column that is meant under data: columns: {{{name}: ...}}, or give it a default"
                )

    def _rights(self, sample: PromptSample, form: Form) -> list[str]:
        """Right answers of a record: each as it stands, and what a solution ends with."""
        fields = sample.fields
        nested = fields.get("reward_model")
        values = [fields.get(name) for name in dict.fromkeys((*form.needed_columns, *_TRUTHS))]
        values.insert(0, nested.get("ground_truth") if isinstance(nested, Mapping) else None)
        found: dict[str, None] = {}
        for value in [fields.get("answer"), *values] if self.reward.rule in RULES else values:
            with contextlib.suppress(ValueError):  # a mapping of which nothing is known
                for text in itertools.islice(texts_of_answer(value), 2):
                    found |= dict.fromkeys(filter(None, (text.rpartition("####")[2].strip(), text)))
        return list(found)[:_MOST_ANSWERS]

    def _wrong(self, sample: PromptSample, rights: Sequence[str], form: Form) -> str:
        """A text that is no right answer: another number, or another record's answer."""
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
        )

    def _values(self, source: RewardSource, sample: PromptSample, texts: Sequence[str]) -> list[float | None]:
        """Raises: ValueError for a failure that would end the run, or where there is nothing else."""
        outcomes = source.start(self._batch(sample, texts)).wait() or []
        failed = [(text, outcome.error) for text, outcome in zip(texts, outcomes, strict=True) if outcome.error]
        if failed and (self.reward.on_failure == "stop" or len(failed) == len(outcomes)):
            text, error = failed[0]
            raise ValueError(
                f"reward {self.label!r} {error} (called before the start, which check: none leaves out; response "
                f"{short(text)} to a record of {self.key}, {_of(sample)})"
            )
        return [outcome.value for outcome in outcomes]

    def _judged(
        self, sample: PromptSample, rights: Sequence[str], wrong: str, seen: Sequence[float], form: Form
    ) -> list[str]:
        """Right and wrong answers scored alike. Raises: ValueError where that is not meant."""
        alike = len(set(seen)) == 1
        if not rights:
            what = "the records have no answer, so that it was only called"
            return [f"reward {self.label!r} gives {seen[0]:g} for two texts; {what}"] if alike else []
        if self.reward.check == "call" or not (alike or _reads_truth(form)):
            return []
        how = f"{seen[0]:g} for all texts" if alike else "the same for either, in every form that was tried"
        raise ValueError(
            f"reward {self.label!r} does not tell a right answer from a wrong one: to a record of {self.key} "
            f"({_of(sample)}) it gives {how}, with {short(rights[0])} as the right answer and {short(wrong)} as a "
            "wrong one, as they stand, in \\boxed{}, behind ####, in <answer> and so on. Nothing could be learnt. "
            "Look at what it compares and returns; where that is meant, or no such text can be right, say check: call"
        )


def _of(sample: PromptSample) -> str:
    return f"prompt {short(sample.text)}, fields {short(sample.fields)}"


def _reads_truth(form: Form) -> bool:
    """Whether the function names the right answer among its parameters."""
    return not {*form.names, *form.places}.isdisjoint({*_TRUTHS, "ground_truths"})
