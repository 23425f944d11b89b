"""GGUF files that gguf's own writer has made of transformers' models become directories that transformers loads as the
same model: tensors bit for bit, logits, tokens, chat template, ends.

Not covered: files of llama.cpp's own making, of which `make pretrained` converts one.
"""

import io
import json
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from megarlhf.commands.convert import main
from megarlhf.data.tokenizer import load_tokenizer
from megarlhf.model_directory import end_tokens
from megarlhf.weights.checkpoint.formats.gguf.header import read_gguf
from megarlhf.weights.checkpoint.formats.gguf.model import architecture_of
from megarlhf.weights.checkpoint.formats.gguf.names import sources
from megarlhf.weights.checkpoint.formats.gguf.numbers import Numbers
from megarlhf.weights.checkpoint.formats.gguf.tokenizer import CUTS, tokenizer_files
from megarlhf.weights.checkpoint.from_gguf import PIECE_ELEMENTS, convert_gguf
from tests.data.chat_styles import CHATML, said
from tests.weights.byte_level import CORPUS, TEXTS, trained
from tests.weights.gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    add_byte_level,
    as_stored,
    write_gguf,
)
from tests.weights.models import make_model

VOCAB = 352
"""A few more than the tokenizers have, as models' own."""
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

CASES = {
    "llama": ("llama", "F32", {}),
    "llama of two dtypes": ("llama", "F16", {"num_key_value_heads": 1}),
    "tied llama": ("llama", "Q4_1", {"tie_word_embeddings": True}),
    "llama with biases": ("llama_biases", "BF16", {"rope_parameters": LLAMA3, "mlp_bias": False}),
    "llama with longer positions": ("llama_linear", "Q5_0", {}),
    "heads of another size": ("llama", "Q8_0", {"head_dim": 32}),
    "mistral": ("mistral", "Q8_0", {}),
    "mixtral": ("mixtral", "BF16", {}),
    "qwen2": ("qwen2", "Q8_0", {}),
    "tied qwen2": ("qwen2_tied", "F32", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}}),
    "qwen3": ("qwen3", "Q4_0", {}),
    "qwen3_moe": ("qwen3_moe", "Q8_0", {}),
    "phi3": ("phi3", "F16", {}),
    "phi3 with longer positions": ("phi3_longrope", "F32", {}),
    "gpt2": ("gpt2", "F32", {}),
    "gpt2 whose head is no copy": ("gpt2", "Q5_1", {"tie_word_embeddings": False}),
}  # fmt: skip

with_tokenizer = partial(add_byte_level, tokenizer=trained("smollm"), pre="smollm", pad_to=VOCAB)


def tokens(writer: GGUFWriter) -> None:
    with_tokenizer(writer)


@pytest.fixture(scope="module")
def llama():
    return make_model("llama", vocab_size=VOCAB, num_hidden_layers=2)


