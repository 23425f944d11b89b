"""Rows as the documentation of other frameworks shows them, written anew: each shape is read by configuration alone,
and what is learnt is what that framework learns. Not covered: their files on the hub, which need a network."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from megarlhf.config import SourceConfig
from megarlhf.data.samples.encoders import PairEncoder, PromptEncoder, SFTEncoder
from megarlhf.data.sources.adapters import nemo_rl
from megarlhf.data.sources.unread_columns import counted
from tests.data.in_memory import load_records
from tests.refuses import refuses

LIMITS = {"tokenizer": Path(), "max_prompt_tokens": 999}
ANSWERS = {**LIMITS, "max_response_tokens": 999}
USER, REPLY = {"role": "user", "content": "37+48?"}, {"role": "assistant", "content": "85"}
WRONG = {"role": "assistant", "content": "75"}
EARLIER = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
CHAT = "<|im_start|>user\n37+48?<|im_end|>\n<|im_start|>assistant\n"
"""The question, as ChatML asks it."""
BEFORE = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{}\n"
VERL = {
    "data_source": "openai/gsm8k", "prompt": [USER], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "85"},
    "extra_info": {"split": "train", "index": 0, "answer": "37+48=85", "question": "37+48?"},
}  # fmt: skip


def read(tmp_path, row, **source):
    """The record of a file with this row, which Parquet has kept and JSON lines too."""
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    records = [load_records(SourceConfig(path=tmp_path / f"rows.{kind}", **source), fields=())[0] for kind in
               ("parquet", "jsonl")]  # fmt: skip
    assert records[0] == records[1]
    return records[0]


def shown(tokenizer, tokens, stretches=()):
    """The tokens by their names, what is learnt in brackets."""
    names = [tokenizer.tokens()[token] for token in tokens]
    for first, end in zip(stretches[0::2], stretches[1::2], strict=True):
        names[first], names[end - 1] = f"[{names[first]}", f"{names[end - 1]}]"
    return "".join(names)


PAIRED = {"instruction": "37+48?", "input": "", "output": "85", "system": "", "history": []}
SHAREGPT = [{"from": "human", "value": "37+48?"}, {"from": "gpt", "value": "85"}]


@pytest.mark.parametrize("row, source, loss_on, expected", [
    # TRL: language modeling, prompt-completion; standard and conversational
    ({"text": "It is blue."}, {}, "last", "<s>[It is blue.</s>]"),
    ({"messages": [USER, REPLY]}, {}, "last", f"{CHAT}[85<|im_end|>]"),
    ({"prompt": "37+48?", "completion": " 85"}, {"columns": {"response": "completion"}}, "last",
     "<s>37+48?[ 85</s>]"),
    ({"prompt": [USER], "completion": [REPLY]}, {"columns": {"response": "completion"}}, "last",
     f"{CHAT}[85<|im_end|>]"),
    # of a completion all is learnt, and of the prompt nothing, whatever stands in it
    ({"prompt": [*EARLIER, USER], "completion": [REPLY, USER, WRONG]}, {"columns": {"response": "completion"}},
     "all", f"{BEFORE.format('Hi<|im_end|>')}{CHAT}[85<|im_end|>]\n{CHAT}[75<|im_end|>]"),
    # OpenRLHF: --input_key, --output_key
    ({"input": "37+48?", "output": "85"}, {"columns": {"prompt": "input", "response": "output"}}, "last",
     "<s>37+48?[85</s>]"),
    ({"input": [USER], "output": "85"}, {"columns": {"prompt": "input", "response": "output"}}, "last",
     f"{CHAT}[85<|im_end|>]"),
    # verl: --prompt_key=extra_info --prompt_dict_keys=question
    (VERL, {"columns": {"prompt": "extra_info.question", "response": "extra_info.answer"}}, "last",
     "<s>37+48?[37+48=85</s>]"),
    # LLaMA-Factory: alpaca without and with history, ShareGPT
    (PAIRED, {"adapter": "alpaca"}, "last", "<s>37+48?[85</s>]"),
    ({**PAIRED, "history": [["Hello", "Hi"]]}, {"adapter": "alpaca"}, "all",
     f"{BEFORE.format('[Hi<|im_end|>]')}{CHAT}[85<|im_end|>]"),
    ({"conversations": SHAREGPT, "system": "", "tools": ""}, {}, "last", f"{CHAT}[85<|im_end|>]"),
    # ms-swift: query and history; Dolly
    ({"system": "", "query": "37+48?", "response": "85", "history": [["Hello", "Hi"]]}, {"adapter": "alpaca"},
     "last", f"{BEFORE.format('Hi<|im_end|>')}{CHAT}[85<|im_end|>]"),
    ({"instruction": "Add.", "context": "37+48?", "response": "85", "category": "sums"}, {"adapter": "alpaca"},
     "last", "<s>Add.\n\n37+48?[85</s>]"),
    # axolotl: alpaca, ShareGPT, completion
    ({"instruction": "Add.", "input": "37+48?", "output": "85"}, {"adapter": "alpaca"}, "last",
     "<s>Add.\n\n37+48?[85</s>]"),
])  # fmt: skip
def test_what_is_fine_tuned_on(chatml, tmp_path, row, source, loss_on, expected):
    record = read(tmp_path, row, **source)
    sample = SFTEncoder(**ANSWERS, loss_on=loss_on).by(chatml)(0, record)
    assert shown(chatml, sample.tokens, sample.stretches) == expected


OF_PAIR = {"from": "human", "value": "37+48?"}
PAIR_OF_TEXTS, PAIR_OF_TALKS = ("<s>37+48?", "85</s>", "75</s>"), (CHAT, "85<|im_end|>", "75<|im_end|>")


@pytest.mark.parametrize("row, source, expected", [
    # TRL: explicit and implicit prompt, standard and conversational
    ({"prompt": "37+48?", "chosen": "85", "rejected": "75"}, {}, PAIR_OF_TEXTS),
    ({"chosen": "The sky is blue.", "rejected": "The sky is black."}, {"adapter": "implicit_prompt"},
     ("<s>The sky is", " blue.</s>", " black.</s>")),
    ({"prompt": [USER], "chosen": [REPLY], "rejected": [WRONG]}, {}, PAIR_OF_TALKS),
    ({"chosen": [USER, REPLY], "rejected": [USER, WRONG]}, {}, PAIR_OF_TALKS),
    # as UltraFeedback keeps them: the chosen conversation stands there twice
    ({"prompt": "37+48?", "chosen": [USER, REPLY], "rejected": [USER, WRONG], "messages": [USER, REPLY]}, {},
     PAIR_OF_TALKS),
    # OpenRLHF: --prompt_key, --chosen_key, --rejected_key
    ({"question": "37+48?", "good": "85", "bad": "75"},
     {"columns": {"prompt": "question", "chosen": "good", "rejected": "bad"}}, PAIR_OF_TEXTS),
    # LLaMA-Factory: alpaca and ShareGPT with ranking
    ({"instruction": "37+48?", "input": "", "chosen": "85", "rejected": "75"}, {"adapter": "alpaca"},
     PAIR_OF_TEXTS),
    ({"conversations": [OF_PAIR], "chosen": {"from": "gpt", "value": "85"},
      "rejected": {"from": "gpt", "value": "75"}}, {}, PAIR_OF_TALKS),
    # ms-swift: the answer that is rejected, alone and with its conversation
    ({"messages": [USER, REPLY], "rejected_response": "75"}, {"adapter": "ms_swift"}, PAIR_OF_TALKS),
    ({"messages": [USER, REPLY], "rejected_messages": [USER, WRONG]}, {"adapter": "ms_swift"}, PAIR_OF_TALKS),
    # NeMo-RL: the lower rank is the better one, wherever it stands
    ({"context": [USER], "completions": [{"rank": 1, "completion": [WRONG]}, {"rank": 0, "completion": [REPLY]}]},
     {"adapter": "nemo_rl"}, PAIR_OF_TALKS),
    ({"context": "37+48?", "completions": [{"rank": 0, "completion": "85"}, {"rank": 1, "completion": "75"}]},
     {"adapter": "nemo_rl"}, PAIR_OF_TEXTS),
])  # fmt: skip
def test_what_is_compared(chatml, tmp_path, row, source, expected):
    sample = PairEncoder(**ANSWERS).by(chatml)(0, read(tmp_path, row, **source))
    fields = (sample.prompt_tokens, sample.chosen_tokens, sample.rejected_tokens)
    assert tuple(shown(chatml, tokens) for tokens in fields) == expected


def test_completions_of_one_rank_are_left_out_and_more_than_two_are_refused():
    same = [{"rank": 0, "completion": [REPLY]}, {"rank": 0, "completion": [WRONG]}]
    assert nemo_rl({"context": [USER], "completions": same}) is None
    with refuses("'context'", "'completions'", "two of {rank, completion}"):
        nemo_rl({"context": [USER], "completions": [*same, *same]})


AS_TEXT = {**VERL, "extra_info": json.dumps(VERL["extra_info"])}


@pytest.mark.parametrize("row, source, prompt, fields", [
    ({"prompt": "37+48?"}, {}, "<s>37+48?", {}),
    ({"prompt": [USER]}, {}, CHAT, {}),
    # verl: what its reward functions read stays, and a JSON text is looked into
    (VERL, {"columns": {"answer": "reward_model.ground_truth"}}, CHAT,
     {"answer": "85", **{key: value for key, value in VERL.items() if key != "prompt"}}),
    (AS_TEXT, {"columns": {"answer": "extra_info.answer"}}, CHAT,
     {"answer": "37+48=85", **{key: value for key, value in AS_TEXT.items() if key != "prompt"}}),
    # OpenRLHF: --input_key context_messages --label_key label
    ({"context_messages": [USER], "label": "85"}, {"columns": {"prompt": "context_messages", "answer": "label"}},
     CHAT, {"answer": "85"}),
    # lists, and a mapping in another
    ({"input": {"messages": [USER]}, "responses": [{"text": "75"}, {"text": "85"}]},
     {"columns": {"prompt": "input.messages", "answer": "responses.1.text"}}, CHAT,
     {"answer": "85", "input": {"messages": [USER]}, "responses": [{"text": "75"}, {"text": "85"}]}),
    # a column that has a point in its own name comes first
    ({"prompt": "37+48?", "x.y": "85", "x": {"y": "75"}}, {"columns": {"answer": "x.y"}}, "<s>37+48?",
     {"answer": "85", "x": {"y": "75"}}),
])  # fmt: skip
def test_what_is_asked_and_what_rewards_are_given(chatml, tmp_path, row, source, prompt, fields):
    sample = PromptEncoder(**LIMITS).by(chatml)(0, read(tmp_path, row, **source))
    assert (shown(chatml, sample.tokens), sample.fields) == (prompt, fields)


@pytest.mark.parametrize("path, names", [
    ("reward_model.truth", "'reward_model'|'style', 'ground_truth'|'truth'"), ("ability.x", "'ability'|'math'|'x'"),
    ("prompt.7.content", "columns asks for '7'"), ("rewardmodel.ground_truth", "'rewardmodel.ground_truth'|'answer'"),
])  # fmt: skip
def test_a_column_in_a_column_that_is_not_there(tmp_path, path, names):
    with refuses("rows.parquet, row 1", *names.split("|")):
        read(tmp_path, VERL, columns={"answer": path})


TEXTS = {"prompt": "37+48?", "response": "85"}


@pytest.mark.parametrize("beside, fault", [
    ({"loss_mask": [0, 1]}, "tokens are learnt"), ({"completion_mask": [0, 1]}, "tokens are learnt"),
    ({"labels": [-100, 5]}, "tokens are learnt"), ({"weight": 0.5}, "how much the record counts"),
    ({"train": False}, "not to be learnt"), ({"loss": False}, "not to be learnt"),
    ({"images": ["cat.png"]}, "only texts"), ({"history": [["Hello", "Hi"]]}, "adapter alpaca"),
    ({"input": "in words"}, "adapter alpaca"), ({"context": "A sum."}, "part of the prompt"),
    ({"system_prompt": "Be brief."}, "columns: {system: system_prompt}"), ({"label": True}, "(KTO)"),
    ({"kto_tag": False}, "(KTO)"), ({"documents": [{"text": "a"}]}, "chat_template_kwargs"),
    ({"enable_thinking": False}, "data.template_args"), ({"tools": "[{}]"}, "chat template"),
    ({"system": "Be brief."}, "chat template"), ({"messages": [USER, REPLY]}, "which is meant"),
    ({"output": "80"}, "beside 'response'"), ({"response": str([REPLY])}, "list of messages"),
])  # fmt: skip
def test_a_column_that_changes_the_meaning_is_refused_by_its_name(chatml, beside, fault):
    """Another name says that it means nothing; for pairs it is the same, but for marks of single answers."""
    (name,) = beside
    with refuses(f"'{name}'", fault):
        SFTEncoder(**ANSWERS).by(chatml)(0, {**TEXTS, **beside})
    pair = {"prompt": "37+48?", "chosen": "85", "rejected": "75", **beside}
    if name not in ("label", "kto_tag", "response", "output"):
        with refuses(f"'{name}'"):
            PairEncoder(**ANSWERS).by(chatml)(0, pair)
    SFTEncoder(**ANSWERS).by(chatml)(0, {**TEXTS, "not_read": beside[name]})


def test_ordinary_columns_pass(chatml):
    ordinary = {"id": 3, "source": "x", "split": "train", "score": 0.5, "lang": "en", "meta": {"a": 1}, "weight": 1,
                "train": True, "loss": 0.53, "label": "sums", "loss_mask": None, "images": [], "history": [],
                "labels": ["easy"]}  # fmt: skip
    encode = SFTEncoder(**ANSWERS).by(chatml)
    sample = encode(0, {**TEXTS, **ordinary})
    assert sample == encode(0, TEXTS)
    assert list(counted(type(sample), {**TEXTS, **ordinary})) == []


@pytest.mark.parametrize("record, names", [
    ({"text": "x", "output": "y"}, "'output'|beside 'text'"), ({"text": json.dumps([USER])}, "'text'|list of messages"),
    ({"text": 3}, "'text'|string"),
    ({"prompt": [*EARLIER, USER], "response": [REPLY, USER, WRONG]}, "loss_on|all"),
    ({"prompt": [USER], "response": [REPLY, WRONG]}, "follows another|'assistant'"),
    ({"prompt": [USER], "response": [{**USER, "role": "asistant"}]}, "answers of 'assistant'|none"),
])  # fmt: skip
def test_what_is_refused_of_raw_texts_and_of_answers_that_are_messages(chatml, record, names):
    with refuses(*names.split("|")):
        SFTEncoder(**ANSWERS).by(chatml)(0, record)


def test_messages_beside_a_pair_that_belong_to_neither_answer(chatml):
    record = {"prompt": [USER], "chosen": [REPLY], "rejected": [WRONG], "messages": [*EARLIER, USER]}
    with refuses("'messages'", "'prompt', 'chosen' and 'rejected'"):
        PairEncoder(**ANSWERS).by(chatml)(0, record)
