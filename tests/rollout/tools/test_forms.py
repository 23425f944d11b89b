"""Calls of tools in the forms in which models write them. Texts of templates: tests/published/test_tool_calls.py."""

import random
import re

import pytest

from megarlhf.rollout.tools.call import Call, Unreadable
from megarlhf.rollout.tools.forms import FORMS, parse

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
        "near": {"anyOf": [{"type": "array"}, {"type": "null"}]}, "id": {"type": ["integer", "string"]},
        "unit": {"enum": ["7", "C"]}, "note": {"type": "string", "nullable": True}, "place": {"$ref": "#/$defs/Place"},
    },
    "$defs": {"Place": {"type": "object"}},
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "add")]
WEATHER = Call("weather", {"city": 'Ulm "</tool_call>" {x}\nä', "days": 3})
ADD = Call("add", {"days": 3})
JSON = r'{"city": "Ulm \"</tool_call>\" {x}\nä", "days": 3}'
DEEPSEEK = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
GEMMA = '<|tool_call>call:weather{city:<|"|>Ulm "</tool_call>" {x}\nä<|"|>,days:3}<tool_call|>'
WRITTEN = {
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"days\\": 3}"}</tool_call>',
    ),
    "qwen3_xml": (
        ("<tool_call>\n<function=weather>\n<parameter=city>\nUlm \"</parameter>\" {x}\nä\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"),
        "<tool_call>\n<function=add>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        ('<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm "</arg_value>" {x}\nä</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"),
        "<tool_call>add<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    ),
    "llama3_json": (
        f'<|python_tag|>{{"name": "weather", "parameters": {JSON}}}',
        '; {"type": "function", "name": "add", "parameters": {"days": 3}}',
    ),
    "pythonic": (
        "<|tool_call_start|>[weather(city='Ulm \"</tool_call>\" {x}\\nä', days=3)]<|tool_call_end|>",
        "<|python_start|>[add(days=3)]<|python_end|>",
    ),
    "mistral": (
        f"[TOOL_CALLS]weather[ARGS]{JSON}",
        '[TOOL_CALLS][{"name": "add", "arguments": {"days": 3}}]',
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>" + DEEPSEEK.format(f"function<｜tool▁sep｜>weather\n```json\n{JSON}\n```"),
        DEEPSEEK.format('add<｜tool▁sep｜>{"days": 3}') + "<｜tool▁calls▁end｜>",
    ),
    "gptoss": (
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}<|call|>",
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"days": 3}<|call|>',
    ),
    "gemma4": (GEMMA, "<|tool_call>call:add{days:3}<tool_call|>"),
    "kimi_k2": (
        ("<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|>"),
        ('<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"days": 3}<|tool_call_end|>'
        "<|tool_calls_section_end|>"),
    ),
    "granite": (
        f'<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}]',
        '<tool_call>[{"name": "add", "arguments": {"days": 3}}]',
    ),
    "phi4": (
        f'<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}]<|/tool_call|>',
        'functools[{"name": "add", "arguments": {"days": 3}}]',
    ),
}  # fmt: skip
MARKED = [form for form in WRITTEN if form != "gptoss"]


def plain(found):
    """Names and arguments; texts of text-only forms hold their own closing mark."""
    texts = [(call.name, dict(call.arguments)) for call in found]
    swap = ("</parameter>", "</tool_call>"), ("</arg_value>", "</tool_call>")
    for _, arguments in texts:
        for old, new in swap if "city" in arguments else ():
            arguments["city"] = arguments["city"].replace(old, new)
    return texts


BOTH = plain([WEATHER, ADD])


def why(form: str, text: str) -> str:
    """The reason of the only thing that is found."""
    (found,) = parse(form, text, TOOLS)
    assert isinstance(found, Unreadable)
    return found.why


def test_each_form_is_written_here():
    assert list(WRITTEN) == list(FORMS)
    with pytest.raises(ValueError, match=r"'xml'; the known ones are hermes, .*phi4, or vllm:NAME"):
        parse("xml", "", [])


@pytest.mark.parametrize("form", FORMS)
def test_calls_in_their_order(form):
    one, other = WRITTEN[form]
    assert plain(parse(form, one + other, TOOLS)) == BOTH
    assert parse(form, one + "\n" + one if form != "llama3_json" else f"{one};{one}", TOOLS)[1:]
    for answer in ("", "Just an answer.", '{"answer": 3}', "[1, 2]", "[see](here)", '{"name": "Ulm"}', "f(x)"):
        assert parse(form, answer, TOOLS) == []


@pytest.mark.parametrize("form", MARKED)
def test_text_around_and_thoughts(form):
    """Calls in thoughts are drafts, in one that the prompt has opened too. A mark in a JSON text closes nothing."""
    one, other = WRITTEN[form]
    between = "" if form == "llama3_json" else " and "
    assert plain(parse(form, f"First{one}{between}{other}", TOOLS)) == BOTH
    for thought in (f"<think>{one} {other}</think>", f"[THINK]{one}[/THINK]", f"<|channel>thought\n{one}<channel|>",
                    f"or {one}\n</think>\n", f"or {one[:-9]}\n</think>\n"):  # fmt: skip
        assert plain(parse(form, thought + one + other, TOOLS)) == BOTH, thought
    assert parse(form, f"<think>{one}", TOOLS) == []