@pytest.fixture(scope="module")
def small(llama, tmp_path_factory):
    """A sound file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", llama, tokens, kind="Q8_0")


@pytest.mark.parametrize("case", CASES)
def test_a_file_becomes_the_model_that_it_was_made_of(case, tmp_path):
    """Every tensor bit for bit: what gguf makes of the stored numbers; logits over all positions."""
    from transformers import AutoModelForCausalLM

    family, kind, changes = CASES[case]
    model = make_model(family, vocab_size=VOCAB, num_hidden_layers=2, **changes)
    write_gguf(tmp_path / "model.gguf", model, tokens, kind=kind)
    written = convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert written.stored_as.startswith(kind)
    assert written.notes == ()
    expected = as_stored(model, kind)
    made, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert made.dtype == torch.float32
    found = as_stored(made, "F32")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    if kind != "F32":
        assert any(not torch.equal(tensor, as_stored(model, "F32")[name]) for name, tensor in expected.items())
        return  # the same tensors in the same model
    assert torch.equal(logits(made), logits(model))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 48 + 3 - 3).view(1, -1)).logits


@pytest.mark.parametrize("case", ["llama with biases", "llama with longer positions", "mistral", "mixtral", "phi3"])
def test_what_the_metadata_says_is_computed(case, tmp_path):
    """Rotary scaling, windows, experts: with the numbers of the file both models have the same logits."""
    from transformers import AutoModelForCausalLM

    family, _, changes = CASES[case]
    model = make_model(family, vocab_size=VOCAB, num_hidden_layers=2, **changes)
    write_gguf(tmp_path / "model.gguf", model, tokens)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(made), logits(model), rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == 2
    assert "quantization_config" not in config
    if case == "llama with biases":
        assert config["rope_scaling"] == {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
        plain = make_model(family, vocab_size=VOCAB, num_hidden_layers=2, **{**changes, "rope_parameters": None})
        assert not torch.allclose(logits(plain), logits(model)), "the scaling makes a difference"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_from_the_file(family, tmp_path):
    """By its own code for GGUF, which puts rows of q and k back in order too."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = make_model(family, vocab_size=VOCAB, num_hidden_layers=2)
    write_gguf(tmp_path / "model.gguf", model, tokens, kind="Q8_0")
    read = load_gguf_checkpoint(tmp_path / "model.gguf", return_tensors=True, model_to_load=model)
    assert read["tensors"].keys() == as_stored(model, "Q8_0").keys()
    for name, tensor in as_stored(model, "Q8_0").items():
        assert torch.equal(read["tensors"][name], tensor), name


def test_a_tensor_in_pieces_and_files_and_dtypes(llama, tmp_path, monkeypatch, capsys):
    """Pieces of a few rows by several threads, shards, bf16 and fp16 as a cast of the numbers; progress in bytes."""
    from safetensors.torch import load_file

    monkeypatch.setattr("megarlhf.weights.checkpoint.from_gguf.PIECE_ELEMENTS", 100)
    assert PIECE_ELEMENTS > 100
    path = write_gguf(tmp_path / "model.gguf", llama, tokens, kind="Q8_0")
    told = []
    written = convert_gguf(path, tmp_path / "a", max_shard_bytes=50_000, started=told.append, progress=told.append)
    assert told[0] == written.num_bytes == sum(told[1:]) == 4 * sum(t.numel() for t in as_stored(llama, "F32").values())
    shards = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 2
    found = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    expected = as_stored(llama, "Q8_0")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        assert main(["gguf-to-hf", "--gguf", str(path), "--out", str(tmp_path / name), "--dtype", name]) == 0
        found = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(found[key], tensor.to(dtype)) for key, tensor in expected.items())
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert "0.000 GB of tensors, stored as Q8_0, F32 before" in capsys.readouterr().out


def test_a_head_that_repeats_the_embedding_is_tied(llama, tmp_path):
    """One that is rounded otherwise is a head of its own."""
    model = make_model("llama", vocab_size=VOCAB, num_hidden_layers=1, tie_word_embeddings=True)
    for name, head, tied in (("same", 1.0, True), ("other", 1.01, False)):

        def repeated(tensors, head=head):
            tensors["output.weight"] = tensors["token_embd.weight"] * head

        convert_gguf(write_gguf(tmp_path / f"{name}.gguf", model, tokens, change=repeated), tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] is tied


