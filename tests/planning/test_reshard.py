"""`python -m megarlhf.weights.plan`: the figures of the published layouts, and what the command says.

Figures: gigabytes (1e9) of bf16, computed apart from this code for Llama-3-70B (need, least receive, all-gather).
Not covered: that a transfer takes the estimated time.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarlhf.config import RLConfig, load_config
from megarlhf.planning.reshard import answer, ask, main, parser
from megarlhf.weights.plan import make_plan
from megarlhf.weights.plan.traffic import model_elements

REPOSITORY = Path(__file__).parents[2]
CONFIGS = ("llama-3-70b", "llama-3.1-405b", "qwen3-30b-a3b")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def figures(capsys, name, *options):
    assert main(["-c", f"configs/plan/{name}.yaml", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def mean_gb(found, key):
    return sum(found[key]) / len(found[key]) / 1e9


@pytest.mark.parametrize(
    ("options", "need", "least", "largest", "all_gather"),
    [
        (["--engine-tp=8"], 17.64, 13.23, 13.36, 136.7),
        (["--engine-tp=4"], 35.28, 30.87, 31.00, 136.7),
        (["--engine-tp=4", "--order=rank"], 35.28, 34.18, 35.28, 136.7),
        (["actor.parallel.pp=1", "--world-size=32"], 17.64, 0.01, None, 123.5),
        (["actor.parallel.pp=8"], 17.64, 15.44, None, 138.9),
        (["--engine-tp=16", "--world-size=32", "--order=rank"], 8.99, 8.71, None, 136.7),
    ],
)
def test_llama_3_70b(capsys, options, need, least, largest, all_gather):
    """Received is the least exactly, rank by rank; all figures to the last digit given."""
    found = figures(capsys, "llama-3-70b", *options)
    assert found["model"] / 1e9 == pytest.approx(141.1, abs=0.05)
    assert found["received"] == found["least"]
    assert mean_gb(found, "need") == pytest.approx(need, abs=0.005)
    assert mean_gb(found, "received") == pytest.approx(least, abs=0.005)
    if largest is not None:
        assert max(found["received"]) / 1e9 == pytest.approx(largest, abs=0.005)
    assert found["formula_all_gather"] / 1e9 == pytest.approx(all_gather, abs=0.05)
    assert sum(found["sent"]) == sum(found["received"])
    if "--engine-tp=16" not in options:  # KV replicas are not in the formula, nor the rows that padding displaces
        assert found["formula_least"] / 1e9 == pytest.approx(least, abs=0.011)
    one, two = found["tiers"]
    assert two["entering"] == found["least_entering"]
    assert sum(two["entering"]) <= sum(one["entering"])
    assert two["inside"] + sum(two["entering"]) == one["inside"] + sum(one["entering"]) == sum(found["received"])
    assert found["plan_seconds"] < 60


def test_two_tiers_halve_what_enters_a_node_of_two_engines(capsys):
    """tp 4 on nodes of 8: 105.83 GB a node (three quarters of the model) instead of twice that and more."""
    one, two = figures(capsys, "llama-3-70b", "--engine-tp=4")["tiers"]
    assert sum(two["entering"]) / 8e9 == pytest.approx(105.83, abs=0.005)
    assert sum(one["entering"]) > 2.1 * sum(two["entering"])
    assert two["seconds"] < one["seconds"] / 2


def question(name, *options):
    arguments = parser().parse_intermixed_args(["-c", f"configs/plan/{name}.yaml", *options])
    return ask(load_config(RLConfig, arguments.config, arguments.overrides), arguments)


def test_llama_405b():
    """126 layers in stages of 32, 32, 31, 31; 811.7 GB, of which a rank needs an eighth and holds a quarter of it."""
    found = answer(question("llama-3.1-405b"))
    assert found.model / 1e9 == pytest.approx(811.7, abs=0.05)
    assert found.received == found.least
    assert sum(found.received) / 64e9 == pytest.approx(811.7 / 8 * 3 / 4, rel=0.001)
    assert found.plan_seconds < 60


@pytest.mark.parametrize("ep", [1, 2])
def test_qwen3_30b_a3b_is_planned_in_seconds(ep):
    """18 thousand expert matrices on 64 ranks. The time is this process's own, placements included."""
    start = time.process_time()
    asked = question("qwen3-30b-a3b", f"--ep={ep}")
    plan = make_plan(*asked.placements(), only_rank=0)
    assert time.process_time() - start < 60
    received = sum(plan.elements_received(rank) for rank in range(64)) * 2 / 64e9
    # KV heads are fewer than ranks and whole on each: 0.05 GB above the formula.
    assert received == pytest.approx({1: 5.77, 2: 6.68}[ep], abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--engine-tp=4"], ["--ep=2"]])
def test_qwen3_30b_a3b_in_both_tiers(options):
    found = answer(question("qwen3-30b-a3b", *options))
    assert found.received == found.least
    assert found.tiers[1].entering == found.least_entering


def test_the_command_prints_tables_and_ranks():
    """As a user starts it; other node sizes and link speeds change the estimate."""
    command = [sys.executable, "-m", "megarlhf.weights.plan", "-c", "configs/plan/llama-3-70b.yaml"]
    options = ["actor.parallel.pp=1", "--world-size=16", "--ranks-per-node=4", "--node-gbps=400", "--per-rank"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    words = " ".join(done.stdout.split())
    for said in (
        "tp 8 x pp 1 x dp 2 (vpp 1, ep 1) = 16 ranks",
        "all-gather by the formula",
        "123.47",
        "400 Gb/s a node",
    ):
        assert said in words
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.count("│") == 6]
    each = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows if row[0].strip().isdigit()}
    assert list(each) == [str(rank) for rank in range(16)]
    assert all(needed == "17.64" and received == least for needed, received, least, _ in each.values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["actor.parallel.tp=7"], "world size 64 is not a multiple of tp x pp = 7 x 4"),
        (["--engine-tp=24"], "64 ranks do not divide into engines of 24 ranks"),
        (["--ep=2"], "ep = 2 on a llama without experts"),
        (["actor.model.path=nowhere"], "nowhere has no config.json"),
        (["--world-size=60"], "world size 60 is not a multiple"),
    ],
)
def test_what_does_not_fit_is_said(capsys, options, said):
    assert main(["-c", "configs/plan/llama-3-70b.yaml", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--node-gbps=0"], ["--rank-gbps=inf"], ["--ranks-per-node=0"]])
def test_options_that_are_no_sizes(options):
    with pytest.raises(SystemExit, match="2"):
        main(["-c", "configs/plan/llama-3-70b.yaml", *options])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_examples_are_what_they_say(name):
    """Parameters in billions, from the models' cards."""
    found = question(name)
    total = {"llama-3-70b": 70.6, "llama-3.1-405b": 405.9, "qwen3-30b-a3b": 30.5}[name]
    assert model_elements(found.arch)[0] / 1e9 == pytest.approx(total, abs=0.05)
    assert found.mesh.world_size == 64
