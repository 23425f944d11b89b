"""Configuration of rewards: what gives them, how failures are treated, how they are scaled and added up."""

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
"""Keys that not every kind reads."""
IN_WORKERS = ("math_verify", "reasoning_gym", "regex")
"""Built-in rules that take any time, and so run in processes of their own."""
_OF_WORKERS = ("timeout_seconds", "retries", "workers", "batch_samples")
"""Keys that built-in rules do not read which run in the rank: they take no time to speak of."""


class RewardConfig(FrozenModel):
    kind: Literal["model", "rule", "http", "classifier"]
    """`model`: the role `reward_model`. `rule`: a function. `http`: a reward model behind a URL. `classifier`: a
    Hugging Face sequence classifier, whole on each rank, with a tokenizer of its own."""
    rule: str | None = None
    """A name from the rule registry, or `package.module:function`."""
    args: Mapping[str, Any] = {}
    """Arguments of a built-in rule, such as `{names: [think, answer]}` of `tags`."""
    url: str | None = None
    """Of kind `http`: gets {query, prompts, labels} by POST and answers {rewards}, as OpenRLHF's server does."""
    token_env: str | None = None
    """Of kind `http`: the environment variable that holds the token, which is sent as `Authorization: Bearer`."""
    path: Path | None = None
    """Of kind `classifier`: its directory. A checkpoint without a head is refused, since scores would be random."""
    classifier_label: str | int | None = None
    """Of kind `classifier`: name or number of the label whose score is the reward; needed where it has several."""
    output: Literal["logit", "probability"] = "logit"
    """Of kind `classifier`: the label's logit, or its probability: a sigmoid for one label, or where the classifier's
    problem_type is multi_label_classification; else a softmax."""
    form: Literal["joined", "pair", "chat"] = "joined"
    """Of kind `classifier`: prompt and response as one text, as two, or as a conversation in the classifier's own chat
    template. A text longer than the model takes is not cut: it has failed."""
    append_eos: bool = False
    """Of kind `classifier` in the form `joined`: write the end-of-sequence token behind a finished response, as a
    reward model expects that was trained so."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of kind `classifier`: its weights and computation."""
    retokenize: bool = False
    """Of kind `model`: the reward model has another tokenizer than the actor. It is given the text of prompt and
    response (with `data.template: chat` the messages, in its own chat template), by its own tokenizer."""
    max_tokens: PositiveInt | None = None
    """With `retokenize`: the longest text in tokens. Default: what the model can read, and
    `train.max_tokens_per_micro_batch`."""
    too_long: Literal["fail", "cut"] = "fail"
    """With `retokenize`: a text over `max_tokens` ends the run, or its beginning is cut off and
    `reward/NAME_truncated` counts it."""
    name: Annotated[str, Field(pattern=r"^[\w.:/+-]+$")] | None = None
    """In metrics and messages; default: the rule's name, or the kind."""
    weight: float = 1.0
    """Multiplies what comes out of `shift`, `clip` and `normalise`; may be negative."""
    shift: float = 0.0
    """Subtracted first."""
    clip: Positive | None = None
    """Then held in [-clip, clip]. Without `normalise` the reward used is weight x clip(reward - shift)."""
    normalise: Literal["none", "running", "group"] = "none"
    """`running`: less the mean and over the standard deviation of all values of the run so far, of the samples that
    dynamic sampling kept and of which no reward failed, those of the step counted in. `group`: the same within each
    group of responses to one prompt (GDPO, 2026), 0 where a group's values are equal; weights then say how much each
    reward counts, whatever its scale."""
    normalise_eps: Positive = 1e-6
    """Of `normalise: group`: added to a group's deviation. verl has 1e-6, TRL's GDPO 1e-4."""
    timeout_seconds: Positive = 60.0
    """Of a call of the function or the server. Functions run in processes of their own; one that takes longer is ended
    and has failed."""
    retries: Annotated[int, Field(ge=0)] | None = None
    """Further tries where a process or a server gave no answer, after a growing pause; default: 0 for a rule, 4 for
    http. What a function itself raises is not tried again."""
    workers: Annotated[int, Field(ge=0)] = 1
    """Processes of each rank that run the function; for http, requests of each rank at the same time. 0: the function
    runs in the rank itself, where no call is ended that takes too long; then the watchdog ends the run."""
    batch_samples: PositiveInt | None = None
    """Responses for one call of a function that takes a batch (default: all of the rank), for one request, or for one
    forward of a classifier (32)."""
    on_failure: Literal["stop", "drop"] = "stop"
    """What a reward that could not be had means: the run ends, or the sample is left out of the step and counted, also
    where other rewards apply to it: a sum without this one would count it as 0."""

    check: Literal["auto", "scores", "call", "none"] = "auto"
    """Before a start. `scores`: it is called on one record, with right and with wrong answers where the records have
    one, and scores that are all equal are refused. `call`: it is called, and may score all alike. `none`: it is not
    called. `auto`: scores; none for an async function and for http, which cost or need a server."""

    @property
    def label(self) -> str:
        """In metrics and messages."""
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
        if self.rule is not None and ":" not in self.rule and self.rule not in IN_WORKERS:
            fields = type(self).model_fields
            if given := [key for key in _OF_WORKERS if getattr(self, key) != fields[key].default]:
                raise ValueError(
                    f"rule {self.rule!r} runs in the rank and does not read {', '.join(given)}; leave that out"
                )
        unread = [key for key, kinds in _ONLY_OF.items() if self.kind not in kinds and key in self.model_fields_set]
        if set_keys := [key for key in unread if getattr(self, key) != type(self).model_fields[key].default]:
            raise ValueError(f"a reward of kind {self.kind!r} does not read {', '.join(set_keys)}; leave that out")
        if self.normalise != "group" and self.normalise_eps != type(self).model_fields["normalise_eps"].default:
            raise ValueError(f"normalise_eps is of normalise: group; got normalise = {self.normalise}: change one")
        if self.kind == "model" and not self.retokenize and (self.max_tokens is not None or self.too_long != "fail"):
            raise ValueError(
                "max_tokens and too_long are about texts that the reward model's own tokenizer makes; set "
                "retokenize: true, or leave them out"
            )
        return self


def unique_labels(rewards: Sequence[RewardConfig]) -> list[str]:
    """A name for each reward, all different; where several have one name, they are numbered."""
    plain = [reward.label for reward in rewards]
    taken, found = {label for label in plain if plain.count(label) == 1}, []
    for label in plain:
        numbered = (f"{label}_{n}" for n in itertools.count(1))
        name = label if plain.count(label) == 1 else next(each for each in numbered if each not in taken)
        taken.add(name)
        found.append(name)
    return found
