"""The commands as a user types them: dry runs, mistakes that start nothing, and data that turns out to be bad.

Not covered: several ranks (each of them says the mistake, and the launcher's status is torchrun's), and runs to
their end at length (tests/distributed).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megarlhf.commands import cli, launch
from megarlhf.observe.metrics import read_metrics
from tests.ranks import RankPool
from tools.demo.make_data import base_files

ROOT = Path(__file__).parents[1]
TRAIN = {"num_steps": 1, "mini_batch_samples": 8, "micro_batch_samples": 2}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A tiny model's directory without weights, two heads and one KV head, and good data of each kind."""
    root = tmp_path_factory.mktemp("work")
    (root / "base").mkdir()
    files = base_files()
    tiny = {"hidden_size": 64, "head_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tiny |= {"num_key_value_heads": 1, "intermediate_size": 96}
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | tiny).encode()
    for name, content in files.items():
        (root / "base" / name).write_bytes(content)
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(10, 30)]
    write(root / "sft.jsonl", rows)
    write(root / "pairs.jsonl", [{"prompt": r["prompt"], "chosen": r["response"], "rejected": "7"} for r in rows])
    write(root / "prompts.jsonl", [{"prompt": r["prompt"], "answer": r["response"]} for r in rows])
    return root


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def command(work, tmp_path):
    """The arguments of a valid command; its run directory is tmp_path/run."""

    def call(name, *rest):
        model = {"model": {"path": str(work / "base"), "random_init": True}}
        tree = {"run": {"dir": str(tmp_path / "run")}, "train": dict(TRAIN)}
        if name == "rl":
            tree |= {"actor": model, "critic": model, "rewards": [{"kind": "rule", "rule": "exact_match"}]}
            tree["data"] = {"train": str(work / "prompts.jsonl"), "max_prompt_tokens": 16}
            tree["train"]["prompts_per_step"] = 8
            tree["rollout"] = {"num_samples_per_prompt": 4, "max_response_tokens": 8}
        else:
            tree["actor" if name == "sft" else "reward_model"] = model
            tree["data"] = {"train": str(work / ("sft.jsonl" if name == "sft" else "pairs.jsonl"))}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        return [name, "-c", str(path), *rest]

    return call


@pytest.fixture
def started(monkeypatch):
    """What would have been started. The environment is that of a plain start."""
    calls = []
    monkeypatch.setattr(launch, "local_ranks", lambda nproc, argv: calls.append(("local_ranks", nproc)) or 0)
    monkeypatch.setattr(launch, "as_rank", lambda info, cfg, entry: calls.append(("as_rank", entry)) or 0)
    for name in [name for name in os.environ if name.startswith("SLURM_")] + ["RANK", "WORLD_SIZE", launch.MARK]:
        monkeypatch.delenv(name, raising=False)
    return calls


def squeezed(text):
    """Text without the table's frame and padding."""
    return re.sub(r"[^\S\n]+", " ", re.sub(r"[│┃|]", " ", text))


@pytest.mark.parametrize(
    "name, lines",
    [
        ("sft", ["sequences per optimizer step on one data-parallel rank 4", "data-parallel ranks of actor 2"]),
        ("rm", ["preference pairs (two sequences each) per optimizer step (mini-batch), over all ranks 8"]),
        (
            "rl",
            [
                "samples (sequences) per step, over all ranks 32",
                "optimizer steps per rollout-and-train step 4",
                "micro-batches per mini-batch on one of critic's 2 data-parallel ranks 2",
            ],
        ),
    ],
)
def test_a_dry_run_prints_the_resolved_numbers_and_starts_nothing(name, lines, command, started, capsys, tmp_path):
    assert cli.main(command(name, "run.nproc=2", "--dry-run")) == 0
    output = squeezed(capsys.readouterr().out)
    assert [line for line in lines if line not in output] == [], output
    assert "nproc: 2" in output, "the resolved configuration is printed"
    assert started == []
    assert not (tmp_path / "run").exists()


def test_without_dry_run_a_plain_start_launches_ranks_and_a_single_rank_joins(command, started, capsys):
    assert cli.main(command("sft", "run.nproc=2")) == 0
    assert cli.main(command("rm")) == 0
    assert started == [("local_ranks", 2), ("as_rank", "megarlhf.trainers.rm:run")]
    assert "micro-batches per optimizer step" in capsys.readouterr().out


