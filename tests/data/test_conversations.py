"""What a record says, by its columns; and what is said of records that say something else."""

import pytest

from megarlhf.data.records.conversations import (
    EmptyText,
    PairOfConversations,
    PairOfTexts,
    example_of,
    pair_of,
    prompt_of,
)
from megarlhf.data.text.templates import Conversation
from tests.data.chat_styles import said
from tests.refuses import refuses

ASKED, ANSWER = said("user", "1+1"), said("assistant", "2")
TALK = [ASKED, ANSWER]
SHAREGPT = [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]


def test_forms_of_fine_tuning():
    """By the columns; a text is one message of the user where the template is `chat`."""
    texts = {"prompt": "1+1", "response": "2"}
    assert example_of(texts, "auto") == example_of(texts, "plain") == ("1+1", "2")
    for record, template in (
        ({"messages": TALK}, "auto"), ({"conversations": SHAREGPT}, "auto"), (texts, "chat"),
        ({"prompt": [ASKED], "response": "2"}, "auto"), ({"messages": TALK, **texts}, "chat"),
    ):  # fmt: skip
        assert example_of(record, template) == Conversation(TALK)
    assert example_of({"messages": TALK, **texts}, "plain") == ("1+1", "2")
    system = said("system", "be brief")
    assert example_of({**texts, "system": "be brief"}, "chat") == Conversation([system, *TALK])
    assert example_of({"conversations": SHAREGPT, "system": "be brief"}, "auto") == Conversation([system, *TALK])


def test_forms_of_prompts():
    assert prompt_of({"prompt": "1+1"}, "auto") == "1+1"
    assert prompt_of({"prompt": "1+1", "context": "x", "answer": "2"}, "auto") == "1+1", "fields for rewards"
    assert prompt_of({"prompt": "1+1"}, "chat") == Conversation([ASKED])
    assert prompt_of({"prompt": [ASKED]}, "auto") == Conversation([ASKED])
    assert prompt_of({"conversations": SHAREGPT[:1]}, "auto") == Conversation([ASKED])
    assert prompt_of({"messages": [*TALK, ASKED], "answer": "2"}, "auto") == Conversation([*TALK, ASKED])


@pytest.mark.parametrize("name", ["system", "tools", "chat_template_kwargs"])
def test_a_prompt_that_is_a_text_has_nothing_beside_it_that_a_template_writes(name):
    value = {"system": "x", "tools": [{"name": "f"}], "chat_template_kwargs": {"a": 1}}[name]
    for template in ("auto", "plain"):
        with refuses(f"'{name}'", f"columns: {{not_read: {name}}}"):
            prompt_of({"prompt": "1+1", name: value}, template)
        assert prompt_of({"prompt": "1+1", name: None, "not_read": value}, template) == "1+1"
    for record, template in (({"prompt": "1+1"}, "chat"), ({"prompt": [ASKED]}, "auto")):
        assert prompt_of({**record, name: value}, template) != prompt_of(record, template)


@pytest.mark.parametrize("name, value", [
    ("system_prompt", "x"), ("history", [["a", "b"]]), ("documents", [{"text": "a"}]), ("images", ["a.png"]),
    ("audio", {"path": "a.wav"}), ("enable_thinking", False),
])  # fmt: skip
def test_a_column_that_can_only_belong_to_the_prompt_is_no_field_for_rewards(name, value):
    for record, template in (
        ({"prompt": "1+1"}, "plain"), ({"prompt": "1+1"}, "chat"), ({"messages": [ASKED]}, "auto"),
    ):  # fmt: skip
        with refuses(f"'{name}'", f"columns: {{not_read: {name}}}"):
            prompt_of({**record, name: value}, template)
        assert prompt_of({**record, name: None, "not_read": value}, template) == prompt_of(record, template)


@pytest.mark.parametrize("name, value", [
    ("documents", [{"text": "a"}]), ("enable_thinking", True), ("thinking", False), ("context", "A sum."),
    ("response", "4"), ("completion", "4"), ("instruction", "add"),
])  # fmt: skip
def test_what_stands_beside_messages_and_in_none_of_them_is_refused(name, value):
    for template in ("auto", "chat"):
        with refuses(f"'{name}'", f"columns: {{not_read: {name}}}"):
            example_of({"messages": TALK, name: value}, template)
    repeated = {"instruction": "1+1", "response": "2", "context": ""}
    assert example_of({"messages": TALK, **repeated}, "auto") == Conversation(TALK)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking", "thought"])
