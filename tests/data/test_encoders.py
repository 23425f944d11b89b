"""Samples from records, by a tokenizer of one id a character, so that every expected id is written out."""

import json
import pickle
from dataclasses import replace

import pytest

from megarlhf.config import SFTDataConfig
from megarlhf.data.sample_types import PairSample, PromptSample, SFTSample, Skipped, Unusable
from megarlhf.data.samples.encoders import PairEncoder, PromptEncoder, SFTEncoder
from megarlhf.data.samples.limits import require_budget, require_positions
from megarlhf.data.tokenize.load import SetLoader
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, load_tokenizer
from tests.classifiers import CHAT_TEMPLATE, LETTERS, write_tokenizer
from tests.data.chat_styles import CHATML, said
from tests.data.chat_styles import chat_tokenizer as styled_tokenizer
from tests.data.in_memory import build_pairs, build_prompts, build_sft, load_records
from tests.refuses import refuses

BOS, EOS, PAD = 1, 2, 0
ASK = {"max_prompt_tokens": 50, "template": "chat"}
CHAT = {**ASK, "max_response_tokens": 50}
TALK = [said("user", "37+48="), said("assistant", "85")]


class CharTokenizer:
    """Digits are 10..19, `+` 20, `=` 21, anything else 22."""

    eos_id, bos_id, pad_id, vocab_size = EOS, BOS, PAD, 23

    def encode(self, text, *, continuation=False):
        return [10 + "0123456789+=".find(char) if char in "0123456789+=" else 22 for char in text]

    def decode(self, ids, *, continuation=False):
        return "".join("0123456789+=?"[i - 10] for i in ids if i >= 10)


TOKENIZER = CharTokenizer()
WITHOUT_BOS = CharTokenizer()
WITHOUT_BOS.bos_id = None


def test_sft_samples_and_what_is_skipped():
    """Prompt limit 5 with bos, response limit 3 with eos: exactly at the limit is used, one more is not."""
    records = [
        {"prompt": "1+1=", "response": "02"}, {"prompt": "1+1=", "response": ""}, {"prompt": "1+1=", "response": " \n"},
        {"prompt": "10+1=", "response": "11"}, {"prompt": "1+1=", "response": "002"}, {"prompt": "3", "response": "3"},
    ]  # fmt: skip
    samples, skipped = build_sft(records, TOKENIZER, max_prompt_tokens=5, max_response_tokens=3)
    assert samples == [SFTSample([BOS, 11, 20, 11, 21, 10, 12, EOS], [5, 8]), SFTSample([BOS, 13, 13, EOS], [2, 4])]
    assert skipped.describe() == (
        "skipped 4 of 6 records (empty response: 2, prompt longer than 5 tokens: 1, response longer than 3 tokens: 1)"
    )
    assert Skipped(6).describe() == "used all 6 records"


def test_pairs_and_what_is_skipped():
    records = [
        {"prompt": "1=", "chosen": "1", "rejected": "2"},
        {"prompt": "1=", "chosen": "1", "rejected": "1"},
        {"prompt": "1=", "chosen": "1", "rejected": ""},
        {"prompt": "1=", "chosen": "1", "rejected": "1234"},
    ]
    samples, skipped = build_pairs(records, TOKENIZER, max_prompt_tokens=5, max_response_tokens=4)
    assert samples == [PairSample([BOS, 11, 21], [11, EOS], [12, EOS])]
    reasons = ("chosen equals rejected", "empty response", "response longer than 4 tokens")
    assert skipped.reasons == dict.fromkeys(reasons, 1)


def test_prompts_keep_other_columns_and_their_place():
    records = [{"prompt": "123456=", "answer": "7"}, {"prompt": "1=", "answer": 1, "source": "x"}]
    samples, skipped = build_prompts(records, WITHOUT_BOS, max_prompt_tokens=5)
    assert samples == [PromptSample([11, 21], "1=", {"answer": 1, "source": "x"}, index=1)]
    assert skipped.describe() == "skipped 1 of 2 records (prompt longer than 5 tokens: 1)"


