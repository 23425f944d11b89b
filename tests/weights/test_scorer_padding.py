"""A reward model's padding token, by transformers: the same scores alone and in a batch, padded on either side. The
model and tokenizers are made here. Not covered: a whole run's export (tests/distributed/test_rm_options.py), TRL
(tests/peers/test_live.py)."""

import json
from pathlib import Path

import pytest
import torch

from megarlhf.weights.checkpoint.conversion import HuggingFaceTarget, MegatronTarget, convert
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from megarlhf.weights.checkpoint.scorer_padding import with_padding
from tests.classifiers import write_classifier, write_tokenizer
from tests.refuses import missing_names

TEXTS = ["1+1=2</s>", "12+34=46</s>", "7</s>", "98+1=99</s>"]


def scores(directory: Path, batch: int, side: str = "right") -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side=side)
    found: list[float] = []
    for start in range(0, len(TEXTS), batch):
        inputs = tokenizer(TEXTS[start : start + batch], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            found += model(**inputs).logits[:, 0].tolist()
    return found


@pytest.fixture
def scorer(tmp_path: Path) -> Path:
    return write_classifier(tmp_path / "scorer", pad_token_id=2, eos_token_id=2, tokenizer={"pad_token": "</s>"})


def test_converted_reward_models_score_alike_in_any_batch(scorer: Path, tmp_path: Path) -> None:
    """Through a Megatron checkpoint and back; before, the score of another token is read."""
    convert(open_checkpoint(scorer), tmp_path / "megatron", MegatronTarget())
    convert(open_checkpoint(tmp_path / "megatron"), tmp_path / "back", HuggingFaceTarget())
    convert(open_checkpoint(scorer), tmp_path / "copy", HuggingFaceTarget())
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(scorer, dtype=torch.float32).eval()
    model.config.pad_token_id = 63  # which no text has
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(scorer)
    with torch.no_grad():
        expected = [float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits) for text in TEXTS]
    assert scores(scorer, 1) != pytest.approx(expected, abs=1e-3), "the fault is there"
    for directory in (tmp_path / "back", tmp_path / "copy"):
        assert json.loads((directory / "config.json").read_text())["pad_token_id"] == 0
        for batch, side in ((1, "right"), (4, "right"), (4, "left")):
            assert scores(directory, batch, side) == pytest.approx(expected, abs=1e-4)
    assert json.loads((scorer / "config.json").read_text())["pad_token_id"] == 2, "the source stays as it is"


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix == ".json"}


@pytest.mark.parametrize("special, settings, config, expected", [
    (("<unk>", "<s>", "</s>", "<pad>"), {}, {"eos_token_id": 2, "pad_token_id": 2}, 3),
    (("<unk>", "<s>", "</s>"), {"pad_token": "</s>"}, {"eos_token_id": 2}, 0),
    (("<unk>", "<s>", "</s>"), {"pad_token": "<unk>"}, {"eos_token_id": [2, 0], "pad_token_id": 0}, 1),
    (("<unk>", "<s>", "</s>", "<|reserved_0|>", "<|im_start|>"),
     {"pad_token": "</s>", "additional_special_tokens": ["<|im_start|>", "<|reserved_0|>"]}, {"eos_token_id": [2, 0]},
     3),
    (("<s>", "</s>", "<pad>"), {"unk_token": "<s>"}, {"eos_token_id": 1, "vocab_size": 2}, 0),
])  # fmt: skip
def test_which_token_it_is(special, settings, config, expected, tmp_path):
    """The tokenizer's padding, its unknown token, a reserved one, the begin: the first that ends nothing and that the
    model has a row for. The tokenizer's files say the same."""
    write_tokenizer(tmp_path, special=special, **settings)
    found, changed = with_padding({"vocab_size": 64, **config}, files_of(tmp_path))
    assert found["pad_token_id"] == expected
    for name, content in changed.items():
        (tmp_path / name).write_bytes(content)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path).pad_token_id == expected
    again, unchanged = with_padding(found, files_of(tmp_path))
    assert (again, unchanged) == (found, {})


def test_where_there_is_none_none_is_named(tmp_path, caplog):
    """And without a tokenizer nothing is known but that the padding is an end."""
    write_tokenizer(tmp_path, special=("<s>", "</s>"), unk_token="</s>", pad_token="</s>")
    config = {"vocab_size": 64, "eos_token_id": [0, 1], "pad_token_id": 1}
    assert with_padding(config, files_of(tmp_path)) == ({"vocab_size": 64, "eos_token_id": [0, 1]}, {})
    assert not missing_names(caplog.text, "config.json names none", "one text at a time")
    assert with_padding(config, {}) == ({"vocab_size": 64, "eos_token_id": [0, 1]}, {})
    other = {**config, "pad_token_id": 7}
    assert with_padding(other, {}) == (other, {})
