"""Calls of tools as published chat templates write them: the form of each, and vLLM's parser of the same family.

Not covered: templates of Mistral, Kimi, Granite and Phi-4, which no package has. Of gpt-oss, vLLM's parser reads token
ids, not a text.
"""

import json

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from megarlhf.data.text.templates import chat_template
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.rollout.tools.call import Call, Unreadable
from megarlhf.rollout.tools.forms import parse
from megarlhf.rollout.tools.forms.of_template import descriptions, form_of, written_calls
from megarlhf.rollout.tools.forms.vllm_parser import load_vllm_parser
from tests.published.test_live import write_directory
from tests.published.test_turns import MARKS, OWN, TOKENIZERS, marked, template_of
from tools import published

pytestmark = [pytest.mark.published, pytest.mark.timeout(600)]

FORM = {
    "qwen2_5": "hermes", "qwen2_5_training": "hermes", "own/qwen3": "hermes", "qwen3_training": "hermes",
    "qwen3_instruct_2507": "hermes", "qwen3_5_think": "qwen3_xml", "nemotron_3_nano": "qwen3_xml", "glm4moe": "glm",
    "llama3_1": "llama3_json", "llama3_2": "llama3_json", "lfm2_2_5": "pythonic", "gemma4": "gemma4",
    "deepseekv3": "deepseek_v3", "own/deepseek_v3": "deepseek_v3", "deepseek_r1_distill": "deepseek_v3",
    "gptoss": "gptoss", "gptoss_training": "gptoss", "own/smollm2": None, "own/llama3": None, "own/llama3_1": None,
    "own/gemma3": None, "cohere2": None, "phi3_5": None,
}  # fmt: skip
PARSERS = {
    "hermes": "hermes", "qwen3_xml": "qwen3_xml", "glm": "glm45", "llama3_json": "llama3_json", "pythonic": "lfm2",
    "gemma4": "gemma4", "deepseek_v3": "deepseek_v3",
}  # fmt: skip
"""vLLM's parser of a form."""
NONE_AS_TEXT = ("qwen3_xml", "gemma4")
"""Forms whose templates write Python's None, which vLLM reads as a text although the type is null."""
ONE_CALL = ("llama3_1", "llama3_2", "gptoss", "gptoss_training")
CALL_MARKS = {
    "glm": "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
    "qwen3_xml": "<tool_call> </tool_call>",
    "pythonic": "<|tool_call_start|> <|tool_call_end|>", "gemma4": '<|tool_call> <tool_call|> <|"|>',
}  # fmt: skip
VALUES = {"text": ["", "7", "null", "a, b=[1]\n\n{c}", 'don\'t "quote" <b>ü</b> 你好'], "whole": [0, -3, 10**20],
          "part": [0.5, 1e-7, 3], "truth": [True, False], "nothing": [None], "list": [[], [[1, "x"], {"y": None}]],
          "object": [{}, {"a b": [1.5, "ü"], "c": {"d": True}}]}  # fmt: skip


def template(name, directory):
    plain = {"qwen2_5_training": "qwen3", "gptoss_training": "gptoss"}.get(name)
    if plain is None:
        return template_of(name, directory)
    text = (published.fetch("templates") / f"{name}.jinja").read_text(encoding="utf-8")
    return chat_template(load_tokenizer(write_directory(plain, directory, "llama")), text)


def calls_with_all_values():
    """Two calls for each set of values."""
    for number in range(5):
        values = {key: kinds[number % len(kinds)] for key, kinds in VALUES.items()}
        yield Call("first_tool", values), Call("second_tool", {"text": values["text"], "list": values["list"]})


def as_texts(value):
    """All that is in a value as texts."""
    if isinstance(value, dict):
        return {key: as_texts(part) for key, part in value.items()}
    return [as_texts(part) for part in value] if isinstance(value, list) else str(value).lower()


