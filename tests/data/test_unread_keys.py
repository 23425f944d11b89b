"""Keys of messages, of calls of tools and of descriptions of tools that change the meaning elsewhere: read, refused by
name, or counted."""

import json

import pytest

from megarlhf.data.sample_types import Changed
from tests.data.chat_styles import CHATML, STYLES, chat_tokenizer, said
from tests.data.test_written import encoder
from tests.refuses import refuses


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("keys"), None)


FLAGS = [{"loss": False}, {"train": False}, {"training": 0}, {"trainable": False}, {"weight": 0}, {"loss": 0.0}]


@pytest.mark.parametrize("flag", FLAGS, ids=str)
@pytest.mark.parametrize("form", ["messages", "sharegpt"])
def test_an_answer_that_others_would_not_learn_is_not_learnt(tokenizer, flag, form):
    """Whoever's the mark is; and a mark that says otherwise, or of a part of an answer, is refused by name."""

    def record(marks):
        messages = [said("user", "a"), said("assistant", "b", **marks), said("user", "c"), said("assistant", "d")]
        if form == "messages":
            return {"messages": messages}
        names = {"user": "human", "assistant": "gpt"}
        rest = [{key: part for key, part in each.items() if key not in ("role", "content")} for each in messages]
        turns = zip(messages, rest, strict=True)
        return {"conversations": [{"from": names[m["role"]], "value": m["content"], **others} for m, others in turns]}

    encode = encoder(tokenizer, "chatml", loss_on="all")
    both, one = encode(0, record({})), encode(0, record(flag))
    assert (len(both.stretches), one.stretches) == (4, both.stretches[2:])
    assert one.tokens == both.tokens
    assert encode(0, record(dict.fromkeys(flag, True))) == both
    for marks, names in (
        ({**flag, "train": True, "loss": False}, "contradict"), (dict.fromkeys(flag, "no"), "1 or true|0 or false"),
        ({"loss_mask": [1, 0]}, "'loss_mask'|part of a message"), ({"images": ["a.png"]}, "'images'|text alone"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "'train_detail'"),
    ):  # fmt: skip
        with refuses(*names.split("|")):
            encode(0, record(marks))


def unread(made):
    """Keys that are counted, as the one note lists them in brackets."""
    (how,) = made.how
    return how.partition("(")[2].rstrip(")")


def test_keys_of_messages_that_nobody_reads_are_counted_by_name(tokenizer):
    talk = [said("user", "a", name="bob", country="x"), said("assistant", "b", tool_call_id="1")]
    assert unread(encoder(tokenizer, "chatml")(0, {"messages": talk})) == "country, name"
    named = STYLES["chatml"].replace("{{ m.role }}", "{{ m.name or m.role }}")
    assert unread(encoder(tokenizer, named)(0, {"messages": talk})) == "country"
    talk = [said("user", "a"), said("assistant", "b", learn=False, supervise=0, notes="")]
    assert unread(encoder(tokenizer, "chatml")(0, {"messages": talk})) == "learn, supervise", "flags that say no"


def test_a_key_that_the_template_reads_elsewhere_only_is_counted(tokenizer):
    """Its name in the code says nothing; and a message's own tools, which change what is asked, are refused."""
    calling, talk = STYLES["tools"], [said("user", "a", name="bob", notes=[]), said("assistant", "b")]
    assert unread(encoder(tokenizer, calling)(0, {"messages": talk})) == "name"
    with refuses("'tools'", "chat template", "column"):
        encoder(tokenizer, calling)(0, {"messages": [said("system", "c", tools=[{"name": "f"}]), *talk]})
    reading = STYLES["chatml"].replace("{{ m.content }}", "{{ m.content }}{{ m.tools or '' }}")
    assert encoder(tokenizer, reading)(0, {"messages": [said("system", "c", tools="f"), *talk]})


def test_what_calls_of_tools_have_beside_name_and_arguments(tokenizer):
    """JSON text of calls keeps every digit, or is refused; further keys are counted."""

    def talk(calls):
        return {"messages": [said("user", "a"), {"role": "assistant", "content": "", "tool_calls": calls}]}

    function = {"name": "f", "arguments": {"a": 1}, "thought": "secret"}
    made = encoder(tokenizer, "tools")(0, talk([{"type": "function", "function": function, "result": 4}]))
    assert unread(made) == "tool_calls.result, tool_calls.thought"
    for arguments, fault in (
        ('{"a": 1, "a": 2}', "2 times"), ('{"a": 0.12345678901234567890}', "exactly"), ('{"a": 1e400}', "exactly"),
    ):  # fmt: skip
        text = '[{"type": "function", "function": {"name": "f", "arguments": ' + arguments + "}}]"
        with refuses("a call of a tool", fault):
            encoder(tokenizer, "tools")(0, talk(text))
        turns = [{"from": "human", "value": "a"}, {"from": "function_call", "value": text[1:-1]}]
        with refuses("expected JSON", fault):
            encoder(tokenizer, "tools")(0, {"conversations": turns})


def calling(call):
    return {"messages": [said("user", "a"), {"role": "assistant", "content": "", "tool_calls": [call]}]}


@pytest.mark.parametrize("call", [
    {"name": "f", "parameters": {"a": 1}}, {"action": "f", "arguments": {}}, {"tool": "f", "args": {}}, {},
    {"type": "custom", "custom": {"name": "f", "input": "a"}}, {"type": "function", "function": {"arguments": {}}},
], ids=str)  # fmt: skip
def test_calls_of_another_form_are_refused_with_their_keys(tokenizer, call):
    """Bare or as a function, in messages and in ShareGPT's turns: the template is not to blame."""
    calls = [call, {"type": "function", "function": call}] if "function" not in call else [call]
    for each in calls:
        with refuses("a call of a tool", "keys", "name and arguments"):
            encoder(tokenizer, "tools")(0, calling(each))
        turns = [{"from": "human", "value": "a"}, {"from": "function_call", "value": json.dumps(each)}]
        with refuses("a call of a tool", "keys", "name and arguments"):
            encoder(tokenizer, "tools")(0, {"conversations": turns})


def test_a_call_without_arguments_has_none(tokenizer):
    without, empty = ({"function": {"name": "f", **more}, "id": "1"} for more in ({}, {"arguments": {}}))
    assert encoder(tokenizer, "tools")(0, calling(without)) == encoder(tokenizer, "tools")(0, calling(empty))


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "returns": {"type": "int"}, "parameters": {
    "type": "object", "required": ["a"], "properties": {"a": {"type": "string", "enum": ["x", "y"], "default": ""},
                                                        "minimum": {"type": "integer", "minimum": 0}}}}}  # fmt: skip
SIGNATURES = """{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}
{% for n, p in t.function.parameters.properties.items() %}{{ n }} {{ p.type }} {{ p.enum }}{% endfor %}
{% endfor %}"""


def test_keys_of_tools_that_the_template_does_not_write_are_counted(tokenizer):
    """Names of parameters are no keys; whole JSON has all."""
    talk = {"messages": [said("user", "a"), said("assistant", "b")], "tools": [TOOL]}
    for _ in ("looked", "known"):
        made = encoder(tokenizer, SIGNATURES + CHATML)(0, talk)
        assert isinstance(made, Changed)
        assert unread(made) == "minimum, returns"
    assert not isinstance(encoder(tokenizer, "{{ tools | tojson if tools }}" + CHATML)(0, talk), Changed)
