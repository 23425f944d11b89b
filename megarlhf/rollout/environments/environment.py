"""The configured environment on one rank: its processes, what the template writes between turns, and its limits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarlhf.config import ConversationConfig, EvaluateConfig, GenerateConfig, RLConfig
from megarlhf.config.ask import AskConfig
from megarlhf.config.environment import EnvironmentConfig
from megarlhf.data.records.conversations import tools_of, variables_of
from megarlhf.data.sample_types import PromptSample
from megarlhf.data.samples.encoders import NO_TEMPLATE_FOR_TOOLS
from megarlhf.data.text.templates import Conversation, chat_template, has_template
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.rollout.environments.answer import Answer, Messages
from megarlhf.rollout.environments.pool import EnvironmentPool
from megarlhf.rollout.environments.rendering import ChatRendering, HistoryRewritten, NotContinued, PlainRendering
from megarlhf.rollout.environments.transcript import Transcript
from megarlhf.rollout.responses import Sampling
from megarlhf.rollout.tools.described import tools_start
from megarlhf.rollout.tools.forms.scan import THOUGHTS
from megarlhf.rollouts import Rollouts

log = logging.getLogger(__name__)

_MARK_TOKENS = 16
"""Tokens before a turn in which a mark is looked for; a tokenizer may divide it."""


@dataclass(frozen=True)
class Continuation:
    """Tokens before a turn, and the conversation that they belong to."""

    tokens: list[int]
    talk: Talk
    history: str = "exact"
    """How the template writes the turn before: `rendering.Outcome`."""


@dataclass(frozen=True)
class Talk:
    """A conversation before a turn."""

    conversation: Conversation | str
    """All messages before the turn; the prompt's text where prompts have no template."""
    begun: str = ""
    """Text of the turn that is written already, because the environment answered inside it."""


@dataclass(frozen=True)
class Resting:
    """A conversation that waits for a later round, with its environment."""

    key: int
    """Number in the pool."""
    digest: str
    """Digest of the tokens that were written."""
    talk: Talk


@dataclass(frozen=True)
class TurnLimits:
    """Limits of a conversation besides that of all tokens after the prompt."""

    max_turns: int
    max_turn_tokens: int


