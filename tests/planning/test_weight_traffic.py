"""`megarlhf plan`: the figures of the published layouts, and what the command says. Figures: gigabytes (1e9) of bf16,
computed apart from this code for Llama-3-70B (need, least receive, all-gather). The formula against random models and
layouts: tests/weights/test_formula.py. Not covered: that a transfer takes the estimated time."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megarlhf.commands.plan import main
from megarlhf.commands.plan_arguments import parser
from megarlhf.config import RLConfig, load_config
from megarlhf.planning.weight_traffic import plan_transfer, transfer_setup
from megarlhf.weights.plan.copy_plan import make_plan
from megarlhf.weights.plan.traffic import Links, formula, least_receive, model_elements
from tests.refuses import missing_names

REPOSITORY = Path(__file__).parents[2]
CONFIGS = ("llama-3-70b", "llama-3.1-405b", "qwen3-30b-a3b")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def figures(capsys, name, *options):
    assert main(["-c", f"configs/plan/{name}.yaml", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def mean_gb(report, key):
    return sum(report[key]) / len(report[key]) / 1e9


@pytest.mark.parametrize("options, need, least, largest, all_gather", [
    (["--engine-tp=8"], 17.64, 13.233, 13.36, 136.7), (["--engine-tp=4"], 35.28, 30.870, 31.00, 136.7),
    (["--engine-tp=4", "--order=rank"], 35.28, 34.176, 35.28, 136.7),
    (["actor.parallel.pp=1"], 17.64, 0.01101, 0.02202, 123.5),
    (["actor.parallel.pp=8"], 17.64, 15.437, None, 138.9),
    (["--engine-tp=16", "--order=rank"], 8.99, 8.708, None, 136.7),
])  # fmt: skip
def test_llama_3_70b(capsys, options, need, least, largest, all_gather):
    """Received, counted least and formula are the same bytes rank by rank, within 0.1% of the published figures.
    Published for pp 1 is 0.01, vocabulary rows only: 96 v rows of two matrices 8192 wide on rank v, 336 on average."""
    report = figures(capsys, "llama-3-70b", *options)
    assert report["model"] / 1e9 == pytest.approx(141.1, abs=0.05)
    assert report["received"] == report["least"] == report["formula"]
    assert mean_gb(report, "need") == pytest.approx(need, rel=0.001)
    assert mean_gb(report, "received") == pytest.approx(least, rel=0.001)
    assert report["formula_least"] / 1e9 == pytest.approx(least, rel=0.001)
    if largest is not None:
        assert max(report["received"]) / 1e9 == pytest.approx(largest, rel=0.001)
    assert report["formula_all_gather"] / 1e9 == pytest.approx(all_gather, rel=0.001)
    assert report["formula_all_gather"] == pytest.approx(sum(report["all_gather"]) / len(report["all_gather"]))
    assert sum(report["sent"]) == sum(report["received"])
    one_tier, two_tiers = report["tiers"]
    assert two_tiers["entering"] == report["least_entering"]
    assert sum(two_tiers["entering"]) <= sum(one_tier["entering"])
    tiers = [tier["inside"] + sum(tier["entering"]) for tier in (two_tiers, one_tier)]
    assert tiers == [sum(report["received"])] * 2
    assert report["plan_seconds"] < 60


def test_the_dtype_is_config_json_s_unless_one_is_given():
    for overrides, size in (((), 2), (("actor.model.dtype=fp32",), 4)):
        cfg = load_config(RLConfig, "configs/plan/llama-3-70b.yaml", overrides)
        setup = transfer_setup(cfg, links=Links(rank_gbps=1.0, node_gbps=1.0), order="engine", ranks_per_node=8)
        assert setup.element_bytes == size


def test_links_inside_and_between_nodes_are_charged_apart(capsys):
    """At 400 Gb/s, 50 GB/s, a node sends a little more than the busiest receives, whatever --rank-gbps; without pp
    nothing enters a node, and its ranks' links alone count."""
    seconds = set()
    for rank_gbps in ("450", "3600"):
        report = figures(capsys, "llama-3-70b", "--engine-tp=4", "--node-gbps=400", f"--rank-gbps={rank_gbps}")
        one_tier = report["tiers"][0]
        seconds.add(one_tier["seconds"])
        assert 1 <= one_tier["seconds"] / (max(one_tier["entering"]) / 50e9) < 1.03
    assert len(seconds) == 1
    inside = figures(capsys, "llama-3-70b", "actor.parallel.pp=1", "--node-gbps=1e-6")
    assert sum(inside["tiers"][0]["entering"]) == 0
    assert inside["tiers"][0]["seconds"] == pytest.approx(max(inside["received"]) / 450e9)


