"""What is held out of Megatron's indexed data is not trained on: by documents, whatever the splits are called. Not
covered: what a run reads of a split (tests/data/test_megatron_indexed.py)."""

import os

import pytest

from megarlhf.config.data import SFTDataConfig
from megarlhf.planning.data.first_rows import same_data
from tests.data.test_megatron_indexed import documents, write
from tests.refuses import refuses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two sets of 100 documents, one of them also under another name."""
    root = tmp_path_factory.mktemp("indexed")
    for number, name in enumerate("ab"):
        write(root / name, documents(100, number))
    for ending in ("bin", "idx"):
        os.symlink(root / f"a.{ending}", root / f"linked.{ending}")
    (root / "rows.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    return root


def checked(folder, train, validation, test=None):
    def source(name):
        path, _, split = name.partition(" ")
        if path.endswith(".jsonl"):
            return {"path": folder / path}
        return {"kind": "megatron", "path": str(folder / path), "split": split or None}

    keys = {"train": train, "validation": validation, "test": test}
    sets = {key: list(map(source, names)) for key, names in keys.items() if names}
    return same_data(SFTDataConfig.model_validate(sets))


@pytest.mark.parametrize("train, validation, test", [
    (["a 80,10,10"], ["a 80,10,10"], ["a 80,10,10"]),
    (["a 50,0,0"], ["b"], None),
    (["a 80,10,10"], ["a 90,10"], None),  # the last ten documents
    (["a 8,2", "b 8,2"], ["a 8,2", "b 8,2"], None),
    (["a 8,2", "rows.jsonl"], ["a 8,2"], None),
])  # fmt: skip
def test_parts_that_share_no_document_are_taken(folder, train, validation, test):
    assert checked(folder, train, validation, test) == []


@pytest.mark.parametrize("train, validation, names", [
    (["a"], ["a"], "data.train|documents 1 to 100 of 100|documents 1 to 100|100 of them"),
    (["a"], ["a 80,10,10"], "documents 1 to 100 of 100|data.validation|split 80,10,10|documents 81 to 90"),
    (["a 80,10,10"], ["a 50,50"], "documents 1 to 80 of 100|documents 51 to 100|30 of them"),
    (["b", "a 80,20"], ["b 80,20", "a 80,20"], "documents 1 to 100 of 100|81 to 100|20 of them"),
    (["a"], ["linked 80,20"], "linked|split 80,20|documents 81 to 100|the same split"),
    (["rows.jsonl"], ["rows.jsonl", "a"], "rows.jsonl|held-out data"),
])  # fmt: skip
def test_documents_that_both_would_read_are_refused(folder, train, validation, names):
    with refuses(*names.split("|")):
        checked(folder, train, validation)


def test_so_are_those_of_test_and_validation(folder):
    with refuses("data.validation", "documents 81 to 90", "data.test", "86 to 100", "5 of them"):
        checked(folder, ["b"], ["a 8,1,1"], ["a 8,0.5,1.5"])
