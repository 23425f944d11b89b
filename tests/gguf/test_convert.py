"""GGUF files that gguf's own writer has made of transformers' models become directories that transformers loads as the
same model: tensors bit for bit, logits, what the metadata says. Not covered: files of llama.cpp's own making, of which
`make pretrained` converts one."""

import json

import pytest
import torch

from tests.gguf.gguf_files import VOCAB, as_stored, tokens, write_gguf
from tests.refuses import missing_names
from tests.weights.models import make_model
from tools.gguf_to_hf.__main__ import main
from tools.gguf_to_hf.convert import PIECE_ELEMENTS, convert_gguf

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

CASES = {
    "llama": ("llama", "F32", {}), "llama of two dtypes": ("llama", "F16", {"num_key_value_heads": 1}),
    "tied llama": ("llama", "Q4_1", {"tie_word_embeddings": True}),
    "llama with biases": ("llama_biases", "BF16", {"rope_parameters": LLAMA3, "mlp_bias": False}),
    "llama with longer positions": ("llama_linear", "Q5_0", {}),
    "heads of another size": ("llama", "Q8_0", {"head_dim": 32}), "mistral": ("mistral", "Q8_0", {}),
    "mixtral": ("mixtral", "BF16", {}), "qwen2": ("qwen2", "Q8_0", {}),
    "tied qwen2": ("qwen2_tied", "F32", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}}),
    "qwen3": ("qwen3", "Q4_0", {}), "qwen3_moe": ("qwen3_moe", "Q8_0", {}), "phi3": ("phi3", "F16", {}),
    "phi3 with longer positions": ("phi3_longrope", "F32", {}), "gpt2": ("gpt2", "F32", {}),
    "gpt2 whose head is no copy": ("gpt2", "Q5_1", {"tie_word_embeddings": False}),
}  # fmt: skip


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

    monkeypatch.setattr("tools.gguf_to_hf.convert.PIECE_ELEMENTS", 100)
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
        assert main(["--gguf", str(path), "--out", str(tmp_path / name), "--dtype", name]) == 0
        found = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(found[key], tensor.to(dtype)) for key, tensor in expected.items())
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert not missing_names(capsys.readouterr().out, "0.000 GB", "Q8_0, F32")


def test_a_head_that_repeats_the_embedding_is_tied(llama, tmp_path):
    """One that is rounded otherwise is a head of its own."""
    model = make_model("llama", vocab_size=VOCAB, num_hidden_layers=1, tie_word_embeddings=True)
    for name, head, tied in (("same", 1.0, True), ("other", 1.01, False)):

        def repeated(tensors, head=head):
            tensors["output.weight"] = tensors["token_embd.weight"] * head

        convert_gguf(write_gguf(tmp_path / f"{name}.gguf", model, tokens, change=repeated), tmp_path / name)
        assert json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"] is tied