def test_thoughts_of_gptoss():
    one, other = WRITTEN["gptoss"]
    thought = '<|channel|>analysis<|message|>to=functions.add {"days": 1}<|end|><|start|>assistant'
    assert plain(parse("gptoss", thought + one + other, TOOLS)) == BOTH
    assert plain(parse("gptoss", (thought + one + other).removesuffix("<|call|>"), TOOLS)) == BOTH
    assert parse("gptoss", "<|channel|>final<|message|>Use to=functions.add", TOOLS) == []


@pytest.mark.parametrize("form", FORMS)
def test_cuts_and_mutations(form):
    """A cut text has its first calls, perhaps one that cannot be read, and never another call. Nothing raises."""
    text = "".join(WRITTEN[form])
    seen = set()
    for length in range(len(text)):
        found = parse(form, text[:length], TOOLS)
        calls = [call for call in found if isinstance(call, Call)]
        assert plain(calls) == BOTH[: len(calls)], text[:length]
        assert all(isinstance(call, Call) for call in found[:-1]), text[:length]
        seen |= {(len(calls), len(found) - len(calls))}
    assert {(0, 0), (0, 1), (1, 0)} <= seen
    draw = random.Random(form)
    pieces = (
        [text[a : a + 9] for a in range(0, len(text), 9)] + list("{}[]()\"'\\,:=<>\n0aN\ud800") + ["</think>", "1e999"]
    )
    for _ in range(1500):
        letters = list(text)
        for _ in range(draw.randint(1, 5)):
            place = draw.randrange(len(letters))
            letters[place : place + draw.randint(0, 4)] = draw.choice(pieces)
        for found in parse(form, "".join(letters), TOOLS):
            repr(found).encode()
            assert isinstance(found, Call | Unreadable)


@pytest.mark.parametrize("body, reason", [
    ('{"name": "add", "arguments": {"a": True}}', "not JSON: .*before 'True}}.*JSON has true, .* not True"),
    ("{'name': 'add', 'arguments': {}}", r"double quotes \(character 2, .*not '"),
    ('{"name": "add", "arguments": {"a": 1}', r"Expecting ',' delimiter \(character 38"),
    ('{"name": "add", "arguments": {"a": "x\ny"}}', r"write a line break in a text as \\n"),
    ('{"arguments": {}}', "expected .*, got an object with 'arguments'"),
    ("3", "got a number"),
    ('{"name": 3, "arguments": {}}', "the name of a call is a number"),
    ('{"name": "", "arguments": {}}', "the name of a call is empty"),
    ('{"name": "add", "arguments": [1]}', "the arguments are a list, expected an object"),
    ('{"name": "add", "arguments": null}', "the arguments are null"),
    ('{"name": "add", "arguments": "{} x"}', "no JSON object: .*more behind"),
    ('{"name": "add", "city": "Ulm"}', "put 'city' into `arguments`"),
    ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no number"),
    ('{"name": "add", "arguments": {"a": -Infinity}}', "-Infinity is no number"),
    ('{"name": "add", "arguments": {"a": 1e999}}', "too large"),
    ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "not JSON: .*4300"),
    ('{"name": "add", "arguments": {"a": 1, "a": 2}}', "'a' is repeated"),
    ('{"name": "add", "arguments": {"a": "\\ud800"}}', "half a character"),
    ('{"name": "add", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}", "nested"),
    ('{"name": "add", "arguments": {"a": ' + "[" * 100000, "nested"),
    ('{"name": "add", "arguments": {}} }', r"</tool_call> is missing: expected it before '}"),
])  # fmt: skip
def test_broken_json(body, reason):
    """What follows the broken call is read."""
    good = WRITTEN["hermes"][1]
    broken, call = parse("hermes", f"<tool_call>{body}</tool_call>{good}", TOOLS)
    assert isinstance(broken, Unreadable)
    assert re.search(reason, broken.why, re.DOTALL), broken.why
    assert call == ADD
    assert parse("hermes", '<tool_call>{"name": "now"}</tool_call>', TOOLS) == [Call("now", {})]


