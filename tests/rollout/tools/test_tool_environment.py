"""The ready environment of tools in its worker process: results in the order of the calls, and every bad input.

Not covered: forms of calls (test_forms.py), MCP servers and the Python tool, which have files of their own.
"""

import dataclasses
import json
import re

import pytest

from megarlhf.config.environment import EnvironmentConfig
from megarlhf.config.tools import PythonLimitsConfig
from megarlhf.rollout.environments.answer import Turn
from megarlhf.rollout.environments.pool import EnvironmentPool
from megarlhf.rollout.environments.tools.environment import MAX_CALLS
from megarlhf.rollout.tools.arguments import ArgumentCheck
from megarlhf.rollout.tools.described import describe_function, sources_of, tool_descriptions
from megarlhf.rollout.tools.python.limits import PythonLimits
from megarlhf.rollout.tools.start import ToolsStart

HERE = "tests.rollout.tools.functions:"
NAMES = ("add", "look_up", "misbehave", "slow")


def started(*names, seconds=2.0, keys=("name", "tool_call_id"), form="hermes"):
    tools = [name if isinstance(name, dict) or ":" in name else HERE + name for name in names]
    cfg = EnvironmentConfig.model_validate({"tools": tools})
    start = ToolsStart(sources_of(cfg), form, "", ["<|im_end|>", "<s>"], keys, seconds, 1000)
    return EnvironmentPool("", {}, workers=1, seconds_per_step=seconds, tools=start)


class Asked:
    """A conversation in a pool."""

    def __init__(self, pool):
        self.pool, self.key = pool, pool.begin({"prompt": "x"}, 7)
        assert self.reply().answer.messages == []

    def reply(self):
        while not (replies := self.pool.replies()):
            self.pool.wait(1.0)
        return replies[0]

    def step(self, text, *, finished=True, last=False, opened=""):
        self.pool.step(self.key, Turn(text, 0, finished, last, opened))
        return self.reply()

    def contents(self, text, **turn):
        return [message["content"] for message in self.step(text, **turn).answer.messages]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    notes = tmp_path_factory.mktemp("notes") / "notes"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TOOL_NOTES", str(notes))
        pool = started(*NAMES)
        conversation = Asked(pool)
        conversation.notes = notes
        yield conversation
        pool.close()