# --- tokenizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_text_becomes_the_same_tokens(cut, tmp_path):
    """Spaces, digits, combining marks, emoji, marks in the text; back to text; len without what fills it up."""
    original = trained(cut)
    path = tmp_path / "a.gguf"
    family = {"qwen2": "qwen2", "gpt-2": "gpt2"}.get(cut, "llama")
    write_gguf(path, make_model(family, vocab_size=VOCAB, num_hidden_layers=1), partial(
        add_byte_level, tokenizer=original, pre=cut, pad_to=VOCAB
    ))  # fmt: skip
    convert_gguf(path, tmp_path / "out")
    made = load_tokenizer(tmp_path / "out")
    assert made.vocab_size == original.get_vocab_size() < VOCAB
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert made.encode(text) == ids, text
        if cut != "qwen2":  # which composes
            assert made.decode(ids) == text.replace("<|im_start|>", "").replace("<|im_end|>", "").replace(
                "<|endoftext|>", ""
            )
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
    assert main(["gguf-to-hf", "--input", str(path), "--output", str(tmp_path / "b")]) == 0
    assert "ends an answer with token 2 (<|im_end|>), which the file does not name" in capsys.readouterr().out
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
    assert main(["gguf-to-hf", "--gguf", str(path), "--out", str(tmp_path / "b")]) == 0
    assert "the file has no chat template, and none was written" in capsys.readouterr().out
    assert not (tmp_path / "b" / "chat_template.jinja").exists()
    broken = partial(with_tokenizer, template="{% for m in messages %}{{ raise_exception('never') }}{% endfor %}")
    written = convert_gguf(write_gguf(tmp_path / "c.gguf", llama, broken), tmp_path / "c")
    assert "the chat template was written as it is, and fails" in written.notes[0]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer(prefix, tmp_path, llama):
    """Against SentencePiece itself: spaces, bytes of what has no piece, a mark of the user's, bos."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB,
        hard_vocab_limit=False,
        add_dummy_prefix=prefix,
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    def add(writer: GGUFWriter) -> None:
        size = range(pieces.get_piece_size())
        kinds = {
            UNKNOWN: pieces.is_unknown,
            CONTROL: pieces.is_control,
            BYTE: pieces.is_byte,
            USER_DEFINED: lambda n: pieces.id_to_piece(n) == "<|im_end|>",
            NORMAL: lambda n: True,
        }
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([pieces.id_to_piece(n) for n in size])
        writer.add_token_scores([pieces.get_score(n) for n in size])
        writer.add_token_types([next(kind for kind, is_kind in kinds.items() if is_kind(n)) for n in size])
        writer.add_bos_token_id(pieces.bos_id())
        writer.add_eos_token_id(pieces.eos_id())
        writer.add_unk_token_id(pieces.unk_id())
        writer.add_add_space_prefix(prefix)

    convert_gguf(write_gguf(tmp_path / "a.gguf", llama, add), tmp_path / "out")
    made = load_tokenizer(tmp_path / "out")
    for text in [*(text for text in TEXTS if "<|" not in text and text), "  lead", "the 85<|im_end|>"]:
        assert made.encode(text) == pieces.encode(text), text
        assert made.decode(pieces.encode(text)) == text
    assert made.bos_id == pieces.bos_id()
    assert made.decode(made.encode("the") + made.encode(" 85", continuation=True)) == "the 85"


def test_a_tokenizer_of_one_s_own(tmp_path, llama, small, capsys):
    """In place of one that is not known; its tokens must be the file's."""
    path = write_gguf(tmp_path / "a.gguf", llama, partial(with_tokenizer, pre="another-one"))
    assert main(["gguf-to-hf", "--gguf", str(path), "--out", str(tmp_path / "a")]) == 2
    assert "says 'another-one', which is not known here" in capsys.readouterr().err
    convert_gguf(small, tmp_path / "theirs")
    command = ["gguf-to-hf", "--gguf", str(path), "--out", str(tmp_path / "a"), "--tokenizer"]
    assert main([*command, str(tmp_path / "theirs")]) == 0
    assert load_tokenizer(tmp_path / "a").tokens() == load_tokenizer(tmp_path / "theirs").tokens()
    assert (tmp_path / "a" / "chat_template.jinja").read_text() == CHATML
    other = partial(add_byte_level, tokenizer=trained("qwen2"), pre="qwen2")
    convert_gguf(write_gguf(tmp_path / "b.gguf", make_model("qwen2", vocab_size=VOCAB), other), tmp_path / "others")
    capsys.readouterr()
    assert main([*command[:3], "--out", str(tmp_path / "c"), "--tokenizer", str(tmp_path / "others")]) == 2
    assert "they do not belong together; name the tokenizer of this model" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


