"""Generated tasks as a data source."""

import os
import subprocess
import sys

import pytest

from megarlhf.data.sources.find import find, source_files
from megarlhf.data.sources.procedural import parse, require_disjoint
from megarlhf.data.sources.reasoning_gym import FIELD, SAME_HASHES, item_again, require_task
from tests.command import ROOT
from tests.data.in_memory import load_records, source_of
from tests.refuses import refuses

LEGS = "reasoning_gym:leg_counting?size=4&seed=5&max_animals=4"


def test_a_source_is_its_task_and_parameters():
    source = parse("reasoning_gym:chain_sum?size=10&seed=3&operators=[+, -]")
    assert (source.task, source.params) == ("chain_sum", {"size": 10, "seed": 3, "operators": ["+", "-"]})
    assert source.seeds() == range(3, 13)


@pytest.mark.parametrize("parameters, names", [
    ("", "size = None|at least 1"), ("?size=3", "seed = None"), ("?size=0&seed=1", "size = 0"),
    ("?size=true&seed=1", "size = True"), ("?size=3&seed=-1", "seed = -1"), ("?size=3&seed", "'seed'"),
    ("?size=3&seed=1&size=4", "'size=4'|once"), ("?size=[3&seed=1", "size = '[3'|YAML"),
])  # fmt: skip
def test_a_bad_form_is_refused(parameters, names):
    with refuses(*names.split("|")):
        parse(f"reasoning_gym:leg_counting{parameters}")


def test_train_and_validation_share_no_seed():
    def named(seed, more=""):
        return f"reasoning_gym:leg_counting?size=100&seed={seed}{more}"

    with refuses("data.train", "data.validation", "99 items", "seed of 100"):
        require_disjoint(named(0), named(1))
    require_disjoint(named(0), named(100))
    require_disjoint(named(0), named(1, "&max_animals=3"))
    require_disjoint("data/train.jsonl", named(0))


@pytest.mark.parametrize("name, names", [
    ("leg_conting?size=3&seed=5", "no task 'leg_conting'|'leg_counting'"),
    ("leg_counting?size=3&seed=5&max_animal=3", "no parameter 'max_animal'|'max_animals'"),
    ("leg_counting?size=3&seed=1&min_animals=0", "refuses the parameters|min_animals must be positive"),
])  # fmt: skip
def test_what_reasoning_gym_does_not_have_is_said_before_anything_is_generated(name, names):
    pytest.importorskip("reasoning_gym")
    with refuses(*names.split("|")):
        find(source_of(f"reasoning_gym:{name}"))


def test_items_are_records_with_what_the_rule_needs():
    pytest.importorskip("reasoning_gym")
    records = load_records(LEGS, fields=("prompt",))
    assert len({record["prompt"] for record in records}) == 4
    assert [record.where for record in records][:2] == [f"{LEGS}, item 0", f"{LEGS}, item 1"]
    assert "messages" not in records[1], "the prompt is one message of the user where a template is read"
    dataset, item = item_again(records[1][FIELD])
    assert (item["question"], item["answer"]) == (records[1]["prompt"], records[1]["answer"])
    assert dataset.score_answer(records[1]["answer"], item) == 1.0
    assert source_files([source_of(LEGS)]) == set()
    with refuses("split 'test'", LEGS):
        load_records(LEGS, fields=("prompt",), split="test")
    with refuses("'response'"):
        load_records(LEGS, fields=("prompt", "response"))
    with refuses("item 2", "another one", "reasoning-gym"):
        item_again(records[1][FIELD] | {"item": 2})


def test_items_are_equal_whatever_hashes_a_process_has():
    """The generator of `isomorphic_strings` walks through sets."""
    pytest.importorskip("reasoning_gym")
    name = "reasoning_gym:isomorphic_strings?size=3&seed=5"
    rows = load_records(name, fields=("prompt",))
    load = f"load_records({name!r}, fields=())"
    code = f"from tests.data.in_memory import load_records; print([row['prompt'] for row in {load}])"
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        assert said.strip() == repr([row["prompt"] for row in rows])
    assert SAME_HASHES == {"PYTHONHASHSEED": "0"}


def test_a_task_without_one_answer_has_none():
    pytest.importorskip("reasoning_gym")
    assert "answer" not in load_records("reasoning_gym:graph_color?size=1&seed=0", fields=("prompt",))[0]
    assert require_task("reasoning_gym:graph_color?size=1&seed=0").task == "graph_color"