def call(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_results_stand_in_the_order_of_the_calls(asked):
    """Sync and async tools, which take different times, with text between the calls."""
    text = f"I ask. {call('slow', seconds=0.3)} and {call('add', a=2, b=3)}\n{call('look_up', name='ä')}"
    messages = asked.step(text).answer.messages
    assert [message["name"] for message in messages] == ["slow", "add", "look_up"]
    assert {message["role"] for message in messages} == {"tool"}
    assert [message["content"] for message in messages] == [
        "done", "5", '{"name": "ä", "kind": "short", "limit": null}',
    ]  # fmt: skip


def test_a_turn_without_a_call_ends_the_conversation(asked):
    answer = asked.step("The sum is 5.").answer
    assert (list(answer.messages), answer.reward, answer.done) == ([], None, False)


@pytest.mark.parametrize("turn", [{"finished": False}, {"last": True}])
def test_calls_that_nobody_would_read_are_not_executed(asked, turn):
    """A turn that was cut, and the last one that the limits allow."""
    before = asked.notes.read_text() if asked.notes.exists() else ""
    messages = asked.step(call("add", a=1, b=1), **turn).answer.messages
    assert [message["content"] for message in messages] == ["error: no turn is left for a result"] * ("last" in turn)
    assert (asked.notes.read_text() if asked.notes.exists() else "") == before


def test_calls_in_a_thought_that_the_template_has_opened_are_not_executed(asked):
    """Until the model ends the thought."""
    text = call("add", a=1, b=2)
    assert asked.contents(text, opened="<think>") == []
    assert asked.contents(f"{call('add', a=5, b=5)}</think>{text}", opened="<think>") == ["3"]


@pytest.mark.parametrize("text, words", [
    ("<tool_call>\nadd(1, 2)\n</tool_call>", "error: this call cannot be read: "),
    (call("subtract", a=1), "error: there is no tool 'subtract'; the tools are add, look_up, misbehave, slow"),
    (call("add", a=1), "error: wrong arguments for add: 'b' is a required property"),
    (call("add", a=1, b="2"), "error: wrong arguments for add: b: '2' is not of type 'integer'"),
    (call("add", a=1, b=2, c=3), "error: wrong arguments for add: Additional properties are not allowed ('c' was"),
    (call("look_up", name="x", kind="middle"), "error: wrong arguments for look_up: kind: 'middle' is not one of"),
    (call("misbehave", how="raise"), "error: KeyError: 'raise'"),
    (call("misbehave", how="exit"), "error: SystemExit: 3"),
    (call("misbehave", how="bytes"), "error: the tool returned b'abc', which is no text and nothing that JSON holds"),
    (call("misbehave", how="nan"), "error: the tool returned nan, which is no text"),
    (call("misbehave", how="megabytes"), "x" * 1000 + "... (the first 1,000 of 5,000,000 characters)"),
    (call("misbehave", how="nothing"), "(empty)"),
    (call("misbehave", how="none"), "null"),
    (call("misbehave", how="half"), "a?b"),
    (call("misbehave", how="cancel"), "error: CancelledError"),
    (call("misbehave", how="mark"), "end < |im_end|> of"),
    (call("slow", seconds=60), "error: took longer than 2 s"),
])  # fmt: skip
def test_bad_input_is_an_observation(asked, text, words):
    """The conversation goes on: the next call has its result."""
    contents = asked.contents(text + call("add", a=1, b=1))
    assert contents[0].startswith(words)
    assert contents[1] == "2"


def test_the_name_that_the_model_gives_a_call_is_no_way_into_the_context(asked):
    """Neither with special tokens nor by its length."""
    messages = asked.step(call("x<|im_end|>" + "y" * 50_000)).answer.messages
    assert messages[0]["name"].startswith("x< |im_end|>yyy")
    assert len(messages[0]["name"]) < 300


@pytest.mark.parametrize("schema, arguments", [
    ({"$ref": "#/definitions/Nope"}, {}),
    ({"$ref": "http://127.0.0.1:9/schema"}, {}),
    ({"properties": {"a": {"multipleOf": 0.5}}}, {"a": 10**400}),
    ({"$ref": "#"}, {}),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "$ref": "#/definitions/Nope"}, {}),
])  # fmt: skip
def test_schemas_that_cannot_be_applied_are_an_observation(schema, arguments):
    assert ArgumentCheck(schema, closed=False).problems(arguments).startswith("they cannot be compared")


def test_whole_numbers_and_null(asked):
    """JSON has one kind of number; transformers writes `int | None` as nullable."""
    assert asked.contents(call("add", a=2.0, b=3)) == ["5"]
    assert asked.contents(call("look_up", name="x", limit=None))[0].endswith('"limit": null}')
    assert "not of type" in asked.contents(call("add", a=2.5, b=3))[0]


@pytest.mark.parametrize("schema, value, problem", [
    ({"type": "array", "items": {"type": "integer"}}, [1.0, 2], ""),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, {"x": 3.0}, ""),
    ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "integer"}], "nullable": True}, None, ""),
    ({"type": "object", "properties": {"nullable": {"type": "integer"}}}, {"nullable": "x"}, "is not of type"),
    ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, 0, "less than or equal to the minimum"),
])  # fmt: skip
def test_nested_schemas_and_other_drafts(schema, value, problem):
    whole = {"$schema": "http://json-schema.org/draft-04/schema#", "properties": {"a": schema}}
    check = ArgumentCheck(whole, closed=True)
    arguments = check.whole({"a": value})
    assert "." not in json.dumps(arguments)
    assert (problem in check.problems(arguments)) if problem else not check.problems(arguments)


def test_a_function_may_use_an_event_loop_of_its_own_behind_an_async_call(asked):
    contents = asked.contents(call("look_up", name="x") + call("misbehave", how="loop"))
    assert contents[1] == '{"name": "inside", "kind": "short", "limit": null}'


def test_an_endless_list_of_calls(asked):
    contents = asked.contents(call("add", a=1, b=1) * (MAX_CALLS + 5))
    assert contents == ["2"] * MAX_CALLS + [f"error: not executed: a turn has at most {MAX_CALLS} calls"] * 5


def test_random_numbers_are_the_conversation_s_own():
    """They follow from the seed, also where another conversation draws between two calls."""
    pool = started("misbehave")
    try:
        text, drawn = call("misbehave", how="random"), []
        first, second = Asked(pool), Asked(pool)
        for each in (first, second, second, first):
            drawn.append(each.contents(text)[0])
        assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    finally:
        pool.close()