class Environment:
    """The environment of a run. Each rank asks its own processes."""

    def __init__(
        self,
        section: EnvironmentConfig,
        data: ConversationConfig,
        tokenizer: Tokenizer,
        *,
        tokenizer_place: Path = Path(),
        end_ids: Sequence[int],
        max_tokens: int,
    ) -> None:
        """
        tokenizer_place: directory of the tokenizer
        max_tokens: `rollout.max_response_tokens`
        """
        self.limits = TurnLimits(section.max_turns, min(section.max_turn_tokens or max_tokens, max_tokens))
        self.on_failure = section.on_failure
        self._tokenizer, self._end_ids = tokenizer, frozenset(end_ids)
        self.chat = rendering_of(section, data, tokenizer)
        self._plain = PlainRendering(tokenizer)
        tools = None
        if section.tools:
            if self.chat is None:
                raise ValueError(NO_TEMPLATE_FOR_TOOLS)
            tools = tools_start(section, self.chat.template, tokenizer_place)
        self.pool = EnvironmentPool(
            section.function or "",
            section.args,
            workers=section.workers,
            seconds_per_step=section.seconds_per_step,
            tools=tools,
            interface=section.interface,
            python=section.interpreter,
        )
        self._resting: dict[int, Resting] = {}
        self._resting_before: dict[int, Resting] = {}
        """Conversations that rest since the last round, by seed."""
        self._reported: set[str] = set()

    def close(self) -> None:
        """End the environment's processes."""
        self.pool.close()

    # --- texts and tokens -----------------------------------------------------------------------

    def text(self, tokens: Sequence[int], *, finished: bool) -> str:
        """Text of a turn, as environments and rewards read it: with special tokens, such as one that begins a call of
        a tool, except the one that ends it."""
        is_ended = bool(tokens) and tokens[-1] in self._end_ids
        text = self._tokenizer.decode(tokens[:-1] if is_ended else tokens, continuation=True, special=True)
        # A turn that was cut may end inside a character, which the replacement character marks.
        return text if finished else text.removesuffix("\N{REPLACEMENT CHARACTER}")

    def opened(self, before: Sequence[int]) -> str:
        """Mark of a thought that stands open before a turn. `before`: the tokens there"""
        text = self._tokenizer.decode(before[-_MARK_TOKENS:], continuation=True, special=True).rstrip()
        return next((mark for mark in THOUGHTS if text.endswith(mark)), "")

    def opening(self, prompt: PromptSample, answer: Answer) -> Continuation:
        """The beginning of a conversation; no tokens if the answer of `reset` adds nothing to the prompt's.

        Raises: ValueError for messages that cannot be written.
        """
        asked = self.asked(prompt)
        if not answer.messages:
            return Continuation([], Talk(asked))
        opening = self._rendering(asked).opening(asked, answer.messages)
        begun = answer.messages if isinstance(answer.messages, str) and not isinstance(asked, str) else ""
        return Continuation(opening.ids, Talk(opening.conversation, begun))

    def between(self, talk: Talk, turn: Sequence[int], observation: Messages | str) -> Continuation:
        """Tokens between a turn that the model has ended and the next one.

        turn: its tokens. observation: messages, or the text, of the environment's answer

        Raises: ValueError for an answer that cannot be written.
        """
        text = talk.begun + self.text(turn, finished=True)
        ended_by = turn[-1] if turn and turn[-1] in self._end_ids else None
        delta = self._rendering(talk.conversation).delta(talk.conversation, text, observation, ended_by=ended_by)
        begun = text + observation if isinstance(observation, str) else ""
        return Continuation(delta.ids, Talk(delta.conversation, begun), delta.history)

    def talk(
        self, prompt: PromptSample, observations: Sequence[Messages | str], turns: Sequence[Sequence[int]]
    ) -> Talk:
        """A conversation before a turn, put together again.

        observations: `Dialogue.observations`. turns: tokens of each turn that was answered

        Raises: ValueError for an answer that cannot be written.
        """
        if not observations:  # `reset` has failed
            return Talk(self.asked(prompt))
        talk = self.opening(prompt, Answer(observations[0])).talk
        for turn, observation in zip(turns, observations[1:], strict=True):
            talk = self.between(talk, turn, observation).talk
        return talk

    def asked(self, prompt: PromptSample) -> Conversation | str:
        """The prompt, with the tools and template variables of its record."""
        if prompt.messages is None:
            return prompt.text
        messages, fields = [dict(message) for message in prompt.messages], prompt.fields
        return Conversation(messages, tools_of(fields), variables=variables_of(fields))

    def _rendering(self, conversation: Conversation | str) -> ChatRendering | PlainRendering:
        if isinstance(conversation, str):
            return self._plain
        assert self.chat is not None, "a prompt of messages was written by a template"
        return self.chat

    def transcript(self, prompt: PromptSample, rollouts: Rollouts, sample: int) -> Transcript:
        """A sample as text."""
        assert rollouts.stretches is not None, "samples without an environment"
        split = rollouts.responses.rows()[sample].split(rollouts.stretches.sampled.rows()[sample].tolist())
        tokens = [turn.tolist() for turn in split]
        observations, finished = rollouts.dialogues[sample].observations, bool(rollouts.finished_N[sample])
        ends = [True] * (len(tokens) - 1) + [finished]
        turns = [self.text(turn, finished=end) for turn, end in zip(tokens, ends, strict=True)]
        if prompt.messages is None:
            parts = zip(observations, [*turns[:-1], ""], strict=False)
            return Transcript(turns, prompt.text + "".join(f"{text or ''}{turn}" for text, turn in parts))
        assert self.chat is not None, "a prompt of messages was written by a template"
        talk = self.talk(prompt, observations, tokens[:-1])
        assert isinstance(talk.conversation, Conversation)
        messages, before = talk.conversation.messages, self.chat.template.text(talk.conversation, reply=True)
        begun = [{"role": "assistant", "content": talk.begun}] * bool(talk.begun)
        last = {"role": "assistant", "content": self.chat.content(talk.conversation, talk.begun + turns[-1])}
        return Transcript(turns, before + talk.begun, [*messages, *begun], [*messages, last])

    def is_fatal(self, error: ValueError) -> bool:
        """Whether an error is one of the configuration, which no other answer mends."""
        return isinstance(error, HistoryRewritten | NotContinued)

    # --- conversations that rest ----------------------------------------------------------------

    def next_round(self) -> None:
        """Forget resting conversations that this rank did not go on with in the last round."""
        for resting in self._resting_before.values():
            self.pool.forget(resting.key)
        self._resting, self._resting_before = {}, self._resting

    def rest(self, seed: int, resting: Resting) -> None:
        """Keep the environment of a conversation that goes on in a later round."""
        self._resting[seed] = resting

    def rested(self, seed: int, digest: str) -> Resting | None:
        """Take back the conversation of a seed; None if this rank has none that has seen these tokens."""
        resting = self._resting_before.pop(seed, None)
        if resting is not None and resting.digest != digest:
            self.pool.forget(resting.key)
            return None
        return resting

    def report(self, where: str, error: str, follows: str) -> None:
        """Log a failure that the run survives; an equal error once."""
        if error not in self._reported:
            self._reported.add(error)
            log.warning("%s %s; %s (further failures of this kind are counted only)", where, error, follows)


def environment_of(
    cfg: RLConfig | GenerateConfig | EvaluateConfig | AskConfig, tokenizer: Tokenizer, sampling: Sampling
) -> Environment | None:
    """The environment of a configuration, with its processes; None if it has none."""
    if cfg.environment is None:
        return None
    assert cfg.actor is not None, "it draws responses"
    return Environment(
        cfg.environment,
        cfg.data,
        tokenizer,
        tokenizer_place=cfg.actor.model.tokenizer_place(),
        end_ids=sampling.end_ids,
        max_tokens=cfg.rollout.max_response_tokens,
    )


def rendering_of(section: EnvironmentConfig, data: ConversationConfig, tokenizer: Tokenizer) -> ChatRendering | None:
    """Rendering of conversations by the chat template; None where prompts are texts."""
    mode = data.template_mode
    if mode == "plain" or (mode == "auto" and not has_template(tokenizer)):
        return None
    template = chat_template(tokenizer, data.chat_template_text(), data.template_args)
    return ChatRendering(template, section.history, data.template_may_drop)
