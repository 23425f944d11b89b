"""The commands as a user types them: dry runs, mistakes that start nothing, and data that turns out to be bad. Not
covered: what torchrun and srun say of a rank that has ended, and runs to their end at length (tests/distributed)."""

import json
import os
import re
import shutil
import signal

import pytest
import torch
import yaml

from megarlhf.commands import cli, launch
from megarlhf.config import EvaluateConfig, FrozenModel, GenerateConfig, RLConfig, SFTConfig, load_config
from megarlhf.errors import WatchdogTimeout
from megarlhf.observe.records.metrics import read_metrics
from megarlhf.resume.claim.lock import Lock
from megarlhf.resume.signals import StopRun
from megarlhf.runtime import Runtime
from megarlhf.trainers.generation import evaluate, generate
from megarlhf.trainers.rl import loop as rl
from tests.command import megarlhf
from tests.ranks import RankPool
from tests.refuses import missing_names, refuses
from tests.resume.earlier_run import begin
from tools.demo.make_data import base_files

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
    def call(name, *rest):
        model = {"model": {"path": str(work / "base"), "random_init": True}}
        tree = {"run": {"dir": str(tmp_path / "run")}, "train": dict(TRAIN)}
        if name == "rl":
            tree |= {"actor": model, "critic": model, "rewards": [{"kind": "rule", "rule": "exact_match"}]}
            tree["data"] = {"train": str(work / "prompts.jsonl"), "max_prompt_tokens": 16}
            tree["train"]["prompts_per_step"] = 8
            tree["rollout"] = {"num_samples_per_prompt": 4, "max_response_tokens": 8}
        else:
            tree["reward_model" if name == "rm" else "actor"] = model
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
    monkeypatch.setattr(launch, "as_rank", lambda info, cfg, entry, check: calls.append(("as_rank", entry)) or 0)
    for name in [name for name in os.environ if name.startswith("SLURM_")] + ["RANK", "WORLD_SIZE", launch.MARK]:
        monkeypatch.delenv(name, raising=False)
    return calls


def squeezed(text):
    return re.sub(r"[^\S\n]+", " ", re.sub(r"[│┃|]", " ", text))


@pytest.mark.parametrize("name, lines", [
    ("sft", ["sequences per optimizer step on one data-parallel rank 4", "data-parallel ranks of actor 2"]),
    ("rm", ["preference pairs (two sequences each) per optimizer step (mini-batch), over all ranks 8"]),
    ("dpo", ["preference pairs (two sequences each) per optimizer step (mini-batch), over all ranks 8",
             "passes of the frozen reference over the pairs of an optimizer step 1", "loss = dpo: beta = 0.1"]),
    ("rl", ["samples (sequences) per step, over all ranks 32", "optimizer steps per rollout-and-train step 4",
            "micro-batches per mini-batch on one of critic's 2 data-parallel ranks 2"]),
])  # fmt: skip
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
    assert started == [("local_ranks", 2), ("as_rank", "megarlhf.trainers.supervised.rm:run")]
    assert "micro-batches per optimizer step" in capsys.readouterr().out


