"""Sets of records as others write them. All hold the same: sums, with a right and a wrong answer."""

import bz2
import csv
import gzip
import json
import lzma
from pathlib import Path

import datasets
import pyarrow as pa

ROWS = [
    {"prompt": f"{n}+{n}=", "response": str(2 * n), "chosen": str(2 * n), "rejected": str(2 * n + 1)} for n in range(24)
]
ROWS = [{**row, "answer": row["chosen"]} for row in ROWS]
THEIRS = [{"question": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in ROWS]
COLUMNS = {"prompt": "question", "response": "good", "chosen": "good", "rejected": "bad", "answer": "good"}
ADAPTER = '''
def sums(row):
    """The ten lines of a user."""
    if row["good"] is None:
        return None
    record = {"prompt": row["question"], "response": row["good"], "answer": row["good"]}
    return {**record, "chosen": row["good"], "rejected": row["bad"]}
'''


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _jsonl(folder, rows=THEIRS, name="rows.jsonl"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(lines(rows))
    return folder / name


def other_columns(folder):
    return {"path": _jsonl(folder), "columns": COLUMNS}


def own_adapter(folder):
    _jsonl(folder, [*THEIRS, {"question": "left out", "good": None}])
    (folder / "my_sums.py").write_text(ADAPTER)
    return {"path": folder / "rows.jsonl", "adapter": "my_sums:sums"}


def gz(folder):
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines(THEIRS)))
    return {"path": folder / "rows.jsonl.gz", "columns": COLUMNS}


def json_array_xz(folder):
    (folder / "rows.json.xz").write_bytes(lzma.compress(json.dumps(THEIRS, indent=1).encode()))
    return {"path": folder / "rows.json.xz", "columns": COLUMNS}


def _table(folder, name, delimiter):
    with (folder / name).open("w", newline="", encoding="utf-8-sig") as out:
        writer = csv.DictWriter(out, list(THEIRS[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(THEIRS)
    return {"path": folder / name, "columns": COLUMNS}


def table(folder):
    return _table(folder, "rows.csv", ",")


def table_bz2(folder):
    _table(folder, "plain.tsv", "\t")
    (folder / "rows.tsv.bz2").write_bytes(bz2.compress((folder / "plain.tsv").read_bytes()))
    return {"path": folder / "rows.tsv.bz2", "columns": COLUMNS}


def parquet_zst(folder):
    datasets.Dataset.from_list(THEIRS).to_parquet(folder / "plain.parquet")
    with pa.CompressedOutputStream(pa.OSFile(str(folder / "rows.parquet.zst"), "wb"), "zstd") as out:
        out.write((folder / "plain.parquet").read_bytes())
    return {"path": folder / "rows.parquet.zst", "columns": COLUMNS}


def arrow(folder):
    written = pa.Table.from_pylist(THEIRS)
    with pa.ipc.new_stream(folder / "rows.arrow", written.schema) as out:
        out.write_table(written)
    return {"path": folder / "rows.arrow", "columns": COLUMNS}


def pattern(folder):
    for number in range(3):
        _jsonl(folder / "deep", THEIRS[8 * number : 8 * number + 8], f"rows_{number}.jsonl")
    _jsonl(folder, [{"other": 1}], "other.jsonl")
    return {"path": folder / "**" / "rows_*.jsonl", "columns": COLUMNS}


def saved_dict(folder):
    table = datasets.Dataset.from_list(THEIRS)
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(folder / "saved")
    return {"path": folder / "saved", "split": "train", "columns": COLUMNS}


def hub_with_readme(folder):
    """As `git clone` of a dataset with subsets leaves it."""
    for name, rows in (("sums", THEIRS), ("sums_test", THEIRS[:1]), ("poems", THEIRS[:2])):
        (folder / "hub" / "parquet").mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(folder / "hub" / "parquet" / f"{name}-00000-of-00001.parquet")
    (folder / "hub" / "README.md").write_text(
        "---\nlicense: mit\nconfigs:\n- config_name: sums\n  data_files:\n  - split: learn\n    path: parquet/sums-*\n"
        "  - split: exam\n    path: [parquet/sums_test-*]\n- config_name: poems\n  data_files: parquet/poems-*\n---\n"
    )
    return {"path": folder / "hub", "subset": "sums", "split": "learn", "columns": COLUMNS}


def hub_without_readme(folder):
    (folder / "hub" / "data").mkdir(parents=True)
    (folder / "hub" / "README.md").write_text("# Sums, without front matter")
    for name, rows in (
        ("train-00000-of-00002", THEIRS[:9]), ("train-00001-of-00002", THEIRS[9:]), ("test-00000-of-00001", []),
    ):  # fmt: skip
        table = datasets.Dataset.from_list(rows or THEIRS[:1])
        table.to_parquet(folder / "hub" / "data" / f"{name}.parquet")
    return {"path": folder / "hub", "split": "train", "columns": COLUMNS}


def folders_of_splits(folder):
    _jsonl(folder / "set" / "Train", THEIRS, "a.jsonl")
    _jsonl(folder / "set" / "dev", THEIRS[:1], "a.jsonl")
    return {"path": folder / "set", "split": "train", "columns": COLUMNS}


def joined(folder):
    other = _jsonl(folder, THEIRS[10:], "second.jsonl")
    return [{"path": _jsonl(folder, THEIRS[:10]), "columns": COLUMNS}, {"path": other, "columns": COLUMNS}]


STRANGERS = {
    made.__name__: made
    for made in (
        other_columns, own_adapter, gz, json_array_xz, table, table_bz2, parquet_zst, arrow, pattern, saved_dict,
        hub_with_readme, hub_without_readme, folders_of_splits, joined,
    )
}  # fmt: skip


def written(name: str, folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    made = STRANGERS[name](folder)
    several = made if isinstance(made, list) else [made]
    told = [{**each, "path": str(each["path"])} for each in several]
    return told if isinstance(made, list) else told[0]
