"""`megarlhf rehearse` through its entry point: what it writes, which ranks it chooses, what stands in.

One job is rehearsed once for most of what is asserted. Not covered: whether figures are true (`test_truth.py`), and
what the page looks like (`test_page.py`).
"""

import json

import pytest

from megarlhf.rehearsal.fakes.inputs import write_tokenizer
from tests.refuses import lines_naming, missing_names
from tests.rehearsal.jobs import Rehearsed, job_tree, run_command, write_job

WORLD = 8
ROLES = {"actor", "critic", "reference", "reward_model"}


@pytest.fixture(scope="module")
def ppo(tmp_path_factory) -> Rehearsed:
    """Four roles: actor, critic and reference at TP1 x PP2 x DP4, reward model at TP4 x PP1 x DP2."""
    folder = tmp_path_factory.mktemp("ppo")
    file = write_job("rl", folder, job_tree("rl", folder, pp=2))
    return run_command("rl", file, folder / "out", "--world-size", str(WORLD), "--workers", "2")


def test_a_job_that_fits(ppo) -> None:
    """Exit status 0, two files, nothing else, and no run directory."""
    assert ppo.status == 0
    assert sorted(path.name for path in ppo.out.iterdir()) == ["rehearsal.html", "rehearsal.json"]
    assert not (ppo.out.parent / "run").exists()
    said = ppo.json()
    assert (said["command"], said["world_size"], said["steps"]) == ("rl", WORLD, 2)
    assert said["fits"] is True
    assert said["refusals"] == said["faults"] == []
    tightest = next(rank for rank in said["ranks"] if rank["rank"] == said["tightest"])
    assert said["free"] == said["capacity"] - tightest["need"]
    assert tightest["need"] == max(rank["need"] for rank in said["ranks"])
    assert tightest["need"] == tightest["peak"] + sum(item["nbytes"] for item in tightest["margin"])
    # What vLLM keeps beside weights and cache is there while others work.
    assert {"CUDA context", "CUDA graphs"} <= {item["name"] for item in tightest["margin"]}
    assert "Llama" not in said["hardware"]
    page = (ppo.out / "rehearsal.html").read_text()
    assert page.startswith(("<!DOCTYPE html>", "<!doctype html>"))


def test_one_rank_of_each_kind(ppo) -> None:
    """Every stage of every role, of the data-parallel ranks those with the most and the least work; all ranks are
    stood for."""
    said = ppo.json()
    assert said["layouts"] == {
        **dict.fromkeys(ROLES - {"reward_model"}, "tp 1 x pp 2 x dp 4"),
        "reward_model": "tp 4 x pp 1 x dp 2",
    }
    seen = {(role, stage) for rank in said["ranks"] for role, stage in rank["stages"].items()}
    assert seen == {(role, stage) for role in ROLES - {"reward_model"} for stage in (0, 1)} | {("reward_model", 0)}
    stands_for = {tuple(rank["stages"].items()): rank["stands_for"] for rank in said["ranks"]}
    assert sum(stands_for.values()) == WORLD
    whys = " ".join(rank["why"] for rank in said["ranks"])
    assert not missing_names(whys, "most work", "least work")
    # A pipeline is rehearsed whole: ranks of one data-parallel position stand four apart.
    busiest = [rank["rank"] for rank in said["ranks"] if "most work" in rank["why"]]
    assert len(busiest) == 2
    assert busiest[1] - busiest[0] == 4


