"""GGUF files that are damaged, foreign, or state what nobody here computes are refused, and nothing is left of them."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarlhf.commands.convert import main as convert
from tests.gguf.gguf_files import VOCAB, small_file, small_llama, tokens, write_gguf
from tests.refuses import missing_names
from tools.gguf_to_hf.__main__ import main
from tools.gguf_to_hf.header import read_gguf
from tools.gguf_to_hf.model import architecture_of
from tools.gguf_to_hf.names import sources
from tools.gguf_to_hf.numbers import Numbers
from tools.gguf_to_hf.tokenizer import tokenizer_files


@pytest.fixture(scope="module")
def llama():
    return small_llama()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A sound file."""
    return small_file(tmp_path_factory.mktemp("gguf") / "small.gguf")


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
    "several, said in words": (keys(split__count="3", llama__rope__scaling__type="su"), "rope.scaling.type 'su'"),
    "experts without a router": (keys(llama__expert_count=4), "has experts and no tensor blk.0.ffn_gate_inp.weight"),
    "no divisors": (put("rope_freqs.weight", torch.zeros(8)), "holds 8 divisors of up to 0, expected 8 of 1 or more"),
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
    assert main(["--gguf", str(path), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    said_at_all = [line for line in captured.err.splitlines() if not line.startswith("converting")]
    assert len(said_at_all) == 1
    assert message in said_at_all[0]
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_what_is_no_file_of_its_own(tmp_path, small, capsys):
    """Names, other files, an output that is there; a run, `inspect` and `verify` say how a GGUF file is used."""

    def refused(path, *options):
        assert main(["--gguf", str(path), "--out", str(tmp_path / "out"), *options]) == 2
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
    for command in (["inspect", str(small)], ["hf-to-megatron", "--hf", str(small.parent), "--out", "x"]):
        assert convert(command) == 2
        assert missing_names(capsys.readouterr().err, f"python -m tools.gguf_to_hf --gguf {small}") == []


@pytest.mark.parametrize(
    ("key", "value"), [("ggml.eos_token_id", -1), ("ggml.bos_token_id", -1), ("chat_template", 5), ("ggml.model", [])]
)
def test_values_that_no_writer_of_gguf_makes(key, value, small):
    """-1 would be the last token."""
    file = read_gguf(small)
    with pytest.raises(ValueError, match=rf"small\.gguf has tokenizer\.{key} = "):
        tokenizer_files(replace(file, metadata={**file.metadata, f"tokenizer.{key}": value}), VOCAB)


def test_two_kinds_of_rotary_scaling_at_once(small):
    """llama.cpp computes both."""
    file = read_gguf(small)
    more = {**file.tensors, "rope_freqs.weight": file.tensors["output_norm.weight"]}
    file = replace(file, metadata={**file.metadata, "llama.rope.scaling.type": "yarn"}, tensors=more)
    with pytest.raises(ValueError, match=r"'yarn' and the tensor rope_freqs\.weight: no family"):
        architecture_of(file, Numbers(read_gguf(small)))


def test_numbers_that_fp16_cannot_hold(tmp_path, llama, capsys):
    big = put("output_norm.weight", torch.full((64,), 1e5))
    path = write_gguf(tmp_path / "model.gguf", llama, tokens, **big)
    command = ["--gguf", str(path), "--out", str(tmp_path / "out"), "--dtype"]
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
    assert main(["--gguf", str(small), "--out", str(tmp_path / "a")]) == 2
    assert "(ggml's types 8), which are read with the package gguf" in (err := capsys.readouterr().err)
    assert "pip install 'megarlhf[gguf]'" in err
    assert main(["--gguf", str(plain), "--out", str(tmp_path / "b")]) == 0


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
