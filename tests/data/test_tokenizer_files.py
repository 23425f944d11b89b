"""Tokenizers from other files than a tokenizer.json: GPT-2's pair, SentencePiece with a template, Megatron's."""

import json
from pathlib import Path

import pytest

from megarlhf.data.samples.encoders import PairEncoder, PromptEncoder, SFTEncoder
from megarlhf.data.tokenizers.files import has_tokenizer, tokenizer_digest, writes_the_date
from megarlhf.data.tokenizers.tokenizer import SentencePieceTokenizer, load_tokenizer
from megarlhf.weights.checkpoint.formats.megatron.tokenizers import tokenizer_in_words, tokenizer_place
from tests.data.chat_styles import CHATML, MISTRAL, said
from tests.data.test_tokenizer import sentencepiece_model
from tests.refuses import missing_names, refuses

TEXTS = ["the answer is 85", " what is 37+48=\n\nand so on", "naïve 日本 🙂", "<|endoftext|>the"]


def write_gpt2(directory: Path, *, prefix: str = "", end: bool = True) -> Path:
    from tokenizers import ByteLevelBPETokenizer

    directory.mkdir(parents=True, exist_ok=True)
    made = ByteLevelBPETokenizer()
    special = ["<|endoftext|>"] if end else []
    made.train_from_iterator(["the answer is 85", "what is 37+48= and so on"] * 5, 300, special_tokens=special)
    made.save_model(str(directory), prefix or None)
    return directory


@pytest.mark.parametrize("prefix", ["", "gpt2"])
def test_gpt_2_s_two_files_are_its_tokenizer(tmp_path, prefix):
    """Under both names; ids as transformers' own class makes them."""
    from transformers import GPT2Tokenizer

    directory = write_gpt2(tmp_path, prefix=prefix)
    assert {path.name for path in directory.iterdir()} == {
        f"{prefix}{'-' * bool(prefix)}{n}" for n in ("vocab.json", "merges.txt")
    }
    ours = load_tokenizer(directory)
    named = {path.name.removeprefix("gpt2-").partition(".")[0]: str(path) for path in directory.iterdir()}
    theirs = GPT2Tokenizer(vocab=named["vocab"], merges=named["merges"])
    end = theirs.convert_tokens_to_ids("<|endoftext|>")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == text.replace("<|endoftext|>", "")
    assert theirs("the").input_ids == theirs.encode("the", add_special_tokens=False), "it begins no text with its bos"
    assert (ours.eos_id, ours.bos_id, ours.vocab_size) == (end, None, len(theirs))
    assert has_tokenizer(directory)
    before = tokenizer_digest(directory)
    (directory / f"{prefix}{'-' * bool(prefix)}merges.txt").write_text("#version: 0.2\n")
    assert tokenizer_digest(directory) != before


def test_what_is_wrong_with_gpt_2_s_files_is_said(tmp_path):
    with refuses("no end-of-sequence token"):
        load_tokenizer(write_gpt2(tmp_path / "no_end", end=False))
    several = write_gpt2(write_gpt2(tmp_path / "several"), prefix="gpt2")
    with refuses("several", "gpt2-vocab.json, vocab.json"):
        load_tokenizer(several)
    damaged = write_gpt2(tmp_path / "damaged")
    (damaged / "vocab.json").write_text("{")
    with refuses("vocab.json", "tokenizer_config.json", "copy the tokenizer"):
        load_tokenizer(damaged)
    (damaged / "merges.txt").unlink()
    with refuses("found vocab.json", "copy", "merges.txt"):
        load_tokenizer(damaged)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pieces")
    marks = ["<|im_start|>", "<|im_end|>"]
    model = sentencepiece_model(add_dummy_prefix=True, user_defined_symbols=marks, normalization_rule_name="identity")
    (directory / "tokenizer.model").write_bytes(model)
    return directory


