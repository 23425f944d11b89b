"""Shares of a set: disjoint, of the size that is asked for, and the same whoever asks."""

import json

import numpy as np
import pytest

from megarlhf.data.samples.split import set_aside
from tests.data.counting import Counting, loader, write
from tests.refuses import missing_names, refuses


@pytest.fixture
def file(tmp_path):
    """200 records, of which each prompt has two and every tenth is skipped."""
    rows = [{"prompt": f"{n // 2}", "response": "" if n % 10 == 9 else f"r{n}"} for n in range(200)]
    return write(tmp_path / "rows.jsonl", rows)


def records(samples):
    return set(samples.records().tolist())


def of(file, tmp_path, command="sft", option=0, **data):
    encoder = Counting(tmp_path / "log", option)
    return loader({"train": file, "cache": str(tmp_path / "cache"), **data}, encoder).train_and_validation(command)


def test_phases_are_disjoint_shares_of_one_set(file, tmp_path):
    """2, 4 and 4 tenths of the records: 40, 80 and 80, with those that are skipped. `rm` and `dpo` read the same."""
    whole = records(of(file, tmp_path)[0])
    shares = {command: of(file, tmp_path, command, phases="2,4,4") for command in ("sft", "rm", "dpo", "rl")}
    read = {command: records(train) for command, (train, _, _) in shares.items()}
    assert read["rm"] == read["dpo"]
    assert read["sft"] | read["rm"] | read["rl"] == whole
    assert len(read["sft"]) + len(read["rm"]) + len(read["rl"]) == len(whole) == 180
    for command, most in (("sft", 40), ("rm", 80), ("rl", 80)):
        assert most * 0.75 < len(read[command]) <= most
    assert max(read["sft"]) > 150 > 50 > min(read["sft"]), "from all of the file"
    assert not missing_names(shares["sft"][2][-1], "data.phases = 2,4,4", f"sft {len(read['sft'])} of 180 samples")
    assert read["sft"] != records(of(file, tmp_path, phases="2,4,4", split_seed=1)[0])
    assert records(of(file, tmp_path, "sft", phases="1,0,0")[0]) == whole
    with refuses("data.phases", "200 to 200", "the 200"):
        of(file, tmp_path, "rl", phases="1,1,0")


def test_what_is_set_aside_is_never_trained_on(file, tmp_path):
    """Nor are its prompts: both records of a prompt stay together. Of a phase's share too."""
    for phases in (None, "2,4,4"):
        train, held, notes = of(file, tmp_path, "rl", validation_share=0.1, phases=phases)
        total = len(train) + len(held)
        assert not records(train) & records(held)
        assert not np.isin(held.prompts(), train.prompts()).any()
        assert len(held) == round(0.1 * total)
        assert not missing_names(notes[-1], f"{len(held)} samples", f"{len(held) / total:.2g} of all", f"{len(train)}")
    same = of(file, tmp_path, "rl", validation_share=0.1)
    again, other = (of(file, tmp_path, "rl", validation_share=0.1, split_seed=seed) for seed in (0, 1))
    assert same[0].digest() == again[0].digest() != other[0].digest()
    assert same[1].digest() == again[1].digest() != other[1].digest()


def test_the_order_of_the_records_does_not_decide(file, tmp_path):
    """So that a set that is put together anew keeps its validation prompts."""
    _, held, _ = of(file, tmp_path, validation_share=0.1)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[::-1]))
    _, turned, _ = of(file, tmp_path, validation_share=0.1)
    assert sorted(held.prompts().tolist()) == sorted(turned.prompts().tolist())


def test_a_share_that_leaves_nothing_to_train_on_is_refused(file, tmp_path):
    train, _, _ = of(file, tmp_path)
    with refuses("data.validation_share = 0.999", "180 samples", "100", "nothing to train on"):
        set_aside([train], 0.999, 0)
    with refuses("1 samples", "1 different prompts"):
        set_aside([train[:1]], 0.5, 0)
    assert len(set_aside([train], 1e-6, 0)[1][0]) in (1, 2), "one prompt at least"


@pytest.mark.parametrize("counts, share, held", [
    ([91, *[1] * 9], 0.05, 5),  # whichever is drawn first
    ([50, 10, 10, 10, 10, 10], 0.2, 20), ([48, 48, 4], 0.05, 4), ([40, 40, 10, 10], 0.03, 10),  # nothing is nearer
    ([97, 3], 0.02, 3), ([5] * 20, 0.07, 5), ([5] * 20, 0.08, 10), ([96, 4], 0.01, 4),
    ([50, 50], 0.05, "2 different|has 50|50 samples|0.5"), ([91, *[1] * 9], 0.5, "has 91|9 samples|0.09|50"),
])  # fmt: skip
def test_a_prompt_of_many_records_does_not_turn_the_set_over(file, tmp_path, counts, share, held):
    """Of 100 records, with every seed; each prompt stays whole."""
    rows = [{"prompt": f"p{n}", "response": f"{k}"} for n, count in enumerate(counts) for k in range(count)]
    write(file, rows)
    train, _, _ = of(file, tmp_path)
    for seed in range(12):
        if isinstance(held, str):
            with refuses("cannot be met", *held.split("|")):
                set_aside([train], share, seed)
            continue
        ((kept,), (away,)) = set_aside([train], share, seed)
        assert (len(kept), len(away)) == (100 - held, held)
        assert not np.isin(away.prompts(), kept.prompts()).any()


@pytest.mark.parametrize("weights", [(None, None), (3, 1)])
def test_sets_of_a_list_share_one_cut(file, tmp_path, weights):
    """The same prompts in two sets, in each so often that a cut of its own would lie elsewhere: each prompt is on one
    side in both. The sets keep their weights in what is trained on."""
    rows = [{"prompt": f"{n}", "response": f"s{n}.{k}"} for n in range(100) for k in range(1 + n % 7)]
    other = write(file.with_name("other.jsonl"), rows)
    sets = [
        {"path": str(path)} | ({} if weight is None else {"weight": weight})
        for path, weight in zip((file, other), weights, strict=True)
    ]
    apart = [set(of([each["path"]], tmp_path, validation_share=0.1)[1].prompts().tolist()) for each in sets]
    assert apart[0] != apart[1], "each by itself has another cut"
    train, held, _ = of(sets, tmp_path, validation_share=0.1)
    assert not np.isin(held.prompts(), train.prompts()).any()
    assert (len(train.parts), len(held.parts)) == (2, 2)
    assert min(map(len, held.parts)) > 0
    total = len(train) + len(held)
    assert abs(len(held) - 0.1 * total) <= 1
    assert train.weights == (None if weights[0] is None else [3.0, 1.0])


def test_a_weighted_set_that_is_set_aside_as_a_whole_is_refused(file, tmp_path):
    held = of(file, tmp_path, validation_share=0.5)[1][0]
    small = file.with_name("small.jsonl")
    small.write_text(json.dumps({"prompt": "".join(map(chr, held.tokens[: held.prompt_length])), "response": "x"}))
    sets = [{"path": str(file), "weight": 3}, {"path": str(small), "weight": 1}]
    with refuses("data.validation_share", "small.jsonl", "weight is 1"):
        of(sets, tmp_path, validation_share=0.5)