@pytest.mark.parametrize("tokenizer", [TOKENIZER, WITHOUT_BOS])
def test_empty_prompts_are_skipped_with_and_without_bos(tokenizer):
    """By every command; white space alone is empty, as in a response."""
    records = [{"prompt": text, "response": "2", "chosen": "2", "rejected": "3"} for text in ("", " \n", "1=")]
    limits = {"max_prompt_tokens": 5, "max_response_tokens": 5}
    for build, options in ((build_sft, limits), (build_pairs, limits), (build_prompts, {"max_prompt_tokens": 5})):
        samples, skipped = build(records, tokenizer, **options)
        assert len(samples) == 1
        assert dict(skipped.reasons) == {"empty prompt": 2}


def chat_tokenizer(fast_tokenizer, template=None):
    fast = fast_tokenizer(prefix=False, eos_token="</s>", bos_token="<s>")
    fast.chat_template = template or fast.chat_template
    return HuggingFaceTokenizer(fast, "here")


def test_chat_template(fast_tokenizer):
    """The template of conftest.py, which writes no begin of sequence and no end of a turn: eos ends it. The last
    assistant message is the response, the rest the prompt."""
    tokenizer = chat_tokenizer(fast_tokenizer)
    [sample], _ = build_sft([{"messages": TALK}], tokenizer, **CHAT)
    prompt = tokenizer.encode("<user>37+48=<bot>")
    assert sample.tokens == [*prompt, *tokenizer.encode("85"), tokenizer.eos_id]
    assert sample.prompt_length == len(prompt)
    [asked], _ = build_prompts([{"messages": TALK[:1], "answer": "85"}], tokenizer, **ASK)
    assert (asked.tokens, asked.text, asked.fields) == (prompt, "<user>37+48=<bot>", {"answer": "85"})
    _, skipped = build_sft([{"messages": TALK}, {"messages": TALK[:1]}], tokenizer, **CHAT)
    assert skipped.reasons == {"no message of the assistant": 1}


@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_the_end_of_a_conversation_that_was_cut_is_not_learnt(tmp_path, loss_on):
    """`finished: false` beside messages, and beside texts that a template writes: the last answer alone has no end."""
    tokenizer = styled_tokenizer(tmp_path, CHATML)
    limits = {"max_prompt_tokens": 99, "max_response_tokens": 99, "loss_on": loss_on, "template": "chat"}
    encode = SFTEncoder(tokenizer=tmp_path, **limits).by(tokenizer)
    talk = [said(role, str(number)) for number, role in enumerate(("user", "assistant") * 2)]
    for record in ({"messages": talk}, {"prompt": talk[:3], "response": "3"}, {"prompt": "1", "response": "2"}):
        whole, cut = encode(0, record), encode(0, {**record, "finished": False})
        assert whole.tokens == [*cut.tokens, whole.tokens[-1]]
        assert whole.tokens[-1] in tokenizer.special_ids
        assert cut.stretches == [*whole.stretches[:-1], whole.stretches[-1] - 1]
        assert encode(0, {**record, "finished": True}) == whole
    if loss_on == "all":
        unlearnt = {"messages": [*talk[:3], {**talk[3], "weight": 0}]}
        assert encode(0, {**unlearnt, "finished": False}) == encode(0, unlearnt), "the first answer has ended"


def test_pairs_take_their_prompt_from_prompt_whatever_else_a_record_has(fast_tokenizer):
    """`messages` with the chosen answer, as published preference data has them, is not read."""
    tokenizer = chat_tokenizer(fast_tokenizer)
    pair = {"prompt": "37+48=", "chosen": "85", "rejected": "75"}
    [sample], _ = build_pairs([{**pair, "messages": TALK}], tokenizer, **CHAT)
    assert sample.prompt_tokens == tokenizer.encode("<user>37+48=<bot>")
    assert [sample] == build_pairs([pair], tokenizer, **CHAT)[0]
    _, skipped = build_pairs([pair, {**pair, "prompt": " "}], tokenizer, **CHAT)
    assert dict(skipped.reasons) == {"empty prompt": 1}


