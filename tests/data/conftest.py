"""A small Hugging Face tokenizer with a chat template, trained here: no network; a file of records and a cache."""

import os
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.data.chat_styles import CHATML, chat_tokenizer
from tests.data.counting import ROWS, write

CORPUS = ["the answer is 85", "what is 37+48= and so on", "0123456789 abc"] * 5
CHAT = (
    "{% for m in messages %}<{{ 'bot' if m.role == 'assistant' else m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def make_fast_tokenizer(*, prefix, chat=True, **special):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    alphabet = sorted(set("".join(CORPUS)) | {"\n", "<", ">"})
    trainer = trainers.BpeTrainer(
        vocab_size=90, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)
    wrapped.chat_template = CHAT if chat else None
    return wrapped


@pytest.fixture
def fast_tokenizer():
    """The function that makes one: `prefix` puts a space before a text's first word."""
    return make_fast_tokenizer


@pytest.fixture
def place(tmp_path):
    """A file of records, written a while ago, and a cache."""
    file = write(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "x", "response": ""}])
    os.utime(file, (time.time() - 60,) * 2)
    return {"train": file, "cache": str(tmp_path / "cache")}


@pytest.fixture(scope="package")
def chatml(tmp_path_factory):
    """A tokenizer of one id a character with ChatML's template."""
    return chat_tokenizer(tmp_path_factory.mktemp("chatml"), CHATML)
