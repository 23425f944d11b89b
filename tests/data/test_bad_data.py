"""Data that is not what was meant, and what each mistake is told: all of it before ranks start, by the check that
`--dry-run` makes too, unless it stands behind the first rows. Not covered: mistakes in conversations, and those of
values that a command reads (test_samples.py)."""

import bz2
import gzip
import json

import datasets
import pytest

from megarlhf.config import load_config
from megarlhf.planning.data.first_rows import same_data
from megarlhf.planning.preflight import preflight
from megarlhf.trainers.supervised.loop import load_samples
from megarlhf.trainers.supervised.sft import SupervisedFineTuning
from tests.config.examples import KINDS
from tests.planning.configs import MODEL
from tests.refuses import refuses
from tools.demo.make_data import train_tokenizer

GOOD = '{"prompt": "1+1=", "response": "2"}\n' * 16
PAIR = '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 16
ADAPTERS = """
def refuses(row): raise ValueError("no sum in it")
def fails(row): return row["nothing"]
def gives_text(row): return "text"
number = 3
"""


def saved(folder):
    table = datasets.Dataset.from_list([{"prompt": "a", "response": "b"}] * 16)
    datasets.DatasetDict({"train": table, "exam": table}).save_to_disk(folder / "saved")
    table.select([]).save_to_disk(folder / "saved_empty")
    (folder / "saved_broken").mkdir()
    (folder / "saved_broken" / "dataset_dict.json").write_text("{}")
    (folder / "saved_half").mkdir()
    (folder / "saved_half" / "state.json").write_text("{}")