def test_two_tiers_halve_what_enters_a_node_of_two_engines(capsys):
    """tp 4 on nodes of 8: 105.83 GB a node (three quarters of the model) instead of twice that and more."""
    one_tier, two_tiers = figures(capsys, "llama-3-70b", "--engine-tp=4")["tiers"]
    assert sum(two_tiers["entering"]) / 8e9 == pytest.approx(105.83, abs=0.005)
    assert sum(one_tier["entering"]) > 2.1 * sum(two_tiers["entering"])
    assert two_tiers["seconds"] < one_tier["seconds"] / 2


@pytest.mark.parametrize("order", ["engine", "rank"])
@pytest.mark.parametrize("name, engine_tp", [
    *(("llama-3-70b", engine_tp) for engine_tp in (2, 4, 8, 16, 32)),
    ("llama-3.1-405b", 4), ("llama-3.1-405b", 16), ("qwen3-30b-a3b", 4),
])  # fmt: skip
def test_the_formula_is_the_count_in_either_order(name, engine_tp, order):
    """Rank by rank. The order that suits engines is permuted, and moves less, just where the tp of both differ."""
    setup = setup_for(name, f"--engine-tp={engine_tp}", f"--order={order}")
    report = formula(setup.arch, setup.mesh, setup.trainer, engine_tp)
    assert report.least == list(least_receive(*setup.placements()).values())
    assert (setup.mesh.order is None) == (order == "rank" or engine_tp == 8)
    if setup.mesh.order is not None:
        by_number = formula(setup.arch, replace(setup.mesh, order=None), setup.trainer, engine_tp)
        assert sum(report.least) < sum(by_number.least)


def setup_for(name, *options):
    arguments = parser().parse_intermixed_args(["-c", f"configs/plan/{name}.yaml", *options])
    names = ("world_size", "engine_tp", "ep", "vpp", "order", "ranks_per_node")
    return transfer_setup(
        load_config(RLConfig, arguments.config, arguments.overrides),
        links=Links(rank_gbps=arguments.rank_gbps, node_gbps=arguments.node_gbps),
        **{name: getattr(arguments, name) for name in names},
    )


def test_llama_405b():
    """126 layers in stages of 32, 32, 31, 31; 811.7 GB, of which a rank needs an eighth and holds a quarter of it."""
    report = plan_transfer(setup_for("llama-3.1-405b"))
    assert report.model / 1e9 == pytest.approx(811.7, abs=0.05)
    assert report.received == report.least == report.formula
    assert sum(report.received) / 64e9 == pytest.approx(811.7 / 8 * 3 / 4, rel=0.001)
    assert report.plan_seconds < 60


