"""The chat demo's task and its data: what the checks say of answers, by hand, and what its files hold."""

import collections
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.refuses import missing_names, refuses
from tools.demo_chat import make_data, words
from tools.demo_chat.tasks import CHECKS, Task, all_tasks, checks, degrees, graded, judge, right, task_of
from tools.demo_chat.words import name_of

ANIMALS = Task(category="animals", count=3, case="upper", full_stop=True)


@pytest.mark.parametrize(
    ("answer", "missed"),
    [
        ("BEAR, CAT, DOG.", []),
        ("DOG, CAT, BEAR. \n", []),
        ("WOLVES, GEESE, POLAR BEARS.", []),
        ("BEAR, CAT.", ["count"]),
        ("BEAR, CAT, DOG, FOX.", ["count"]),
        ("BEAR, CAT, DOGGO.", ["kind"]),
        ("BEAR, CAT, CATS.", ["distinct"]),
        ("BEAR, WOLF, WOLVES.", ["distinct"]),
        ("Bear, CAT, DOG.", ["case"]),
        ("BEAR, CAT, DOG", ["end"]),
        ("cat, bear", ["count", "case", "end"]),
        ("", list(CHECKS)),
        ("1. BEAR, 2. CAT, 3. DOG.", list(CHECKS)),
        ("BEAR, CAT, DOG..", list(CHECKS)),
        ("BEAR, CAT,\nDOG. HERE THEY ARE!", list(CHECKS)),
    ],
)
def test_what_the_checks_say(answer, missed) -> None:
    found = judge(ANIMALS, answer)
    assert [name for name, value in found.items() if not value] == missed
    fields = {"prompt": "unread", **ANIMALS.fields()}
    assert checks("", answer, fields) == {"score": pytest.approx(1 - len(missed) / 6), **found}
    assert right("", answer, fields) == (not missed)


@pytest.mark.parametrize(
    ("answer", "less"),
    [
        ("BEAR, CAT, DOG.", {}),
        ("BEAR, CAT.", {"count": 2 / 3}),
        ("BEAR, CAT, DOG, FOX.", {"count": 2 / 3}),
        ("ANT, BEAR, CAT, DOG, FOX, HORSE, LION.", {"count": 0.0}),
        ("BEAR, TABLE, CHAIR.", {"kind": 1 / 3}),
        ("CAT, CAT, CAT.", {"distinct": 1 / 3}),
        ("Bear, CAT, DOG.", {"case": 2 / 3}),
        ("BEAR, CAT, DOG", {"end": 0.0}),
        ("no list", dict.fromkeys(CHECKS, 0.0)),
    ],
)
def test_how_far_the_checks_hold(answer, less) -> None:
    expected = {name: pytest.approx(less.get(name, 1.0)) for name in CHECKS}
    assert degrees(ANIMALS, answer) == expected
    assert judge(ANIMALS, answer) == {name: float(name not in less) for name in CHECKS}
    score = sum(less.get(name, 1.0) for name in CHECKS) / 6
    assert graded("", answer, ANIMALS.fields()) == {"score": pytest.approx(score), **expected}


def test_repeating_what_is_known_does_not_pay() -> None:
    """GRPO's reward of distinct items, one of another kind, is above that of one item three times."""
    fields = ANIMALS.fields()
    assert graded("", "BEAR, CAT, TABLE.", fields)["score"] > graded("", "CAT, CAT, CAT.", fields)["score"]


def test_other_names_of_the_same() -> None:
    countries = Task(category="countries", count=2, case="any", full_stop=False)
    assert all(judge(countries, "USA, France").values())
    assert [name for name, value in judge(countries, "USA, the United States").items() if not value] == ["kind"]
    assert not judge(countries, "USA, United States")["distinct"]
    assert name_of("Grey", "colors") == name_of("gray", "colors") == "gray"
    for other, name in words._SAME.items():
        assert any(name in known for known in words.CATEGORIES.values()), (other, name)