def test_a_launched_rank_joins_with_the_launchers_world(command, work, started, capsys, monkeypatch):
    """run.nproc is for plain starts; under torchrun the world is torchrun's. Every rank looks at layouts and batches by
    itself. None reads a checkpoint before it has joined: then the first one checks the run, but not where the process
    that started the ranks has done so."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    checks = []
    monkeypatch.setattr(launch, "as_rank", lambda info, cfg, entry, check: checks.append(check) or 0)
    monkeypatch.setattr(launch, "SILENCE_SECONDS", 0.0)
    assert cli.main(command("sft", "run.nproc=4", "train.mini_batch_samples=7")) == 2
    assert not missing_names(capsys.readouterr().err, "train.mini_batch_samples = 7", "multiple")
    assert checks == []
    assert cli.main(command("sft", "run.nproc=4", f"run.dir={work / 'sft.jsonl'}/run")) == 0
    assert cli.main(command("sft", "run.nproc=4")) == 0
    assert capsys.readouterr().out == ""
    with refuses(str(work / "sft.jsonl"), "a file"):
        checks[0]()
    checks[1]()
    said = capsys.readouterr().out
    assert "data-parallel ranks of actor 2" in squeezed(said)
    assert not missing_names(said, "2 rank(s)", "run.nproc = 4")
    monkeypatch.setenv(launch.MARK, "somewhere")
    assert cli.main(command("sft", "run.nproc=4")) == 0
    assert checks[2] is None


def test_a_dry_run_is_of_the_ranks_that_the_file_is_for(command, started, capsys, tmp_path):
    rows = [{"prompt": "1+1=", "response": "2", "answer": "2"}] * 1024
    many = write(tmp_path / "many.jsonl", rows)
    cluster = ["run.world_size=512", "train.mini_batch_samples=1024", f"data.train={many}"]
    assert cli.main(command("rl", "--dry-run", *cluster, "train.prompts_per_step=256", "rollout.engine=megatron")) == 0
    said = squeezed(capsys.readouterr().out)
    assert "tp 1 x pp 1 x dp 512 = 512 ranks" in said
    assert "micro-batches per mini-batch on one of critic's 512 data-parallel ranks 1" in said
    assert not missing_names(said, "512 ranks of run.world_size", "run.nproc = 1")
    assert cli.main(command("sft", "--dry-run", *cluster, "train.mini_batch_samples=1000")) == 2
    assert not missing_names(capsys.readouterr().err, "train.mini_batch_samples = 1000", "multiple", "512 x 2")
    assert cli.main(command("sft", "--dry-run", *cluster, "run.world_size=")) == 0
    assert "run.world_size;" not in capsys.readouterr().out
    assert (started, (tmp_path / "run").exists()) == ([], False)


def test_a_start_on_other_ranks_than_the_file_is_for_says_so(command, started, capsys, monkeypatch):
    assert cli.main(command("sft", "run.nproc=2", "run.world_size=512")) == 0
    assert started == [("local_ranks", 2)]
    elsewhere = ("512 ranks", "run.world_size")
    assert not missing_names(capsys.readouterr().out, *elsewhere, "has 2")
    assert cli.main(command("sft", "run.nproc=2", "run.world_size=512", "actor.parallel.pp=4")) == 2
    refused = capsys.readouterr().err
    assert not missing_names(refused, "world size 2", "tp x cp x pp = 1 x 1 x 4", *elsewhere, "has 2")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    checks = []
    monkeypatch.setattr(launch, "as_rank", lambda info, cfg, entry, check: checks.append(check) or 0)
    for world_size, names in ((512, (*elsewhere, "has 4")), (4, ())):
        assert cli.main(command("sft", f"run.world_size={world_size}")) == 0
        checks.pop()()
        said = capsys.readouterr().out
        assert not missing_names(squeezed(said), "data-parallel ranks of actor 4", *names)
        assert ("run.world_size" in said) == bool(names)
        assert "run.nproc" not in said


@pytest.mark.parametrize("name, overrides, names", [
    ("sft", ["actor.parallel.pp=2"], ["world size 1", "tp x cp x pp = 1 x 1 x 2 = 2", "2 ranks"]),
    ("dpo", ["loss=simpo", "reference={model: {path: m}}"], ["reference", "loss = 'simpo'"]),
    ("dpo", ["run.nproc=2", "reference={model: {path: absent}, parallel: {tp: 2}}"], ["absent does not exist"]),
    ("rl", ["rollout.max_response_tokens=49"], ["16 + 49 = 65 tokens"]),
    ("rl", ["critic="], ["algo.advantage = 'gae'", "critic"]),
    ("sft", ["actor.parallel.tp=2", "actor.parallel={}"], ["replaces the whole section"]),
    ("rl", ["critic.model.random_init=false"], ["is no checkpoint"]),
])  # fmt: skip
def test_a_mistake_is_said_once_and_starts_nothing(name, overrides, names, command, started, capsys, tmp_path):
    assert cli.main(command(name, *overrides)) == 2
    captured = capsys.readouterr()
    assert missing_names(captured.err, *names) == []
    assert captured.err.startswith(f"megarlhf {name}: ")
    assert captured.err.count("\n") == 1, captured.err
    assert captured.out == ""
    assert started == []
    assert not (tmp_path / "run").exists()


def test_options_may_stand_behind_overrides_and_a_repeated_one_is_said(command, started, capsys):
    name, *config = command("sft")
    assert cli.main([name, "run.seed=3", *config, "run.seed=4", "--dry-run", "train.num_steps=9"]) == 0
    output = squeezed(capsys.readouterr().out)
    assert not missing_names(output, "optimizer steps of the run 9", "run.seed", "2 times", "run.seed=4")
    assert started == []


@pytest.mark.parametrize("name", ["sft", "plan"])
def test_a_second_file_is_refused(name, command, started, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, *command("sft")[1:], "-c", "other.yaml"])
    assert ended.value.code == 2
    assert not missing_names(capsys.readouterr().err, "-c", "twice")
    assert started == []


@pytest.mark.parametrize("option", ["--dry-run", "run.nproc=2"])
def test_a_used_run_directory_is_refused_before_anything_starts(option, command, started, capsys, tmp_path):
    """By `refuse`, by another computation, and by a run that is running; started again it goes on, and says so."""
    cfg = load_config(SFTConfig, command("sft")[2])
    begin(cfg, "sft")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 0}\n')
    assert cli.main(command("sft", option, "run.on_existing=refuse")) == 2
    assert not missing_names(capsys.readouterr().err, "earlier run", "config.yaml, metrics.jsonl")
    assert cli.main(command("sft", option, "run.seed=5")) == 2
    assert not missing_names(capsys.readouterr().err, "run.seed: 0 -> 5")
    with Lock.take(tmp_path / "run"):
        assert cli.main(command("sft", option, "run.on_existing=overwrite")) == 2
    assert not missing_names(capsys.readouterr().err, "is running", f"pid {os.getpid()}")
    assert started == []
    assert cli.main(command("sft", option)) == 0
    assert not missing_names(capsys.readouterr().out, "megarlhf sft", "goes on")
    started.clear()
    assert cli.main(command("sft", option, "run.on_existing=overwrite")) == 0
    assert not missing_names(capsys.readouterr().out, "2 files and folders", "removed")
    assert (tmp_path / "run/metrics.jsonl").read_text() == '{"step": 0}\n'
    assert started == ([] if option == "--dry-run" else [("local_ranks", 2)])


@pytest.mark.parametrize("error, status", [
    (ValueError("m"), 2), (WatchdogTimeout("m", agreed=True), 3), (FloatingPointError("m"), 4), (StopRun("m"), 75),
    (StopRun("m", signal.SIGUSR1), 75), (StopRun("m", signal.SIGINT), 130), (RuntimeError("m"), None),
])  # fmt: skip
def test_errors_that_are_said_in_a_sentence_have_their_status(error, status, command, started, monkeypatch, capsys):
    """Where our own code raises them: one of a library keeps its traceback."""

    def fail(info, cfg, entry, check):
        raise error

    def fail_in_a_library(info, cfg, entry, check):
        json.loads("", object_hook=exec)  # a ValueError that the standard library raises

    monkeypatch.setattr(launch, "as_rank", fail)
    monkeypatch.setattr(cli, "_raised_here", lambda error: True)
    if status is None:
        with pytest.raises(RuntimeError):
            cli.main(command("sft"))
    else:
        assert cli.main(command("sft")) == status
        assert capsys.readouterr().err == "megarlhf sft: m\n"
    monkeypatch.undo()
    monkeypatch.setattr(launch, "as_rank", fail_in_a_library)
    with pytest.raises(ValueError, match="Expecting value"):
        cli.main(command("sft"))


@pytest.mark.parametrize("start", [evaluate.run, generate.run, rl.run])
def test_a_prompt_without_what_a_rule_needs_leaves_no_run_directory(start, work, tmp_path):
    """Told before a model is built: no device, no engine."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    tree = {"run": {"dir": tmp_path / "run"}, "actor": {"model": {"path": work / "base"}}}
    tree |= {"data": {"train": tmp_path / "prompts.jsonl"}, "rewards": [{"kind": "rule", "rule": "exact_match"}]}
    config: FrozenModel = GenerateConfig.model_validate(tree)
    if start is evaluate.run:
        config = EvaluateConfig.model_validate(tree)
    if start is rl.run:
        limits = {"num_steps": 1, "prompts_per_step": 1, "mini_batch_samples": 2, "micro_batch_samples": 1}
        tree |= {"algo": {"advantage": "leave_one_out"}, "rollout": {"num_samples_per_prompt": 2}, "train": limits}
        config = RLConfig.model_validate(tree)
    with refuses("prompts.jsonl, line 1", "'exact_match'", "field"):
        start(config, Runtime(device=torch.device("cpu"), backend="gloo"))
    assert not (tmp_path / "run").exists()


