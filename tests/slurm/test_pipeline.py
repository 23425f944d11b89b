"""slurm/pipeline.sh with a stand-in for sbatch: which stages are submitted, with what, and what each one waits for.

Not covered: Slurm itself (`test_life_cycle.py`).
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.refuses import missing_names

SLURM = Path(__file__).parents[2] / "slurm"

# Writes down its arguments and the runs to come before; the jobs' numbers are 101, 102, ...
SBATCH = """#!/usr/bin/env bash
printf '%s\\0' "$@" "after=${MEGARLHF_AFTER:-}" >"$RECORD/sbatch.$(ls "$RECORD" | wc -l)"
echo $((100 + $(ls "$RECORD" | wc -l)))
"""


@pytest.fixture
def pipeline(tmp_path):
    """Run pipeline.sh with these runs finished; returns (what it says, the arguments of each sbatch)."""
    folder, record = tmp_path / "bin", tmp_path / "record"
    folder.mkdir()
    record.mkdir()
    (folder / "sbatch").write_text(SBATCH)
    (folder / "sbatch").chmod(0o755)
    for name in ("sft", "rm", "rl"):
        (tmp_path / f"{name}.yaml").touch()

    def run(*finished):
        for name in finished:
            (tmp_path / "runs" / name).mkdir(parents=True)
            (tmp_path / "runs" / name / "FINISHED").touch()
        command = ["bash", str(SLURM / "pipeline.sh"), "runs", "sft.yaml", "rm.yaml", "rl.yaml", "--time=9"]
        environ = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RECORD": str(record)}
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines(), [path.read_text().split("\0")[:-1] for path in sorted(record.iterdir())]

    return run


ACTOR, REWARD_MODEL = "runs/sft/checkpoints/latest/actor", "runs/rm/checkpoints/latest/reward_model"
STAGES = {
    "sft": ["-c", "sft.yaml", "run.dir=runs/sft", "after="],
    "rm": ["-c", "rm.yaml", "run.dir=runs/rm", f"reward_model.model.path={ACTOR}", "after=runs/sft"],
    "rl": [
        *("-c", "rl.yaml", "run.dir=runs/rl", f"actor.model.path={ACTOR}", f"critic.model.path={REWARD_MODEL}"),
        *(f"reward_model.model.path={REWARD_MODEL}", "after=runs/sft:runs/rm"),
    ],
}


@pytest.mark.parametrize(
    "finished", [(), ("sft",), ("sft", "rm"), ("rm",), ("sft", "rm", "rl")], ids=lambda names: "-".join(names) or "none"
)
def test_stages_that_have_finished_are_not_submitted_again(pipeline, finished):
    """The first stage that is submitted waits for no job, and each further one for the one before it. What has to have
    finished when a stage starts names the runs of all stages before it."""
    said, submitted = pipeline(*finished)
    expected, lines = [], []
    for name, arguments in STAGES.items():
        if name in finished:
            lines.append((f"{name}: not submitted", f"runs/{name}/FINISHED"))
            continue
        before = 100 + len(expected)
        wait = [f"--dependency=afterok:{before}", "--kill-on-invalid-dep=yes"] if expected else []
        lines.append((f"{name}: job {before + 1}", *([f"after job {before}"] if expected else [])))
        options = ["--parsable", f"--job-name=megarlhf-{name}", *wait, "--time=9"]
        expected.append([*options, str(SLURM / "run.sbatch"), name, *arguments])
    assert submitted == expected
    assert [missing_names(line, *names) for line, names in zip(said, lines, strict=True)] == [[]] * 3


OWN = ["dependencies", "environment"]


@pytest.mark.parametrize(
    "directory, option, names",
    [
        ("runs", "train.num_steps=5", ["train.num_steps=5", "sbatch's options"]),
        ("runs", "--dependency=afterok:1", OWN),
        ("runs", "--export=X=1", OWN),
        ("a:b", "--time=9", ["colon", "MEGARLHF_AFTER"]),
    ],
)
def test_what_would_break_the_chain_is_refused(tmp_path, directory, option, names):
    """sbatch would take a configured value for the script, and the last of two options counts."""
    for name in ("sft", "rm", "rl"):
        (tmp_path / f"{name}.yaml").touch()
    command = ["bash", str(SLURM / "pipeline.sh"), directory, "sft.yaml", "rm.yaml", "rl.yaml", option]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert not missing_names(done.stderr, *names)
