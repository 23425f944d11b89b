"""Tokenizers: prompt and response concatenate in ids and in text, with and without a dummy prefix."""

import io
import logging
import pickle
import subprocess
import sys

import pytest
import sentencepiece
from tokenizers import ByteLevelBPETokenizer, processors
from transformers import AutoTokenizer

from megarlhf.data.samples.encoders import PromptEncoder
from megarlhf.data.samples.texts import pieces
from megarlhf.data.tokenizers.sample_texts import where_they_differ
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, load_tokenizer
from tests.refuses import refuses

CORPUS = ["the answer is 85", "what is 37+48= and so on", "0123456789 abc"] * 5


def sentencepiece_model(**options):
    buffer = io.BytesIO()
    options = {"model_type": "bpe", "vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=buffer, **options)
    return buffer.getvalue()


def save_fast(directory, fast_tokenizer, **options):
    fast_tokenizer(**options).save_pretrained(directory)
    return load_tokenizer(directory)


def save_sentencepiece(directory, **options):
    (directory / "tokenizer.model").write_bytes(sentencepiece_model(**options))
    return load_tokenizer(directory)


CASES = {
    "sentencepiece": lambda d, _: save_sentencepiece(d, add_dummy_prefix=False),
    "sentencepiece_prefix": lambda d, _: save_sentencepiece(d, add_dummy_prefix=True),
    "fast": lambda d, fast: save_fast(d, fast, prefix=False, eos_token="</s>", bos_token="<s>"),
    "fast_prefix": lambda d, fast: save_fast(d, fast, prefix=True, eos_token="</s>", bos_token="<s>"),
}


@pytest.mark.parametrize("case", CASES)
def test_prompt_and_response_concatenate(case, tmp_path, fast_tokenizer):
    """Ids by construction, text by `continuation`; a response may start with a space or not."""
    tokenizer = CASES[case](tmp_path, fast_tokenizer)
    expected = HuggingFaceTokenizer if case.startswith("fast") else SentencePieceTokenizer
    assert type(tokenizer) is expected
    for prompt, response in (("37+48=", "85"), ("what is", " the answer"), ("the answer is", "85 abc")):
        ids = tokenizer.encode(response, continuation=True)
        assert tokenizer.decode(tokenizer.encode(prompt) + ids) == prompt + response
        assert tokenizer.decode(ids, continuation=True) == response
        assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
        assert max(ids) < tokenizer.vocab_size
        assert not {tokenizer.bos_id, tokenizer.eos_id} & {*ids, *tokenizer.encode(prompt)}


@pytest.mark.parametrize("case", CASES)
def test_special_tokens_leave_their_name_where_that_is_asked_for(case, tmp_path, fast_tokenizer):
    tokenizer = CASES[case](tmp_path, fast_tokenizer)
    first, second = (tokenizer.encode(text, continuation=True) for text in (" the", " answer"))
    ids = [*first, tokenizer.eos_id, *second, tokenizer.eos_id, tokenizer.vocab_size + 1]
    assert tokenizer.decode(ids, continuation=True, special=True) == " the</s> answer</s>"
    assert tokenizer.decode([*tokenizer.encode("the"), *ids[len(first) :]], special=True) == "the</s> answer</s>"
    assert tokenizer.decode(ids, continuation=True) == " the answer"


@pytest.mark.parametrize("case", ["sentencepiece_prefix", "fast_prefix"])
def test_the_prefix_is_there_and_continuation_leaves_it_out(case, tmp_path, fast_tokenizer):
    """So that the test above is not passed by tokenizers that never add one."""
    tokenizer = CASES[case](tmp_path, fast_tokenizer)
    assert tokenizer.decode(tokenizer.encode("37") + tokenizer.encode("85")) == "37 85"
    assert tokenizer.encode("85") != tokenizer.encode("85", continuation=True)


def test_ids_of_special_tokens(tmp_path, fast_tokenizer):
    model = sentencepiece_model(add_dummy_prefix=False, unk_id=3, bos_id=0, eos_id=1, pad_id=2)
    tokenizer = SentencePieceTokenizer(model)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert tokenizer.vocab_size == sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    assert 1 not in tokenizer.encode("</s>")
    fast = save_fast(tmp_path, fast_tokenizer, prefix=False, eos_token="</s>", pad_token="<unk>")
    assert (fast.bos_id, fast.eos_id, fast.pad_id) == (None, 2, 0)


@pytest.mark.parametrize("writes", [True, False])
def test_a_text_begins_with_bos_where_its_own_tokenizer_writes_it(writes, tmp_path, fast_tokenizer):
    """Prompts and texts are transformers' `tokenizer(text).input_ids`; that there is a bos is not enough."""
    made = fast_tokenizer(prefix=False, eos_token="</s>", bos_token="<s>")
    if writes:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
        )
    made.save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)("what is 37").input_ids
    assert (theirs[0] == made.bos_token_id) is writes
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_id == (made.bos_token_id if writes else None)
    assert pieces("what is 37", tokenizer, 99, end=False) == [theirs]
    encode = PromptEncoder(tokenizer=tmp_path, max_prompt_tokens=99, template="plain").open()
    assert encode(0, {"prompt": "what is 37"}).tokens == theirs