@pytest.mark.parametrize("template", ["auto", "chat"])
def test_a_thought_beside_texts_is_refused(name, template):
    """The answer alone would be learnt."""
    pair = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    readers = [(example_of, {"prompt": "1+1", "response": "2"}), (pair_of, pair)]
    for read, texts in readers[: 1 if name == "reasoning" else 2]:  # of a pair it may be the judge's
        with refuses(f"'{name}'", "a thought", f"columns: {{not_read: {name}}}"):
            read({**texts, name: "one and one"}, template)
        for switch in (" ", "on"):
            assert read({**texts, name: switch}, template) == read(texts, template)


def test_a_prompt_beside_messages_that_are_to_be_answered():
    record = {"messages": [ASKED], "prompt": "Translate 10"}
    with refuses("'prompt' = 'Translate 10'"):
        prompt_of(record, "chat")
    assert prompt_of({**record, "prompt": ASKED["content"]}, "chat") == Conversation([ASKED])


def test_an_instruction_that_is_the_question_of_a_pair():
    """As in Magpie's preferences; and empty variables of the template are none, as in smoltalk2."""
    sides = {"chosen": TALK, "rejected": [ASKED, said("assistant", "3")]}
    beside = {
        "instruction": ASKED["content"],
        "chat_template_kwargs": {"custom_instructions": "", "python_tools": None},
    }
    assert pair_of({**sides, **beside}, "auto") == pair_of(sides, "auto")
    with refuses("'instruction' = 'Be brief'"):
        pair_of({**sides, "instruction": "Be brief"}, "auto")


def test_forms_of_pairs():
    """A system message of both sides, or of the record, is a part of the prompt."""
    texts = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    other = [ASKED, said("assistant", "3")]
    assert pair_of(texts, "auto") == PairOfTexts("1+1", "2", "3")
    expected = PairOfConversations(Conversation(TALK), Conversation(other))
    assert pair_of(texts, "chat") == expected
    assert pair_of({**texts, "messages": TALK}, "chat") == expected, "messages beside a prompt are not read"
    assert pair_of({"chosen": TALK, "rejected": other}, "auto") == expected
    assert pair_of({"prompt": "1+1", "chosen": TALK, "rejected": other}, "auto") == expected
    system = said("system", "be brief")
    longer = PairOfConversations(Conversation([system, *TALK]), Conversation([system, *other]))
    assert pair_of({"chosen": TALK, "rejected": other, "system": "be brief"}, "auto") == longer
    assert pair_of({"prompt": "1+1", "chosen": [system, *TALK], "rejected": [system, *other]}, "auto") == longer


def test_sharegpt_calls_and_nulls_of_parquet():
    """Names of roles in either case. Rows of Parquet have the keys of all rows: null is not there. Arguments that are a
    text are read as JSON."""
    record = {
        "conversations": [
            {"from": "Human", "value": "1+1", "weight": None},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"}, {"from": "gpt", "value": "2"},
        ],
        "tools": '[{"name": "add", "strict": null}]',
    }  # fmt: skip
    found = example_of(record, "auto")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    roles = [ASKED, said("assistant", "", tool_calls=[call]), said("tool", "2"), ANSWER]
    assert found == Conversation(roles, [{"name": "add", "strict": None}]), "JSON says null itself"
    nulls = [{**ASKED, "tool_calls": None, "name": None}, {**ANSWER, "tool_calls": []}]
    assert example_of({"messages": nulls, "tools": None}, "auto") == Conversation(TALK)


SKIPPED = [
    (example_of, {"prompt": " ", "response": "2"}, "chat", "empty prompt"),
    (example_of, {"messages": [ASKED, said("assistant", " \n")]}, "auto", "empty response"),
    (example_of, {"messages": [said("user", ""), ANSWER]}, "auto", "empty message of the user"),
    (example_of, {"messages": []}, "auto", "without messages"),
    (example_of, {"messages": [ASKED]}, "auto", "no message of the assistant"),
    (pair_of, {"chosen": TALK, "rejected": TALK}, "auto", "chosen equals rejected"),
    (pair_of, {"chosen": [*TALK, said("user", "a"), ANSWER], "rejected": [*TALK, said("user", "b"), ANSWER]}, "auto",
     "differ before their last message"),
]  # fmt: skip


@pytest.mark.parametrize("read, record, template, reason", SKIPPED, ids=[case[3] for case in SKIPPED])
def test_records_that_say_nothing_are_skipped_with_the_reason(read, record, template, reason):
    with refuses(reason, error=EmptyText):
        read(record, template)


def talk(*roles, column="messages"):
    return {column: [said(role, "1") for role in roles]}


