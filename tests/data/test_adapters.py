"""Adapters: rows of well-known sets become records; and JSON arrays of any length are read a piece at a time. Not
covered: what a command makes of the records (test_strangers.py, test_bad_data.py)."""

import io
import json
import tracemalloc

import pytest

from megarlhf.config import SourceConfig
from megarlhf.data import json_rows
from megarlhf.data.json_rows import parse_array
from megarlhf.data.samples.encoders import PairEncoder
from megarlhf.data.sources.adapters import ADAPTERS, alpaca, anthropic_hh, digest_of_adapter, openai_messages, sharegpt
from megarlhf.data.sources.fields import Reader
from megarlhf.data.sources.read import read_chunks
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer
from tests.data.chat_styles import said
from tests.data.conftest import CHAT
from tests.data.in_memory import load_records
from tests.refuses import refuses


def test_anthropic_hh_parts_behind_the_last_common_answer():
    """Both dialogues agree up to there; what follows may have turns of its own."""
    common = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: 1+1?\n\nAssistant:"
    row = {"chosen": common + " 2", "rejected": common + " 3\n\nHuman: no\n\nAssistant: 2", "id": 7}
    made = {"id": 7, "prompt": common, "chosen": " 2", "rejected": " 3\n\nHuman: no\n\nAssistant: 2"}
    assert anthropic_hh(row) == made
    early = "\n\nHuman: a\n\nAssistant:"
    assert anthropic_hh({"chosen": early + " x", "rejected": early + " y"})["prompt"] == early
    same = common + " 2"
    assert anthropic_hh({"chosen": same, "rejected": same}) == {"prompt": common, "chosen": " 2", "rejected": " 2"}
    with refuses("no common beginning"):
        anthropic_hh({"chosen": "a" + common, "rejected": common})


def test_alpaca_puts_the_input_behind_the_instruction():
    assert alpaca({"instruction": "Add.", "input": "1 2", "output": "3", "id": 1}) == {
        "id": 1, "prompt": "Add.\n\n1 2", "response": "3",
    }  # fmt: skip
    for empty in ({}, {"input": ""}, {"input": None}):
        assert alpaca({"instruction": "Add.", **empty, "output": "3"}) == {"prompt": "Add.", "response": "3"}
    assert alpaca({"instruction": "Add."}) == {"prompt": "Add."}, "a prompt alone, for rl"
    dolly = {"instruction": "Add.", "context": "1 2", "response": "3"}
    assert alpaca(dolly) == alpaca({**dolly, "input": "", "output": None}) == {"prompt": "Add.\n\n1 2", "response": "3"}
    for other in ({"input": "3 4"}, {"output": "7"}, {"query": "Subtract."}):
        with refuses(f"'{next(iter(other))}'", "adapter"):
            alpaca({**dolly, **other})


def test_sharegpt_turns_become_messages():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "Tool", "value": "c"}]
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"},
    ]  # fmt: skip
    assert sharegpt({"conversations": turns, "id": 1}) == {"id": 1, "messages": messages}
    weighed = sharegpt({"conversations": [turns[0], {**turns[1], "weight": 0}]})
    assert weighed == {"messages": [messages[0], {**messages[1], "weight": 0}]}
    system = {"role": "system", "content": "s"}
    assert sharegpt({"conversation": turns[:1], "system": "s"}) == {"messages": [system, messages[0]]}
    for row, names in (
        ({"conversations": [{"from": "human", "text": "a"}]}, ("'human'", "'value'")),
        ({"conversations": [{"from": "system", "value": "s"}, *turns], "system": "t"}, ("'system'", "one out")),
        ({"turns": turns}, ("'conversations'", "{from, value}", "'turns'")),
    ):
        with refuses(*names):
            sharegpt(row)


