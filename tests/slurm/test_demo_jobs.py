"""The shipped batch scripts with the demo's configurations under a real Slurm of two nodes: megarlhf itself.

Not covered: GPUs, and nodes that are different machines.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarlhf.observe.records.cost_metrics import reproducible
from tests.command import ROOT
from tests.refuses import lines_naming, missing_names
from tests.slurm.cluster import CPU, ENDED, Cluster, missing, output, running_cluster

NUM_STEPS = 500
"""Enough for the time limit to fall inside the run: Slurm looks at limits every 30 seconds."""
STEPS_BEFORE = 20
"""After these the time limit is set."""

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@dataclass(frozen=True)
class Site:
    """A directory that jobs are submitted from, with the demo's data."""

    root: Path
    cluster: Cluster

    def submit(self, command: str, run: str, *overrides: str, options: tuple[str, ...] = (), site: str = "") -> int:
        """`sbatch slurm/run.sbatch COMMAND` with the demo's configuration, on two nodes with one rank each."""
        (self.root / f"{run}.sh").write_text(ENVIRONMENT + site)
        arguments = ["--nodes=2", *CPU, *options, str(ROOT / "slurm/run.sbatch"), command]
        arguments += ["-c", str(ROOT / "configs/demo" / f"{command}.yaml"), f"run.dir={self.root}/{run}"]
        arguments += ["run.on_existing=resume", f"actor.model.path={self.root}/data/base"]
        files = {"train": "sft_train.jsonl", "validation": "sft_validation.jsonl"}
        arguments += [f"data.{key}={self.root}/data/{file}" for key, file in files.items()]
        return self.cluster.submit(*arguments, *overrides, cwd=self.root, MEGARLHF_ENV=f"{self.root}/{run}.sh")

    def train(self, run: str, *overrides: str, **options: Any) -> int:
        steps = (f"train.num_steps={NUM_STEPS}", "eval.every=0", "checkpoint.every=0")
        return self.submit("sft", run, *steps, *overrides, **options)

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """What has been logged, without what a step took, which differs from run to run."""
        path = self.root / run / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [reproducible(row) for row in rows]

    def save_failure(self, job: int) -> str:
        return output(self.root, job)[-4000:]