REFUSED = [
    ("both forms", example_of, {"messages": TALK, "prompt": "1", "response": "2"}, "auto",
     "'messages'|'prompt'|'response'|data.template = chat"),
    ("both forms of a prompt", prompt_of, {"messages": [ASKED], "prompt": "1"}, "auto", "both 'messages' and 'prompt'"),
    ("two conversations", example_of, {"messages": TALK, "conversations": SHAREGPT}, "chat",
     "both 'messages' and 'conversations'"),
    ("ends with the answer", prompt_of, {"messages": TALK}, "auto", "ends|'assistant'|drop the last"),
    ("a misspelt role", example_of, {"messages": [ASKED, said("asistant", "2")]}, "auto",
     "'assistant'|none|'asistant'"),
    ("no response", example_of, {"prompt": "1"}, "auto", "no field 'response'|found 'prompt'"),
    ("a misspelt column", example_of, {"prompt": "1", "respones": "2"}, "auto", "no field 'response'|is it 'respones'"),
    ("a null", example_of, {"prompt": "1", "response": None}, "auto", "field 'response'|null|string"),
    ("a number", example_of, {"prompt": "1", "response": 2}, "auto", "field 'response'|int 2|string"),
    ("a prompt that is a number", prompt_of, {"prompt": 3}, "chat", "field 'prompt'|int 3|string"),
    ("messages read as texts", example_of, {"messages": TALK}, "plain", "no field 'prompt'|conversations"),
    ("a text for messages", prompt_of, {"messages": "hello"}, "auto", "field 'messages'|str 'hello'|list"),
    ("a text for a message", example_of, {"messages": ["hello"]}, "auto", "message 1|str 'hello'|object"),
    ("no role", example_of, {"messages": [{"content": "1"}]}, "auto", "message 1|role None|'content'"),
    ("a role that is no text", example_of, {"messages": [said(3, "1")]}, "auto", "message 1|role 3"),
    ("no content", example_of, {"messages": [{"role": "user"}]}, "auto", "content|NoneType None|text"),
    ("a picture", example_of, {"messages": [said("user", [{"type": "image", "url": "1"}]), ANSWER]}, "auto",
     "message 1 ('user')|dict {'type': 'image'|text alone"),
    ("a number as content", example_of, {"messages": [said("user", 1), ANSWER]}, "auto", "content|int 1"),
    ("an unknown speaker", example_of, {"conversations": [{"from": "humen", "value": "1"}]}, "auto",
     "message 1|'humen'|human, user, gpt"),
    ("a value that is no text", example_of, {"conversations": [{"from": "human", "value": 1}]}, "auto",
     "value|int 1|text"),
    ("a call that is no JSON", example_of, {"conversations": [{"from": "function_call", "value": "add"}]}, "auto",
     "'function_call'|JSON"),
    ("answers in a row", example_of, talk("user", "assistant", "assistant"), "auto", "message 3|'assistant'|follows"),
    ("begins with the answer", example_of, talk("system", "assistant"), "auto",
     "message 2|'assistant'|answers nothing|sharegpt"),
    ("a tool without a call", prompt_of, talk("user", "tool"), "auto", "message 2|'tool'|tool's answer"),
    ("two system messages", example_of, {**talk("system", "user", "assistant"), "system": "x"}, "auto",
     "column 'system'|system message"),
    ("a system message beside texts", example_of, {"prompt": "1", "response": "2", "system": "x"}, "auto",
     "'system'|texts|chat template"),
    ("tools that are no JSON", example_of, {"messages": TALK, "tools": "add"}, "auto", "field 'tools'|text"),
    ("tools that are no objects", example_of, {"messages": TALK, "tools": ["add"]}, "auto", "'tools'|list of objects"),
    ("arguments that are no JSON", example_of,
     {"messages": [ASKED, said("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])]}, "auto",
     "arguments of a call|str '{'|JSON"),
    ("one side a text", pair_of, {"prompt": "1", "chosen": "2", "rejected": [ANSWER]}, "auto", "two texts"),
    ("no rejected", pair_of, {"prompt": "1", "chosen": "2"}, "auto", "no field 'rejected'"),
    ("answers to nothing", pair_of, {"chosen": [ANSWER], "rejected": [said("assistant", "3")]}, "auto",
     "begin with the answer|no 'prompt'"),
    ("another prompt", pair_of, {"prompt": "9", "chosen": TALK, "rejected": [ASKED, said("assistant", "3")]}, "auto",
     "whole conversations|do not begin with 'prompt'"),
    ("a side that ends with the question", pair_of, {"chosen": TALK, "rejected": [ASKED]}, "auto",
     "'rejected' ends|'user'"),
    ("messages of pairs read as texts", pair_of, {"prompt": "1", "chosen": [ANSWER], "rejected": [ANSWER]}, "plain",
     "lists of messages|data.template = plain"),
]  # fmt: skip


@pytest.mark.parametrize("name, read, record, template, names", REFUSED, ids=[case[0] for case in REFUSED])
def test_what_is_not_meant_is_refused(name, read, record, template, names):
    with refuses(*names.split("|")) as raised:
        read(record, template)
    assert "\n" not in str(raised.value)