def test_a_launched_rank_joins_with_the_launchers_world(command, started, capsys, monkeypatch):
    """run.nproc is for plain starts; under torchrun the world is torchrun's, and rank 1 prints nothing."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(command("sft", "run.nproc=4")) == 0
    assert started == [("as_rank", "megarlhf.trainers.sft:run")]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "name, overrides, message",
    [
        ("sft", ["trian.num_steps=3"], "unknown key 'trian'; did you mean 'train'?"),
        ("sft", ["train.num_steps=x"], "train.num_steps: Input should be a valid integer"),
        ("sft", ["train.num_steps=[1"], "override 'train.num_steps=[1': '[1' is not valid YAML; quote it"),
        ("sft", ["run.nproc=4", "actor.parallel.tp=4"], "actor.parallel.tp = 4 does not divide the 2 attention heads"),
        ("rm", ["run.nproc=3", "reward_model.parallel.tp=3"], "tp = 3 does not divide the 2 attention heads"),
        ("sft", ["actor.parallel.pp=2"], "world size 1 is not a multiple of tp x pp = 1 x 2 = 2; use 2 ranks"),
        ("rm", ["train.micro_batch_samples=3"], "train.mini_batch_samples = 8 is not a multiple of"),
        ("rl", ["train.prompts_per_step=7"], "= 7 x 4 = 28 is not a multiple of train.mini_batch_samples = 8"),
        ("rl", ["rollout.max_response_tokens=49"], "= 16 + 49 = 65 tokens, but"),
        ("rl", ["critic="], "algo.advantage = 'gae' needs values: give a critic section"),
        ("sft", ["data.heldout=sft_heldout.jsonl"], "data.heldout: no such data file or directory: sft_heldout.jsonl"),
        ("sft", ["actor.model.path=absent"], "absent has no config.json; give a Hugging Face directory"),
    ],
)
def test_a_mistake_is_said_once_and_starts_nothing(name, overrides, message, command, started, capsys, tmp_path):
    assert cli.main(command(name, *overrides)) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith(f"megarlhf {name}: ")
    assert said.err.count("\n") == 1, said.err
    assert said.out == ""
    assert started == []
    assert not (tmp_path / "run").exists()


def test_a_configuration_file_that_is_not_there_names_the_near_one(command, started, capsys, tmp_path):
    command("sft")
    assert cli.main(["sft", "-c", str(tmp_path / "stf.yaml")]) == 2
    assert f"no configuration file {tmp_path}/stf.yaml; did you mean {tmp_path}/sft.yaml?" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("status", [0, 1])
def test_doctor_hands_on_its_exit_status(status, monkeypatch):
    monkeypatch.setattr("megarlhf.commands.doctor.print_doctor", lambda capabilities: status)
    assert cli.main(["doctor"]) == status


def test_a_report_of_a_directory_that_is_no_run_is_a_mistake(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 2
    assert "no metrics.jsonl in" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def run_really(arguments):
    """The command in a process of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RANK", "MASTER_"))}
    env = {**env, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-m", "megarlhf", *arguments]
    return subprocess.run(call, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_malformed_line_of_data_is_said_with_file_and_line(command, tmp_path):
    """The third line of the held-out data. Data is read before a run directory is made."""
    good = {"prompt": "1+1=", "response": "2"}
    bad = write(tmp_path / "bad.jsonl", [good, good, '{"prompt": "1+1=", "response": ', good])
    done = run_really(command("sft", f"data.heldout={bad}"))
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("megarlhf sft: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"megarlhf sft: {bad}, line 3: malformed JSON (")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_pairs_that_are_all_equal_are_refused_with_their_count(command, tmp_path, ranks: RankPool):
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "2"}] * 5
    bad = write(tmp_path / "equal.jsonl", [*pairs, {"prompt": "1+1=", "chosen": "2", "rejected": " "}])
    ((status, said),) = ranks.run(1, "command_status", *command("rm", f"data.train={bad}"))
    assert status == 2, said
    assert (
        "megarlhf rm: no usable records: skipped 6 of 6 records (chosen equals rejected: 5, empty response: 1)" in said
    )
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_prompts_over_the_limit_are_counted_aloud_and_the_rest_is_trained_on(command, tmp_path, ranks: RankPool):
    """Ten good records and three long ones: two steps run, and a checkpoint is complete."""
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(10, 20)]
    long = [{"prompt": "1234567+1234567=", "response": "2469134"}] * 3
    data = write(tmp_path / "mixed.jsonl", [*long, *rows])
    arguments = command("sft", f"data.train={data}", "data.max_prompt_tokens=8", "train.num_steps=2")
    ((status, said),) = ranks.run(1, "command_status", *arguments)
    assert status == 0, said
    said = said.replace("\n", "")
    assert "mixed.jsonl: skipped 3 of 13 records (prompt longer than 8 tokens: 3)" in said, said
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2]
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == ["latest", "step_000002"]
