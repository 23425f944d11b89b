"""Sources: the same records from every format, and what each kind of bad input says. Not covered: a successful load
from the hub (no network here), only its failure."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import datasets
import pytest

from megarlhf.config import SourceConfig
from megarlhf.data.sources.find import FoundSource, find, source_files
from tests.data.in_memory import load_records, source_of
from tests.refuses import refuses

ROWS = [
    {"prompt": prompt, "response": response, "answer": answer, "day": f"2024-01-0{day}"}
    for day, (prompt, response, answer) in enumerate((("1+1=", "2", 2), ("2+2=", "4\u2028", 4), ("é=", "5", 5)), 1)
]
FIELDS = ("prompt", "response")


def found(path: Path | str, split: str | None = None) -> FoundSource:
    return find(source_of(path, split))


def files_of(path: Path | str, split: str | None = None) -> set[Path]:
    return source_files([source_of(path, split)])


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _no_shared_cache(tmp_path, monkeypatch):
    """What is cached anyhow would land here, and a test says that nothing does."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_every_format_gives_the_same_records(tmp_path):
    """JSON lines, JSON, Parquet, both Arrow formats, saved dataset; strings like dates stay strings."""
    import pyarrow as pa

    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(ROWS, indent=1), encoding="utf-8")
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "dict")
    arrow = pa.Table.from_pylist(ROWS)
    for name, new in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        with new(tmp_path / f"{name}.arrow", arrow.schema) as writer:
            writer.write_table(arrow)
    for name in ("a.jsonl", "a.json", "a.parquet", "saved", "dict/train", "stream.arrow", "file.arrow"):
        assert load_records(tmp_path / name, fields=FIELDS) == ROWS, name
    assert load_records(tmp_path / "dict", fields=FIELDS, split="train") == ROWS
    assert load_records(tmp_path / "dict", fields=FIELDS, split="test") == ROWS[:1]
    assert not (tmp_path / "cache").exists()
    with refuses("'dev'", "train, test"):
        load_records(tmp_path / "dict", fields=FIELDS, split="dev")
    with refuses("several splits", "train, test", "data.train.split"):
        load_records(tmp_path / "dict", fields=FIELDS)


def test_the_files_of_a_directory_are_joined_in_order(tmp_path):
    write_jsonl(tmp_path / "2.jsonl", ROWS[1:])
    datasets.Dataset.from_list(ROWS[:1]).to_parquet(tmp_path / "1.parquet")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.jsonl").write_text("broken")
    assert load_records(tmp_path, fields=FIELDS) == ROWS


def test_a_directory_of_different_kinds_is_not_joined(tmp_path):
    """Prompts and preference pairs, which `rl` would both take as prompts. Not covered: kinds mixed in one file."""
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "a", "answer": "b"}])
    with refuses("different kinds", "pairs.jsonl looks like preference pairs", "prompts.jsonl looks like prompts"):
        load_records(tmp_path, fields=["prompt"])
    assert len(load_records(tmp_path / "pairs.jsonl", fields=["prompt"])) == 1


def test_a_note_says_what_of_a_directory_is_read_and_what_is_not(tmp_path):
    for n in range(10):
        write_jsonl(tmp_path / f"part_{n}.jsonl", ROWS)
    (tmp_path / "part_x.txt").write_text("x")
    (tmp_path / ".hidden.jsonl").write_text("broken")
    (tmp_path / "sub").mkdir()
    names = ", ".join(f"part_{n}.jsonl" for n in range(8))
    expected = f"; read 10 files: {names} and 2 more; passed over, as folders and other kinds of files are: "
    assert found(tmp_path).describe_files() == expected + "part_x.txt, sub/"
    assert found(tmp_path / "part_0.jsonl").describe_files() == ""
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "sub")
    assert found(tmp_path / "sub").describe_files() == ""