def test_undefined_padding_falls_back_to_eos_and_says_so(caplog):
    caplog.set_level(logging.INFO)
    tokenizer = SentencePieceTokenizer(sentencepiece_model(add_dummy_prefix=False, bos_id=-1))
    assert tokenizer.bos_id is None
    assert tokenizer.pad_id == tokenizer.eos_id
    assert "no padding token" in caplog.text


def test_eos_is_required(fast_tokenizer):
    with refuses("no end-of-sequence token"):
        SentencePieceTokenizer(sentencepiece_model(add_dummy_prefix=False, eos_id=-1))
    with refuses("no end-of-sequence token", "here"):
        HuggingFaceTokenizer(fast_tokenizer(prefix=False), "here")


def test_directories_without_a_tokenizer(tmp_path):
    with refuses("no such tokenizer directory", "nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with refuses("tokenizer.json", "tokenizer.model", "config.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with refuses("tokenizer.model", "SentencePiece"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["junk", "{", "[]"])
def test_a_damaged_file_is_told_in_one_line(tmp_path, fast_tokenizer, name, text):
    save_fast(tmp_path, fast_tokenizer, prefix=False, eos_token="</s>")
    (tmp_path / name).write_text(text)
    with refuses(f"{tmp_path}/tokenizer.json", "tokenizer_config.json", "copy") as raised:
        load_tokenizer(tmp_path)
    assert "\n" not in str(raised.value)


def test_the_ids_are_those_of_transformers_also_where_the_file_says_to_cut_and_to_fill(fast_tokenizer, tmp_path):
    """A tokenizer.json may have truncation and padding, which apply to no text here."""
    made = fast_tokenizer(prefix=True, bos_token="<s>", eos_token="</s>")
    made.backend_tokenizer.enable_truncation(4)
    made.backend_tokenizer.enable_padding(length=20)
    made.save_pretrained(tmp_path)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "a", "the answer is 85", "what is </s> 37+48= and so on \n", "é\u2028 \U0001f600"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_a_tokenizer_given_to_another_process_encodes_as_here(tmp_path, fast_tokenizer):
    """Byte pairs of GPT-2, a prepended space, SentencePiece, special tokens as text; refusals too. A process that
    encodes texts never imports transformers; a template is loaded again from the files."""
    places = {name: tmp_path / name for name in (*CASES, "bytes", "split")}
    for place in places.values():
        place.mkdir()
    given = {name: make(places[name], fast_tokenizer) for name, make in CASES.items()}
    byte_pairs = ByteLevelBPETokenizer()
    byte_pairs.train_from_iterator(CORPUS, 300, special_tokens=["<|endoftext|>"])
    byte_pairs.save_model(str(places["bytes"]))
    given["bytes"] = load_tokenizer(places["bytes"])
    given["split"] = save_fast(
        places["split"], fast_tokenizer, prefix=True, eos_token="</s>", split_special_tokens=True
    )
    assert given["split"].encode("</s>") != given["fast_prefix"].encode("</s>")  # what is asked below differs
    texts = [
        "", " ", "the answer", " the answer is 85", "a\n\nb </s><|endoftext|>", "\u00e9\u4e16\U0001f600", "0123 " * 99,
    ]  # fmt: skip
    asked = [(text, continuation) for text in texts for continuation in (False, True)]
    script = (
        "import pickle, sys\ngiven, asked = pickle.load(sys.stdin.buffer)\n"
        "ids = {name: [each.encode(text, continuation=c) for text, c in asked] for name, each in given.items()}\n"
        "loaded = 'transformers' in sys.modules\n"
        "chat = given['fast_prefix'].render([{'role': 'user', 'content': 'a'}], None, {}, tools=None, reply=True)\n"
        "sys.stdout.buffer.write(pickle.dumps((ids, loaded, chat, 'torch' in sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps((given, asked)), capture_output=True, check=True
    )
    ids, loaded, chat, torch = pickle.loads(done.stdout)
    assert ids == {name: [each.encode(text, continuation=c) for text, c in asked] for name, each in given.items()}
    assert (loaded, torch) == (False, False)
    assert chat == given["fast_prefix"].render([{"role": "user", "content": "a"}], None, {}, tools=None, reply=True)
    merging = HuggingFaceTokenizer(given["fast_prefix"].of_transformers, str(places["fast_prefix"]))
    merging._lead = [1, 2, 3]  # such as of a tokenizer that merges a line break with what follows
    for each in (merging, pickle.loads(pickle.dumps(merging))):
        with refuses("line break", "'x'"):
            each.encode("x", continuation=True)


@pytest.mark.parametrize("ours, theirs, expected", [
    ([1, 2, 3], [1, 7, 3], ("[1, 2, 3]", "[1, 7, 3]")),
    ([*range(30), 30], [*range(30), 99], ("[..., 28, 29, 30]", "[..., 28, 29, 99]")),
    ([*range(10), 5], [*range(10)], ("[..., 8, 9, 5]", "[..., 8, 9]")),
    (list(range(40)), [*range(20), 99], ("[..., 18, 19, 20, 21, 22, 23, 24, 25, ...]", "[..., 18, 19, 99]")),
])  # fmt: skip
def test_ids_in_a_message_are_shown_where_they_differ(ours, theirs, expected):
    assert where_they_differ(ours, theirs) == expected
