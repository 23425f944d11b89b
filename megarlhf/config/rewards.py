"""Configuration of rewards: their sources, the handling of failures, their scaling and weighted sum."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from megarlhf.config.roles import FrozenModel, Positive

_ONLY_OF: dict[str, tuple[str, ...]] = {
    "rule": ("rule",),
    "args": ("rule",),
    "url": ("http",),
    "token_env": ("http",),
    "timeout_seconds": ("rule", "http"),
    "retries": ("rule", "http"),
    "workers": ("rule", "http"),
    "batch_samples": ("rule", "http", "classifier"),
    "on_failure": ("rule", "http", "classifier"),
    "check": ("rule", "http"),
    "path": ("classifier",),
    "classifier_label": ("classifier",),
    "output": ("classifier",),
    "form": ("classifier",),
    "append_eos": ("classifier",),
    "dtype": ("classifier",),
    "retokenize": ("model",),
    "max_tokens": ("model",),
    "too_long": ("model",),
}
"""Kinds that read a key. Keys that are not listed are read by all kinds."""
IN_WORKERS = ("math_verify", "reasoning_gym", "regex")
"""Built-in rules that may take long, and so run in worker processes."""
_WORKER_KEYS = ("timeout_seconds", "retries", "workers", "batch_samples")
"""Keys that the other built-in rules do not read, as these run in the rank."""


class RewardConfig(FrozenModel):
    kind: Literal["model", "rule", "http", "classifier", "environment"]
    """`model`: the role `reward_model`. `rule`: a function. `http`: a reward model behind a URL. `classifier`: a
    Hugging Face sequence classifier, whole on each rank, with a tokenizer of its own. `environment`: the rewards of the
    environment's answers, each at the last token of its turn."""
    rule: str | None = None
    """A name from the rule registry, or `package.module:function`."""
    args: Mapping[str, Any] = {}
    """Arguments of a built-in rule, such as `{names: [think, answer]}` of `tags`."""
    url: str | None = None
    """Address for kind `http`. It gets {query, prompts, labels} by POST and answers {rewards}, like OpenRLHF's
    server."""
    token_env: str | None = None
    """Environment variable with the token for kind `http`, which is sent as `Authorization: Bearer`."""
    path: Path | None = None
    """Directory of the model of kind `classifier`. One without a head is refused, since its scores would be random."""
    classifier_label: str | int | None = None
    """Label of the `classifier`, by name or number, whose score is the reward; required if it has several."""
    output: Literal["logit", "probability"] = "logit"
    """Score of the `classifier`: the label's logit or its probability. The probability is a sigmoid for a single label,
    or if the classifier's problem_type is multi_label_classification; else a softmax."""
    form: Literal["joined", "pair", "chat"] = "joined"
    """Input of the `classifier`: prompt and response as one text, as two, or as a conversation in the classifier's own
    chat template. A text longer than the model takes is not cut: the reward fails."""
    append_eos: bool = False
    """For kind `classifier` with form `joined`: append the end-of-sequence token to a finished response, for a reward
    model that was trained with it."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Weights and computation of the `classifier`."""
    retokenize: bool = False
    """For kind `model`: the reward model has another tokenizer than the actor. It reads the text of prompt and response
    (with `data.template: chat` the messages, in its own chat template) with its own tokenizer."""
    max_tokens: PositiveInt | None = None
    """Longest text in tokens, with `retokenize`. Default: the lower of the model's limit and
    `train.max_tokens_per_micro_batch`."""
    too_long: Literal["fail", "cut"] = "fail"
    """A text over `max_tokens` (with `retokenize`) ends the run, or its beginning is cut off and
    `reward/NAME_truncated` counts it."""
    name: Annotated[str, Field(pattern=r"^[\w.:/+-]+$")] | None = None
    """Name in metrics and messages; default: the rule's name, or the kind."""
    weight: float = 1.0
    """Factor of the reward in the sum, after `shift`, `clip` and `normalise`; may be negative."""
    shift: float = 0.0
    """Number that is subtracted first."""
    clip: Positive | None = None
    """Clip to [-clip, clip] after `shift`. Without `normalise` the reward is weight x clip(reward - shift)."""
    normalise: Literal["none", "running", "group"] = "none"
    """`running`: subtract the mean and divide by the standard deviation of all values of the run so far, including this
    step; samples that dynamic sampling dropped, or with a failed reward, do not count. `group`: the same within each
    group of responses to one prompt (GDPO, 2026), 0 if a group's values are equal; weights then give the influence of
    each reward, independent of its scale."""
    normalise_eps: Positive = 1e-6
    """For `normalise: group`: added to a group's deviation. verl uses 1e-6, TRL's GDPO 1e-4."""
    timeout_seconds: Positive = 60.0
    """Time limit of one call of the function or the server. Functions run in worker processes; a call that takes longer
    is killed and fails."""
    retries: Annotated[int, Field(ge=0)] | None = None
    """Retries if a process or a server gives no answer, after growing pauses; default: 0 for a rule, 4 for http. An
    exception of the function itself is not retried."""
    workers: Annotated[int, Field(ge=0)] = 1
    """Worker processes of each rank that run the function; for http, concurrent requests of each rank. 0: the function
    runs in the rank itself, where no call has a time limit; the watchdog then ends the run."""
    batch_samples: PositiveInt | None = None
    """Responses in one call of a function that takes a batch (default: all of the rank), in one request (32), or in one
    forward of a classifier (32)."""
    on_failure: Literal["stop", "drop"] = "stop"
    """Handling of a failed reward: end the run, or leave the sample out of the step and count it. It is left out even
    if other rewards apply to it: their sum would count the failed one as 0."""

    check: Literal["auto", "scores", "call", "none"] = "auto"
    """Check before a start. `scores`: call the reward on one record, with right and wrong answers if the records have
    answers, and refuse scores that are all equal. `call`: call it, and allow equal scores. `none`: do not call it.
    `auto`: `scores`, but `none` for an async function and for http, which cost money or need a server."""

    @property
    def label(self) -> str:
        """Name in metrics and messages."""
        return self.name or self.rule or self.kind

    @model_validator(mode="after")
    def _check(self) -> RewardConfig:
        for key, kind in (("rule", "rule"), ("url", "http"), ("path", "classifier")):
            if (self.kind == kind) != (getattr(self, key) is not None):
                raise ValueError(
                    f"a reward of kind {self.kind!r} got {key} = {getattr(self, key)!r}; kind {kind!r} needs a {key}, "
                    "the others take none"
                )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r}, expected http://HOST:PORT/PATH or https://...")
        if self.kind == "http" and not self.workers:
            raise ValueError("workers = 0 sends no request; give 1 or more")
        if self.rule in IN_WORKERS and not self.workers:
            raise ValueError(f"rule {self.rule!r} runs in processes of its own; workers = 0, give 1 or more")
        runs_in_rank = self.rule is not None and ":" not in self.rule and self.rule not in IN_WORKERS
        if runs_in_rank and (given := self.changed(*_WORKER_KEYS)):
            raise ValueError(
                f"rule {self.rule!r} runs in the rank and does not read {', '.join(given)}; leave that out"
            )
        unread = [key for key, kinds in _ONLY_OF.items() if self.kind not in kinds and key in self.model_fields_set]
        if unread and (set_keys := self.changed(*unread)):
            raise ValueError(f"a reward of kind {self.kind!r} does not read {', '.join(set_keys)}; leave that out")
        if self.kind == "environment" and (scaled := self.changed("shift", "clip", "normalise")):
            raise ValueError(
                f"a reward of kind 'environment' is one of turns, to which {', '.join(scaled)} does not apply; scale "
                "it in the environment, or by weight"
            )
        if self.normalise != "group" and self.changed("normalise_eps"):
            raise ValueError(f"normalise_eps is for normalise: group; got normalise = {self.normalise}: change one")
        if self.kind == "model" and not self.retokenize and (self.max_tokens is not None or self.too_long != "fail"):
            raise ValueError(
                "max_tokens and too_long are for texts in the reward model's own tokenizer; set retokenize: true, or "
                "leave them out"
            )
        return self


def require_distinct_labels(rewards: Sequence[RewardConfig]) -> None:
    """Raises: ValueError for rewards with one label, whose figures would have one name."""
    labels = [reward.label for reward in rewards]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise ValueError(
            f"rewards has {', '.join(repeated)} more than once, and figures would have one name; once will do, or give "
            "them names: rewards[].name"
        )


def unique_labels(rewards: Sequence[RewardConfig]) -> list[str]:
    """A different label for each reward. Equal labels are numbered: `judge_1`, `judge_2`."""
    plain = [reward.label for reward in rewards]
    taken, labels = {label for label in plain if plain.count(label) == 1}, []
    for label in plain:
        numbered = (f"{label}_{n}" for n in itertools.count(1))
        unique = label if plain.count(label) == 1 else next(name for name in numbered if name not in taken)
        taken.add(unique)
        labels.append(unique)
    return labels