def test_a_sentencepiece_model_writes_conversations_by_a_template_of_the_configuration(pieces):
    """Its control symbols, which text cannot spell, are tokens where a template names them."""
    tokenizer = load_tokenizer(pieces)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    limits = {"tokenizer": pieces, "max_prompt_tokens": 99, "template": "chat"}
    talk = [said("user", "is 37"), said("assistant", "the 85")]
    encode = SFTEncoder(**limits, max_response_tokens=99, chat_template=MISTRAL).open()
    sample = encode(0, {"messages": talk})
    spell = tokenizer._continued.encode
    asked = [tokenizer.bos_id, *spell("[INST] is 37 [/INST]")]
    assert sample.tokens == [*asked, *spell("the 85"), tokenizer.eos_id]
    assert sample.stretches == [len(asked), len(sample.tokens)]
    prompt = PromptEncoder(**limits, chat_template=MISTRAL).open()(0, {"messages": talk[:1]})
    assert (prompt.tokens, prompt.text) == (asked, "<s>[INST] is 37 [/INST]")
    names = tokenizer.tokens()
    chatml = SFTEncoder(**limits, max_response_tokens=99, chat_template=CHATML).open()(0, {"messages": talk})
    assert names[chatml.tokens[-1]] == "<|im_end|>", "a piece of the user's ends a turn too"
    pairs = PairEncoder(**limits, max_response_tokens=99, chat_template=CHATML).open()
    pair = pairs(0, {"prompt": "is 37", "chosen": "the 85", "rejected": "is"})
    assert pair.prompt_tokens + pair.chosen_tokens == chatml.tokens


def test_a_sentencepiece_model_without_a_template_says_what_to_do(pieces, tmp_path):
    with refuses("SentencePiece", "data.chat_template", "plain"):
        SFTEncoder(tokenizer=pieces, max_prompt_tokens=9, max_response_tokens=9, template="chat").open()
    encode = PromptEncoder(tokenizer=pieces, max_prompt_tokens=99).open()
    assert encode(0, {"prompt": "is 37"}).messages is None, "texts need none"
    with refuses("SentencePiece", "chat template"):
        encode(0, {"messages": [said("user", "is 37")]})
    (tmp_path / "tokenizer.model").write_bytes((pieces / "tokenizer.model").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    sample = PromptEncoder(tokenizer=tmp_path, max_prompt_tokens=99).open()(0, {"messages": [said("user", "is 37")]})
    assert sample.text == "<|im_start|>user\nis 37<|im_end|>\n<|im_start|>assistant\n"
    assert load_tokenizer(tmp_path / "tokenizer.model").tokens() == load_tokenizer(pieces).tokens(), "a file by itself"


def test_a_template_that_writes_the_date_makes_another_key_each_day(pieces, tmp_path):
    """Of Llama 3.1's kind; nothing else makes a key depend on the day."""
    (tmp_path / "tokenizer.model").write_bytes((pieces / "tokenizer.model").read_bytes())
    options = {"tokenizer": tmp_path, "max_prompt_tokens": 9}
    assert "date" not in PromptEncoder(**options).key()
    dated = CHATML + "{{ strftime_now('%d %b %Y') }}"
    assert "date" in PromptEncoder(**options, chat_template=dated).key()
    (tmp_path / "chat_template.jinja").write_text(dated)
    assert writes_the_date(tmp_path, None)
    assert "date" in PromptEncoder(**options).key()
    assert "date" not in PromptEncoder(**options, template="plain").key()
    json.dumps(PromptEncoder(**options, template_args={"a": 1}).key())


STATED = [
    ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "/d/gpt2-vocab.json", "merge_file": "/d/gpt2-merges.txt"},
     "/d", "--tokenizer-type GPT2BPETokenizer|--vocab-file /d/gpt2-vocab.json|--merge-file|model.tokenizer to /d,"),
    ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "/d/tokenizer.model"}, "/d/tokenizer.model",
     "model.tokenizer to /d/tokenizer.model"),
    ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/d/llama"}, "/d/llama",
     "model.tokenizer to /d/llama"),
    ({"tokenizer_type": "Llama3Tokenizer", "tokenizer_model": "/d/tokenizer.model"}, None, "tokenizer.json"),
    ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "/a/vocab.json", "merge_file": "/b/merges.txt"}, None,
     "one directory"),
    ({"tokenizer_type": "NullTokenizer"}, None, "NullTokenizer|no file"),
]  # fmt: skip


@pytest.mark.parametrize("args, place, names", STATED, ids=[case[0]["tokenizer_type"] for case in STATED])
def test_megatron_s_names_of_tokenizers_are_files(args, place, names):
    assert tokenizer_place(args) == (None if place is None else Path(place))
    assert not missing_names(tokenizer_in_words(args), *names.split("|"))
    assert tokenizer_in_words({}) == ""