def test_a_configuration_file_that_is_not_there_names_the_near_one(command, started, capsys, tmp_path):
    command("sft")
    assert cli.main(["sft", "-c", str(tmp_path / "stf.yaml")]) == 2
    assert not missing_names(capsys.readouterr().err, f"{tmp_path}/stf.yaml", f"did you mean {tmp_path}/sft.yaml")
    assert started == []


def test_a_malformed_line_of_data_is_said_with_file_and_line_once(command, tmp_path):
    """A line of the held-out data, behind those that are looked at before ranks start; both ranks read it. Data
    is read before a run directory is made."""
    good = {"prompt": "1+1=", "response": "2"}
    bad = write(tmp_path / "bad.jsonl", [good] * 64 + ['{"prompt": "1+1=", "response": ', good])
    done = megarlhf(*command("sft", f"data.validation={bad}", "run.nproc=2"))
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("megarlhf sft: ")]
    assert len(lines) == 1, done.stderr
    assert not missing_names(lines[0], f"{bad}, line 65", "malformed JSON")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_pairs_that_are_all_equal_are_refused_with_their_count(command, tmp_path, ranks: RankPool):
    """By the run, as there are more of them than are looked at before it (tests/test_bad_input.py has fewer)."""
    pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "2"}] * 70
    bad = write(tmp_path / "equal.jsonl", [*pairs, {"prompt": "1+1=", "chosen": "2", "rejected": " "}])
    ((status, written),) = ranks.run(1, "command_status", *command("rm", f"data.train={bad}"))
    assert status == 2, written
    counts = ("71 of 71 records", "chosen equals rejected: 70", "empty response: 1")
    assert not missing_names(written, "megarlhf rm", str(bad), "no usable records", *counts)
    assert "Traceback" not in written
    assert not (tmp_path / "run").exists()


