"""Trial of a chat template at the start of a run: where are conversations of several turns written as they are sampled?

Synthetic conversations are tried, so that a template that cannot be used is reported before the first step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megarlhf.data.text.templates import ChatTemplate, Conversation
from megarlhf.rollout.environments.rendering import ChatRendering, OnRewriting, Outcome

TrialOutcome = Literal[Outcome, "refused"]
_ORDER: tuple[TrialOutcome, ...] = ("exact", "white_space", "rewritten", "refused")
_ANSWER, _THOUGHT, _OBSERVED = "zqanswer", "zqthought", "zqobserved"


@dataclass(frozen=True)
class TemplateTrial:
    """Outcome of conversations of one kind."""

    follows: tuple[str, ...]
    """Role of the environment's messages after each turn of the model, such as ("tool", "user")."""
    thought: bool
    """Whether the model's turns begin with a thought, `<think>...</think>`."""
    outcome: TrialOutcome
    """The worst of all turns. `refused`: the template cannot be continued there at all."""
    reason: str
    """Sentence about the worst turn. Empty if `exact`."""


def try_template(
    template: ChatTemplate,
    prompt: Conversation | None = None,
    roles: Sequence[str] = ("user", "tool"),
    end_ids: Collection[int] = (),
) -> list[TemplateTrial]:
    """Try a template on conversations of two turns of the model, with plain answers and with thoughts.

    prompt: the beginning, such as the first of the data, with its tools; by default a short message of the user
    roles: of the messages that the environment may return. Where a tool answers, two messages follow the first turn, as
        after two calls at once. With `tool` and `user`, a conversation in which both answer is tried too.
    end_ids: tokens at which the run ends a turn, besides the template's. GLM's models use the next message's mark
    """
    prompt = prompt or Conversation([{"role": "user", "content": "zqquestion"}])
    orders = [(role, role) for role in roles] + [("tool", "user")] * ({"tool", "user"} <= set(roles))
    return [_tried(template, prompt, order, thought, end_ids) for order in orders for thought in (False, True)]


def _tried(
    template: ChatTemplate, prompt: Conversation, order: tuple[str, ...], thought: bool, end_ids: Collection[int]
) -> TemplateTrial:
    rendering, conversation = ChatRendering(template, "as_sampled"), prompt
    outcome: TrialOutcome = "exact"
    reason = ""
    for number, role in enumerate(order):
        try:
            messages = _observed(role, number)
            text = _turn(template, conversation, messages, number, thought)
            cut = rendering.delta(conversation, text, messages, ended_by=None)
            ended_by = cut.ids[0] if cut.ids[0] in end_ids else template.end
            delta = rendering.delta(conversation, text, messages, ended_by=ended_by)
        except ValueError as error:
            return TemplateTrial(order, thought, "refused", f"turn {number + 1}: {error}")
        if _ORDER.index(delta.history) > _ORDER.index(outcome):
            outcome, reason = delta.history, f"turn {number + 1}: {delta.reason}"
        assert isinstance(delta.conversation, Conversation), "the prompt is one"
        conversation = delta.conversation
    return TemplateTrial(order, thought, outcome, reason)


def _turn(
    template: ChatTemplate, before: Conversation, messages: list[dict[str, Any]], number: int, thought: bool
) -> str:
    """A turn of the model. It begins with what the template writes before answers and does not ask with: a space
    (Mistral's), or an empty thought."""
    asked, answer = template.text(before, reply=True), f"{_ANSWER}{number}"
    turn = {"role": "assistant", "content": answer}
    whole = template.text(replace(before, messages=[*before.messages, turn, *messages]), reply=True)
    head, _, _ = whole.rpartition(answer)
    lead = head[len(asked) :] if head.startswith(asked) else ""
    if not thought:
        return lead + answer
    opened = "" if asked.rstrip().endswith("<think>") else "<think>\n"
    return f"{lead if lead.isspace() else ''}{opened}{_THOUGHT}{number}\n</think>\n\n{answer}"


def _observed(role: str, number: int) -> list[dict[str, Any]]:
    """Messages of the environment. The ids of calls have nine characters, as Mistral's."""
    if role != "tool":
        return [{"role": role, "content": f"{_OBSERVED}{number}"}]
    calls = range(2 * number, 2 * number + 2 - number)
    return [{"role": role, "content": f"{_OBSERVED}{n}", "tool_call_id": f"aaaaaaaa{n}"} for n in calls]


def describe_trials(trials: Sequence[TemplateTrial], history: OnRewriting) -> list[str]:
    """Sentences about a template, for the start of a run. `history`: `environment.history` of the run."""
    refusing = (
        "such a turn ends the run with an error (environment.history: refuse); with as_sampled what was sampled stays, "
        "and is counted"
    )
    counting = "what was sampled stays, and is counted"
    sentences: dict[TrialOutcome, tuple[str, str]] = {
        "exact": ("keeps the history as it was sampled", ""),
        "white_space": ("changes white space of the history", f"; {counting}"),
        "rewritten": ("rewrites the history", f"; {refusing if history == 'refuse' else counting}"),
        "refused": ("cannot be continued", "; such a turn ends the run with an error"),
    }
    described = []
    for outcome, (holds, follows) in sentences.items():
        if same := [trial for trial in trials if trial.outcome == outcome]:
            reason = f" For example, {same[0].reason}." if same[0].reason else ""
            described.append(f"The chat template {holds} where these answer: {_situations(same)}{follows}.{reason}")
    return described


def _situations(trials: Sequence[TemplateTrial]) -> str:
    """Roles that answer, such as "tool, user (to plain turns)"."""
    kinds: dict[str, list[bool]] = {}
    for trial in trials:
        kinds.setdefault(" and then ".join(dict.fromkeys(trial.follows)), []).append(trial.thought)
    names = {True: " (to turns with a thought)", False: " (to plain turns)"}
    return ", ".join(role + (names[thoughts[0]] if len(thoughts) == 1 else "") for role, thoughts in kinds.items())
