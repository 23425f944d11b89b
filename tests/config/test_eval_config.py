"""What `megarlhf eval` is told to do by what its file has, and what is refused.

Not covered: what the data has to hold (tests/distributed/test_eval.py, tests/data).
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megarlhf.config import EvaluateConfig, load_config
from tests.command import ROOT

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
    tree = BASE | {
        "actor": ROLE,
        "rewards": [RULE],
        "select": "all",
        "out": None,
        "min_reward": None,
        "pairs_per_prompt": 1,
    }
    assert EvaluateConfig.model_validate(tree).generates


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("nothing", {}, "nothing to evaluate: give an actor"),
    ("unclear", {"actor": ROLE, "reward_model": ROLE}, "name eval.tasks"),
    ("no rewards to compare by", {"actor": ROLE, "against": ROLE}, "comparison needs rewards; give that"),
    ("compared with nobody", {"actor": ROLE, "rewards": [RULE], "eval": {"tasks": ["comparison"]}}, "needs against"),
    ("nobody to compare", {"against": ROLE, "rewards": [RULE]}, "comparison needs actor"),
    ("pairs of nobody", {"actor": ROLE, "eval": {"tasks": ["pairs"]}}, "pairs needs reward_model"),
    ("nothing that scores", {"actor": ROLE, "eval": {"tasks": ["generation"]}}, "needs something that scores"),
    ("no task", {"actor": ROLE, "eval": {"tasks": []}}, "name each task once, and one at least"),
    ("a task twice", {"actor": ROLE, "eval": {"tasks": ["perplexity"] * 2}}, "name each task once"),
    ("a task misspelt", {"actor": ROLE, "eval": {"tasks": ["perplexty"]}}, "did you mean 'perplexity'?"),
    ("rewards unread", {"actor": ROLE, "rewards": [RULE], "eval": {"tasks": ["perplexity"]}},
     "no task reads rewards (generation, comparison would read it): the tasks are perplexity"),
    ("a reward model unread", {"actor": ROLE, "reward_model": ROLE, "rewards": [RULE]},
     "a reward of kind model scores with reward_model"),
    ("a model unread", {"actor": ROLE, "against": ROLE, "rewards": [RULE], "eval": {"tasks": ["generation"]}},
     "no task reads against (comparison would read it)"),
    ("no reward model", {"actor": ROLE, "rewards": [{"kind": "model"}]}, "give a reward_model section"),
    ("a learnt scale", {"actor": ROLE, "rewards": [RULE | {"normalise": "running"}]}, "rewards[0].normalise = running"),
    ("a reward twice", {"actor": ROLE, "rewards": [RULE, RULE]}, "has exact_match more than once"),
    ("greedy samples", {"actor": ROLE, "rewards": [RULE], "rollout": SAMPLED["rollout"]},
     "would draw 4 equal responses"),
    ("greedy filters", {"actor": ROLE, "rewards": [RULE], "rollout": {"top_p": 0.9}},
     "has no effect with greedy = true"),
    ("pass@k of greedy", {"actor": ROLE, "rewards": [RULE], "eval": {"pass_at": [1]}}, "greedy = true draws none"),
    ("k above n", {"actor": ROLE, "rewards": [RULE], **SAMPLED, "eval": {"pass_at": [8]}}, "none above the number"),
    ("k twice", {"actor": ROLE, "rewards": [RULE], **SAMPLED, "eval": {"pass_at": [2, 2]}}, "name each k once"),
    ("k of 0", {"actor": ROLE, "rewards": [RULE], **SAMPLED, "eval": {"pass_at": [0]}}, "greater than 0"),
    ("pass@k of texts", {"actor": ROLE, "eval": {"pass_at": [1], "tasks": ["perplexity"]}}, "eval.pass_at = [1]"),
    ("responses written", {"actor": ROLE, "rewards": [RULE], "out": "x.jsonl"}, "eval writes figures and no responses"),
    ("responses chosen", {"actor": ROLE, "rewards": [RULE], "select": "best"}, "select = best: eval chooses no resp"),
    ("pairs chosen", {"actor": ROLE, "rewards": [RULE], "pairs_per_prompt": 2}, "pairs_per_prompt = 2: eval chooses"),
    ("data unread", {"actor": ROLE, "data": {"train": "x", "validation": "y"}},
     "would leave data.validation = y unread"),
    ("part of the ranks", {"actor": ROLE | {"parallel": {"ranks": [0, 1]}}}, "actor.parallel.ranks = (0, 1)"),
    ("two ways to cut", {"actor": ROLE, "forward": {}}, "give one of them"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_makes_no_sense_is_refused_with_what_to_do(tree: dict[str, Any], words: str, tmp_path: Any) -> None:
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(BASE | tree))
    with pytest.raises(ValueError, match=r"eval\.yaml: ") as refused:
        load_config(EvaluateConfig, tmp_path / "eval.yaml")
    assert words in str(refused.value)


def test_the_example_loads() -> None:
    cfg = load_config(EvaluateConfig, ROOT / "configs" / "example" / "eval.yaml")
    assert (cfg.tasks(), cfg.eval.pass_at) == (("generation",), (1, 4, 16))
