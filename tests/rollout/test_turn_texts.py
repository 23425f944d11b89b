"""Texts of turns and conversations, as environments, rewards and files read them.

Not covered: the same in runs (tests/distributed/test_chat_environments.py).
"""

from dataclasses import replace
from pathlib import Path

import pytest

from megarlhf.config import ConversationConfig
from megarlhf.config.environment import EnvironmentConfig
from megarlhf.data.sample_types import PromptSample
from megarlhf.rollout.conversations import Conversations
from megarlhf.rollout.environments.environment import Environment
from megarlhf.rollout.responses import FinishedResponses, Response, Sampling, rollouts_of
from megarlhf.rollouts import Dialogue
from tests.data.chat_styles import STYLES, chat_tokenizer, said
from tests.refuses import missing_names, refuses
from tests.rollout.turn_styles import TURN_STYLES

CALL = "<|eot_id|>"
"""A special token that ends no turn here, as [TOOL_CALLS] of Mistral."""
PROMPT = PromptSample([1], "ask", {}, 0, [said("user", "ask")])


def environment_of(directory: Path, style: str) -> Environment:
    tokenizer = chat_tokenizer(directory, None)
    section = EnvironmentConfig(function="tests.rollout.environments_for_tests:Sync", history="as_sampled")
    data = ConversationConfig(chat_template={**STYLES, **TURN_STYLES}[style])
    ends = [tokenizer.tokens().index("<|im_end|>")]
    return Environment(section, data, tokenizer, end_ids=ends, max_tokens=100)


def ids(environment: Environment, text: str) -> list[int]:
    return environment.chat.template.ids(text, continuation=True)


def test_a_special_token_inside_a_turn_is_in_its_text_and_keeps_the_history_exact(tmp_path):
    """It may begin a call of a tool. The token that ends the turn is no text."""
    environment = environment_of(tmp_path, "chatml")
    turn = ids(environment, f"{CALL}[1]<|im_end|>")
    assert len(turn) == 5
    assert environment.text(turn, finished=True) == environment.text(turn[:-1], finished=True) == f"{CALL}[1]"
    after = environment.between(environment.talk(PROMPT, [[]], []), turn, [said("tool", "1")])
    assert after.history == "exact"
    assert after.talk.conversation.messages[1:] == [said("assistant", f"{CALL}[1]"), said("tool", "1")]


@pytest.mark.parametrize(("style", "begins"), [
    ("chatml", ""), ("opened", "<think>\n"), ("bracketed", "[THINK]"), ("splitting", ""), ("stripping", ""),
])  # fmt: skip
def test_a_conversation_as_messages_renders_as_it_was_read_where_the_template_keeps_thoughts(tmp_path, style, begins):
    """A content begins with what the template has asked with, where that belongs to the message later."""
    environment = environment_of(tmp_path, style)
    template, texts = environment.chat.template, ["hm\n</think>\n\n2", "so\n</think>\n\n3"]
    turns = [ids(environment, f"{text}<|im_end|>") for text in texts]
    observed = environment.between(environment.talk(PROMPT, [[]], []), turns[0], [said("user", "go")]).tokens
    sampled, lengths = [*turns[0], *turns[1]], (len(turns[0]), len(observed), len(turns[1]))
    dialogue = Dialogue(observations=([], [said("user", "go")]), rewards=(None, 1.0), ended_by="environment")
    response = Response(sampled, [0.0] * len(sampled), True, ((0, len(sampled)),), lengths, observed, dialogue)
    transcript = environment.transcript(PROMPT, rollouts_of([response]), 0)
    assert transcript.turns == texts
    assert [message["content"] for message in transcript.messages] == ["ask", begins + texts[0], "go"]
    assert transcript.whole == [*transcript.messages, said("assistant", begins + texts[1])]
    read = template.ids(template.text(environment.asked(PROMPT), reply=True)) + turns[0] + observed
    if style != "stripping":
        assert template.ids(transcript.before) == read
        whole = template.text(environment.asked(PROMPT.__class__(**{**vars(PROMPT), "messages": transcript.whole})))
        assert whole.rstrip() == environment._tokenizer.decode([*read, *turns[1]], special=True)


def test_a_conversation_that_cannot_go_on_where_it_was_left_ends_the_run_with_its_reason(tmp_path, one_rank):
    """Not as a failure of the engine, which would be rebuilt and fail again."""
    environment = environment_of(tmp_path, "stripping")
    environment.chat = replace(environment.chat, history="refuse")
    turn = ids(environment, "<think>hm</think>2<|im_end|>")
    dialogue = Dialogue(observations=([], [said("user", "go")]), rewards=(None,))
    begun = Response(turn, [0.0] * len(turn), False, ((0, len(turn)),), (len(turn), 1, 0), [1], dialogue)
    sampling = Sampling(max_tokens=100, end_ids=(turn[-1],))
    conversations = Conversations(environment, [PROMPT], [0], sampling, untils=[100], begun=[begun])
    conversations.restart(FinishedResponses(), 1)
    assert conversations.begin(0, mine=True) is None
    assert not missing_names(conversations.failure, "sample 0 cannot go on", "as_sampled")


def test_a_key_that_the_template_does_not_write_is_a_wrong_answer_and_no_fault_of_the_template(tmp_path):
    environment = environment_of(tmp_path, "chatml")
    called = said("user", "go", tool_calls=[{"function": {"name": "f"}}])
    with refuses("'user'", "'tool_calls'", "leave it out") as raised:
        environment.between(environment.talk(PROMPT, [[]], []), ids(environment, "2<|im_end|>"), [called])
    assert not environment.is_fatal(raised.value)