def test_no_question_of_what_is_forgotten_is_like_one_that_is_learnt() -> None:
    """Neither its first three words nor two of its telling ones."""
    learnt, asked = (
        [line.lower() for line in path.read_text().splitlines()]
        for path in (make_data.REPLAY_QUESTIONS, make_data.QUESTIONS)
    )
    common = {"would", "should", "could", "about"}
    telling = [{word for word in re.findall("[a-z]+", line) if len(word) > 4} for line in learnt]
    assert learnt
    assert asked
    for line in asked:
        assert tuple(line.split()[:3]) not in {tuple(other.split()[:3]) for other in learnt}
        words_of_line = {word for word in re.findall("[a-z]+", line) if len(word) > 4} - common
        assert all(len(words_of_line & other) < 2 for other in telling), line


def test_case_and_full_stop_count_where_they_were_asked_for() -> None:
    for answer in ("BEAR, CAT, DOG", "BEAR, CAT, DOG."):
        assert all(judge(replace(ANIMALS, full_stop=False), answer).values())
    for answer in ("bear, cat, dog.", "Bear, Cat, Dog.", "BEAR, cat, DOG."):
        assert all(judge(replace(ANIMALS, case="any"), answer).values())


def test_right_answers_are_right_and_of_spoiled_ones_one_check_does_not_hold() -> None:
    """Of every task; and every check but the form is missed by some."""
    draw, missed = random.Random(0), collections.Counter[str]()
    for task in all_tasks():
        assert all(judge(task, task.answer(draw)).values())
        for _ in range(4):
            chosen, rejected = task.spoiled(draw)
            assert all(judge(task, chosen).values()), (task, chosen)
            (name,) = [name for name, value in judge(task, rejected).items() if not value] or [""]
            missed[name] += 1
    assert set(missed) == set(CHECKS) - {"form"}
    assert min(missed.values()) > 100


def test_data_of_another_seed_or_version_is_not_taken_for_this(tmp_path, capsys) -> None:
    """It is refused as it is; a file that is missing is made again."""
    arguments = ["--out", str(tmp_path), "--sft", "8"]
    assert make_data.main(arguments) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for change in (["--seed", "1"], ["--pairs", "3"]):
        assert make_data.main([*arguments, *change]) == 2
        assert not missing_names(capsys.readouterr().err, str(tmp_path), "other records", "seed")
    (tmp_path / "test.jsonl").unlink()
    assert make_data.main(arguments) == 0
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert make_data.main(["--out", str(tmp_path / "none"), "--test", "5000"]) == 2
    assert "5064 tasks" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    for wrong in ("tset=3", "test", "test=0", "test=many"):
        with refuses(f"data:{wrong}", "NAME=NUMBER", "sft, spoiled"):
            make_data.sizes_with([wrong])


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_splits_share_no_task_and_a_seed_gives_the_same_bytes(tmp_path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert make_data.main(["--out", str(tmp_path / name), "--seed", seed]) == 0
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    fixed = {"questions.jsonl", "replay_questions.jsonl"}
    assert names == sorted([*(f"{name}.jsonl" for name in make_data.SIZES), *fixed, "sft_validation.jsonl"])
    for name in names:
        same, other = ((tmp_path / each / name).read_bytes() for each in "bc")
        assert (tmp_path / "a" / name).read_bytes() == same
        assert (same == other) == (name in fixed)
    asked = {name: {str(row) for row in _read(tmp_path / "a" / name)} for name in fixed}
    assert [len(asked[name]) for name in sorted(fixed)] == [50, 160]
    assert not asked["questions.jsonl"] & asked["replay_questions.jsonl"]
    rows = {name: _read(tmp_path / "a" / f"{name}.jsonl") for name in make_data.SIZES}
    assert {name: len(of) for name, of in rows.items()} == make_data.SIZES
    tasks = {name: {task_of(row) for row in of} for name, of in rows.items()}
    training = tasks["sft"] | tasks["spoiled"] | tasks["pairs"] | tasks["prompts"]
    assert not training & tasks["validation"]
    assert not training & tasks["test"]
    assert not tasks["validation"] & tasks["test"]
    assert {task_of(row) for row in _read(tmp_path / "a/sft_validation.jsonl")} == tasks["validation"]
    for row in rows["spoiled"]:
        assert right("", row["chosen"], row) > right("", row["rejected"], row)
        assert [message["role"] for message in row["prompt"]] == ["user"]