# --- refusals -------------------------------------------------------------------------------------


def keys(**metadata):
    """A file with other metadata."""
    return {"metadata": {key.replace("__", "."): value for key, value in metadata.items()}}


def drop(name):
    return {"change": lambda tensors: tensors.pop(name)}


def put(name, tensor):
    return {"change": lambda tensors: tensors.update({name: tensor})}


REFUSED = {
    "another family": (keys(general__architecture="gemma3"), "architecture 'gemma3'; known: gpt2, llama, phi3, qwen2"),
    "an adapter": (keys(general__type="adapter"), "holds a 'adapter' (general.type), expected a 'model'"),
    "one of several": (keys(split__count=3), "one of 3 files that a model is split over; put them together first"),
    "an unknown key": (keys(llama__logit_scale="0.1"), "states llama.logit_scale = '0.1', which is not known here"),
    "no number of layers": (keys(llama__block_count=None), "does not state llama.block_count, expected a whole"),
    "more layers": (keys(llama__block_count=3), "states 3 layers (llama.block_count) and has tensors of 2"),
    "heads that divide nothing": (keys(llama__attention__head_count=7), "embeddings of 64 and 7 heads"),
    "another vocabulary": (keys(llama__vocab_size=99), f"llama.vocab_size = 99, expected {VOCAB}"),
    "values of other heads": (keys(llama__attention__value_length=8), "attention.value_length = 8, expected 16"),
    "part of a head": (keys(llama__rope__dimension_count=8), "turns 8 of a head's 16 channels"),
    "unknown scaling": (keys(llama__rope__scaling__type="su"), "rope.scaling.type 'su'; known: none, linear, yarn"),
    "unknown divisors": (put("rope_freqs.weight", torch.rand(8) + 1), "holds other divisors than Llama 3.1's scaling"),
    "a tensor less": (drop("blk.1.attn_q.weight"), "in 1 tensors: blk.1.attn_q.weight is missing"),
    "a tensor more": (put("blk.0.attn_q.scale", torch.ones(1)), "blk.0.attn_q.scale is not part of the model"),
    "another shape": (put("blk.0.ffn_up.weight", torch.ones(96, 32)), "shape (96, 32), expected (96, 64)"),
    "no embedding": (drop("token_embd.weight"), "no tensor token_embd.weight: it is no whole model"),
    "no number": (put("output_norm.weight", torch.full((64,), torch.nan)), "model.norm.weight has values that"),
    "no tokenizer": (keys(tokenizer__ggml__model="none"), "has no tokenizer; name a directory that has"),
    "an unknown kind": (keys(tokenizer__ggml__model="bert"), "of kind 'bert' (tokenizer.ggml.model), known: gpt2"),
    "no word for its cut": (keys(tokenizer__ggml__pre=None), "does not say how its tokenizer cuts text"),
    "no types of tokens": (keys(tokenizer__ggml__token_type=None), "tokens and no types of them"),
    "no merges": (keys(tokenizer__ggml__merges=None), "no sound tokenizer.ggml.merges"),
    "no end": (keys(tokenizer__ggml__eos_token_id=None), "names no end-of-sequence token"),
    "an end beyond": (keys(tokenizer__ggml__eos_token_id=5000), "eos_token_id = 5000, and "),
    "a template for no file": (
        {"metadata": {"tokenizer.chat_template.../x": "a"}}, "a chat template named '../x', which is no file's name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_said(case, tmp_path, llama, capsys):
    """In one line, with exit status 2, and nothing is written."""
    changes, message = REFUSED[case]
    path = write_gguf(tmp_path / "model.gguf", llama, tokens, **changes)
    assert main(["gguf-to-hf", "--gguf", str(path), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    said_at_all = [line for line in captured.err.splitlines() if not line.startswith("converting")]
    assert len(said_at_all) == 1
    assert message in said_at_all[0]
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_what_is_no_file_of_its_own(tmp_path, small, capsys):
    """Names, other files, an output that is there; a run, `inspect` and `verify` say how a GGUF file is used."""

    def refused(path, *options):
        assert main(["gguf-to-hf", "--gguf", str(path), "--out", str(tmp_path / "out"), *options]) == 2
        return capsys.readouterr().err

    assert "is a directory; name a .gguf file in it" in refused(tmp_path)
    assert "does not exist; correct the path" in refused(tmp_path / "absent.gguf")
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04 and so on")
    assert "expected b'GGUF': it is no GGUF file; name one" in refused(tmp_path / "a.gguf")
    shutil.copyfile(small, tmp_path / "model-00001-of-00003.gguf")
    assert "is one of 3 files that a model is split over" in refused(tmp_path / "model-00001-of-00003.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(40))
    assert "says GGUF version 1, expected 2 or 3" in refused(tmp_path / "b.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert "exists already" in refused(small)
    assert "--force replaces checkpoints only" in refused(small, "--force")
    assert main(["inspect", str(small)]) == 2
    assert "gguf-to-hf --gguf" in capsys.readouterr().err
    assert main(["verify", str(small.parent), str(small)]) == 2
    assert f"{small.parent} has a GGUF file, which is converted first" in capsys.readouterr().err


def test_numbers_that_fp16_cannot_hold(tmp_path, llama, capsys):
    big = put("output_norm.weight", torch.full((64,), 1e5))
    path = write_gguf(tmp_path / "model.gguf", llama, tokens, **big)
    command = ["gguf-to-hf", "--gguf", str(path), "--out", str(tmp_path / "out"), "--dtype"]
    assert main([*command, "fp16"]) == 2
    assert "model.norm.weight has numbers above 65504, the largest of torch.float16" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert main([*command, "bf16"]) == 0


def test_without_the_package(tmp_path, llama, small, monkeypatch, capsys):
    """Which quantized tensors need; floats do not."""
    plain = write_gguf(tmp_path / "plain.gguf", llama, tokens, kind="F16")
    for name in [*sys.modules]:
        if name.split(".")[0] == "gguf":
            monkeypatch.setitem(sys.modules, name, None)
    assert main(["gguf-to-hf", "--gguf", str(small), "--out", str(tmp_path / "a")]) == 2
    assert "(ggml's types 8), which are read with the package gguf" in (err := capsys.readouterr().err)
    assert "pip install 'megarlhf[gguf]'" in err
    assert main(["gguf-to-hf", "--gguf", str(plain), "--out", str(tmp_path / "b")]) == 0


def all_checks(path: Path) -> None:
    """All that is read of a file before something is written."""
    file = read_gguf(path)
    numbers = Numbers(file)
    arch = architecture_of(file, numbers)
    sources(file, arch)
    tokenizer_files(file, arch.vocab_size)


def test_a_file_cut_anywhere_or_changed_anywhere_raises_nothing_else(tmp_path, small):
    """A ValueError that names the file: at some hundred lengths, and after some hundred changes of a byte in the
    header, most of which change no more than a text."""
    whole, path = small.read_bytes(), tmp_path / "damaged.gguf"
    all_checks(small)
    for length in [*range(4, 200, 7), *range(200, len(whole) - 1, len(whole) // 150), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"damaged\.gguf"):
            all_checks(path)
    random = np.random.default_rng(0)
    header = min(tensor.offset for tensor in read_gguf(small).tensors.values())
    refused = 0
    for at in random.integers(4, header, 400):
        changed = bytearray(whole)
        changed[at] ^= int(random.integers(1, 256))
        path.write_bytes(changed)
        try:
            all_checks(path)
        except ValueError as error:
            assert "damaged.gguf" in str(error)  # noqa: PT017 - what is not refused was a text
            refused += 1
    assert 20 < refused < 380
