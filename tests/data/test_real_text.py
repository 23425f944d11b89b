"""What real text and a byte-level tokenizer have that sums of two digits have not: characters of several tokens, cut
characters, answers that merge with the template, answers that were cut, text that is none. The tokenizer is trained
here and cuts bytes as SmolLM2's does. Empty answers: tests/trainers/test_best_of.py. Whole runs:
tests/test_demo_chat.py."""

import json

import pytest
import torch

from megarlhf.columns import Ragged
from megarlhf.data.samples.encoders import PairEncoder, PromptEncoder, SFTEncoder
from megarlhf.data.samples.retokenize import Retokenizer
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.observe.records.sample_tables import SampleTables, ShownTables, read_table
from megarlhf.observe.report.page import report_page
from megarlhf.observe.report.recorded_run import RecordedRun
from megarlhf.rollout.rewards.score import response_texts
from tests.chat_model import write_chat_tokenizer
from tests.data.chat_styles import said
from tests.data.in_memory import build_sft, load_records
from tests.refuses import refuses
from tests.tables import make_rollouts

LIMITS = {"max_prompt_tokens": 100, "max_response_tokens": 100}
ASKED = [said("user", "Hi")]
START, END = 1, 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    write_chat_tokenizer(folder := tmp_path_factory.mktemp("tokenizer"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


def talk(answer):
    return {"messages": [*ASKED, said("assistant", answer)]}


ANSWERS = {
    "plain": "Paris", "emoji": "Paris 🙂👩\u200d👩\u200d👧", "combining": "cafe\u0301", "another script": "日本語",
    "no text": "\x00\ufffd\u2028", "repeated": "no " * 20 + "aaaa" * 10, "digits": "1234567890",
    "space first": " Paris", "line break first": "\nParis", "line breaks first": "\n\nParis",
    "white space behind": "Paris \n", "markup": "[/INST] [bold]<b>x</b>[/]",
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_what_is_asked_is_what_is_learnt_behind(directory, tokenizer, answer):
    """The prompt's ids as `rl` asks with them, then the answer's, then the end of the turn; and back to the text."""
    prompt = PromptEncoder(tokenizer=directory, max_prompt_tokens=100).open()(0, {"messages": ASKED})
    sample = SFTEncoder(tokenizer=directory, **LIMITS).open()(0, talk(answer))
    assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert sample.tokens[: sample.prompt_length] == prompt.tokens
    response = sample.tokens[sample.prompt_length :]
    assert response[-1] == END == tokenizer.eos_id
    assert response.count(END) == 1
    assert tokenizer.decode(response, continuation=True) == answer
    pair = PairEncoder(tokenizer=directory, **LIMITS).open()(0, {"prompt": ASKED, "chosen": answer, "rejected": "No"})
    assert (pair.prompt_tokens, pair.chosen_tokens) == (prompt.tokens, response)


def test_the_tokenizer_does_merge_line_breaks(tokenizer):
    """Without it "line breaks first" would show nothing."""
    together = tokenizer.encode("assistant\n\n\nParis")
    assert together != [*tokenizer.encode("assistant\n"), *tokenizer.encode("\n\nParis")]


def test_a_response_that_was_cut_is_not_taught_to_end(directory, tokenizer):
    """`generate` says `finished: false` of it. Texts as they stand, as `generate` writes them."""
    encode = SFTEncoder(tokenizer=directory, **LIMITS).open()
    line = {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "response": "A long"}
    for finished, end in ((True, [END]), (None, [END]), (False, [])):
        sample = encode(0, {**line, "finished": finished})
        assert sample.tokens[sample.prompt_length :] == [*tokenizer.encode("A long"), *end]
        assert sample.stretches == [sample.prompt_length, len(sample.tokens)]


@pytest.mark.parametrize("character", ["🙂", "é", "日"])
def test_a_character_that_the_limit_cuts_leaves_no_mark(tokenizer, character):
    """Of a response that has ended, what stands there is what the model has said."""
    tokens = tokenizer.encode(f"ok {character}", continuation=True)
    assert tokenizer.decode(tokens[:-1]) == "ok \ufffd"
    rows = [tokens[:-1], [*tokens[:-1], END], tokens, [END], []]
    responses = Ragged.from_rows([torch.tensor(row) for row in rows], torch.int64)
    finished_N = torch.tensor([False, True, False, True, False])
    rollouts = make_rollouts(responses=responses, logprobs=responses, finished_N=finished_N, version=0)
    assert response_texts(rollouts, tokenizer) == ["ok ", "ok \ufffd", f"ok {character}", "", ""]


def test_half_of_a_surrogate_pair_is_said_with_its_place(directory, tmp_path):
    """JSON can hold it; no tokenizer takes it. The record is named, as for every mistake in data."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(talk("fine")) + "\n" + json.dumps(talk("cut \ud83d")) + "\n")
    with refuses("line 2", r"'\ud83d'", "UTF-16"):
        build_sft(load_records(path, fields=()), load_tokenizer(directory), **LIMITS)


def test_tables_and_pages_hold_any_text(tmp_path):
    rows = [{"step": 1, "sample": n, "response": text} for n, text in enumerate(ANSWERS.values())]
    SampleTables(tmp_path).write("train", 1, rows)
    assert read_table(tmp_path, "train", 1) == rows
    told = {"prompt": "p", "rewards": {}, "reward": None, "length": 1, "finished": True}
    tables = ShownTables(training={1: [row | told for row in rows]})
    run = RecordedRun(name="texts", kind="rl", rows=[{"step": 1}], config=None, tables=tables)
    page = report_page([run], title="texts")
    page.encode()
    assert "[/INST] [bold]&lt;b&gt;x&lt;/b&gt;[/]" in page


def test_a_cut_text_is_read_by_another_tokenizer_without_an_end(tokenizer):
    write = Retokenizer(tokenizer, max_tokens=100)
    whole = write("asked", ASKED, "No", finished=True).tokens
    assert write("asked", ASKED, "No", finished=False).tokens == whole[:-1]
    assert whole[-1] == END
    assert write("asked", ASKED, "", finished=True).tokens[-2:] == [*tokenizer.encode("\n")[-1:], END]