def load_chat(tmp_path, *conversations):
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations))
    return load_records(tmp_path / "chat.jsonl")


def test_a_conversation_that_ends_with_the_assistant_is_no_prompt(tmp_path, fast_tokenizer):
    """Refused with file and line; a system message or a tool's result may be the last."""
    tokenizer = chat_tokenizer(fast_tokenizer)
    roles = [("user",), ("user", "assistant", "tool"), ("user", "system"), ("user", "assistant")]
    records = load_chat(tmp_path, *([said(role, "1") for role in each] for each in roles))
    samples, _ = build_prompts(records[:3], tokenizer, **ASK)
    assert [sample.text for sample in samples][1:] == ["<user>1<bot>1<tool>1<bot>", "<user>1<system>1<bot>"]
    with refuses(f"{tmp_path}/chat.jsonl, line 4", "'assistant'", "drop the last message"):
        build_prompts(records, tokenizer, **ASK)


@pytest.mark.parametrize("template, names", [
    ("{{ raise_exception('System role not supported') }}", "TemplateError: System role not supported"),
    ("{{ messages[5].content.strip() }}", "UndefinedError"), ("{{ 1 + 'a' }}", "TypeError"),
])  # fmt: skip
def test_an_error_inside_a_chat_template_names_file_and_line(tmp_path, fast_tokenizer, template, names):
    usual = fast_tokenizer(prefix=False).chat_template
    system = "{% if messages[0].role == 'system' %}" + template + "{% endif %}" + usual
    tokenizer = chat_tokenizer(fast_tokenizer, system if "raise" in template else template)
    good = [said("user", "1"), said("assistant", "1")]
    records = load_chat(tmp_path, good, [said("system", "1"), *good])
    with refuses(f"chat.jsonl, line {2 if 'raise' in template else 1}", "chat template of here", names) as raised:
        build_sft(records, tokenizer, **CHAT)
    assert "\n" not in str(raised.value)


def test_chat_template_that_writes_bos_gets_no_second_one(fast_tokenizer):
    tokenizer = chat_tokenizer(fast_tokenizer, "{{ bos_token }}{{ messages[0].content }}")
    [sample], _ = build_prompts([{"messages": [said("user", "37")]}], tokenizer, **ASK)
    assert sample.text == "<s>37"
    assert sample.tokens == [tokenizer.tokens().index("<s>"), *tokenizer.encode("37")]


def test_template_errors(fast_tokenizer):
    with refuses("CharTokenizer", "data.template"):
        build_prompts([{"prompt": "1"}], TOKENIZER, **ASK)
    with refuses("'alpaca'", "auto, plain, chat"):
        build_prompts([{"prompt": "1"}], TOKENIZER, max_prompt_tokens=9, template="alpaca")
    without = HuggingFaceTokenizer(fast_tokenizer(prefix=False, chat=False, eos_token="</s>"), "here")
    with refuses("here", "data.chat_template", "data.template"):
        build_prompts([{"prompt": "1"}], without, **ASK)
    with refuses("chat template", "TemplateSyntaxError", "line 1"):
        build_prompts([{"prompt": "1"}], chat_tokenizer(fast_tokenizer, "{% if %}"), **ASK)


def test_more_tokens_than_positions_are_refused_with_both_numbers():
    require_positions(64, 64, "base")
    with refuses("65 tokens", "base takes 64"):
        require_positions(65, 64, "base")


def test_a_sample_longer_than_a_packed_micro_batch_is_named_with_both_numbers():
    require_budget([64, 3], 64, "train.jsonl", "prompt and response")
    require_budget([64, 3], None, "train.jsonl", "prompt and response")
    with refuses("train.jsonl", "record 1", "65 tokens", "prompt and response", "max_tokens_per_micro_batch = 64"):
        require_budget([3, 65, 65], 64, "train.jsonl", "prompt and response")


