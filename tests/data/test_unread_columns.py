"""Columns of a record that are refused, counted, or told of by a hint, since others read them; and messages that are
kept as JSON text. Not covered: keys of messages (test_conversations.py)."""

import csv
import json

import pytest

from megarlhf.config import PromptDataConfig, SourceConfig
from megarlhf.config.conversations import ConversationConfig
from megarlhf.data.sample_types import PairSample, PromptSample, SFTSample
from megarlhf.data.samples.encoders import PairEncoder, PromptEncoder, SFTEncoder
from megarlhf.data.sources.fields import hint
from megarlhf.data.sources.unread_columns import counted, unread_columns
from megarlhf.data.tokenize.load import SetLoader
from tests.data.chat_styles import CHATML, write_chat_tokenizer
from tests.data.in_memory import load_records
from tests.data.test_frameworks import ANSWERS, LIMITS, REPLY, TEXTS, USER, VERL, WRONG
from tests.refuses import missing_names, refuses

TALK = {"messages": [USER, REPLY]}
NATIVE = [{"from": "human", "value": "37+48?"}, {"from": "gpt", "value": "85"}]


@pytest.mark.parametrize("encoder, row", [
    (SFTEncoder, TALK), (SFTEncoder, {"conversations": NATIVE}), (SFTEncoder, {"prompt": [USER], "response": "85"}),
    (SFTEncoder, {"prompt": [USER], "response": [REPLY]}),
    (PairEncoder, {"prompt": [USER], "chosen": [REPLY], "rejected": [WRONG]}),
    (PairEncoder, {"chosen": [USER, REPLY], "rejected": [USER, WRONG]}),
    (PromptEncoder, {"prompt": [USER]}), (PromptEncoder, {"messages": [USER]}),
    (SFTEncoder, {**TALK, "tools": [{"name": "f"}]}),
])  # fmt: skip
def test_messages_in_json_text_are_read_as_the_list_that_they_are(chatml, tmp_path, encoder, row):
    """As files of Parquet and CSV keep them: here of CSV, where every cell is a text. Null keys are none."""
    encode = encoder(**(LIMITS if encoder is PromptEncoder else ANSWERS), template_may_drop=("tools",)).by(chatml)
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, texts)
        writer.writeheader()
        writer.writerow(texts)
    (record,) = load_records(SourceConfig(path=tmp_path / "rows.csv"), fields=())
    assert encode(0, record) == encode(0, row)
    columns = {name: {key: [each.get(key) for each in value] for key in value[0]} if isinstance(value, list)
               and name != "tools" else value for name, value in row.items()}  # fmt: skip
    assert encode(0, columns) == encode(0, row), "a Sequence of the datasets library"
    marked = {name: "\ufeff" + text if text.startswith("[") else text for name, text in texts.items()}
    assert encode(0, marked) == encode(0, row)
    with_null = {name: json.dumps([{**each, "tool_calls": None} for each in value]) if isinstance(value, list)
                 and name != "tools" else value for name, value in row.items()}  # fmt: skip
    assert encode(0, with_null) == encode(0, row)


@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_a_response_in_json_text_with_several_answers(chatml, loss_on):
    """Is that of the list: one of them alone would be learnt."""
    answers = [REPLY, USER, WRONG]
    encode = SFTEncoder(**ANSWERS, loss_on=loss_on).by(chatml)
    if loss_on == "last":
        with refuses("loss_on", "all"):
            encode(0, {"prompt": [USER], "response": json.dumps(answers)})
    else:
        record = {"prompt": json.dumps([USER]), "response": json.dumps(answers)}
        assert encode(0, record) == encode(0, {"prompt": [USER], "response": answers})


@pytest.mark.parametrize("record, template, names", [
    ({"messages": str([USER, REPLY])}, "auto", "'messages'|JSON|Expecting property name"),
    ({"messages": '[{"role": "user", "role": "user", "content": "a"}]'}, "auto", "'messages'|'role'|2 times"),
    ({"messages": "37+48?"}, "auto", "'messages'|list of messages"),
    ({**TEXTS, "prompt": str([USER])}, "auto", "'prompt'|no JSON"),
    ({**TEXTS, "prompt": json.dumps([USER])}, "plain", "'prompt'|data.template = auto or chat"),
    ({**TEXTS, "prompt": json.dumps([USER, {"content": "a"}])}, "auto", "'prompt'|as it stands"),
    ({"text": json.dumps([USER])}, "auto", "'text'|'messages', 'conversations' or 'prompt'"),
])  # fmt: skip
def test_texts_that_look_like_messages_and_are_not_read(chatml, record, template, names):
    with refuses(*names.split("|")):
        SFTEncoder(**ANSWERS, template=template).by(chatml)(0, record)