def test_a_start_that_is_refused_late_leaves_a_finished_run_as_it_is(command, work, tmp_path):
    """The weights' file is damaged, which shows when the model is loaded; the earlier run would be overwritten."""
    cfg = load_config(SFTConfig, command("sft")[2])
    begin(cfg, "sft")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 0}\n')
    shutil.copytree(work / "base", tmp_path / "damaged")
    (tmp_path / "damaged/model.safetensors").write_bytes(b"damaged")
    overrides = ["run.on_existing=overwrite", f"actor.model={{path: {tmp_path / 'damaged'}}}"]
    done = megarlhf(*command("sft", *overrides))
    assert done.returncode == 2, done.stderr
    assert not missing_names(done.stderr, "model.safetensors", "truncated")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.yaml", "metrics.jsonl"]
    assert (tmp_path / "run/metrics.jsonl").read_text() == '{"step": 0}\n'


def test_prompts_over_the_limit_are_counted_aloud_and_the_rest_is_trained_on(command, tmp_path, ranks: RankPool):
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(10, 20)]
    long = [{"prompt": "1234567+1234567=", "response": "2469134"}] * 3
    data = write(tmp_path / "mixed.jsonl", [*long, *rows])
    limits = ("data.max_prompt_tokens=8", "train.num_steps=2", "data.max_skipped=0.25")
    arguments = command("sft", f"data.train={data}", *limits)
    ((status, written),) = ranks.run(1, "command_status", *arguments)
    assert status == 0, written
    counts = ("mixed.jsonl", "3 of 13 records", "longer than 8 tokens: 3", "23 %")
    assert not missing_names(written.replace("\n", ""), *counts), written
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [0, 1, 2]
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == ["latest", "step_000002"]
