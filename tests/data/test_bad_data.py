"""Data that is not what was meant, and what each mistake is told: all of it before ranks start, by the check that
`--dry-run` makes too, unless it stands behind the first rows.

Not covered: mistakes in conversations, and those of values that a command reads (test_samples.py).
"""

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
FILES = {
    "good.jsonl": GOOD, "pairs.jsonl": PAIR, "empty.jsonl": "", "blank.jsonl": "\n \n", "empty_list.json": " [ ] ",
    "broken.jsonl": '{"prompt": "a", "response": oops}\n',
    "cut.json": '[{"prompt": "a", "response": "b"}, {"prompt": "a"',
    "trailing.json": '[{"prompt": "a", "response": "b"}] more',
    "no_comma.json": '[{"prompt": "a", "response": "b"} {"prompt": "a"}]',
    "latin.jsonl": b'{"prompt": "\xe9", "response": "b"}\n',
    "latin.json": b'[\n{"prompt": "\xe9", "response": "b"}]',
    "twice.jsonl": '{"prompt": "a", "prompt": "b", "response": "c"}\n',
    "number.jsonl": '{"prompt": 1, "response": "b"}\n',
    "null.jsonl": '{"prompt": "a", "response": null}\n',
    "list.jsonl": '["a", "b"]\n',
    "wrapped.json": '{"data": [{"prompt": "a", "response": "b"}]}',
    "other.jsonl": '{"question": "a", "output": "b"}\n',
    "typo.jsonl": '{"prompt": "a", "responce": "b"}\n',
    "only_rejected.jsonl": '{"rejected": "a", "response": "b"}\n',
    "alpaca.jsonl": '{"instruction": "a", "output": "b"}\n',
    "sharegpt.jsonl": '{"conversations": [{"from": "moon", "value": "a"}]}\n',
    "hh.jsonl": '{"chosen": "a", "rejected": "b"}\n',
    "short_row.csv": "prompt,response\na,b\nc\n", "long_row.csv": "prompt,response\na,b,c\n",
    "twice.csv": "prompt,prompt\na,b\n", "semicolons.csv": "prompt;response\na;b\n",
    "unnamed.csv": "prompt,,response\na,b,c\n", "open_quote.csv": 'prompt,response\n"a,b\n',
    "latin.csv": b"prompt,response\na,b\n\xe9,b\n",
    "only_header.tsv": "prompt\tresponse\n", "bad.parquet": "not parquet", "bad.arrow": "not arrow",
    "bad.jsonl.gz": "not gzip",
    "cut.jsonl.gz": gzip.compress(GOOD.encode())[:-12],
    "cut.jsonl.bz2": bz2.compress(GOOD.encode())[:-5],
    "bad.parquet.gz": gzip.compress(b"not parquet"),
    "bad.jsonl.zst": "not zstd", "rows.jsonl.zip": "PK", "notes.txt": "text", "few.jsonl": GOOD[: 7 * 36],
    "splits/train.jsonl": GOOD, "splits/test.jsonl": GOOD, "unclear/trainset.jsonl": GOOD,
    "unclear/testset.jsonl": GOOD, "mixed/a.jsonl": GOOD, "mixed/b.jsonl": PAIR, "nothing/notes.txt": "text",
    "hub/README.md": README.format("a", "a.jsonl"),
    "hub/a.jsonl": GOOD, "hub/b.jsonl": GOOD,
    "hub_moved/README.md": "---\nconfigs:\n- config_name: a\n  data_files: gone-*.jsonl\n---\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("bad")
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    saved(root)
    (root / "bad_adapters.py").write_text(ADAPTERS)
    (root / "model").mkdir()
    (root / "model" / "config.json").write_text(json.dumps(MODEL))
    (root / "model" / "tokenizer.model").write_bytes(train_tokenizer())
    return root


CASES = {
    # file and line
    "trian.jsonl": "no such data file or directory: trian.jsonl; the nearest name beside it is train",
    "empty.jsonl": "no rows in empty.jsonl; give data",
    "blank.jsonl": "no rows in blank.jsonl; give data",
    "empty_list.json": "no rows in empty_list.json; give data",
    "broken.jsonl": "broken.jsonl, line 1: malformed JSON (Expecting value, column 29) near",
    "cut.json": "cut.json, line 1: malformed JSON",
    "trailing.json": "trailing.json, line 1: malformed JSON (expected the end of the file",
    "no_comma.json": "no_comma.json, line 1: malformed JSON (expected ','",
    "latin.jsonl": "latin.jsonl, line 1: not UTF-8 (invalid continuation byte); convert the file",
    "latin.json": "latin.json, line 2: not UTF-8 (invalid continuation byte); convert the file",
    "twice.jsonl": "twice.jsonl, line 1: the key 'prompt' stands 2 times in one object, with 'a', 'b'; expected each",
    "number.jsonl": "number.jsonl, line 1: field 'prompt' is int 1, expected a string; convert the data",
    "null.jsonl": "null.jsonl, line 1: field 'response' is null, expected a string",
    "list.jsonl": "list.jsonl, row 1: expected a JSON object with the columns of a record, got str",
    "wrapped.json": "wrapped.json, line 1: no field 'prompt', found 'data'; name the column that is meant",
    "other.jsonl": "no field 'prompt', found 'question', 'output'; is it 'question'? Then say columns: {prompt: questi",
    "typo.jsonl": "no field 'response', found 'prompt', 'responce'; is it 'responce'? Then say columns: {response: res",
    "only_rejected.jsonl": "no field 'prompt', found 'rejected', 'response'; these rows look like prompts with resp",
    "alpaca.jsonl": "found 'instruction', 'output'; these rows look like those for adapter: alpaca",
    "pairs.jsonl": "no field 'response', found 'prompt', 'chosen', 'rejected'; these rows look like preference pairs",
    "short_row.csv": "short_row.csv, line 3: 1 cells, and the first line names 2 columns (prompt, response); put quote",
    "long_row.csv": "long_row.csv, line 2: 3 cells, and the first line names 2 columns",
    "twice.csv": "twice.csv, line 1: the columns are 'prompt', 'prompt', of which 'prompt' stands there twice",
    "semicolons.csv": "semicolons.csv, line 1 is one column, 'prompt;response': cells are separated by ',' in .csv, ta",
    "unnamed.csv": "unnamed.csv, line 1: the columns are 'prompt', '', 'response', of which '' has no name",
    "open_quote.csv": "open_quote.csv, line 2: broken table (unexpected end of data); write it again",
    "latin.csv": "latin.csv, near line ",
    "only_header.tsv": "no rows in only_header.tsv; give data",
    "bad.parquet": "bad.parquet: not a readable .parquet file: ",
    "bad.arrow": "bad.arrow: not a readable .arrow file: ",
    "bad.jsonl.gz": "bad.jsonl.gz: not a readable .gz file: ",
    "cut.jsonl.gz": "cut.jsonl.gz: not a readable .gz file: Compressed file ended before the end",
    "cut.jsonl.bz2": "cut.jsonl.bz2: not a readable .bz2 file: Compressed file ended before the end",
    "bad.parquet.gz": "bad.parquet.gz: not a readable .parquet file: ",
    "bad.jsonl.zst": "bad.jsonl.zst: not a readable .zst file: ",
    "rows.jsonl.zip": "rows.jsonl.zip is packed in a way that is not read (.zip; read are .gz, .bz2, .xz, .zst); unpac",
    "notes.txt": "notes.txt: cannot tell its format; expected a name that ends in .jsonl, .ndjson, .json, .csv, .tsv,",
    "few.jsonl": "train.mini_batch_samples = 8: a batch would hold some of the 7 records of data.train = few.jsonl twi",
    # directories, patterns, splits
    "splits": "splits has several splits, of which only one is meant: test, train; name it, as {path: splits, split: t",
    "{path: splits, split: exam}": "splits has no split 'exam'; it has test, train",
    "{path: good.jsonl, split: train}": "good.jsonl is one file and has no split 'train'; leave the split out",
    "unclear": "unclear has 2 data files, and may mix splits such as train and test; these names do not say clearly",
    "mixed": "mixed mixes different kinds of data, which are not joined: a.jsonl looks like prompts with responses",
    "nothing": "no data files in nothing: found notes.txt; expected names that end in",
    "none_*.jsonl": "no data files match none_*.jsonl: it matches nothing; expected names that end in",
    "n*.txt": "no data files match n*.txt: it matches notes.txt; expected names that end in",
    "saved": "saved has several splits, of which only one is meant: train, exam; name it",
    "{path: saved, split: test}": "saved has no split 'test'; it has train, exam",
    "saved_empty": "no rows in saved_empty; give data",
    "saved_broken": "dataset_dict.json is not a file of save_to_disk: 'splits'; save the dataset again",
    "saved_half": "saved_half is not a whole dataset of save_to_disk: ",
    "hub": "hub: its README.md names several subsets: a, b; name the one that is meant, as {path: hub, subset: a}",
    "{path: hub, subset: c}": "hub has no subset 'c'; its README.md names a, b",
    "{path: splits, subset: a}": "splits has no subset 'a': no README.md in it names any (configs); leave subset out",
    "hub_moved": "hub_moved: its README.md says gone-*.jsonl for the split train, and no data file is there",
    "owner/name": "data.train = owner/name does not exist (working directory:",
    # columns and adapters
    "{path: other.jsonl, columns: {prompt: questoin}}": "no column 'questoin', which columns names for 'prompt'; the "
    "columns are 'question', 'output'; did you mean 'question'?",
    "{path: other.jsonl, columns: {prompt: question}}": "no field 'response', found 'output', 'prompt'",
    "{path: good.jsonl, adapter: alpacca}": "unknown adapter 'alpacca'; did you mean 'alpaca'? the known ones are",
    "{path: good.jsonl, adapter: 'nowhere:f'}": "adapter 'nowhere:f': cannot import 'nowhere' (No module named",
    "{path: good.jsonl, adapter: 'bad_adapters:f'}": "adapter 'bad_adapters:f': bad_adapters has no function 'f'; it h",
    "{path: good.jsonl, adapter: 'bad_adapters:number'}": "bad_adapters has no function 'number'",
    "{path: good.jsonl, adapter: 'bad_adapters:refuses'}": "good.jsonl, line 1: adapter 'bad_adapters:refuses': no sum",
    "{path: good.jsonl, adapter: 'bad_adapters:fails'}": "adapter 'bad_adapters:fails' failed: KeyError: 'nothing'",
    "{path: good.jsonl, adapter: 'bad_adapters:gives_text'}": "returned str 'text'; expected a mapping, or None",
    "{path: good.jsonl, adapter: alpaca}": "adapter 'alpaca': expected a text in 'instruction', found 'prompt'",
    "{path: sharegpt.jsonl, adapter: sharegpt}": "a turn is from 'moon'; known are human, user, gpt",
    "{path: hh.jsonl, adapter: anthropic_hh}": "have no common beginning that ends in",
    "{path: hh.jsonl, adapter: openai_messages}": "expected 'messages', a list of {role, content}, found 'chosen'",
}
OPTIONS = {
    # what the configuration itself says
    "data.train={path: good.jsonl, adapter: alpaca, columns: {a: b}}": "adapter = alpaca makes the record itself, and",
    "data.train={path: good.jsonl, weight: 1}": "train: weight = 1 has no effect on one set alone; leave it out",
    "data.train=[{path: good.jsonl, weight: 1}, pairs.jsonl]": "train: pairs.jsonl has no weight, and others of the li",
    "data.train=[{path: good.jsonl, weight: 0}, pairs.jsonl]": "data.train.0.weight: Input should be greater than 0",
    "data.train=[]": "data.train: an empty list; name one set of records at least",
    "data.train=": "data.train: nothing is given; name a file",
    "data.train={pth: good.jsonl}": "unknown key 'data.train.pth'; did you mean",
    "data.train={path: good.jsonl, split: ''}": "split is empty; name one, or leave the key out",
    "data.train.splt=test": "unknown key 'data.train.splt'; did you mean 'split'?",
    "data.validation={path: good.jsonl, weight: 2}": "validation: weight = 2 of good.jsonl has no effect: every sample",
    "data.validation_share=1": "data.validation_share: Input should be less than 1",
    "data.phases=2,4": "phases = '2,4', expected three numbers, the shares of sft, of rm and dpo, and of rl, as \"2,4,",
    "data.phases=a,b,c": "phases = 'a,b,c', expected three numbers",
    "data.phases=0,0,0": "phases = '0,0,0', expected three numbers",
    "data.split_seed=1": "split_seed = 1 has no effect without validation_share and phases; leave it out",
    "data.over_long=skip": "data.over_long: Input should be 'drop' or 'cut', got 'skip'",
    "data.train_split=test": "train_split is now a part of train: write train: {path: good.jsonl, split: test}",
    "data.test=*.jsonl": "override 'data.test=*.jsonl': '*.jsonl' is not valid YAML; quote it",
}


@pytest.fixture
def start(folder, monkeypatch):
    """Loads a configuration and checks it, as a start does; returns what is said where it is refused."""
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
    with pytest.raises(ValueError, match=r"^(data\.train|train\.mini|adapter)") as raised:
        start(f"data.train={train}")
    said = str(raised.value)
    assert CASES[train].replace("; the nearest name beside it is train", "; the nearest name beside it is ") in said
    assert "\n" not in said


@pytest.mark.parametrize("override", OPTIONS)
def test_what_the_configuration_says_of_data_is_looked_at_when_it_is_read(start, override):
    with pytest.raises(ValueError, match="data") as raised:
        start(override)
    assert OPTIONS[override] in str(raised.value)


@pytest.mark.parametrize("key", ["train", "validation", "test"])
def test_a_set_that_is_refused_is_told_once(start, key):
    """Not also that no set is left."""
    source = "{path: good.jsonl, adapter: alpaca, columns: {prompt: q}}"
    with pytest.raises(ValueError, match="alpaca makes the record itself, and would not see columns") as raised:
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
    """With file and line, by whichever process reads it."""
    (folder / "late.jsonl").write_text(GOOD * 4 + '{"prompt": "a"}\n')
    cfg = start("data.train=late.jsonl")
    with refuses("late.jsonl, line 65", "'response'", "'prompt'"):
        load_samples(SupervisedFineTuning(cfg))
