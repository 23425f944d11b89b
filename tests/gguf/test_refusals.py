"""GGUF files that are damaged, foreign, or state what nobody here computes are refused, and nothing is left of them."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarlhf.commands.convert import main as convert
from tests.gguf.gguf_files import VOCAB, tokens, write_gguf
from tests.refuses import missing_names, refuses
from tools.gguf_to_hf.__main__ import main
from tools.gguf_to_hf.header import read_gguf
from tools.gguf_to_hf.model import architecture_of
from tools.gguf_to_hf.names import sources
from tools.gguf_to_hf.numbers import Numbers
from tools.gguf_to_hf.tokenizer import tokenizer_files


def keys(**metadata):
    return {"metadata": {key.replace("__", "."): value for key, value in metadata.items()}}


def drop(name):
    return {"change": lambda tensors: tensors.pop(name)}


def put(name, tensor):
    return {"change": lambda tensors: tensors.update({name: tensor})}


REFUSED = {
    "another family": (keys(general__architecture="gemma3"), "'gemma3'|gpt2, llama, phi3, qwen2"),
    "an adapter": (keys(general__type="adapter"), "'adapter'|general.type|'model'"),
    "several, said in words": (keys(split__count="3", llama__rope__scaling__type="su"), "rope.scaling.type 'su'"),
    "experts without a router": (keys(llama__expert_count=4), "experts|blk.0.ffn_gate_inp.weight"),
    "no divisors": (put("rope_freqs.weight", torch.zeros(8)), "8 divisors|up to 0|1 or more"),
    "one of several": (keys(split__count=3), "one of 3 files"),
    "an unknown key": (keys(llama__logit_scale="0.1"), "llama.logit_scale = '0.1'"),
    "no number of layers": (keys(llama__block_count=None), "llama.block_count|whole number"),
    "more layers": (keys(llama__block_count=3), "3 layers|llama.block_count|of 2"),
    "heads that divide nothing": (keys(llama__attention__head_count=7), "embeddings of 64|7 heads"),
    "another vocabulary": (keys(llama__vocab_size=99), f"llama.vocab_size = 99|{VOCAB}"),
    "values of other heads": (keys(llama__attention__value_length=8), "attention.value_length = 8|16"),
    "part of a head": (keys(llama__rope__dimension_count=8), "8 of a head's 16 channels"),
    "unknown scaling": (keys(llama__rope__scaling__type="su"), "rope.scaling.type 'su'|none, linear, yarn"),
    "unknown divisors": (put("rope_freqs.weight", torch.rand(8) + 1), "other divisors|Llama 3.1's"),
    "a tensor less": (drop("blk.1.attn_q.weight"), "1 tensors|blk.1.attn_q.weight is missing"),
    "a tensor more": (put("blk.0.attn_q.scale", torch.ones(1)), "blk.0.attn_q.scale|not part of the model"),
    "another shape": (put("blk.0.ffn_up.weight", torch.ones(96, 32)), "(96, 32)|(96, 64)"),
    "no embedding": (drop("token_embd.weight"), "token_embd.weight|no whole model"),
    "no number": (put("output_norm.weight", torch.full((64,), torch.nan)), "model.norm.weight|values"),
    "no tokenizer": (keys(tokenizer__ggml__model="none"), "no tokenizer"),
    "an unknown kind": (keys(tokenizer__ggml__model="bert"), "'bert'|tokenizer.ggml.model|gpt2"),
    "no word for its cut": (keys(tokenizer__ggml__pre=None), "tokenizer cuts text"),
    "no types of tokens": (keys(tokenizer__ggml__token_type=None), "tokens|no types"),
    "no merges": (keys(tokenizer__ggml__merges=None), "tokenizer.ggml.merges"),
    "no end": (keys(tokenizer__ggml__eos_token_id=None), "no end-of-sequence token"),
    "an end beyond": (keys(tokenizer__ggml__eos_token_id=5000), "eos_token_id = 5000"),
    "a template for no file": ({"metadata": {"tokenizer.chat_template.../x": "a"}}, "chat template|'../x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_said(case, tmp_path, llama, capsys):
    changes, names = REFUSED[case]
    path = write_gguf(tmp_path / "model.gguf", llama, tokens, **changes)
    assert main(["--gguf", str(path), "--out", str(tmp_path / "out")]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("converting")]
    assert not missing_names(error, *names.split("|"))
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_what_is_no_file_of_its_own(tmp_path, small, capsys):
    def refused(path, names, *options):
        assert main(["--gguf", str(path), "--out", str(tmp_path / "out"), *options]) == 2
        assert not missing_names(capsys.readouterr().err, *names.split("|"))

    refused(tmp_path, "a directory|.gguf file")
    refused(tmp_path / "absent.gguf", "absent.gguf|does not exist")
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04 and so on")
    refused(tmp_path / "a.gguf", "a.gguf|b'GGUF'")
    shutil.copyfile(small, tmp_path / "model-00001-of-00003.gguf")
    refused(tmp_path / "model-00001-of-00003.gguf", "one of 3 files")
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(40))
    refused(tmp_path / "b.gguf", "b.gguf|version 1|2 or 3")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    refused(small, "out|exists already")
    refused(small, "--force|checkpoints only", "--force")
    for command in (["inspect", str(small)], ["hf-to-megatron", "--hf", str(small.parent), "--out", "x"]):
        assert convert(command) == 2
        assert missing_names(capsys.readouterr().err, f"python -m tools.gguf_to_hf --gguf {small}") == []


@pytest.mark.parametrize("key, value", [
    ("ggml.eos_token_id", -1), ("ggml.bos_token_id", -1), ("chat_template", 5), ("ggml.model", []),
])  # fmt: skip
def test_values_that_no_writer_of_gguf_makes(key, value, small):
    """-1 would be the last token."""
    file = read_gguf(small)
    with refuses("small.gguf", f"tokenizer.{key} = {value!r}"):
        tokenizer_files(replace(file, metadata={**file.metadata, f"tokenizer.{key}": value}), VOCAB)


def test_two_kinds_of_rotary_scaling_at_once(small):
    """llama.cpp computes both."""
    file = read_gguf(small)
    more = {**file.tensors, "rope_freqs.weight": file.tensors["output_norm.weight"]}
    file = replace(file, metadata={**file.metadata, "llama.rope.scaling.type": "yarn"}, tensors=more)
    with refuses("'yarn'", "rope_freqs.weight", "no family"):
        architecture_of(file, Numbers(read_gguf(small)))


def test_numbers_that_fp16_cannot_hold(tmp_path, llama, capsys):
    big = put("output_norm.weight", torch.full((64,), 1e5))
    path = write_gguf(tmp_path / "model.gguf", llama, tokens, **big)
    command = ["--gguf", str(path), "--out", str(tmp_path / "out"), "--dtype"]
    assert main([*command, "fp16"]) == 2
    assert not missing_names(capsys.readouterr().err, "model.norm.weight", "65504", "torch.float16")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert main([*command, "bf16"]) == 0


def test_without_the_package(tmp_path, llama, small, monkeypatch, capsys):
    """Which quantized tensors need; floats do not."""
    plain = write_gguf(tmp_path / "plain.gguf", llama, tokens, kind="F16")
    for name in [*sys.modules]:
        if name.split(".")[0] == "gguf":
            monkeypatch.setitem(sys.modules, name, None)
    assert main(["--gguf", str(small), "--out", str(tmp_path / "a")]) == 2
    assert not missing_names(capsys.readouterr().err, "types 8", "package gguf", "pip install 'megarlhf[gguf]'")
    assert main(["--gguf", str(plain), "--out", str(tmp_path / "b")]) == 0


def all_checks(path: Path) -> None:
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
        with refuses("damaged.gguf"):
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
