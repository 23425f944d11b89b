"""What is held out of Megatron's indexed data is not trained on: by documents, whatever the splits are called.

Not covered: what a run reads of a split (tests/data/test_megatron_indexed.py).
"""

import os

import pytest

from megarlhf.config.data import SFTDataConfig
from megarlhf.planning.data.first_rows import same_data
from tests.data.test_megatron_indexed import documents, write


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


@pytest.mark.parametrize("train, validation, words", [
    (["a"], ["a"], r"train = .*a reads documents 1 to 100 of 100, .*a documents 1 to 100: both would read 100 of"),
    (["a"], ["a 80,10,10"], r"documents 1 to 100 of 100, and data\.validation = .*, split 80,10,10 documents 81 to 90"),
    (["a 80,10,10"], ["a 50,50"], r"documents 1 to 80 of 100, and .* documents 51 to 100: both would read 30 of"),
    (["b", "a 80,20"], ["b 80,20", "a 80,20"], r"b reads documents 1 to 100 of 100, .*81 to 100: both .* 20 of them"),
    (["a"], ["linked 80,20"], r"linked, split 80,20 documents 81 to 100: .* Give both the same split, such as"),
    (["rows.jsonl"], ["rows.jsonl", "a"], r"both read .*rows\.jsonl: held-out data would be trained on"),
])  # fmt: skip
def test_documents_that_both_would_read_are_refused(folder, train, validation, words):
    """Alone, in a list, whole or in part, under another name; and records beside them."""
    with pytest.raises(ValueError, match=words):
        checked(folder, train, validation)


def test_so_are_those_of_test_and_validation(folder):
    with pytest.raises(
        ValueError, match=r"data\.validation = .* documents 81 to 90 .* data\.test = .* 86 to 100: .* 5 of"
    ):
        checked(folder, ["b"], ["a 8,1,1"], ["a 8,0.5,1.5"])