def test_phases_of_both_steps(ppo) -> None:
    """The optimizer's state appears in the first update, and is in host memory while others work."""
    for rank in ppo.json()["ranks"]:
        kinds = {(row["step"], row["phase"]): row["by_kind"] for row in rank["memory"]}
        for phase in ("rollout", "score/reference", "train/actor", "optimizer/critic", "reshard"):
            assert {(1, phase), (2, phase)} <= set(kinds)
        assert kinds[1, "optimizer/actor"]["optimizer state"] > 0
        assert "optimizer state" not in kinds[2, "train/actor"].keys() | kinds[2, "train/critic"].keys()
        assert kinds[2, "rollout"]["engine's cache"] == -(-rank["cache_bytes"] // 512) * 512 > 0  # in blocks
        assert rank["peak"] == max(row["peak"] for row in rank["memory"])


def test_times_wire_and_reshard(ppo) -> None:
    """Something is there of everything, and the parts add up."""
    said = ppo.json()
    assert [step["step"] for step in said["times"]] == [1, 2]
    for step, rollout in zip(said["times"], said["rollouts"], strict=True):
        phases = {phase["phase"]: phase["seconds"] for phase in step["phases"]}
        assert phases["rollout"] == pytest.approx(rollout["slowest"], rel=0.5)
        assert 0 < step["utilisation"] < 1
        assert max(phases.values()) <= step["seconds"]
    groups = {row["group"] for rank in said["ranks"] for row in rank["messages"]}
    assert {"pp", "dp", "world"} <= groups
    assert said["reshard"]["received_max"] >= said["reshard"]["received_mean"] > 0
    assert said["host_per_node"] == WORLD * sum(row["nbytes"] for row in said["host"])
    process, *counted = (row["nbytes"] for row in said["host"])
    of_ranks = [
        rank["host_peak"] + rank["offloaded"] + (rank["resume_point"] or {"host_bytes": 0})["host_bytes"]
        for rank in said["ranks"]
    ]
    assert process > 0 < sum(counted) == max(of_ranks)
    assert all(rank["groups_created"] >= rank["memberships"] > 0 for rank in said["ranks"])


def test_what_stands_in_is_said(ppo) -> None:
    notes = " ".join(ppo.json()["notes"])
    assert not missing_names(notes, "Weights", "tokenizer", "none.jsonl", "assumed", "--response-lengths")


def test_workers_change_nothing(ppo) -> None:
    """Two of the ranks again, one after the other: all that is said of them is the same, to the last byte and second.
    A rank of the job depends on no other."""
    before = {rank["rank"]: rank for rank in ppo.json()["ranks"]}
    chosen = list(before)[:2]
    options = ("--world-size", str(WORLD), "--workers", "1", "--ranks", ",".join(map(str, chosen)))
    again = run_command("rl", ppo.out.parent / "rl.yaml", ppo.out.parent / "again", *options).json()
    assert [rank["rank"] for rank in again["ranks"]] == chosen
    for rank in again["ranks"]:
        assert rank == before[rank["rank"]] | {"why": "asked for"}
    for key in ("capacity", "rollouts", "reshard", "layouts"):
        assert again[key] == ppo.json()[key]


@pytest.mark.parametrize("command, role", [("sft", "actor"), ("rm", "reward_model"), ("dpo", "actor")])
def test_the_other_commands(command, role, tmp_path) -> None:
    """One step of two stages. `--steps 1` is one step."""
    file = write_job(command, tmp_path, job_tree(command, tmp_path, pp=2))
    done = run_command(command, file, tmp_path / "out", "--world-size", "2", "--steps", "1")
    said = done.json()
    assert (done.status, said["faults"], said["rollouts"], said["reshard"]) == (0, [], [], None)
    assert [rank["stages"][role] for rank in said["ranks"]] == [0, 1]
    assert {row["step"] for rank in said["ranks"] for row in rank["memory"]} == {0, 1}
    assert [step["step"] for step in said["times"]] == [1]
    assert any("8 records stand in" in note for note in said["notes"])
    assert not (tmp_path / "run").exists()


def test_what_is_there_is_used(tmp_path) -> None:
    """Tokenizer and data: nothing stands in but the weights, and the run directory is left alone."""
    tree = job_tree("sft", tmp_path)
    write_tokenizer(tmp_path / "dense")
    records = [{"prompt": "a" * number, "response": "b" * number} for number in range(1, 17)]
    (tmp_path / "none.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    file = write_job("sft", tmp_path, tree)
    said = run_command("sft", file, tmp_path / "out", "--world-size", "1", "--steps", "1").json()
    assert not [note for note in said["notes"] if "stand" in note.split(":")[0]]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]

    lengths = ("--response-lengths", "constant:9", "--prompt-lengths", "constant:7")
    options = ("--world-size", "1", "--steps", "1", *lengths)
    said = run_command("sft", file, tmp_path / "other", *options).json()
    assert lines_naming("\n".join(said["notes"]), "not used", "8 records stand in", "7 tokens")
    assert said["times"][0]["tokens_per_second"] * said["times"][0]["seconds"] == pytest.approx(8 * 16)
