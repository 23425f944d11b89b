"""Conversations with an environment: the requests of an engine turn by turn, and the samples that come of them.

The ranks of an engine keep the same tokens of each of its conversations. The owner of a row, one of them, asks the
environment and makes the sample. What was sampled is never rendered or tokenized again: between two turns stand the
tokens that the chat template writes there.

Legend: a position is the number of tokens that were written after the prompt, sampled or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarlhf.collective_errors import raise_on_all_ranks
from megarlhf.data.sample_types import PromptSample
from megarlhf.errors import EnvironmentFailure
from megarlhf.own_code.failures import short
from megarlhf.rollout.conversation_state import ConversationState, digest, with_answer
from megarlhf.rollout.engine import EngineFailure, RolloutEngine, RolloutInterrupted
from megarlhf.rollout.environments.answer import Answer, Turn
from megarlhf.rollout.environments.environment import Continuation, Environment, Resting
from megarlhf.rollout.environments.pool import AnsweredCall, Reply
from megarlhf.rollout.in_flight import Requests
from megarlhf.rollout.requests import EngineRequest, News
from megarlhf.rollout.responses import (
    AnsweredTurn,
    FinishedResponses,
    Response,
    ResponsePart,
    Sampling,
    end_of,
    turn_seed,
)
from megarlhf.rollouts import Dialogue, EndedBy, Rollouts

MAX_REDRAWS = 3
"""Times that a conversation begins anew. One more failure is handled as with `on_failure: stop`."""
_WAIT_SECONDS = 0.005


class Conversations:
    """The conversations of one rollout: a `RequestSource`."""

    def __init__(
        self,
        environment: Environment,
        prompts: Sequence[PromptSample],
        seeds: Sequence[int],
        sampling: Sampling,
        *,
        untils: Sequence[int] | None = None,
        begun: Sequence[Response] | None = None,
        environment_seeds: Sequence[int] | None = None,
    ) -> None:
        """
        untils: position up to which each conversation is drawn now; default: the longest
        begun:  conversations as far as earlier weights have drawn them
        environment_seeds: seeds for `reset`; default: `seeds`
        """
        self._environment, self._prompts, self._sampling = environment, prompts, sampling
        self._seeds, self._environment_seeds = seeds, environment_seeds or seeds
        self._may_rest = untils is not None
        self._untils = [sampling.max_tokens] * len(prompts) if untils is None else untils
        self._begun = [None] * len(prompts) if begun is None else begun
        self._version = -1
        self._rows: dict[int, ConversationState] = {}
        self._waiting: set[int] = set()
        self._row_of: dict[int, int] = {}
        """Rows of this rank by the number of their conversation in the pool."""
        self._ready: list[int] = []
        """Rows of this rank whose environment is as it was left."""
        self._bank = FinishedResponses()
        self._recorded: dict[int, list[AnsweredTurn]] = {}
        self.failure: str = ""
        """Message about a failure on this rank that ends the run."""

    # --- what an engine calls -------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def restart(self, bank: FinishedResponses, version: int) -> None:
        if self._may_rest:
            self._environment.next_round()
        for row in self._rows.values():
            self._forget(row)
        self._rows, self._waiting, self._row_of, self._ready = {}, set(), {}, []
        self._bank, self._version = bank, version
        by_rank: list[dict[int, list[AnsweredTurn]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, bank.turns)
        # Another rank may own a row from now on, so each begins with what any rank has recorded.
        self._recorded = {row: turns for of_rank in by_rank for row, turns in of_rank.items()}
        bank.turns.clear()

    def begin(self, row: int, *, mine: bool) -> None:
        state = self._rows[row] = self._restored(row)
        self._waiting.add(row)
        if not mine:
            return
        state.mine = True
        if row in self._recorded:
            self._bank.turns[row] = list(self._recorded[row])
        self._ask_to_begin(row, state)

    def request(self, row: int) -> EngineRequest:
        """The row's next request."""
        state, limits = self._rows[row], self._environment.limits
        so_far = state.turn
        count = min(state.until - state.position, limits.max_turn_tokens - len(so_far))
        seed = turn_seed(self._seeds[row], state.num_answered)
        tokens = torch.tensor(state.start + state.written)
        return EngineRequest(tokens, seed, ResponsePart(np.array(so_far, dtype=np.int64), len(so_far) + count))

    def drawn(self, row: int, response: Response) -> Response | None:
        state, limits = self._rows[row], self._environment.limits
        state.add(response.tokens, response.logprobs, response.versions)
        state.finished = response.finished
        is_cut = len(state.turn) >= limits.max_turn_tokens or state.position >= self._sampling.max_tokens
        if not (response.finished or is_cut) or state.is_final:
            assert state.is_final or state.position == state.until, "a turn ended neither at its end nor at a limit"
            return self._done(row)
        self._waiting.add(row)
        if state.mine:
            assert state.key is not None
            self._environment.pool.step(state.key, self._turn(state))
        return None

    def news(self) -> list[News]:
        news = [News(row, "ready") for row in self._ready]
        self._ready = []
        for reply in self._environment.pool.replies():
            row = self._row_of.get(reply.key)
            if row is not None:
                news.append(self._news_of(row, reply))
        return news

    def take(self, news: News) -> EngineRequest | Response | None:
        row, state = news.row, self._rows[news.row]
        if news.kind == "anew":
            fresh = ConversationState(state.prompt, state.until)
            if state.mine:
                fresh = replace(fresh, mine=True, key=state.key, dialogue=state.dialogue)
            self._rows[row] = fresh
            return None
        self._waiting.discard(row)
        if news.kind == "over":
            return self._done(row)
        if news.kind == "opening":
            state.open(news.tokens)
        elif news.kind == "final":
            state.is_final = True
        elif news.kind == "observed":
            state.observe(news.tokens)
        if state.position >= state.until:  # it rests until newer weights go on with it
            return self._done(row)
        return self.request(row)

    def wait(self) -> None:
        self._environment.pool.wait(_WAIT_SECONDS)

    def raise_failure(self) -> None:
        """Collective. Raises: EnvironmentFailure, on every rank, for a failure on any that ends the run."""
        with raise_on_all_ranks(lambda reasons: EnvironmentFailure(reasons[0])) as problems:
            problems += [self.failure] * bool(self.failure)

    # --- the state of a row ---------------------------------------------------------------------

    def _restored(self, row: int) -> ConversationState:
        """State of a conversation as far as earlier calls, or an earlier process, have drawn it."""
        state = ConversationState(list(self._prompts[row].tokens), self._untils[row])
        begun, recorded = self._begun[row], self._recorded.get(row, [])
        if begun is not None and begun.tokens and recorded and recorded[0].is_beginning:  # it began anew
            begun, state.dialogue = None, Dialogue(begun=recorded[0].version, redraws=1)
        if begun is not None and begun.dialogue is not None:
            state.sampled, state.logprobs, state.observed = list(begun.tokens), list(begun.logprobs), begun.observed[:]
            state.written, state.stretches = begun.written, list(begun.stretches)
            state.versions, state.dialogue = list(begun.versions), begun.dialogue
        for turn in recorded:
            state.add(turn.tokens, turn.logprobs, [(turn.version, len(turn.tokens))])
            answer = Answer.from_json(turn.answer)
            if turn.is_beginning:
                state.open(turn.observed)
                state.dialogue = replace(state.dialogue, observations=(answer.messages,))
            else:
                state.dialogue = with_answer(state.dialogue, answer, turn.history)
                state.observe(turn.observed)
        state.recorded = len(state.sampled)
        return state

    def _turn(self, state: ConversationState) -> Turn:
        """The present turn, as the environment gets it."""
        limits, number = self._environment.limits, state.num_answered
        no_more = number + 1 >= limits.max_turns or state.position >= self._sampling.max_tokens
        text = self._environment.text(state.turn, finished=state.finished)
        opened = self._environment.opened(state.before_turn(number))
        return Turn(text, number, state.finished, last=no_more or not state.finished, opened=opened)

    def _done(self, row: int) -> Response | None:
        """The row's sample, on its owner. Its environment is kept if the conversation goes on later."""
        state = self._rows.pop(row)
        if not state.mine:
            return None
        if state.is_final:
            state.dialogue = replace(state.dialogue, ended_by="failure")
        response = state.response()
        if state.dialogue.is_over:
            self._forget(state)
        elif state.key is not None:
            self._row_of.pop(state.key, None)
            assert state.talk is not None
            resting = Resting(state.key, digest(state.written), state.talk)
            self._environment.rest(self._environment_seeds[row], resting)
        return response

    def _forget(self, state: ConversationState) -> None:
        if state.key is not None:
            self._row_of.pop(state.key, None)
            self._environment.pool.forget(state.key)
            state.key = None

    # --- the environment, on the owner of a row -------------------------------------------------

    def _ask_to_begin(self, row: int, state: ConversationState) -> None:
        """Begin the environment of a conversation, or bring it to where the conversation is."""
        environment, seed = self._environment, self._environment_seeds[row]
        resting = environment.rested(seed, digest(state.written)) if self._may_rest else None
        if resting is not None:
            state.key, state.talk = resting.key, resting.talk
            self._ready.append(row)
        else:
            history: Sequence[AnsweredCall] = ()
            if observations := state.dialogue.observations:
                try:
                    state.talk = environment.talk(self._prompts[row], observations, state.turns[:-1])
                except ValueError as error:  # another template or policy than when it began
                    self.failure = f"sample {row} cannot go on where it was left: {error}"
                    return
                history, state.is_replayed = self._history(state), True
            state.key = environment.pool.begin(fields_of(self._prompts[row]), seed, history)
        self._row_of[state.key] = row

    def _history(self, state: ConversationState) -> list[AnsweredCall]:
        """Calls and answers so far."""
        dialogue = state.dialogue
        calls = [AnsweredCall(None, Answer(dialogue.observations[0]))]
        for n, (messages, reward) in enumerate(zip(dialogue.observations[1:], dialogue.rewards, strict=True)):
            text, opened = self._environment.text(state.turns[n], finished=True), state.before_turn(n)
            turn = Turn(text, n, finished=True, last=False, opened=self._environment.opened(opened))
            calls.append(AnsweredCall(turn, Answer(messages, reward)))
        return calls

    def _news_of(self, row: int, reply: Reply) -> News:
        state = self._rows[row]
        if reply.answer is None:
            return self._failed(row, state, reply.error, drifted=reply.drifted)
        if state.is_replayed:
            state.is_replayed = False
            return News(row, "ready")
        begins = not state.dialogue.observations
        try:
            return self._opened(row, state, reply.answer) if begins else self._answered(row, state, reply.answer)
        except ValueError as error:
            stops = self._environment.is_fatal(error)
            return self._failed(row, state, f"cannot go on: {error}", stops=stops)

    def _opened(self, row: int, state: ConversationState, answer: Answer) -> News:
        """News after `reset`."""
        step = self._environment.opening(self._prompts[row], answer)
        extra = len(step.tokens) - len(state.prompt) if step.tokens else 0
        if extra >= self._sampling.max_tokens:
            raise ValueError(
                f"the messages of reset are {extra} tokens, and rollout.max_response_tokens = "
                f"{self._sampling.max_tokens} is for all that stands after the prompt; raise it, or return less"
            )
        state.talk, state.dialogue = step.talk, replace(state.dialogue, observations=(answer.messages,))
        self._record(row, state, answer, step, first=True)
        return News(row, "opening", step.tokens)

    def _answered(self, row: int, state: ConversationState, answer: Answer) -> News:
        """News after `step`."""
        turn, dialogue = self._turn(state), state.dialogue
        if not (ended_by := self._end_of(turn, answer)):
            assert state.talk is not None
            step = self._environment.between(state.talk, state.turn, answer.messages)
            if state.position + len(step.tokens) < self._sampling.max_tokens:
                self._record(row, state, answer, step)
                state.talk, state.dialogue = step.talk, with_answer(dialogue, answer, step.history)
                return News(row, "observed", step.tokens)
            ended_by = "no_room"
        state.dialogue = replace(dialogue, rewards=(*dialogue.rewards, answer.reward), ended_by=ended_by)
        return News(row, "over")

    def _end_of(self, turn: Turn, answer: Answer) -> EndedBy:
        """Reason why a conversation ends with a turn; empty if it may go on."""
        if not turn.finished:
            return "turn_cut"
        if answer.done:
            return "environment"
        if not answer.messages:
            return "model"
        return "max_turns" if turn.number + 1 >= self._environment.limits.max_turns else ""

    def _record(
        self, row: int, state: ConversationState, answer: Answer, step: Continuation, *, first: bool = False
    ) -> None:
        """Keep a turn and its answer in the bank. The answer is not in the row yet."""
        start, state.recorded = state.recorded, len(state.sampled)
        tokens, logprobs = state.sampled[start:], state.logprobs[start:]
        before = end_of([] if first else self._bank.turns.get(row, []))
        turn = AnsweredTurn(tokens, logprobs, self._version, answer.to_json(), step.tokens, step.history, before)
        self._bank.add_turn(row, turn, first=first)

    def _failed(
        self, row: int, state: ConversationState, error: str, *, drifted: bool = False, stops: bool = False
    ) -> News:
        """News after a failure of the environment: the conversation begins anew, is left out, or ends the run."""
        asked = short(self._prompts[row].text)
        where = f"the environment of sample {row} (prompt {asked}), turn {state.num_answered + 1},"
        message = f"{where} {error}"
        policy = "redraw" if drifted else self._environment.on_failure
        if policy == "redraw" and state.dialogue.redraws >= MAX_REDRAWS:
            message, stops = f"{message} (after it began anew {MAX_REDRAWS} times)", True
        self._forget(state)
        if not stops and policy == "redraw":
            self._environment.report(where, error, "the conversation begins anew")
            state.dialogue = Dialogue(begun=self._version, redraws=state.dialogue.redraws + 1)
            self._bank.turns.pop(row, None)
            self._ask_to_begin(row, state)
            return News(row, "anew")
        if stops or policy == "stop":
            self.failure = self.failure or message
        else:
            self._environment.report(where, error, "the sample is left out")
        state.dialogue = replace(state.dialogue, error=message, ended_by="failure")
        if not state.sampled:
            return News(row, "final")  # a sample has at least one sampled token
        return News(row, "over")


