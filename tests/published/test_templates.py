"""Published chat templates: every part of random conversations is written and learnt, or the record is refused. By
search alone, with texts that stand nowhere else: `tests/data/test_written.py` has the same for templates of our own,
and texts that are equal."""

import random

import pytest

from megarlhf.data.text.assistant_mask import Whole
from megarlhf.data.text.templates import Conversation, chat_template
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from tests.data.conversation_parts import conversation
from tests.data.test_written import check_records
from tests.published.test_live import write_directory
from tools import pretrained, published

pytestmark = [pytest.mark.published, pytest.mark.timeout(600)]

MOST_REFUSED = {
    "deepseek_v3": "thoughts under a key, developers, calls beside a content",
    "gemma3": "white space, and whatever does not alternate",
    "llama3": "white space, calls", "llama3_1": "white space, calls",
    "qwen3": "thoughts of earlier answers, developers, line breaks around thoughts",
    "smollm2": "thoughts, calls",
}  # fmt: skip
"""Of each package that has a template, what that leaves out or changes."""


def spelled(tokenizer):
    def spell(tokens):
        return tokenizer.of_transformers.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return spell


@pytest.mark.parametrize("name", published.TEMPLATES)
def test_templates_of_models_beside_another_tokenizer(name):
    """They write calls and thoughts in many ways: JSON, XML, channels; those for training with marks."""
    template = (published.fetch("templates") / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = load_tokenizer(pretrained.directory())
    records = [conversation(random.Random(seed), plain=seed % 4 == 0) for seed in range(60)]
    outcomes = check_records(tokenizer, template, records, spelled(tokenizer))
    assert outcomes["used"], outcomes
    assert outcomes["NotWritten"], outcomes
    writes_calls = chat_template(tokenizer, template).program.names("tool_calls")
    assert writes_calls == (name not in ("cohere2", "phi3_5"))


@pytest.mark.parametrize("name", MOST_REFUSED)
def test_all_parts_of_random_conversations_are_written_and_learnt_or_refused(name, tmp_path):
    tokenizer = load_tokenizer(write_directory(name, tmp_path, "llama"))
    records = [conversation(random.Random(seed)) for seed in range(300)]
    outcomes = check_records(tokenizer, None, records, spelled(tokenizer))
    assert outcomes["used"], outcomes
    assert outcomes["NotWritten"], outcomes
    plain = [conversation(random.Random(seed), plain=True) for seed in range(100)]
    assert check_records(tokenizer, None, plain, spelled(tokenizer))["used"] > 100


@pytest.mark.parametrize("name", MOST_REFUSED)
def test_ids_of_a_beginning_are_those_of_the_whole_up_to_a_mark(name, tmp_path):
    tokenizer = load_tokenizer(write_directory(name, tmp_path, "llama"))
    template, draw, compared = chat_template(tokenizer), random.Random(1), 0
    for seed in range(100):
        text = template.text(Conversation(conversation(random.Random(seed), plain=True)["messages"]))
        whole = Whole(template, text)
        for end in draw.choices(range(len(text) + 1), k=20):
            ids = whole.ids_of(text[:end])
            assert ids == template.ids(text[:end])
            compared += len(ids)
    assert compared > 10_000
