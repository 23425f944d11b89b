"""Text that a tokenizer has no piece for is counted; and which names of special tokens in a text become those tokens.
Not covered: tokenizers that write every text byte by byte, which have no unknown token."""

import json

import pytest

from megarlhf.config import DataConfig
from megarlhf.data.samples.encoders import PairEncoder, PairSample, SFTEncoder, SFTSample
from megarlhf.data.tokenize.load import SetLoader
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from tests.refuses import missing_names
from tools.demo.make_data import train_tokenizer

LIMITS = {"max_prompt_tokens": 40, "max_response_tokens": 40}


@pytest.fixture
def pieces(tmp_path):
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "tokenizer.model").write_bytes(train_tokenizer())
    return tmp_path / "pieces"


def notes_of(tmp_path, encoder, sample_type, rows, **data):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"train": tmp_path / "rows.jsonl", "cache": str(tmp_path / "cache"), "workers": 1, "max_skipped": 0.2}
    loader = SetLoader(DataConfig.model_validate(given | data), encoder, sample_type)
    samples, _, notes = loader.train_and_validation()
    assert loader.train_and_validation()[2] == notes, "out of the cache too"
    return list(samples), notes[0].partition("rows.jsonl: ")[2]


def test_records_with_unknown_text_are_counted_once_each(tmp_path, pieces):
    """In a prompt, a response, both, or a side of a pair; also where a response is cut behind it. What is skipped does
    not count."""
    asked = (("1+1", "2"), ("1 é", "2"), ("1", "é é"), ("é", "é"), ("1" * 99 + "é", "1"))
    rows = [{"prompt": prompt, "response": response} for prompt, response in asked]
    encoder = SFTEncoder(tokenizer=pieces, **LIMITS)
    samples, note = notes_of(tmp_path, encoder, SFTSample, rows)
    assert [load_tokenizer(pieces).unk_id in sample.tokens for sample in samples] == [False, True, True, True]
    assert not missing_names(note, "1 of 5 records", "longer than 40 tokens: 1", "20 %", "unknown token: 3")
    rows = [{"prompt": "1", "response": "é" + "2" * 60}]
    _, note = notes_of(tmp_path, encoder, SFTSample, rows, over_long="cut")
    assert not missing_names(note, "all 1 records", "cut at 40 tokens: 1", "unknown token: 1")
    rows = [{"prompt": "1", "chosen": "2", "rejected": "é"}, {"prompt": "1", "chosen": "2", "rejected": "3"}]
    _, note = notes_of(tmp_path, PairEncoder(tokenizer=pieces, **LIMITS), PairSample, rows)
    assert not missing_names(note, "all 2 records", "unknown token: 1")


@pytest.mark.parametrize("end, counted", [("</s>", True), ("<unk>", False)])
def test_an_unknown_token_that_also_ends_texts_is_no_sign(tmp_path, fast_tokenizer, end, counted):
    """As that of GPT-2, which stands in every sample."""
    fast_tokenizer(prefix=False, eos_token=end, chat=False).save_pretrained(tmp_path / "model")
    rows = [{"prompt": "37", "response": "85"}, {"prompt": "é", "response": "85"}]
    _, note = notes_of(tmp_path, SFTEncoder(tokenizer=tmp_path / "model", **LIMITS), SFTSample, rows)
    assert not missing_names(note, "all 2 records")
    assert ("unknown token: 1" in note, "unknown" in note) == (counted, counted)


def test_the_name_of_a_special_token_in_a_text(tmp_path, pieces, fast_tokenizer):
    """Is that token for a Hugging Face tokenizer; for a SentencePiece model in what a template has written only."""
    fast_tokenizer(prefix=False, eos_token="</s>").save_pretrained(tmp_path / "model")
    face, piece = load_tokenizer(tmp_path / "model"), load_tokenizer(pieces)
    assert face.eos_id in face.encode("8</s>5")
    assert piece.eos_id not in piece.encode("8</s>5")
    assert piece.eos_id in piece.encode_rendered("8</s>5")