def fields_of(prompt: PromptSample) -> dict[str, Any]:
    """Columns of a prompt's record, with the prompt itself, as `reset` gets them."""
    return {**prompt.fields, "prompt": prompt.text, "messages": prompt.messages}


def draw_samples(
    engine: RolloutEngine,
    environment: Environment | None,
    samples: Sequence[PromptSample],
    requests: Requests,
    sampling: Sampling,
    *,
    bank: FinishedResponses | None = None,
    should_stop: Callable[[], bool] | None = None,
    environment_seeds: Sequence[int] | None = None,
) -> Rollouts:
    """Draw responses, or conversations with the environment, with an engine. Collective.

    samples: prompt of each request. environment_seeds: seeds for `reset`, by default those of the requests

    Raises: as `RolloutEngine.generate`; EnvironmentFailure, on every rank, for a failure that ends the run.
    """
    if environment is None:
        return engine.generate(
            requests.prompts, requests.seeds, sampling, parts=requests.parts, bank=bank, should_stop=should_stop
        )
    conversations = Conversations(
        environment,
        samples,
        requests.seeds,
        sampling,
        untils=[part.until for part in requests.parts] if requests.begun else None,
        begun=requests.begun or None,
        environment_seeds=environment_seeds,
    )
    try:
        rollouts = engine.generate(
            requests.prompts,
            requests.seeds,
            sampling,
            parts=requests.parts,
            bank=bank,
            should_stop=should_stop,
            conversations=conversations,
        )
    except (RolloutInterrupted, EngineFailure):  # raised on every rank
        conversations.raise_failure()
        raise
    conversations.raise_failure()
    return rollouts