ENVIRONMENT = f"""\
export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT} MASTER_ADDR=127.0.0.1
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 TORCH_CPP_LOG_LEVEL=ERROR
launcher=(python -m)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "tools.demo.make_data", "--out", str(root / "data"), "--seed", "0"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with running_cluster() as cluster:
        yield Site(root, cluster)


@pytest.fixture(scope="module")
def uninterrupted(site) -> list[dict[str, Any]]:
    """The metrics of a run on two nodes, from its first step to its last."""
    job = site.train("whole")
    assert site.cluster.wait(job, ENDED, 400) == "COMPLETED", site.save_failure(job)
    assert site.cluster.job(job)["Restarts"] == "0"
    return site.metrics("whole")


def test_two_nodes_train_to_the_end(site, uninterrupted) -> None:
    """The loss falls, the model is exported, and the job leaves nothing but its output and its run."""
    assert [row["step"] for row in uninterrupted] == list(range(NUM_STEPS + 1))
    assert uninterrupted[-1]["eval_loss"] < 0.6 * uninterrupted[0]["eval_loss"]
    assert json.loads((site.root / "whole" / "FINISHED").read_text())["step"] == NUM_STEPS
    assert (site.root / "whole" / "checkpoints" / "latest" / "actor" / "model.safetensors").is_file()
    assert list(site.root.glob("*.state")) == []
    assert list((site.root / "whole").glob(".preflight*")) == []


def test_a_time_limit_saves_and_the_job_goes_on_to_the_same_numbers(site, uninterrupted) -> None:
    """Slurm sends the signal because of the time limit; the run saves, the script queues its job again, and every
    metric of every step is that of the run without a limit, bit for bit."""
    job = site.train("cut", options=("--time=30",))
    deadline = time.monotonic() + 120
    while len(site.metrics("cut")) < STEPS_BEFORE:
        assert time.monotonic() < deadline, site.save_failure(job)
        time.sleep(0.2)
    # Ten minutes before the end, says the script: with five minutes left the signal comes at the next look.
    site.cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=5")
    facts = site.cluster.job
    site.cluster.wait(job, ["PENDING"], 120, until=lambda: facts(job)["Restarts"] == "1")
    saved = [path.parent.name for path in (site.root / "cut").glob("resume/step_*/MANIFEST.json")]
    done = len(site.metrics("cut"))
    assert STEPS_BEFORE <= done <= NUM_STEPS, "the run had ended before the signal came"
    # At the border of a step, or between its update, which is not done again, and its line of metrics.
    assert {f"step_{done - 1:06d}", f"step_{done - 1:06d}_update_0001"} & set(saved), (saved, done)
    site.cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    assert site.cluster.wait(job, ENDED, 400) == "COMPLETED", site.save_failure(job)
    assert site.cluster.job(job)["Restarts"] == "1"
    assert not missing_names(output(site.root, job), "srun ended with 75", "SIGTERM received: 0")
    assert site.metrics("cut") == uninterrupted


def test_a_node_that_does_not_fit_is_named_and_nothing_is_touched(site) -> None:
    """Node 2 has too few open files: status 2, not queued again, no run directory, and the message once."""
    two = site.cluster.nodes[1]
    limit = f"launcher=({site.root}/limited)\n"
    (site.root / "limited").write_text(
        f'#!/bin/bash\n[[ $SLURMD_NODENAME != {two} ]] || ulimit -n 256\nexec python -m "$@"\n'
    )
    (site.root / "limited").chmod(0o755)
    job = site.train("refused", site=limit)
    assert site.cluster.wait(job, ENDED, 120) == "FAILED"
    said = output(site.root, job)
    facts = site.cluster.job(job)
    assert (facts["ExitCode"], facts["Restarts"]) == ("2:0", "0"), said
    assert len(lines_naming(said, two, "rank 1", "ulimit -n is 256", "520 open files")) == 1, said
    assert not (site.root / "refused").exists()


def test_a_killed_rank_is_survived(site, uninterrupted) -> None:
    """SIGKILL to rank 1: rank 0 is ended, the job queued again, and the numbers are those of the uninterrupted run."""
    job = site.train("killed", "checkpoint.every=20", site="srun_args+=(--wait=5)\n")
    deadline = time.monotonic() + 120
    while len(site.metrics("killed")) < 50:
        assert time.monotonic() < deadline, site.save_failure(job)
        time.sleep(0.2)
    pids = site.cluster.processes(site.cluster.nodes[1])
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
    (rank,) = (pid for pid, words in commands.items() if b"megarlhf" in words and words[0].endswith(b"python"))
    subprocess.run(["kill", "-KILL", str(rank)], check=True)
    assert site.cluster.wait(job, ENDED, 400) == "COMPLETED", site.save_failure(job)
    assert site.cluster.job(job)["Restarts"] == "1"
    assert site.metrics("killed") == uninterrupted


def test_three_stages_train_one_after_the_other(site) -> None:
    """SFT, reward model and PPO with vLLM, by slurm/pipeline.sh, a few steps of each on one node."""
    steps = {"sft": 20, "rm": 10, "ppo": 2}
    for name, num_steps in steps.items():
        text = (ROOT / "configs/demo" / f"{name}.yaml").read_text().replace("runs/demo/data", f"{site.root}/data")
        tree = yaml.safe_load(text)
        tree["run"]["on_existing"] = "resume"
        tree["train"] |= {"num_steps": num_steps}
        for role in ("actor", "reward_model"):
            if "warmup_steps" in tree.get(role, {}).get("optim", {}):
                tree[role]["optim"]["warmup_steps"] = 2
        tree["train"] |= {"prompts_per_step": 8, "mini_batch_samples": 32} if name == "ppo" else {}
        tree["eval"] = {"every": 0}
        (site.root / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    (site.root / "chain.sh").write_text(ENVIRONMENT)
    files = [f"{site.root}/{name}.yaml" for name in steps]
    said = site.cluster.call(
        str(ROOT / "slurm" / "pipeline.sh"),
        f"{site.root}/chain",
        *files,
        "--nodes=1",
        *CPU,
        cwd=site.root,
        env=site.cluster.environment | {"MEGARLHF_ENV": f"{site.root}/chain.sh"},
    )
    for line in said.splitlines():
        job = int(line.split()[2].rstrip(","))
        assert site.cluster.wait(job, ENDED, 300) == "COMPLETED", site.save_failure(job)
    for name, run in (("sft", "sft"), ("rm", "rm"), ("ppo", "rl")):
        assert json.loads((site.root / "chain" / run / "FINISHED").read_text())["step"] == steps[name]