@pytest.mark.parametrize("margin", [None, "much", True, float("nan")])
def test_a_margin_that_is_no_number_names_its_record(margin):
    records = [{"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 1}]
    records.append({"prompt": "1+2=", "chosen": "3", "rejected": "4", "margin": margin})
    options = {"max_prompt_tokens": 9, "max_response_tokens": 9}
    with refuses("record 2", "margin", "number"):
        build_pairs(records, CharTokenizer(), with_margin=True, **options)
    samples, _ = build_pairs(records[:1], CharTokenizer(), with_margin=True, **options)
    assert samples[0].margin == 1.0
    assert build_pairs(records, CharTokenizer(), **options)[0][1].margin == 0.0


def test_encoders_travel_to_other_processes(tmp_path):
    """Pickled and opened there they make the same samples; a key tells options and tokenizers apart. Not covered: that
    the processes are others."""
    directory = write_tokenizer(tmp_path / "one", letters="12+=")
    record = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "1"}
    limits = {"max_prompt_tokens": 9, "max_response_tokens": 9}
    encoders = [
        SFTEncoder(tokenizer=directory, **limits), PairEncoder(tokenizer=directory, **limits),
        PromptEncoder(tokenizer=directory, max_prompt_tokens=9),
    ]  # fmt: skip
    builds = [build_sft, build_pairs, build_prompts]
    for encoder, build in zip(encoders, builds, strict=True):
        travelled = pickle.loads(pickle.dumps(encoder))
        options = limits if build is not build_prompts else {"max_prompt_tokens": 9}
        assert [travelled.open()(0, record)] == build([record], load_tokenizer(directory), **options)[0]
        assert travelled.key() == json.loads(json.dumps(encoder.key()))
    keys = [json.dumps(encoder.key(), sort_keys=True) for encoder in encoders]
    keys += [json.dumps(replace(each, max_prompt_tokens=8).key(), sort_keys=True) for each in encoders]
    other = write_tokenizer(tmp_path / "two", letters="12+=3")
    keys += [json.dumps(replace(each, tokenizer=other).key(), sort_keys=True) for each in encoders]
    assert len(set(keys)) == 9
    with refuses("longer than 2 tokens", error=Unusable):
        replace(encoders[0], max_prompt_tokens=2).open()(0, record)


def test_learnt_tokens_are_counted_and_marked():
    sample = SFTSample([5, 6, 7, 8, 9, 10], [1, 3, 5, 6])
    assert sample.learnt() == [False, True, True, False, False, True]
    assert (sample.num_learnt, sample.prompt_length) == (3, 1)
    assert SFTSample.of_response([5, 6, 7], 2) == SFTSample([5, 6, 7], [2, 3])


def test_a_set_with_texts_and_conversations_is_refused_unless_a_template_is_named(tmp_path):
    """By the first record, however many processes read the others. `chat` writes both as messages."""
    directory = write_tokenizer(tmp_path / "model", letters=LETTERS, chat_template=CHAT_TEMPLATE)
    file = tmp_path / "mixed.jsonl"
    talk = {"messages": [said("user", "1+1="), said("assistant", "2")]}
    rows = [{"prompt": "1+1=", "response": "2"}] * 2 + [talk]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = {"max_prompt_tokens": 99, "max_response_tokens": 9}

    def load(**options):
        data = SFTDataConfig.model_validate({"train": str(file), "cache": str(tmp_path / "cache")})
        encoder = SFTEncoder(tokenizer=directory, **limits, **options)
        return SetLoader(data, encoder, SFTSample).train_and_validation("sft")[0]

    with refuses("mixed.jsonl, line 3", "conversations", "texts", "data.template = auto"):
        load()
    chat = load(template="chat")
    assert chat[0].tokens == chat[2].tokens
    file.write_text(json.dumps(talk) + "\n" + json.dumps(rows[0]) + "\n")
    with refuses("mixed.jsonl, line 2", "texts", "conversations"):
        load()