@pytest.mark.parametrize("ep", [1, 2])
def test_qwen3_30b_a3b_is_planned_in_seconds(ep):
    """18 thousand expert matrices on 64 ranks. The time is this process's own, placements included."""
    start = time.process_time()
    setup = setup_for("qwen3-30b-a3b", f"--ep={ep}")
    plan = make_plan(*setup.placements(), only_rank=0)
    assert time.process_time() - start < 60
    received = [plan.elements_received(rank) for rank in range(64)]
    assert formula(setup.arch, setup.mesh, setup.trainer, setup.engine_tp).least == received
    # KV heads are fewer than ranks and whole on each: 0.05 GB more than W / 8 x 3 / 4, or 7 / 8 of the experts.
    assert sum(received) * 2 / 64e9 == pytest.approx({1: 5.77, 2: 6.68}[ep], rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--engine-tp=4"], ["--ep=2"]])
def test_qwen3_30b_a3b_in_both_tiers(options):
    report = plan_transfer(setup_for("qwen3-30b-a3b", *options))
    assert report.received == report.least == report.formula
    assert report.tiers[1].entering == report.least_entering


def as_a_user(*options):
    command = [sys.executable, "-m", "megarlhf", "plan", "-c", "configs/plan/llama-3-70b.yaml", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout


def words_and_rows(printed):
    rows: dict[str, list[str]] = {}
    for line in printed.splitlines():
        if "│" in line:
            name, *cells = (cell.strip() for cell in line.split("│")[1:-1])
            rows.setdefault(name, cells)
    return " ".join(printed.split()), rows


def test_the_command_prints_tables_and_ranks():
    options = ["actor.parallel.pp=1", "--world-size=16", "--ranks-per-node=4", "--node-gbps=400", "--per-rank"]
    words, rows = words_and_rows(as_a_user(*options))
    assert rows["trainer"] == ["tp 8 x pp 1 x dp 2 (vpp 1, ep 1) = 16 ranks"]
    assert not missing_names(words, "3600 Gb/s", "400 Gb/s")
    small = ["0.000", "0.011", "0.022"]
    assert rows["received"] == rows["least: needed and not held"] == rows["least by the formula"] == small
    assert rows["sent"][1] == "0.011"
    assert rows["all-gather by the formula"] == ["123.464", "123.467", "123.489"]
    each = [rows[str(rank)] for rank in range(16)]
    assert all(needed == "17.641" and received == least == by_sizes for needed, received, _, least, by_sizes, _ in each)
    assert each[7] == ["17.641", "0.022", "0.000", "0.022", "0.022", "123.489"]


@pytest.mark.parametrize("options, order, permutation, ranks, received", [
    (["--engine-tp=4"], "--order engine", "permuted", "0 4 1 5 2 6 3 7, and so on", "30.870"),
    (["--engine-tp=4", "--order=rank"], "--order rank", "contiguous", "by number", "34.176"),
    ([], "--order engine", "permuted", "by number", "13.233"),
])  # fmt: skip
def test_the_command_says_for_which_order_its_figures_are(options, order, permutation, ranks, received, capsys):
    assert main(["-c", "configs/plan/llama-3-70b.yaml", *options]) == 0
    words, rows = words_and_rows(capsys.readouterr().out)
    assert not missing_names(rows["order of the ranks"][0], order, permutation)
    assert rows["ranks at the trainer's positions"] == [ranks]
    assert f"GB a rank ({order})" in words
    assert rows["received"][1] == rows["sent"][1] == rows["least by the formula"][1] == received


@pytest.mark.parametrize("options, names", [
    (["actor.parallel.tp=7"], "world size 64|tp x cp x pp = 7 x 1 x 4"),
    (["--engine-tp=24"], "--engine-tp = 24|64 ranks|engines of 24 ranks"),
    (["--engine-tp=24", "--order=rank"], "64 ranks|engines of 24 ranks"),
    (["--engine-tp=3", "--world-size=96"], "--engine-tp = 3|64 query heads|tp = 3"),
    (["rollout.parallel.tp=24"], "rollout.parallel.tp = 24|64 ranks"),
    (["--ep=2"], "actor.parallel|--ep = 2|llama without experts"), (["--ep=3"], "--ep = 3|tp 8 x pp 4 x dp 2"),
    (["--vpp=3"], "--vpp = 3|80 layers|pp x vpp = 4 x 3 = 12"),
    (["actor.model.path=nowhere"], "nowhere does not exist"), (["--world-size=60"], "world size 60"),
])  # fmt: skip
def test_what_does_not_fit_is_said(capsys, options, names):
    assert main(["-c", "configs/plan/llama-3-70b.yaml", *options]) == 2
    assert not missing_names(capsys.readouterr().err, *names.split("|"))


@pytest.mark.parametrize("kind", ["gbps", "size"])
@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "abc", "", "1.5"])
def test_options_that_are_no_sizes(capsys, text, kind):
    if (text, kind) == ("1.5", "gbps"):
        return
    options = {"gbps": ["--node-gbps", "--rank-gbps"], "size": ["--ranks-per-node", "--engine-tp", "--ep", "--vpp"]}
    what = {"gbps": "gigabits per second", "size": "positive whole number"}
    for option in options[kind]:
        with pytest.raises(SystemExit, match="2"):
            main(["-c", "configs/plan/llama-3-70b.yaml", f"{option}={text}"])
        message = capsys.readouterr().err.splitlines()[-1]
        assert not missing_names(message, f"argument {option}", repr(text), what[kind])


def test_a_configuration_that_is_no_text(capsys, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x08\x00\xff")
    assert main(["-c", str(path)]) == 2
    assert not missing_names(capsys.readouterr().err, str(path), "UTF-8", "byte 2", "0xff")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_examples_are_what_they_say(name):
    """Parameters in billions, from the models' cards."""
    report = setup_for(name)
    total = {"llama-3-70b": 70.6, "llama-3.1-405b": 405.9, "qwen3-30b-a3b": 30.5}[name]
    assert model_elements(report.arch) / 1e9 == pytest.approx(total, abs=0.05)
    assert report.mesh.world_size == 64