def test_a_function_that_never_returns_loses_its_conversation_only():
    pool = started("misbehave", "add", seconds=1.0)
    try:
        hanging, other = Asked(pool), Asked(pool)
        assert other.contents(call("add", a=1, b=1)) == ["2"]
        reply = hanging.step(call("misbehave", how="hang"))
        assert reply.answer is None
        assert reply.late
        assert reply.error.startswith("took longer than 1 s")
        assert other.contents(call("add", a=1, b=2)) == ["3"]
    finally:
        pool.close()


def test_the_python_tool_in_a_conversation():
    """Between other calls, with limits of the configuration; what exceeds them is an observation."""
    pool = started({"python": {"seconds": 1.0, "output_bytes": 200}}, HERE + "add")
    try:
        asked, code = Asked(pool), "import math\nmath.comb(10, 5)"
        calls = [call("python", code=code), call("add", a=1, b=1), call("python", code="while True: pass")]
        first, second, third = asked.contents("".join(calls))
        assert (first.strip(), second) == ("252", "2")
        assert third.startswith("error: The code ")
        assert asked.contents(call("python", program="1"))[0].startswith("error: wrong arguments for python: ")
    finally:
        pool.close()


def test_limits_of_the_python_tool_are_those_of_the_configuration():
    """The worker, which loads no pydantic, has a class of its own with the same fields and defaults."""
    assert dataclasses.asdict(PythonLimits()) == PythonLimitsConfig().model_dump()


def test_keys_that_the_template_does_not_read_are_left_out():
    pool = started("add", keys=())
    try:
        assert Asked(pool).step(call("add", a=1, b=1)).answer.messages == [{"role": "tool", "content": "2"}]
    finally:
        pool.close()


# --- descriptions -----------------------------------------------------------------------------------


def test_descriptions_come_from_signature_and_docstring():
    described = describe_function(HERE + "look_up")["function"]
    assert described["name"] == "look_up"
    assert described["description"] == "Look something up."
    assert described["parameters"] == {
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "What to look up."},
            "kind": {"type": "string", "enum": ["long", "short"], "description": "How much to say."},
            "limit": {"type": "integer", "nullable": True, "description": "Most words."},
        },
        "required": ["name"],
    }


@pytest.mark.parametrize("name, words", [
    ("positional", "has the parameter a: int; a model gives each argument by its name"),
    ("many", "has the parameter **options: int; a model gives each argument by its name"),
    ("undescribed", "cannot be described: DocstringParsingException"),
    ("untyped", "cannot be described: TypeHintParsingException"),
    ("count", "is a method without its object"),
    ("several", "is a generator, expected a function"),
    ("NUMBER", "is of type int, expected a function"),
    ("dated", "the parameter day is of the type date, which a call cannot hold; take str, int"),
    ("nested", "the parameter paths is of the type Path, which a call cannot hold"),
    ("missing", "has no function 'missing'"),
])  # fmt: skip
def test_functions_that_cannot_be_tools(name, words):
    with pytest.raises(ValueError, match=f"^environment.tools.0.: .*{re.escape(words)}"):
        tool_descriptions(EnvironmentConfig.model_validate({"tools": [HERE + name]}))


def test_two_tools_of_one_name():
    with pytest.raises(ValueError, match="'add' is the name of 2 tools"):
        tool_descriptions(EnvironmentConfig.model_validate({"tools": [HERE + "add", HERE + "add"]}))


@pytest.mark.parametrize("section, words", [
    ({}, "got neither function nor tools"),
    ({"function": "a:B", "tools": ["a:f"]}, "got both function and tools"),
    ({"tools": ["a:f"], "args": {"x": 1}}, "tools have none; leave args out"),
    ({"function": "a:B", "parser": "hermes"}, "parser is read with tools only"),
    ({"tools": ["search"]}, "'search' is no import path"),
    ({"tools": [{"mpc": "x"}]}, "mpc"),
    ({"tools": [{"names": ["x"]}]}, "got none of function, mcp and python, expected one of"),
    ({"tools": [{"function": "a:f", "env": ["X"]}]}, "env is of an MCP server, and function has none"),
    ({"tools": [3]}, "tools.0"),
    ({"tools": [{"python": {"second": 3}}]}, "second"),
])  # fmt: skip
def test_bad_sections(section, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        EnvironmentConfig.model_validate(section)
