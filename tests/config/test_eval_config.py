"""What `megarlhf eval` is told to do by what its file has, and what is refused. Not covered: what the data has to hold
(tests/distributed/test_eval.py, tests/data)."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megarlhf.config import EvaluateConfig, load_config
from tests.command import ROOT
from tests.refuses import refuses

ROLE = {"model": {"path": "models/x"}}
RULE = {"kind": "rule", "rule": "exact_match"}
SAMPLED = {"greedy": False, "rollout": {"num_samples_per_prompt": 4}}
BASE = {"run": {"dir": "runs/x"}, "data": {"train": "data/x.jsonl"}}


@pytest.mark.parametrize("tree, tasks", [
    ({"actor": ROLE}, ["perplexity"]), ({"reward_model": ROLE}, ["pairs"]),
    ({"actor": ROLE, "rewards": [RULE]}, ["generation"]),
    ({"actor": ROLE, "eval": {"accuracy": "exact_match"}}, ["generation"]),
    ({"actor": ROLE, "reward_model": ROLE, "rewards": [{"kind": "model"}]}, ["generation"]),
    ({"actor": ROLE, "against": ROLE, "rewards": [RULE]}, ["comparison"]),
    ({"actor": ROLE, "rewards": [RULE], "eval": {"tasks": ["generation", "perplexity"]}}, ["perplexity", "generation"]),
    ({"actor": ROLE, "reward_model": ROLE, "eval": {"tasks": ["pairs", "perplexity"]}}, ["perplexity", "pairs"]),
])  # fmt: skip
def test_what_is_given_says_what_is_evaluated(tree: dict[str, Any], tasks: list[str]) -> None:
    assert list(EvaluateConfig.model_validate(BASE | tree).tasks()) == tasks


def test_a_file_for_generate_loads_where_it_asks_for_nothing_else() -> None:
    tree = BASE | {"actor": ROLE, "rewards": [RULE], "select": "all", "out": None, "min_reward": None}
    tree["pairs_per_prompt"] = 1
    assert EvaluateConfig.model_validate(tree).generates


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("nothing", {}, "nothing to evaluate|actor"),
    ("unclear", {"actor": ROLE, "reward_model": ROLE}, "eval.tasks"),
    ("no rewards to compare by", {"actor": ROLE, "against": ROLE}, "comparison|rewards"),
    ("compared with nobody", {"actor": ROLE, "rewards": [RULE], "eval": {"tasks": ["comparison"]}},
     "comparison|against"),
    ("nobody to compare", {"against": ROLE, "rewards": [RULE]}, "comparison needs|actor"),
    ("pairs of nobody", {"actor": ROLE, "eval": {"tasks": ["pairs"]}}, "pairs needs|reward_model"),
    ("nothing that scores", {"actor": ROLE, "eval": {"tasks": ["generation"]}}, "generation|scores"),
    ("no task", {"actor": ROLE, "eval": {"tasks": []}}, "each task once"),
    ("a task twice", {"actor": ROLE, "eval": {"tasks": ["perplexity"] * 2}}, "each task once"),
    ("a task misspelt", {"actor": ROLE, "eval": {"tasks": ["perplexty"]}}, "did you mean 'perplexity'"),
    ("rewards unread", {"actor": ROLE, "rewards": [RULE], "eval": {"tasks": ["perplexity"]}},
     "rewards|generation|comparison|perplexity"),
    ("a reward model unread", {"actor": ROLE, "reward_model": ROLE, "rewards": [RULE]}, "kind model|reward_model"),
    ("a model unread", {"actor": ROLE, "against": ROLE, "rewards": [RULE], "eval": {"tasks": ["generation"]}},
     "against|comparison"),
    ("no reward model", {"actor": ROLE, "rewards": [{"kind": "model"}]}, "reward_model section"),
    ("a learnt scale", {"actor": ROLE, "rewards": [RULE | {"normalise": "running"}]}, "rewards[0].normalise = running"),
    ("a reward twice", {"actor": ROLE, "rewards": [RULE, RULE]}, "exact_match more than once"),
    ("greedy samples", {"actor": ROLE, "rewards": [RULE], "rollout": SAMPLED["rollout"]}, "4 equal responses"),
    ("greedy filters", {"actor": ROLE, "rewards": [RULE], "rollout": {"top_p": 0.9}}, "top_p|greedy = true"),
    ("pass@k of greedy", {"actor": ROLE, "rewards": [RULE], "eval": {"pass_at": [1]}}, "pass_at|greedy = true"),
    ("k above n", {"actor": ROLE, "rewards": [RULE], **SAMPLED, "eval": {"pass_at": [8]}}, "pass_at|above"),
    ("k twice", {"actor": ROLE, "rewards": [RULE], **SAMPLED, "eval": {"pass_at": [2, 2]}}, "pass_at|each k once"),
    ("k of 0", {"actor": ROLE, "rewards": [RULE], **SAMPLED, "eval": {"pass_at": [0]}}, "pass_at|greater than 0"),
    ("pass@k of texts", {"actor": ROLE, "eval": {"pass_at": [1], "tasks": ["perplexity"]}}, "eval.pass_at = [1]"),
    ("responses written", {"actor": ROLE, "rewards": [RULE], "out": "x.jsonl"}, "x.jsonl|no responses"),
    ("responses chosen", {"actor": ROLE, "rewards": [RULE], "select": "best"}, "select = best"),
    ("pairs chosen", {"actor": ROLE, "rewards": [RULE], "pairs_per_prompt": 2}, "pairs_per_prompt = 2"),
    ("data unread", {"actor": ROLE, "data": {"train": "x", "validation": "y"}}, "data.validation = y"),
    ("part of the ranks", {"actor": ROLE | {"parallel": {"ranks": [0, 1]}}}, "actor.parallel.ranks = (0, 1)"),
    ("two ways to cut", {"actor": ROLE, "forward": {}}, "forward|one of them"),
]  # fmt: skip


@pytest.mark.parametrize("tree, names", [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_makes_no_sense_is_refused_with_what_to_do(tree: dict[str, Any], names: str, tmp_path: Any) -> None:
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(BASE | tree))
    with refuses("eval.yaml", *names.split("|")):
        load_config(EvaluateConfig, tmp_path / "eval.yaml")


def test_the_example_loads() -> None:
    cfg = load_config(EvaluateConfig, ROOT / "configs" / "example" / "eval.yaml")
    assert (cfg.tasks(), cfg.eval.pass_at) == (("generation",), (1, 4, 16))
