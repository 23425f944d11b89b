"""The tokenizer of a GGUF file becomes files from which transformers and our code read the same tokens, chat template
and end tokens: against the tokenizers that it was made of, and SentencePiece. Not covered: tokenizers of llama.cpp's
own making; white space that a model's own tokenizer drops beside special tokens."""

import io
import json
import re
from functools import partial

import pytest

from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.model_directory import end_tokens
from tests.data.chat_styles import CHATML, said
from tests.gguf.byte_level import CORPUS, TEXTS, trained
from tests.gguf.gguf_files import VOCAB, TokenType, add_byte_level, tokens, with_tokenizer, write_gguf
from tests.refuses import missing_names, refuses
from tests.weights.models import make_model
from tools.gguf_to_hf.__main__ import main
from tools.gguf_to_hf.convert import convert_gguf
from tools.gguf_to_hf.tokenizer import CUTS


@pytest.mark.parametrize("cut", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_text_becomes_the_same_tokens(cut, tmp_path):
    """Spaces, digits, combining marks, emoji, marks in the text; back to text; len without what fills it up."""
    original = trained(cut)
    path = tmp_path / "a.gguf"
    family = {"qwen2": "qwen2", "gpt-2": "gpt2"}.get(cut, "llama")
    tokenizer = partial(add_byte_level, tokenizer=original, pre=cut, pad_to=VOCAB)
    write_gguf(path, make_model(family, vocab_size=VOCAB, num_hidden_layers=1), tokenizer)
    convert_gguf(path, tmp_path / "out")
    made = load_tokenizer(tmp_path / "out")
    assert made.vocab_size == original.get_vocab_size() < VOCAB
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert made.encode(text) == ids, text
        if cut != "qwen2":  # which composes
            assert made.decode(ids) == re.sub(r"<\|(im_start|im_end|endoftext)\|>", "", text)
    assert made.bos_id == (original.token_to_id("<|im_start|>") if cut == "llama-bpe" else None)
    assert (made.eos_id, made.pad_id) == (2, 0)


def test_each_cut_is_needed():
    """Of each known one some text becomes other tokens with every other one: the texts can tell them apart."""
    cuts = ("smollm", "gpt-2", "qwen2", "llama-bpe")
    assert set(cuts) <= set(CUTS)
    pieces = {c: [trained(c).pre_tokenizer.pre_tokenize_str(normal(trained(c), text)) for text in TEXTS] for c in cuts}
    assert len({str(found) for found in pieces.values()}) == len(cuts)


def normal(tokenizer, text: str) -> str:
    return tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text


def test_the_chat_template_and_the_ends(tmp_path, llama, capsys):
    """Rendered as the original; the end of a turn is an end of responses, whether the file names it or the template."""
    from transformers import AutoTokenizer

    talk = [said("user", "What is 37+48?"), said("assistant", "85 🙂"), said("user", " again ")]
    convert_gguf(write_gguf(tmp_path / "a.gguf", llama, tokens), tmp_path / "a")
    made = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert made.chat_template == CHATML
    assert made.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nWhat is 37+48?<|im_end|>\n<|im_start|>assistant\n85 🙂<|im_end|>\n"
        "<|im_start|>user\n again <|im_end|>\n<|im_start|>assistant\n"
    )
    generation = json.loads((tmp_path / "a" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    base = partial(with_tokenizer, eos="<|endoftext|>")
    path = write_gguf(tmp_path / "b.gguf", llama, base)
    assert main(["--gguf", str(path), "--out", str(tmp_path / "b")]) == 0
    assert not missing_names(capsys.readouterr().out, "token 2", "<|im_end|>", "does not name")
    assert end_tokens(tmp_path / "b", load_tokenizer(tmp_path / "b").eos_id) == (0, 2)
    eot = {"tokenizer.ggml.eot_token_id": 2}
    written = convert_gguf(write_gguf(tmp_path / "c.gguf", llama, base, metadata=eot), tmp_path / "c")
    assert written.notes == ()
    assert json.loads((tmp_path / "c" / "config.json").read_text())["eos_token_id"] == [0, 2]


def test_templates_with_names_and_none(tmp_path, llama, capsys):
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": CHATML + "{{ tools }}"}]
    convert_gguf(write_gguf(tmp_path / "a.gguf", llama, partial(with_tokenizer, template=named)), tmp_path / "a")
    assert (tmp_path / "a" / "additional_chat_templates" / "tool_use.jinja").read_text() == CHATML + "{{ tools }}"
    path = write_gguf(tmp_path / "b.gguf", llama, partial(with_tokenizer, template=None))
    assert main(["--gguf", str(path), "--out", str(tmp_path / "b")]) == 0
    assert not missing_names(capsys.readouterr().out, "no chat template")
    assert not (tmp_path / "b" / "chat_template.jinja").exists()
    broken = partial(with_tokenizer, template="{% for m in messages %}{{ raise_exception('never') }}{% endfor %}")
    written = convert_gguf(write_gguf(tmp_path / "c.gguf", llama, broken), tmp_path / "c")
    assert not missing_names(written.notes[0], "chat template", "fails")


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer(prefix, tmp_path, llama):
    """Against SentencePiece itself: spaces, bytes of what has no piece, a mark of the user's, bos."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type="bpe", vocab_size=VOCAB, hard_vocab_limit=False,
        add_dummy_prefix=prefix, byte_fallback=True, remove_extra_whitespaces=False, normalization_rule_name="identity",
        user_defined_symbols=["<|im_end|>"], minloglevel=2,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    def add(writer):
        size = range(pieces.get_piece_size())
        kinds = {
            TokenType.UNKNOWN: pieces.is_unknown, TokenType.CONTROL: pieces.is_control, TokenType.BYTE: pieces.is_byte,
            TokenType.USER_DEFINED: lambda n: pieces.id_to_piece(n) == "<|im_end|>", TokenType.NORMAL: lambda n: True,
        }  # fmt: skip
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([pieces.id_to_piece(n) for n in size])
        writer.add_token_scores([pieces.get_score(n) for n in size])
        writer.add_token_types([next(kind for kind, is_kind in kinds.items() if is_kind(n)) for n in size])
        writer.add_bos_token_id(pieces.bos_id())
        writer.add_eos_token_id(pieces.eos_id())
        writer.add_unk_token_id(pieces.unk_id())
        writer.add_add_space_prefix(prefix)

    written = convert_gguf(write_gguf(tmp_path / "a.gguf", llama, add), tmp_path / "out")
    assert not missing_names(written.notes[0], "GGUF file", "does not say")
    phi3 = write_gguf(tmp_path / "phi3.gguf", make_model("phi3", vocab_size=VOCAB, num_hidden_layers=2), add)
    with refuses("Phi-3", "white space"):
        convert_gguf(phi3, tmp_path / "phi3")
    made = load_tokenizer(tmp_path / "out")
    for text in [*(text for text in TEXTS if "<|" not in text and text), "  lead", "the 85<|im_end|>"]:
        assert made.encode(text) == pieces.encode(text), text
        assert made.decode(pieces.encode(text)) == text
    assert made.bos_id == pieces.bos_id()
    assert made.decode(made.encode("the") + made.encode(" 85", continuation=True)) == "the 85"


def test_a_tokenizer_of_one_s_own(tmp_path, llama, small, capsys):
    path = write_gguf(tmp_path / "a.gguf", llama, partial(with_tokenizer, pre="another-one"))
    assert main(["--gguf", str(path), "--out", str(tmp_path / "a")]) == 2
    assert "'another-one'" in capsys.readouterr().err
    convert_gguf(small, tmp_path / "theirs")
    command = ["--gguf", str(path), "--out", str(tmp_path / "a"), "--tokenizer"]
    assert main([*command, str(tmp_path / "theirs")]) == 0
    assert load_tokenizer(tmp_path / "a").tokens() == load_tokenizer(tmp_path / "theirs").tokens()
    assert (tmp_path / "a" / "chat_template.jinja").read_text() == CHATML
    eot = {"tokenizer.ggml.eot_token_id": 0}
    write_gguf(tmp_path / "eot.gguf", llama, partial(with_tokenizer, pre="another-one"), metadata=eot)
    written = convert_gguf(tmp_path / "eot.gguf", tmp_path / "eot", tokenizer=tmp_path / "theirs")
    assert written.notes == ()
    assert json.loads((tmp_path / "eot" / "config.json").read_text())["eos_token_id"] == [2, 0], "those of both"
    none = write_gguf(tmp_path / "none.gguf", llama, lambda writer: None)
    written = convert_gguf(none, tmp_path / "none", tokenizer=tmp_path / "theirs")
    assert "no tokens" in written.notes[0]
    fewer = json.loads((tmp_path / "theirs" / "tokenizer.json").read_text())
    del fewer["model"]["vocab"][max(fewer["model"]["vocab"], key=fewer["model"]["vocab"].get)]
    del fewer["model"]["merges"][-1]
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps(fewer))
    with refuses("is missing", "do not belong together"):
        convert_gguf(path, tmp_path / "b", tokenizer=tmp_path / "a")
    other = partial(add_byte_level, tokenizer=trained("qwen2"), pre="qwen2")
    convert_gguf(write_gguf(tmp_path / "b.gguf", make_model("qwen2", vocab_size=VOCAB), other), tmp_path / "others")
    capsys.readouterr()
    assert main([*command[:2], "--out", str(tmp_path / "c"), "--tokenizer", str(tmp_path / "others")]) == 2
    assert "do not belong together" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
