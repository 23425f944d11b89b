"""Samples in mapped files: what comes back is what was written, and what is asked of all at once equals what each
sample says. Not covered: who writes them (test_token_cache.py)."""

import datetime
import decimal
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megarlhf.data.samples.columns import ColumnWriter, pack
from megarlhf.data.samples.dataset import (
    Joined,
    Selected,
    Stored,
    by_record,
    lengths_of,
    positions_of_shared,
    record_numbers,
)
from megarlhf.data.samples.encoders import PairSample, PromptSample, SFTSample
from megarlhf.resume.claim.identity import digest_of_samples
from tests.refuses import refuses

FIELDS = {
    "answer": "é\u2028 \U0001f600", "number": 1.5, "nothing": None, "list": [1, {"a": True}],
    "day": datetime.date(2024, 1, 2),
    "moment": datetime.datetime(2024, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    "time": datetime.time(1, 2), "price": decimal.Decimal("1.10"), "raw": b"\x00\xff",
}  # fmt: skip
PROMPTS = [
    PromptSample([1, 2, 3], "one", FIELDS, 0, [{"role": "user", "content": "one"}]),
    PromptSample([4], "lone \ud800", {}, 2),
    PromptSample([1, 2, 3], "one", {"answer": "again"}, 3),
    PromptSample([], "", {}, 5),
]


def stored(directory, samples, records, total, **changes):
    directory.mkdir()
    writer = ColumnWriter(directory, type(samples[0]))
    for start in range(0, len(samples), 2):  # in several pieces, of which the last is empty
        packed = pack(samples[start : start + 2], records[start : start + 2], writer.kinds)
        writer.append(replace(packed, num_records=2, skipped=Counter({"why": 1})))
    writer.append(replace(pack([], [], writer.kinds), num_records=total - 2 * ((len(samples) + 1) // 2)))
    writer.finish()
    return Stored(directory, type(samples[0]))


@pytest.mark.parametrize("samples", [
    PROMPTS,
    [PairSample([1], [2, 3], [4], 0.25), PairSample([5, 6], [7], [2**31 - 1, 0])],
    [SFTSample.of_response([1, 2, 3], 1), SFTSample([1, 2, 3, 4, 5], [1, 2, 4, 5]), SFTSample([9], [1, 1])],
])  # fmt: skip
def test_what_is_read_is_what_was_written(tmp_path, samples):
    read = stored(tmp_path / "a", samples, [2 * n for n in range(len(samples))], 12)
    assert list(read) == samples
    assert [type(value) for value in vars(read[0]).values()] == [type(value) for value in vars(samples[0]).values()]
    assert read[-1] == samples[-1]
    assert list(read[1:]) == samples[1:]
    assert list(read[::-1]) == samples[::-1]
    assert list(read[:0]) == []
    assert read[: len(samples)] is read
    for position in (len(samples), -len(samples) - 1):
        with pytest.raises(IndexError):
            read[position]
    names = [name for name, value in vars(samples[0]).items() if isinstance(value, list) and name != "messages"]
    for name in names:
        for some, expected in ((read, samples), (read[1:], samples[1:])):
            assert lengths_of(some, name).tolist() == lengths_of(expected, name).tolist()
    assert read.records().tolist() == [2 * n for n in range(len(samples))]
    assert read.num_records == 12
    assert read.manifest["skipped"] == {"why": (len(samples) + 1) // 2}


def test_digests_tell_samples_and_their_order_apart(tmp_path):
    """And not where they lie, nor in how many pieces they were written."""
    base = stored(tmp_path / "a", PROMPTS, [0, 2, 3, 5], 6)
    again = stored(tmp_path / "b", PROMPTS, [0, 2, 3, 5], 9)
    other = stored(tmp_path / "c", [*PROMPTS[:3], replace(PROMPTS[3], text="x")], [0, 2, 3, 5], 6)
    assert base.digest() == again.digest() == digest_of_samples(again)
    parts = [
        base, other, Selected(base, np.array([0, 1])), Selected(base, np.array([1, 0])), Joined([base, other], [6, 6]),
        Joined([other, base], [6, 6]), Joined([base, other], [6, 6], [1.0, 2.0]),
        Joined([base, other], [6, 6], [2.0, 1.0]),
    ]  # fmt: skip
    assert len({digest_of_samples(each) for each in parts}) == len(parts)
    assert Joined([base, other], [6, 6], [2.0, 4.0]).digest() == parts[-2].digest(), "the same shares"


def test_records_of_joined_sets_follow_each_other(tmp_path):
    """Skipped records count, so that a record's number says which set it is of. A sample is found by its number."""
    first = stored(tmp_path / "a", PROMPTS, [0, 2, 3, 5], 6)
    joined = Joined([first, Selected(first, np.array([3, 1]))], [6, 10])
    assert len(joined) == 6
    assert [sample.index for sample in joined] == [0, 2, 3, 5, 11, 8] == joined.records().tolist()
    assert [sample.text for sample in joined[4:]] == ["", "lone \ud800"]
    assert joined[4] == replace(PROMPTS[3], index=11)
    assert joined.lengths("tokens").tolist() == [3, 1, 3, 0, 0, 1]
    find = by_record(joined)
    assert find(8) == joined[5]
    assert by_record(PROMPTS)(3) == PROMPTS[2]
    assert record_numbers(PROMPTS).tolist() == [0, 2, 3, 5]
    for missing in (1, 12):
        with refuses(f"record {missing}", error=KeyError):
            find(missing)


def test_shared_prompts_are_found_by_their_tokens(tmp_path):
    base = stored(tmp_path / "a", PROMPTS, [0, 2, 3, 5], 6)
    some = Selected(base, np.array([2]))
    assert positions_of_shared(base, some).tolist() == [0, 2]
    pairs = stored(tmp_path / "b", [PairSample([1, 2, 3], [9], [8]), PairSample([1, 2], [3], [8])], [0, 1], 4)
    texts = stored(
        tmp_path / "c", [SFTSample.of_response([1, 2, 3, 7], 3), SFTSample.of_response([1, 2], 1)], [0, 1], 2
    )
    assert positions_of_shared(pairs, base).tolist() == positions_of_shared(texts, base).tolist() == [0]


def test_a_column_that_cannot_be_kept_is_said():
    with refuses("a column", "complex"):
        pack([PromptSample([1], "a", {"x": 1j}, 0)], [0], {"fields": "json"})
    assert json.loads(pack([PromptSample([1], "a", {"x": 1}, 0)], [0], {"fields": "json"}).values["fields"]) == {"x": 1}