def test_sharegpt_leaves_conversations_out_that_begin_with_an_answer():
    """Parts of longer ones: nothing says what is answered."""
    turns = [{"from": "gpt", "value": "b"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert sharegpt({"conversations": turns}) is None
    assert sharegpt({"conversations": [{"from": "system", "value": "s"}, *turns]}) is None
    assert sharegpt({"conversations": turns[1:]}) is not None


def test_openai_messages_and_preferences():
    row = {"messages": [{"role": "user", "content": "a"}], "tools": []}
    assert openai_messages(row) == row
    before, good, bad = ([{"role": role, "content": role}] for role in ("user", "assistant", "tool"))
    preference = {"input": {"messages": before}, "preferred_output": good, "non_preferred_output": bad}
    assert openai_messages(preference) == {"chosen": before + good, "rejected": before + bad}
    tools = [{"type": "function", "function": {"name": "add"}}]
    whole = {**preference, "input": {"messages": before, "tools": tools, "parallel_tool_calls": None}, "margin": 2.0}
    made = {"chosen": before + good, "rejected": before + bad, "tools": tools, "margin": 2.0}
    assert openai_messages(whole) == openai_messages({**whole, "tools": None}) == made
    with refuses("'tools' once", "input", "column"):
        openai_messages({**whole, "tools": [{}]})
    with refuses("input.messages", "preferred_output", "non_preferred_output"):
        openai_messages({**preference, "input": {}})


def test_tools_of_openai_s_preferences_are_written_or_refused(fast_tokenizer):
    tokenizer = HuggingFaceTokenizer(fast_tokenizer(prefix=False, eos_token="</s>"), "here")
    user, good, bad = ([said(*each)] for each in (("user", "1"), ("assistant", "a"), ("assistant", "b")))
    given = {"messages": user, "tools": [{"name": "85"}]}
    row = openai_messages({"input": given, "preferred_output": good, "non_preferred_output": bad, "margin": 3})
    options = {"tokenizer": None, "max_prompt_tokens": 90, "max_response_tokens": 9, "with_margin": True}
    with refuses("tools", "name"):
        PairEncoder(**options).by(tokenizer)(0, row)
    writes = "{% for t in tools or [] %}{{ t.name }}{% endfor %}" + CHAT
    pair = PairEncoder(**options, chat_template=writes).by(tokenizer)(0, row)
    assert tokenizer.decode(pair.prompt_tokens).startswith("85<")
    assert pair.margin == 3.0


def test_every_adapter_says_what_it_expected(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    for name in ADAPTERS:
        with refuses("x.jsonl, line 1", f"adapter '{name}'", "expected", "'a'"):
            load_records(SourceConfig(path=tmp_path / "x.jsonl", adapter=name), fields=())


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64])
def test_a_json_array_is_the_same_in_pieces_of_any_size(monkeypatch, piece):
    """Cut anywhere: in a number, a word, an escape, a character of several bytes."""
    monkeypatch.setattr(json_rows, "_PIECE", piece)
    rows = [{"a": 'é\u2028\\"]', "b": [-1.5e3, True, None, "\ud83d"]}, {}, {"c": {"d": "x" * 90}}]
    for text in (json.dumps(rows), json.dumps(rows, ensure_ascii=False, indent=2).replace("\ud83d", "y")):
        expected = json.loads(text)
        assert list(parse_array(io.BytesIO(b"\xef\xbb\xbf \n" + text.encode() + b"\n\n"), "x")) == expected
    assert list(parse_array(io.BytesIO(b"[ ]"), "x")) == []


def test_no_file_is_held_as_a_whole(tmp_path):
    """Twenty megabytes as an array and as lines, of which a few are in memory at once."""
    row = {"prompt": "x" * 2000, "response": "y"}
    text = json.dumps(row)
    (tmp_path / "a.json").write_text("[" + ",\n".join([text] * 10_000) + "]")
    (tmp_path / "a.jsonl").write_text((text + "\n") * 10_000)
    for name in ("a.json", "a.jsonl"):
        tracemalloc.start()
        count = sum(len(chunk.rows) for chunk in read_chunks(tmp_path / name))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count == 10_000
        assert peak < 10e6 < (tmp_path / name).stat().st_size


def test_an_adapter_is_another_one_when_a_module_that_it_imports_changes(tmp_path, monkeypatch):
    """Beside it, in a package, imported where it is called, and by way of another; also where nothing has imported it
    yet. What is beside it and not imported does not count, nor what was installed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "digest_pack").mkdir()
    texts = {
        "digest_mine.py": "import yaml, digest_help\nfrom digest_pack import inner\ndef f(row):\n    return row\n",
        "digest_help.py": "def g():\n    from digest_far import WORD\n",
        "digest_far.py": "WORD = 1\n", "digest_pack/__init__.py": "", "digest_pack/inner.py": "from . import other\n",
        "digest_pack/other.py": "WORD = 1\n", "digest_unused.py": "",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    before = digest_of_adapter("digest_mine:f")
    for name, text in texts.items():
        (tmp_path / name).write_text(text + "# changed\n")
        changed = digest_of_adapter("digest_mine:f")
        (tmp_path / name).write_text(text)
        assert (changed != before) == (name != "digest_unused.py"), name
    assert digest_of_adapter("digest_mine:f") == before


@pytest.mark.parametrize("way", ["factory", "decorator", "instance", "partial"])
def test_an_adapter_that_is_made_elsewhere_is_another_one_when_its_own_module_changes(tmp_path, monkeypatch, way):
    """The module that the configuration names counts, and the one that the code stands in."""
    monkeypatch.syspath_prepend(tmp_path)
    made = {
        "factory": "def make(word):\n    def read(row):\n        return {**row, 'prompt': word}\n    return read\n",
        "decorator": "def make(f):\n    def read(row):\n        return f(row)\n    return read\n",
        "instance": "class make:\n    def __init__(self, word):\n        self.word = word\n"
        "    def __call__(self, row):\n        return row\n",
        "partial": "import functools\ndef read(word, row):\n    return row\n"
        "def make(word):\n    return functools.partial(read, word)\n",
    }[way]
    mine = "@make\ndef other(row):\n    return 'OLD'\n" if way == "decorator" else "other = make('OLD')\n"
    helpers, named = tmp_path / f"{way}_helpers.py", tmp_path / f"{way}_mine.py"
    helpers.write_text(made)
    named.write_text(f"from {way}_helpers import make\n{mine}")
    before = digest_of_adapter(f"{way}_mine:other")
    for file in (helpers, named):
        text = file.read_text()
        file.write_text(text.replace("OLD", "NEW") if "OLD" in text else text + "# changed\n")
        assert digest_of_adapter(f"{way}_mine:other") != before
        file.write_text(text)
    assert digest_of_adapter(f"{way}_mine:other") == before


OVERWRITTEN = [
    ("implicit_prompt", {"prompt": "Q: what?", "chosen": "I say yes", "rejected": "I say no"}, "prompt"),
    ("anthropic_hh", {"prompt": "x", "chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"}, "prompt"),
    ("alpaca", {"instruction": "i", "input": "", "output": "o", "prompt": "other"}, "prompt"),
    ("sharegpt", {"messages": [1], "conversations": [{"from": "human", "value": "a"}]}, "messages"),
    ("nemo_rl", {"prompt": "p", "context": "q", "completions": [
        {"rank": 0, "completion": "a"}, {"rank": 1, "completion": "b"}]}, "prompt"),
    ("ms_swift", {"chosen": "c", "messages": [said("assistant", "a")], "rejected_response": "b"}, "chosen"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "column"), OVERWRITTEN, ids=[case[0] for case in OVERWRITTEN])
def test_a_column_in_whose_place_an_adapter_writes_is_refused(name, row, column, tmp_path):
    reader = Reader(SourceConfig(path=tmp_path, adapter=name), ())
    with refuses(f"column '{column}'", "adapter", "leave one of them out"):
        reader.record(row, "row 1")
    assert reader.record({key: value for key, value in row.items() if key != column}, "row 1")


def test_a_system_message_that_is_no_text_and_a_rank_that_is_no_number_are_refused():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    with refuses("'system'", "list"):
        ADAPTERS["sharegpt"]({"system": ["Be Spock"], "conversations": turns})
    pair = [{"rank": float("nan"), "completion": "a"}, {"rank": 1, "completion": "b"}]
    with refuses("rank", "NaN"):
        ADAPTERS["nemo_rl"]({"context": "q", "completions": pair})