@pytest.mark.parametrize("name", ["part_2.jsonl.gz", "part_2.JSON.XZ", "part_2.parquet.zst", "part_2.csv.bz2"])
def test_a_compressed_file_is_never_passed_over(tmp_path, name):
    write_jsonl(tmp_path / "part_1.jsonl", ROWS)
    (tmp_path / "archive.tar.gz").write_bytes(b"not data")
    assert found(tmp_path).describe_files().endswith("are: archive.tar.gz")
    (tmp_path / name).write_bytes(b"x" * 99)
    assert name in {path.name for path in files_of(tmp_path)}
    for path in (tmp_path, tmp_path / name):
        with refuses(name, f"not a readable {Path(name.lower()).suffix} file"):
            load_records(path, fields=FIELDS)
    (tmp_path / name).rename(tmp_path / "part_2.jsonl.zip")
    with refuses("part_2.jsonl.zip", ".zip", ".gz, .bz2, .xz, .zst", "unpack it"):
        found(tmp_path)


def test_a_key_that_stands_twice_is_refused(tmp_path):
    """At any depth; the last value would win in silence."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "a", "answer": "1", "answer": "2"}\n')
    with refuses("x.jsonl, line 2", "'answer'", "2 times", "'1', '2'"):
        load_records(path, fields=["prompt"])
    path.write_text('[{"prompt": "a"}, {"prompt": "a", "extra": {"b": 1, "b": 1}}]')
    with refuses("x.jsonl, row 2", "'b'", "2 times"):
        load_records(path, fields=["prompt"])


def test_names_end_in_upper_case_too(tmp_path):
    """Of a directory, where `train.JSONL` was once passed over in silence, and as one file."""
    write_jsonl(tmp_path / "train.JSONL", ROWS[:1])
    datasets.Dataset.from_list(ROWS[1:]).to_parquet(tmp_path / "Train_2.Parquet")
    assert load_records(tmp_path, fields=FIELDS) == [*ROWS[1:], *ROWS[:1]]
    assert {path.name for path in files_of(tmp_path)} == {"train.JSONL", "Train_2.Parquet"}
    assert load_records(tmp_path / "train.JSONL", fields=FIELDS) == ROWS[:1]


def test_a_directory_with_several_splits_is_read_only_when_one_is_named(tmp_path):
    """All of them joined would train on the test set. Shards of one split are one split."""
    names = {
        "train": "train-00000-of-00002.jsonl train-00001-of-00002.jsonl", "validation": "math_val.jsonl",
        "test": "eval.2.json", "heldout": "pairs-heldout.jsonl", "train_sft": "train_sft-00000-of-00001.jsonl",
        "": "trains.jsonl contest.jsonl",
    }  # fmt: skip
    for number, name in enumerate(" ".join(names.values()).split()):
        write_jsonl(tmp_path / name, [{**ROWS[0], "answer": number}])
    listed = "(no split named), test, validation, heldout, train, train_sft"
    with refuses("several splits", listed):
        load_records(tmp_path, fields=FIELDS)
    read = {split: load_records(tmp_path, fields=FIELDS, split=split) for split in names if split}
    assert {split: [row["answer"] for row in rows] for split, rows in read.items()} == {
        "train": [0, 1], "validation": [2], "test": [3], "heldout": [4], "train_sft": [5],
    }  # fmt: skip
    with refuses("'dev'", listed):
        found(tmp_path, "dev")
    with refuses("math_val.jsonl", "split 'validation'"):
        load_records(tmp_path / "math_val.jsonl", fields=FIELDS, split="validation")


@pytest.mark.parametrize("names, splits", [
    ("Train Test", "test, train"), ("holdout a", "(no split named), heldout"),
    ("held_out a", "(no split named), heldout"),
    ("sums-held-out a", "(no split named), heldout"), ("evals part1", "test, (no split named)"),
    ("train train_heldout", "train, (no split named)"),
])  # fmt: skip
def test_splits_are_found_in_either_case_and_under_every_name(tmp_path, names, splits):
    for name in names.split():
        write_jsonl(tmp_path / f"{name}.jsonl", ROWS)
    with refuses("several splits", splits):
        found(tmp_path)
    for split in splits.replace("(no split named)", "").strip(" ,").split(", "):
        assert load_records(tmp_path, fields=FIELDS, split=split) == ROWS


@pytest.mark.parametrize("names", [
    "trainset testset", "traindata testdata", "mathtrain mathtest", "gsm8kTrain gsm8kTest", "devices contest",
    "mathheldout a", "train_heldout b",
])  # fmt: skip
def test_files_that_may_be_splits_are_not_mixed(tmp_path, names):
    """Whatever split is named: none of them is it. Each file by itself is read."""
    for name in names.split():
        write_jsonl(tmp_path / f"{name}.jsonl", ROWS)
    for split in (None, "train"):
        with refuses("2 data files", "train and test", f"{names.split()[0]}.jsonl", "path of the one file"):
            found(tmp_path, split)
    for name in names.split():
        assert load_records(tmp_path / f"{name}.jsonl", fields=FIELDS) == ROWS


@pytest.mark.parametrize("names", ["contest", "latest_1 latest_2", "trainset1 Trainset-10", "a b", "values intervals"])
def test_files_that_are_no_splits_are_joined(tmp_path, names):
    for name in names.split():
        write_jsonl(tmp_path / f"{name}.jsonl", ROWS)
    assert load_records(tmp_path, fields=FIELDS) == ROWS * len(names.split())


def test_the_files_of_a_source_are_those_that_are_read(tmp_path):
    """By the split that is named, with links followed."""
    train, test = (write_jsonl(tmp_path / f"{name}.jsonl", ROWS) for name in ("train", "test"))
    assert files_of(tmp_path, "test") == {test}
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "a.jsonl").symlink_to(train)
    assert files_of(tmp_path / "linked" / ".." / "linked") == {train}
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "dict")
    assert files_of(tmp_path / "dict", "test") == {tmp_path / "dict" / "test"}
    assert files_of("owner/name") == set()


def test_subsets_of_a_readme_are_folders_or_files(tmp_path):
    """`data_dir`, `data_files`, both, and neither: each is a subset, and of several one has to be named."""
    for name in ("sums/train.jsonl", "sums/test.jsonl", "poems/data/a.jsonl", "b.jsonl", "other/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    configs = [
        {"config_name": "sums", "data_dir": "sums"}, {"config_name": "poems", "data_dir": "poems"},
        {"config_name": "file", "data_files": "b.jsonl"},
        {"config_name": "both", "data_dir": "other", "data_files": [{"split": "test", "path": "*.jsonl"}]},
        {"config_name": "all"}, {"config_name": "gone", "data_dir": "nowhere"},
    ]  # fmt: skip

    def read(subset, split=None, of=configs):
        (tmp_path / "README.md").write_text(f"---\n{json.dumps({'configs': of})}\n---\n")
        files = find(SourceConfig(path=tmp_path, subset=subset, split=split)).files
        return [str(file.relative_to(tmp_path)) for file in files]

    assert read("sums", "test") == ["sums/test.jsonl"]
    assert read("poems") == ["poems/data/a.jsonl"]
    assert read("file") == ["b.jsonl"]
    assert read("both") == ["other/c.jsonl"]
    assert read("all") == ["b.jsonl"]
    assert read(None, "train", of=configs[:1]) == ["sums/train.jsonl"]
    for of in (configs, configs[1:3]):
        with refuses("poems, file", "subset"):
            read(None, of=of)
    with refuses("several splits", "test, train"):
        read("sums")
    with refuses("data_dir: nowhere", "subset gone"):
        read("gone")
    configs[3]["data_files"][0]["path"] = "*.csv"
    with refuses("other/*.csv", "split test"):
        read("both")


def test_a_hub_dataset_with_several_splits_is_read_only_when_one_is_named(monkeypatch):
    several = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split, **_: several[split])
    with refuses("owner/name", "train, test", "data.train.split"):
        load_records("owner/name", fields=FIELDS)
    assert load_records("owner/name", fields=FIELDS, split="train") == ROWS
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train"])
    assert load_records("owner/name", fields=FIELDS) == ROWS


@pytest.mark.parametrize("fields, row, names", [
    ("prompt response", {"prompt": "a", "responce": "b"}, "'response'|is it 'responce'|columns: {response: responce}"),
    ("prompt", {"rejected": "a", "chosen": "b"}, "'prompt'|preference pairs"),
    ("prompt response", {"prompt": "a", "answer": "b"}, "'response'|look like prompts|megarlhf rl"),
    ("prompt response", {"messages": []}, "'prompt'|conversations|data.template|'chat'"),
    ("prompt", {"question": "a"}, "'prompt'|is it 'question'|columns: {prompt: question}"),
    ("prompt", {"rejected": "a"}, "'prompt'|columns: {prompt: ...}|add 'prompt'"),
    ("prompt response", {"instruction": "a", "output": "b"}, "'prompt'|adapter: alpaca"),
])  # fmt: skip
def test_a_missing_field_is_told_what_may_have_been_meant(tmp_path, fields, row, names):
    """A rename is proposed only of a name that is nearly right, never of another field of ours."""
    with refuses("no field", *names.split("|")):
        load_records(write_jsonl(tmp_path / "x.jsonl", [row]), fields=fields.split())


def test_missing_file_names_its_nearest_sibling_and_does_not_go_to_the_hub(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "sft_train.jsonl", ROWS)
    write_jsonl(tmp_path / "other.jsonl", ROWS)
    with refuses("sft_trian.jsonl", "sft_train.jsonl"):
        load_records(tmp_path / "sft_trian.jsonl", fields=FIELDS)
    with refuses(f"{tmp_path}/nowhere"):
        load_records(tmp_path / "nowhere" / "deep" / "a.jsonl", fields=FIELDS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("went to the network"))
    for path, missing in {"data/trian": "data/trian", "trian.jsonl": "trian.jsonl", "a/b/c": "a"}.items():
        with refuses("no such data file", f"directory: {missing}"):
            load_records(path, fields=FIELDS)
    monkeypatch.setattr(datasets, "get_dataset_split_names", mock.Mock(side_effect=ConnectionError("no route")))
    with refuses("owner/name", "hub", "no route", "network"):
        load_records("owner/name", fields=FIELDS)


def test_malformed_line_gives_file_line_and_fragment(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n\n{"prompt": "a", "response": oops}\n')
    with refuses("bad.jsonl, line 3", "column 29", "oops"):
        load_records(path, fields=FIELDS)
    path.write_bytes(b'{"prompt": "a", "response": "b"}\n{"prompt": "\xff"}\n')
    with refuses("bad.jsonl, line 2", "UTF-8"):
        load_records(path, fields=FIELDS)
    path.write_text('[{"prompt": "a",\n "response": "b"},\n {"prompt" "a"}]')
    with refuses("bad.jsonl, line 3", "JSON"):
        load_records(path, fields=FIELDS)
    path.write_text('{"prompt": "a", "response": "b"}\n"text"\n')
    with refuses("line 2", "prompt, response", "str"):
        load_records(path, fields=FIELDS)


@pytest.mark.parametrize("suffix, where", [("jsonl", "line 4"), ("parquet", "row 1")])
def test_missing_field_names_row_fields_and_nearest(tmp_path, suffix, where):
    bad = {"prompt": "a", "responce": "b"}
    write_jsonl(tmp_path / "x.jsonl", [*ROWS, bad])
    datasets.Dataset.from_list([bad]).to_parquet(tmp_path / "x.parquet")
    with refuses(f"x.{suffix}, {where}", "no field 'response'", "found 'prompt', 'responce'"):
        load_records(tmp_path / f"x.{suffix}", fields=FIELDS)


@pytest.mark.parametrize("value, shown", [(None, "NoneType None"), (3, "int 3"), (["a"], "list ['a']")])
def test_wrong_type_names_row_field_and_value(tmp_path, value, shown):
    path = write_jsonl(tmp_path / "x.jsonl", [ROWS[0], {"prompt": "a", "response": value}])
    with refuses("line 2", "'response'", shown, "string"):
        load_records(path, fields=FIELDS)
    assert len(load_records(path, fields=["prompt"])) == 2


def test_nothing_to_read(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "notes.txt").write_text("x")
    with refuses("no data files", "notes.txt", ".parquet"):
        load_records(tmp_path / "sub", fields=FIELDS)
    with refuses("notes.txt", ".jsonl"):
        load_records(tmp_path / "sub" / "notes.txt", fields=FIELDS)
    (tmp_path / "x.parquet").write_bytes(b"not parquet")
    with refuses("x.parquet", "not a readable .parquet file", "magic bytes"):
        load_records(tmp_path / "x.parquet", fields=FIELDS)


def test_processes_that_load_at_once_do_not_race(tmp_path):
    """Three processes, one Parquet file, an empty home: all succeed and the home stays without a cache."""
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "a.parquet")
    code = "import sys; from tests.data.in_memory import load_records as load; print(len(load(sys.argv[1], fields=[])))"
    command = [sys.executable, "-c", code, str(tmp_path / "a.parquet")]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["3", "3", "3"]
    assert not list((tmp_path / "home").rglob("*.arrow"))