CODE = '      [\n  {"role": "user", "content": tok.decode(x)},\n]\nprint(1)'


def test_an_answer_that_is_a_list_of_messages_as_it_stands(chatml):
    """As an assistant for programmers writes them: `plain` says that it is meant so."""
    answer = str([USER, REPLY])
    with refuses("data.template", "plain"):
        SFTEncoder(**ANSWERS).by(chatml)(0, {**TEXTS, "response": answer})
    for encoder, record in (
        (SFTEncoder, {**TEXTS, "response": answer}), (SFTEncoder, {"text": answer}),
        (PairEncoder, {"prompt": "37+48?", "chosen": answer, "rejected": "no"}),
    ):  # fmt: skip
        encoder(**ANSWERS, template="plain").by(chatml)(0, record)


@pytest.mark.parametrize("answer", [CODE, '[{"x": 1}]', '{"role": "user", "content": "a"}', "[1, 2]", "[{"])
def test_answers_that_are_json_of_other_things_stay_texts(chatml, answer):
    encode = SFTEncoder(**ANSWERS).by(chatml)
    assert encode(0, {**TEXTS, "response": answer}).tokens[-len(answer) - 1 : -1] == chatml.encode(answer)


@pytest.mark.parametrize("label", [True, False, 1, 0, 1.0, "True", "false", "1", "0", "undesirable"])
@pytest.mark.parametrize("record", [TEXTS, TALK])
def test_labels_of_unpaired_preferences_are_refused(chatml, record, label):
    """Whatever says yes and no, also where the digit stands in a message. Raw texts have classes (IMDB), which change
    nothing, as have texts with other numbers."""
    encode = SFTEncoder(**ANSWERS).by(chatml)
    with refuses("'label'", "KTO", "columns: {not_read: label}"):
        encode(0, {**record, "label": label})
    assert encode(0, {**record, "label": 3}) == encode(0, record)
    encode(0, {"text": "It is blue.", "label": label})
    PromptEncoder(**LIMITS).by(chatml)(0, {"prompt": "37+48?", "label": label})


@pytest.mark.parametrize("beside", [{"train": "False"}, {"loss": 0.0}, {"weight": "0.5"}, {"mask": "Assistant"}])
def test_marks_as_texts_and_fractions(chatml, beside):
    """As CSV files and pandas' columns with nulls have them."""
    encode = SFTEncoder(**ANSWERS).by(chatml)
    with refuses(f"'{next(iter(beside))}'"):
        encode(0, {**TALK, **beside})
    assert encode(0, {**TALK, "train": "true", "loss": "0.3", "weight": "1", "mask": "User"}) == encode(0, TALK)


PAIR = {"prompt": "37+48?", "chosen": "85", "rejected": "75"}


@pytest.mark.parametrize("sample_type, record, names", [
    (SFTSample, {**TALK, "is_correct": False}, "is_correct = False"),
    (SFTSample, {**TALK, "is_correct": True, "score_chosen": 8.0}, ""),
    (PairSample, {**PAIR, "score_chosen": 1, "score_rejected": 8.0}, "score_chosen below score_rejected"),
    (PairSample, {**PAIR, "chosen_rating": 5, "rejected_rating": 2, "chosen_length": 1, "rejected_length": 9}, ""),
    (PairSample, {**PAIR, "margin": -0.5}, "margin below 0"),
])  # fmt: skip
def test_judgements_of_others_are_counted(sample_type, record, names):
    notes = list(counted(sample_type, record))
    assert len(notes) == bool(names)
    assert not names or not missing_names(notes[0], names)


@pytest.mark.parametrize("sample_type, record, unread", [
    (SFTSample, {**TALK, "rejected_response": "75", "completions": ["75"], "question": "How much?"},
     "completions question rejected_response"),
    (SFTSample, {**TALK, "question": "37+48?", "answer": " 85 ", "id": 0, "source": None, "meta": {}}, "id"),
    (SFTSample, {**TEXTS, "winner": "1", "is_bad": "7", "answer_b": "8"}, "answer_b is_bad winner"),
    (SFTSample, {**TALK, "text": "user: 37+48? assistant: 85"}, "text"),
    (SFTSample, {"conversations": NATIVE, "answer": "85", "input": "Add."}, "input"),
    (SFTSample, {"messages": json.dumps([USER, REPLY]), "answer": "85", "label": 3}, "label"),
    (SFTSample, {**TEXTS, "finished": False, "stop": "length"}, "stop"),
    (SFTSample, {"text": "It is blue.", "label": 0}, "label"),
    (PairSample, {**PAIR, "label": 0, "finished": False, "margin": 1.0}, "finished label"),
    (PromptSample, {"prompt": "37+48?", "answer": "85"}, ""),
])  # fmt: skip
def test_columns_of_which_nothing_is_read(sample_type, record, unread):
    """But for those whose text stands in one that is read, as the question of a conversation does."""
    assert sorted(unread_columns(sample_type, {**record, "not_read": "x"})) == unread.split()