README = "---\nconfigs:\n- config_name: {}\n  data_files: {}\n- config_name: b\n  data_files: b.jsonl\n---\n"
BAD_FILES = {  # their content, and what the refusal of data.train names beside the file
    "empty.jsonl": ("", "no rows"), "blank.jsonl": ("\n \n", "no rows"), "empty_list.json": (" [ ] ", "no rows"),
    "broken.jsonl": ('{"prompt": "a", "response": oops}\n', "line 1|malformed JSON|column 29"),
    "cut.json": ('[{"prompt": "a", "response": "b"}, {"prompt": "a"', "line 1|malformed JSON"),
    "trailing.json": ('[{"prompt": "a", "response": "b"}] more', "line 1|malformed JSON|end of the file"),
    "no_comma.json": ('[{"prompt": "a", "response": "b"} {"prompt": "a"}]', "line 1|malformed JSON|expected ','"),
    "latin.jsonl": (b'{"prompt": "\xe9", "response": "b"}\n', "line 1|UTF-8|convert"),
    "latin.json": (b'[\n{"prompt": "\xe9", "response": "b"}]', "line 2|UTF-8|convert"),
    "twice.jsonl": ('{"prompt": "a", "prompt": "b", "response": "c"}\n', "line 1|'prompt'|2 times|'a'|'b'"),
    "number.jsonl": ('{"prompt": 1, "response": "b"}\n', "line 1|'prompt'|int 1|string"),
    "null.jsonl": ('{"prompt": "a", "response": null}\n', "line 1|'response'|null|string"),
    "list.jsonl": ('["a", "b"]\n', "row 1|JSON object|str"),
    "wrapped.json": ('{"data": [{"prompt": "a", "response": "b"}]}', "line 1|'prompt'|'data'"),
    "other.jsonl": ('{"question": "a", "output": "b"}\n', "'prompt'|'question'|'output'|columns: {prompt: question}"),
    "typo.jsonl": ('{"prompt": "a", "responce": "b"}\n', "'response'|'responce'|columns: {response: responce}"),
    "only_rejected.jsonl": ('{"rejected": "a", "response": "b"}\n', "'prompt'|'rejected'|'response'|prompts"),
    "alpaca.jsonl": ('{"instruction": "a", "output": "b"}\n', "'instruction'|'output'|adapter: alpaca"),
    "pairs.jsonl": (PAIR, "'response'|'chosen'|'rejected'|preference pairs"),
    "short_row.csv": ("prompt,response\na,b\nc\n", "line 3|1 cells|2 columns|prompt, response"),
    "long_row.csv": ("prompt,response\na,b,c\n", "line 2|3 cells|2 columns"),
    "twice.csv": ("prompt,prompt\na,b\n", "line 1|'prompt', 'prompt'|twice"),
    "semicolons.csv": ("prompt;response\na;b\n", "line 1|one column|'prompt;response'|','"),
    "unnamed.csv": ("prompt,,response\na,b,c\n", "line 1|'prompt', '', 'response'|no name"),
    "open_quote.csv": ('prompt,response\n"a,b\n', "line 2|broken table"),
    "latin.csv": (b"prompt,response\na,b\n\xe9,b\n", "near line"),
    "only_header.tsv": ("prompt\tresponse\n", "no rows"),
    "bad.parquet": ("not parquet", "readable .parquet"), "bad.arrow": ("not arrow", "readable .arrow"),
    "bad.jsonl.gz": ("not gzip", "readable .gz"), "bad.jsonl.zst": ("not zstd", "readable .zst"),
    "cut.jsonl.gz": (gzip.compress(GOOD.encode())[:-12], "readable .gz|Compressed file ended"),
    "cut.jsonl.bz2": (bz2.compress(GOOD.encode())[:-5], "readable .bz2|Compressed file ended"),
    "bad.parquet.gz": (gzip.compress(b"not parquet"), "readable .parquet"),
    "rows.jsonl.zip": ("PK", ".zip|.gz, .bz2, .xz, .zst"), "notes.txt": ("text", "format|.jsonl, .ndjson, .json, .csv"),
    "few.jsonl": (GOOD[: 7 * 36], "train.mini_batch_samples = 8|7 records|data.train"),
}  # fmt: skip
FILES = {
    "good.jsonl": GOOD, "splits/train.jsonl": GOOD, "splits/test.jsonl": GOOD, "unclear/trainset.jsonl": GOOD,
    "unclear/testset.jsonl": GOOD, "mixed/a.jsonl": GOOD, "mixed/b.jsonl": PAIR, "nothing/notes.txt": "text",
    "hub/README.md": README.format("a", "a.jsonl"), "hub/a.jsonl": GOOD, "hub/b.jsonl": GOOD,
    "hub_moved/README.md": "---\nconfigs:\n- config_name: a\n  data_files: gone-*.jsonl\n---\n",
    "sharegpt.jsonl": '{"conversations": [{"from": "moon", "value": "a"}]}\n',
    "hh.jsonl": '{"chosen": "a", "rejected": "b"}\n', "bad_adapters.py": ADAPTERS,
    "model/config.json": json.dumps(MODEL),
    **{name: content for name, (content, _) in BAD_FILES.items()},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    saved(root)
    (root / "model" / "tokenizer.model").write_bytes(train_tokenizer())
    return root


CASES = {name: f"{name}|{names}" for name, (_, names) in BAD_FILES.items()} | {
    "trian.jsonl": "no such data file|trian.jsonl|train",
    # directories, patterns, splits
    "splits": "several splits|test, train|{path: splits, split: test}",
    "{path: splits, split: exam}": "splits|'exam'|test, train",
    "{path: good.jsonl, split: train}": "good.jsonl|one file|'train'",
    "unclear": "unclear|2 data files|train and test",
    "mixed": "mixed|different kinds|a.jsonl", "nothing": "nothing|notes.txt",
    "none_*.jsonl": "none_*.jsonl|matches nothing", "n*.txt": "n*.txt|notes.txt",
    "saved": "saved|several splits|train, exam", "{path: saved, split: test}": "saved|'test'|train, exam",
    "saved_empty": "no rows|saved_empty", "saved_broken": "dataset_dict.json|save_to_disk|'splits'",
    "saved_half": "saved_half|save_to_disk",
    "hub": "hub|README.md|a, b|{path: hub, subset: a}", "{path: hub, subset: c}": "hub|'c'|README.md|a, b",
    "{path: splits, subset: a}": "splits|'a'|README.md|subset", "hub_moved": "hub_moved|README.md|gone-*.jsonl|train",
    "owner/name": "data.train = owner/name|working directory",
    # columns and adapters
    "{path: other.jsonl, columns: {prompt: questoin}}": "'questoin'|'prompt'|'question', 'output'|mean 'question'",
    "{path: other.jsonl, columns: {prompt: question}}": "'response'|'output', 'prompt'",
    "{path: good.jsonl, adapter: alpacca}": "'alpacca'|did you mean 'alpaca'",
    "{path: good.jsonl, adapter: 'nowhere:f'}": "adapter 'nowhere:f'|cannot import nowhere|No module named",
    "{path: good.jsonl, adapter: 'bad_adapters:f'}": "adapter 'bad_adapters:f'|no function 'f'",
    "{path: good.jsonl, adapter: 'bad_adapters:number'}": "bad_adapters:number|is of type int, expected a function",
    "{path: good.jsonl, adapter: 'bad_adapters:refuses'}": "good.jsonl, line 1|'bad_adapters:refuses'|no sum in it",
    "{path: good.jsonl, adapter: 'bad_adapters:fails'}": "adapter 'bad_adapters:fails'|KeyError: 'nothing'",
    "{path: good.jsonl, adapter: 'bad_adapters:gives_text'}": "str 'text'|mapping|None",
    "{path: good.jsonl, adapter: alpaca}": "adapter 'alpaca'|'instruction'|'prompt'",
    "{path: sharegpt.jsonl, adapter: sharegpt}": "'moon'|human, user, gpt",
    "{path: hh.jsonl, adapter: anthropic_hh}": "no common beginning",
    "{path: hh.jsonl, adapter: openai_messages}": "'messages'|{role, content}|'chosen'",
}  # fmt: skip
OPTIONS = {
    # what the configuration itself says
    "data.train={path: good.jsonl, adapter: alpaca, columns: {a: b}}": "adapter = alpaca|columns",
    "data.train={path: good.jsonl, weight: 1}": "train:|weight = 1|one set alone",
    "data.train=[{path: good.jsonl, weight: 1}, pairs.jsonl]": "train:|pairs.jsonl has no weight",
    "data.train=[{path: good.jsonl, weight: 0}, pairs.jsonl]": "data.train.0.weight|greater than 0",
    "data.train=[]": "data.train|empty list", "data.train=": "data.train|nothing is given",
    "data.train={pth: good.jsonl}": "unknown key 'data.train.pth'",
    "data.train={path: good.jsonl, split: ''}": "data|split is empty",
    "data.train.splt=test": "unknown key 'data.train.splt'|'split'",
    "data.validation={path: good.jsonl, weight: 2}": "validation:|weight = 2|good.jsonl",
    "data.validation_share=1": "data.validation_share|less than 1",
    "data.phases=2,4": "phases = '2,4'|three numbers|sft|rm|dpo|rl",
    "data.phases=a,b,c": "phases = 'a,b,c'|three numbers",
    "data.phases=0,0,0": "phases = '0,0,0'|three numbers",
    "data.split_seed=1": "split_seed = 1|validation_share|phases",
    "data.over_long=skip": "data.over_long|'drop'|'cut'|'skip'",
    "data.train_split=test": "train_split|train: {path: good.jsonl, split: test}",
    "data.test=*.jsonl": "override 'data.test=*.jsonl'|'*.jsonl'|not valid YAML|quote",
}  # fmt: skip


@pytest.fixture
def start(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def refused(*overrides, command="sft"):
        kind, tree = KINDS[command]
        role = "reward_model" if command == "rm" else "actor"
        tree = {**tree, role: {"model": {"path": "model", "random_init": True}}, "run": {"dir": "run"}}
        tree["data"] = {"train": "good.jsonl" if command == "sft" else "pairs.jsonl"}
        tree.pop("checkpoint", None)
        (folder / "config.yaml").write_text(json.dumps(tree))
        preflight(command, load_config(kind, folder / "config.yaml", overrides), 1)
        return load_config(kind, folder / "config.yaml", overrides)

    return refused


@pytest.mark.parametrize("train", CASES)
def test_bad_data_is_told_before_ranks_start(start, train):
    with refuses(*CASES[train].split("|")) as raised:
        start(f"data.train={train}")
    assert str(raised.value).startswith(("data.train", "train.mini", "adapter"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("override", OPTIONS)
def test_what_the_configuration_says_of_data_is_looked_at_when_it_is_read(start, override):
    with refuses(*OPTIONS[override].split("|")):
        start(override)


@pytest.mark.parametrize("key", ["train", "validation", "test"])
def test_a_set_that_is_refused_is_told_once(start, key):
    source = "{path: good.jsonl, adapter: alpaca, columns: {prompt: q}}"
    with refuses("alpaca", "columns") as raised:
        start(f"data.{key}={source}")
    assert "\n" not in str(raised.value)
    assert "Tuple" not in str(raised.value)


def test_both_ways_of_validation_and_a_cut_of_what_is_compared_are_refused(start):
    with refuses("validation_share = 0.1", "validation = a"):
        start("data.validation_share=0.1", "data.validation=a")
    with refuses("data.over_long = cut", "sft", "rm"):
        start("data.over_long=cut", command="rm")
    start(command="rm")


def test_a_set_that_is_read_twice_is_said_or_refused(start, folder):
    (folder / "both").mkdir(exist_ok=True)
    for name in ("good.jsonl", "more.jsonl"):
        (folder / "both" / name).write_text(GOOD)
    for key in ("validation", "test"):
        with refuses("data.train = both", f"data.{key} = both/more.jsonl"):
            start("data.train=both", f"data.{key}=both/more.jsonl")
    data = start("data.test=good.jsonl", "data.validation=pairs.jsonl", "data.validation=good.jsonl").data
    assert [note.partition(":")[0] for note in same_data(data)] == [
        "data.validation is data.train", "data.test is data.train", "data.test is data.validation",
    ]  # fmt: skip


def test_shares_count_when_a_batch_is_compared_with_the_data(start):
    """Half of sixteen records is enough for a batch of eight, a fifth of them is not."""
    start("data.phases=1,1,0")
    for less in ("data.phases=1,2,2", "data.validation_share=0.6"):
        with refuses("train.mini_batch_samples = 8", "data.train"):
            start(less)


def test_what_stands_behind_the_first_rows_is_told_when_it_is_read(start, folder):
    (folder / "late.jsonl").write_text(GOOD * 4 + '{"prompt": "a"}\n')
    cfg = start("data.train=late.jsonl")
    with refuses("late.jsonl, line 65", "'response'", "'prompt'"):
        load_samples(SupervisedFineTuning(cfg))
