"""The demonstration's data: what training on it relies on. Not covered: that the task can be learnt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarlhf.data.tokenizers.tokenizer import SentencePieceTokenizer, load_tokenizer
from tests.data.in_memory import load_records
from tests.refuses import refuses
from tools.demo.make_data import (
    ALPHABET,
    MODEL_CONFIG,
    NEAR_MISSES,
    Problem,
    Recipe,
    all_problems,
    check_rows,
    main,
    make_rows,
    near_misses,
    train_tokenizer,
    write_all,
)

FILES = [f"{kind}_{part}" for kind in ("sft", "pairs", "prompts") for part in ("train", "validation")] + [
    "prompts_test"
]
SMALL = Recipe(validation=20, test=40, sft_train=101, pairs_train=300, prompts_train=50)


def swapped(prompt):
    a, b = prompt.rstrip("=").split("+")
    return f"{b}+{a}="


def right_answer(prompt):
    a, b = prompt.rstrip("=").split("+")
    return str(int(a) + int(b))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    write_all(out, SMALL, seed=0)
    return out


def test_files_shares_and_disjointness(made):
    """Read back from disk, counted by an addition of the test's own."""
    rows = {name: load_records(made / f"{name}.jsonl", fields=["prompt"]) for name in FILES}
    sizes = {name: len(file) for name, file in rows.items()}
    assert sizes == dict(zip(FILES, (101, 20, 300, 20, 50, 20, 40), strict=True))
    prompts = {name: {row["prompt"] for row in file} for name, file in rows.items()}
    assert all(len(prompts[name]) == sizes[name] for name in FILES)  # each problem once before any comes twice
    validation, test = prompts["sft_validation"], prompts["prompts_test"]
    assert validation == prompts["pairs_validation"] == prompts["prompts_validation"]
    train = prompts["sft_train"] | prompts["pairs_train"] | prompts["prompts_train"]
    for one, other in ((train, validation), (train, test), (validation, test)):
        assert not one & other
        assert not {swapped(prompt) for prompt in one} & other
    for part, half in ((validation, 10), (test, 20)):
        assert sum(Problem(*map(int, prompt.rstrip("=").split("+"))).carries() for prompt in part) == half
        assert {swapped(prompt) for prompt in part} == part
    assert all(row["response"] == right_answer(row["prompt"]) for row in rows["sft_validation"])
    for row in rows["pairs_train"] + rows["pairs_validation"]:
        assert row["chosen"] == right_answer(row["prompt"]) != row["rejected"]
    for row in rows["prompts_train"] + rows["prompts_validation"] + rows["prompts_test"]:
        assert row["answer"] == right_answer(row["prompt"])
    assert sorted(p.name for p in made.iterdir()) == sorted(["base", *(f"{name}.jsonl" for name in FILES)])


def test_most_carries_are_forgotten_and_the_rest_is_mostly_right():
    """4000 rows: 0.75 of the problems with a carry forget it (but for the careless), few others are wrong."""
    recipe = Recipe(validation=20, test=8, sft_train=4000, pairs_train=4000, prompts_train=50)
    rows = make_rows(recipe, seed=0)
    forgotten, others = [], []
    for row in rows["sft_train"]:
        problem = Problem(*map(int, row["prompt"].rstrip("=").split("+")))
        if problem.carries():
            forgotten.append(row["response"] in near_misses(problem)["carry forgotten"])
        else:
            others.append(row["response"] != problem.answer())
    assert 0.70 < sum(forgotten) / len(forgotten) < 0.78
    assert 0.03 < sum(others) / len(others) < 0.07
    invented = [row for row in rows["pairs_train"] if int(row["rejected"]) == int(row["chosen"]) + 10]
    assert len(invented) > 1000


def test_a_leak_is_found():
    rows = make_rows(SMALL, seed=0)
    check_rows(rows)
    rows["prompts_train"][3] = {"prompt": swapped(rows["prompts_test"][5]["prompt"]), "answer": "0"}
    with refuses("train in test", error=AssertionError):
        check_rows(rows)


def test_near_misses_by_hand():
    """37+48=85; 55+45=100; without a carry 12+34=46 has no such miss."""
    assert near_misses(Problem(37, 48)) == {
        "off by one": ["84", "86"],
        "off by ten": ["75", "95"],
        "off by a hundred": ["185"],
        "digits swapped": ["58"],
        "digit replaced": [f"{d}5" for d in "012345679"] + [f"8{d}" for d in "012346789"],
        "carry forgotten": ["75"],
        "digit dropped": ["5", "8"],
        "digit added": [text for d in range(10) for text in (f"85{d}", f"{d}85")],
        "digit doubled": ["885", "855"],
    }
    hundred = near_misses(Problem(55, 45))
    assert (hundred["carry forgotten"], hundred["digits swapped"]) == (["90"], ["010"])
    assert "carry forgotten" not in near_misses(Problem(12, 34))


def test_every_problem_has_only_wrong_misses():
    kinds = set()
    for problem in all_problems():
        misses = near_misses(problem)
        kinds |= misses.keys()
        texts = {text for texts_of_kind in misses.values() for text in texts_of_kind}
        assert texts
        assert not texts & {problem.answer(), ""}
    assert kinds == NEAR_MISSES.keys()


def test_the_same_seed_gives_the_same_bytes(made, tmp_path):
    """Also from another process with another hash seed; and another seed gives other rows, the same model."""
    command = [sys.executable, "-m", "tools.demo.make_data", "--out", str(tmp_path / "again"), "--seed", "0"]
    for name in ("validation", "test", "sft_train", "pairs_train", "prompts_train"):
        command += [f"--{name.replace('_', '-')}", str(getattr(SMALL, name))]
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert "wrong responses in sft_train: " in done.stdout
    files = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    assert len(files) == 11
    for file in files:
        assert (made / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
    write_all(tmp_path / "other", SMALL, seed=1)
    changed = [f for f in files if (made / f).read_bytes() != (tmp_path / "other" / f).read_bytes()]
    assert [str(f) for f in changed] == sorted(f"{name}.jsonl" for name in FILES)


def test_too_large_a_recipe_is_refused():
    for option, size, names in (
        ("prompts-train", "8000", ("prompts_train=8000", "6300")), ("test", "8000", ("test=8000", "8100")),
        ("validation", "6", ("validation=6", "multiple of 4")),
    ):  # fmt: skip
        with refuses(*names):
            main(["--out", "unused", f"--{option}", size])


def test_tokenizer_is_one_token_a_character(made):
    tokenizer = load_tokenizer(made / "base")
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (1, 2, 3, 16)
    assert tokenizer.encode(ALPHABET) == list(range(4, 16))
    for problem in all_problems()[::37]:
        prompt, answer = problem.prompt(), problem.answer()
        ids = tokenizer.encode(prompt) + tokenizer.encode(answer, continuation=True)
        assert ids == tokenizer.encode(prompt + answer)
        assert tokenizer.decode([1, *ids, 2]) == prompt + answer
    assert train_tokenizer() == (made / "base" / "tokenizer.model").read_bytes()


def test_transformers_reads_the_model_directory(made):
    """Same ids by its own tokenizer, and the model's sizes."""
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = (of.from_pretrained(made / "base", local_files_only=True) for of in (AutoConfig, AutoTokenizer))
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "eos_token_id"):
        assert getattr(config, key) == MODEL_CONFIG[key]
    assert tokenizer.encode("37+48=", add_special_tokens=False) == load_tokenizer(made / "base").encode("37+48=")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 3)