def test_columns_that_are_not_read_are_named_with_the_set(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARLHF_CACHE", str(tmp_path / "cache"))
    rows = [{**TEXTS, "id": n, "source": "x" if n else None, **{f"score_{k:02}": 1 for k in range(25)}} for n in (0, 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceConfig(path=tmp_path / "rows.jsonl")
    encoder = SFTEncoder(**{**ANSWERS, "tokenizer": write_chat_tokenizer(tmp_path / "tokenizer", CHATML)})
    for _ in ("made", "kept"):
        notes = []
        SetLoader(PromptDataConfig(train=[source]), encoder, SFTSample).stored(source, notes)
        assert not missing_names(notes[0], "all 2 records", "id, score_00, score_01", "score_18 and 7 others")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**TEXTS, **row}) + "\n" for row in [{"a": 1}, {"b": 1}]))
    SetLoader(PromptDataConfig(train=[source]), encoder, SFTSample).stored(source, notes := [])
    assert notes[0].endswith(": a (in 1), b (in 1)")


@pytest.mark.parametrize("name", ["thinking_trajectories", "deepseek_thinking_trajectory", "Complex_CoT"])
def test_thoughts_under_names_of_their_own_are_refused(chatml, name):
    """As in s1K and medical-o1; a switch or a number of that name is none."""
    encode = SFTEncoder(**ANSWERS).by(chatml)
    for value in ("Seven and eight are 15.", ["Seven and eight are 15."]):
        with refuses(f"'{name}'", "a thought", f"columns: {{not_read: {name}}}"):
            encode(0, {**TEXTS, name: value})
    assert encode(0, {**TEXTS, name: 512, "reasoning_effort": "high"}) == encode(0, TEXTS)


def test_a_margin_that_is_not_read_is_counted(chatml):
    pair = {**PAIR, "margin": 2.0}
    (how,) = PairEncoder(**ANSWERS).by(chatml)(0, pair).how
    assert not missing_names(how, "'margin'", "rm", "margin: true")
    assert PairEncoder(**ANSWERS, with_margin=True).by(chatml)(0, pair).margin == 2.0


@pytest.mark.parametrize("name, belongs", [
    ("tools", "column 'tools'"), ("messages", "column 'messages'"), ("conversation", "column 'messages'"),
    ("add_generation_prompt", "command"), ("tokenize", "command"), ("chat_template", "data.chat_template"),
])  # fmt: skip
def test_names_that_are_no_variables_of_a_template(chatml, name, belongs):
    """Arguments of apply_chat_template: said by name, with where it belongs; of all records too."""
    with refuses("'chat_template_kwargs'", f"'{name}'", "no variable", belongs):
        SFTEncoder(**ANSWERS).by(chatml)(0, {**TALK, "chat_template_kwargs": {"enable_thinking": None, name: True}})
    with refuses("template_args", f"'{name}'", "no variable", belongs):
        ConversationConfig(template_args={name: True})


HELPSTEER = {"context": [USER], "completions": [{"rank": 0, "completion": [REPLY]}]}
STEPS = {"prompt": "37+48?", "completions": ["7+8=15", "85"], "labels": [True, False]}


@pytest.mark.parametrize("missing, row, names", [
    ("chosen", {"prompt": "The sky is", "completion": " blue.", "label": 1}, "(KTO)|no command"),
    ("response", {"prompt": "The sky is", "completion": " blue.", "label": 1}, "{response: completion}"),
    ("prompt", {"text": "It is blue.", "label": 1}, "raw texts|megarlhf sft|ptx.data"),
    ("response", STEPS, "(PRM)|no command"), ("chosen", HELPSTEER, "megarlhf rm|adapter: nemo_rl"),
    ("prompt", HELPSTEER, "adapter: nemo_rl"),
    ("chosen", {**TALK, "rejected_response": "75"}, "megarlhf rm|adapter: ms_swift"),
    ("prompt", {"conversation": [USER, REPLY]}, "columns: {messages: conversation}"),
    ("response", {"dialogue": json.dumps(NATIVE)}, "columns: {messages: dialogue}"),
    ("prompt", {"conversation": [{"human": "37+48?", "assistant": "85"}]}, "an adapter of yours"),
    ("answer", VERL, "columns: {answer: reward_model.ground_truth}"),
    ("prompt", {"chosen": "a b", "rejected": "a c"}, "adapter: implicit_prompt"),
])  # fmt: skip
def test_hints_say_what_rows_are_and_what_to_do(missing, row, names):
    assert not missing_names(hint(missing, row), *names.split("|"))