def plain(calls):
    return [(call.name, dict(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", FORM)
def test_the_form_of_each_template(name, tmp_path):
    assert form_of(template(name, tmp_path)) == FORM[name]


@pytest.mark.parametrize("name", [name for name, form in FORM.items() if form])
def test_what_a_template_writes_is_read(name, tmp_path):
    """Behind a thought too. A cut turn has no other call."""
    written, form = template(name, tmp_path), FORM[name]
    for calls in calls_with_all_values():
        calls = calls[: 1 if name in ONE_CALL else 2]
        text = written_calls(written, calls)
        assert text
        assert plain(parse(form, text, descriptions())) == plain(calls), text
        thought = "" if form == "gptoss" else f"I could {text}</think>"
        assert plain(parse(form, thought + text, descriptions())) == plain(calls)
        for length in range(0, len(text), 7):
            found = [call for call in parse(form, text[:length], descriptions()) if isinstance(call, Call)]
            assert plain(found) == plain(calls)[: len(found)]


def directory_with_marks(name, directory):
    """The template's tokenizer, with the marks of calls that vLLM's parser looks up."""
    own = name.removeprefix("own/")
    if own != name or name not in MARKS:
        kept = {"qwen2_5_training": "qwen3", **TOKENIZERS}
        write_directory(own if own in OWN and own != name else kept[name], directory, "llama")
    else:
        marked(directory, name)
    file = FastTokenizer.from_file(str(directory / "tokenizer.json"))
    words = ["<|python_tag|>", *CALL_MARKS.get(FORM[name], "").split()]
    file.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    (directory / "tokenizer.json").write_text(file.to_str())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    keep = {key: config[key] for key in ("bos_token", "eos_token", "pad_token") if key in config}
    config = {**keep, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", [name for name, form in FORM.items() if form in PARSERS])
def test_vllm_reads_the_same(name, tmp_path):
    (tmp_path / "own").mkdir()
    written, parser = template(name, tmp_path / "own"), PARSERS[FORM[name]]
    read = load_vllm_parser(parser, directory_with_marks(name, tmp_path))
    agreed = 0
    for calls in calls_with_all_values():
        text = written_calls(written, calls[: 1 if name in ONE_CALL else 2])
        ours, theirs = parse(FORM[name], text, descriptions()), read(f"<think>so</think>{text}", descriptions())
        if FORM[name] in NONE_AS_TEXT:
            assert theirs[0].arguments["nothing"] == "None"
            theirs = [Call(c.name, {k: None if k == "nothing" else v for k, v in c.arguments.items()}) for c in theirs]
        if FORM[name] == "pythonic" and "don't" in text:
            assert len(theirs) < len(ours)  # vLLM's repair of an apostrophe makes one call of two
            continue
        if FORM[name] == "gemma4":  # vLLM reads what is in lists and objects as texts
            ours, theirs = ([Call(c.name, as_texts(c.arguments)) for c in calls] for calls in (ours, theirs))
        assert plain(theirs) == plain(ours), text
        agreed += len(ours)
    assert agreed == (5 if name in ONE_CALL else 8 if FORM[name] == "pythonic" else 10)
    assert read("An answer.", descriptions()) == []


def test_a_mark_without_a_call_and_unknown_names(tmp_path):
    directory = directory_with_marks("own/qwen3", tmp_path)
    read = load_vllm_parser("hermes", directory)
    (broken,) = read('<tool_call>{"name": "f"', [])
    assert isinstance(broken, Unreadable)
    assert "<tool_call> is there" in broken.why
    with pytest.raises(ValueError, match=r"called 'qwen'; the known ones are .*hermes"):
        load_vllm_parser("qwen", directory)
    with pytest.raises(ValueError, match="use the form gptoss"):
        load_vllm_parser("openai", directory)
    with pytest.raises(ValueError, match="lfm2 cannot be used with the tokenizer"):
        load_vllm_parser("lfm2", directory)


def test_the_table_names_every_template():
    assert {name.removeprefix("own/") for name in FORM} == {*published.TEMPLATES, *OWN}