@pytest.mark.parametrize("form, text, reason", [
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}', "</tool_call> is missing: expected it at the end"),
    ("qwen3_xml", "<tool_call>\n<function=add>\n<parameter=days>\n3\n</function>\n</tool_call>", "is not closed"),
    ("qwen3_xml", "<function=add>\n<parameter=days>\n3\n</parameter>\n</function>", "<tool_call> is missing"),
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>3</tool_call>", "is not closed"),
    ("glm", "<tool_call>add" + 2 * "<arg_key>a</arg_key><arg_value>3</arg_value>" + "</tool_call>", "repeated"),
    ("llama3_json", '{"name": "add", "parameters": {"days": 3}', "not JSON"),
    ("llama3_json", "{'name': 'add', 'parameters': {'days': None}}", "JSON expected"),
    ("llama3_json", '{"name": "add", "para', "not JSON"),
    ("llama3_json", '<|python_tag|>add.call(days="3")', "not JSON"),
    ("pythonic", "[add(days=3", "expected"),
    ("pythonic", "[add(days=other)]", "expected a text in quotes, a number, .* before 'other"),
    ("pythonic", "[add(days=1 + 2)]", "expected ,"),
    ("pythonic", "[add(3)]", "arguments need names"),
    ("pythonic", "[add(days=3, days=4)]", "'days' is repeated"),
    ("pythonic", "[add(city='a' + 'b')]", "expected ,"),
    ("pythonic", "<|tool_call_start|>[add(days=3)]", "<|tool_call_end|> is missing"),
    ("mistral", "[TOOL_CALLS]add", "broken"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>add", "head"),
    ("gptoss", "<|channel|>commentary to=functions.add", "<|message|> is missing"),
    ("gemma4", "<|tool_call>call:add{days:three}<tool_call|>", "a number"),
])  # fmt: skip
def test_broken_calls(form, text, reason):
    assert re.search(reason.replace("|", r"\|"), why(form, text)), why(form, text)


def test_a_turn_without_marks_is_calls_as_a_whole_or_none():
    call = '{"name": "add", "parameters": {"days": 3}}'
    assert parse("llama3_json", f"{call}; {call}", TOOLS) == [ADD, ADD]
    assert parse("llama3_json", f"<think>\n{call}\n</think>\n\n{call}", TOOLS) == [ADD]
    assert parse("llama3_json", f"I call {call}", TOOLS) == parse("llama3_json", f"{call} is it", TOOLS) == []
    assert parse("pythonic", "[add(days=3), add(days=3)]", TOOLS) == [ADD, ADD]
    assert parse("pythonic", "so</think>[add(days=3)]", TOOLS) == [ADD]
    assert parse("pythonic", "[add(days=3)] is it", TOOLS) == parse("pythonic", "[note (a thing) here]", TOOLS) == []


def test_literals():
    text = "[f.g-h(a=True, b=false, c=None, d=[1, -2.5e3, {'x': null}], e='it\\'s \"so\"\\u00e4', class='don't\n', "
    text += "g='''q\"''')]"
    values = {"a": True, "b": False, "c": None, "d": [1, -2500.0, {"x": None}], "e": 'it\'s "so"ä', "class": "don't\n"}
    assert parse("pythonic", text, []) == [Call("f.g-h", {**values, "g": 'q"'})]
    text = '<|tool_call>call:f{a b:{c:[<|"|>x,}<|"|>,true],<|"|>d:<|"|>:null}}<tool_call|>'
    assert parse("gemma4", text, []) == [Call("f", {"a b": {"c": ["x,}", True], "d:": None}})]


def test_ids():
    text = '[TOOL_CALLS][{"name": "add", "arguments": {"days": 3}, "id": "abcdefg12"}]'
    assert parse("mistral", text, TOOLS) == [Call("add", {"days": 3}, "abcdefg12")]
    text = '[TOOL_CALLS]add[CALL_ID]abcdefg12[ARGS]{"days": 3}'
    assert parse("mistral", text, TOOLS) == [Call("add", {"days": 3}, "abcdefg12")]
    assert [call.id for call in parse("kimi_k2", "".join(WRITTEN["kimi_k2"]), TOOLS)] == [
        "functions.weather:0",
        "functions.add:1",
    ]


@pytest.mark.parametrize("key, text, value", [
    ("city", "3", "3"), ("city", "null", "null"), ("days", "3", 3), ("days", "3.0", 3), ("days", "three", "three"),
    ("exact", "True", True), ("exact", "false", False), ("near", "[1]", [1]), ("near", "None", None),
    ("id", "3", 3), ("id", "[3]", "[3]"), ("unit", "7", "7"), ("note", "null", None), ("note", "7", "7"),
    ("place", '{"a": 1}', {"a": 1}), ("place", "{a}", "{a}"), ("other", "3", 3), ("other", "three", "three"),
    ("other", "NaN", "NaN"), ("other", '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'), ("days", "9" * 400, int("9" * 400)),
])  # fmt: skip
def test_types_of_texts(key, text, value):
    xml = f"<tool_call>\n<function=add>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for form, written in (
        ("qwen3_xml", xml),
        ("glm", f"<tool_call>add<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"),
    ):
        (call,) = parse(form, written, TOOLS)
        assert isinstance(call, Call)
        assert (call.arguments[key], type(call.arguments[key])) == (value, type(value))


def test_a_value_that_holds_the_end_of_another_call_is_not_read_as_one():
    """Where a value is not closed, the next call's arguments do not become its text."""
    unclosed = "<tool_call>\n<function=add>\n<parameter=city>\nUlm\n</function>\n</tool_call>\n"
    broken, call = parse("qwen3_xml", unclosed + WRITTEN["qwen3_xml"][1], TOOLS)
    assert (type(broken), call) == (Unreadable, ADD)
