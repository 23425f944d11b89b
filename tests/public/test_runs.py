"""Commands from Python. Not covered: vLLM (test_loop.py has a slow one), NCCL, and Jupyter itself."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import megarlhf

REWARDS = """
import os, signal

def length(prompt, response, fields):
    return float(len(response))

def fails(prompt, response, fields):
    raise KeyError("no such answer")

def asks_to_stop(prompt, response, fields):
    if not os.path.exists(os.environ["STOPPED"]):
        open(os.environ["STOPPED"], "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
    return float(len(response))
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """A user's module, and its name."""
    (tmp_path / "code").mkdir()
    name = f"rewards_of_{tmp_path.name}"
    (tmp_path / "code" / f"{name}.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path / "code")
    return name


def process_state():
    """What a run changes in its process."""
    return (
        dict(os.environ),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)],
        (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic, torch.get_num_threads()),
        torch._dynamo.config.disable,
        torch.get_rng_state().tolist(),
        torch.distributed.is_initialized(),
    )


def test_runs_follow_each_other_in_a_process_with_an_event_loop(sft):
    """As in a notebook: the second is deterministic, and the process is as before after each."""

    async def cell():
        before = process_state()
        first = megarlhf.run("sft", sft("first"))
        assert process_state() == before
        second = megarlhf.run("sft", sft("second"), overrides=["run.deterministic=true"])
        assert process_state() == before
        assert asyncio.get_running_loop() is not None
        return first, second

    first, second = asyncio.run(cell())
    assert first.column("step") == [0, 1, 2]
    assert first.column("loss")[0] is None
    assert first.column("loss")[1:] == second.column("loss")[1:]
    assert first.column("loss")[2] < first.column("loss")[1]
    assert (first.steps, first.finished, first.stop_reason, first.can_resume) == (2, True, None, False)
    assert list(first.exports) == ["actor"]
    assert (first.exports["actor"] / "config.json").is_file()
    assert first.best == {}
    assert megarlhf.RunResult.of(first.run_dir) == first


OBSERVER = """
import megarlhf


class Best:
    def __init__(self):
        self.loss = float("inf")

    def after_step(self, step: megarlhf.Step):
        self.loss = min(self.loss, step.metrics["loss"])
        return {"best_loss": self.loss}

    def state_dict(self):
        return {"loss": self.loss if self.loss < float("inf") else None}

    def load_state_dict(self, state):
        self.loss = state["loss"]


def half(step):
    return step.metrics["loss"] / 2
"""


def test_metrics_and_observers_of_sft_keep_their_state(sft, tmp_path, monkeypatch):
    """The run goes on with more steps; the best loss is that of all of them."""
    (tmp_path / "watching.py").write_text(OBSERVER)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"observe": {"metrics": ["watching:half"], "observers": ["watching:Best"]}}
    megarlhf.run("sft", sft(**own))
    result = megarlhf.run("sft", sft(**own), overrides=["train.num_steps=4"])
    losses = result.column("loss")[1:]
    assert result.column("half")[1:] == [loss / 2 for loss in losses]
    assert result.column("best_loss")[1:] == [min(losses[: n + 1]) for n in range(4)]


def test_a_finished_run_goes_on_when_it_has_more_steps(sft):
    """The sentence of the command line says what to do, and the same directory then goes on."""
    config = sft("longer", train=sft()["train"] | {"num_steps": 1})
    megarlhf.run("sft", config)
    with pytest.raises(ValueError, match=r"raise train\.num_steps above 1"):
        megarlhf.run("sft", config)
    assert megarlhf.run("sft", config, overrides=["train.num_steps=2"]).column("step") == [0, 1, 2]


def test_a_run_works_after_a_failure(sft, rl, rewards):
    before = process_state()
    with pytest.raises(ValueError, match=r"KeyError.*no such answer"):
        megarlhf.run("rl", rl(f"{rewards}:fails"))
    assert process_state() == before
    failed = megarlhf.RunResult.of(rl("")["run"]["dir"])
    assert (failed.command, failed.finished, failed.exports) == ("rl", False, {})
    assert megarlhf.run("sft", sft()).finished


def test_a_run_that_is_asked_to_stop_saves_and_goes_on(rl, rewards, tmp_path, monkeypatch):
    """SIGTERM comes while the first step's rewards are computed: that step is drawn again, with the same numbers."""
    monkeypatch.setenv("STOPPED", str(tmp_path / "stopped"))
    config = rl(f"{rewards}:asks_to_stop")
    with pytest.raises(megarlhf.StopRun, match="SIGTERM") as stopped:
        megarlhf.run("rl", config)
    assert stopped.value.status == 75
    left = megarlhf.RunResult.of(config["run"]["dir"])
    assert (left.finished, left.can_resume) == (False, True)
    done = megarlhf.run("rl", config)
    whole = megarlhf.run("rl", rl(f"{rewards}:length", "whole"))
    assert done.finished
    assert done.column("reward_mean") == whole.column("reward_mean")


def test_generate_gives_its_file(model, data, tmp_path):
    result = megarlhf.run(
        "generate",
        {
            "run": {"dir": tmp_path / "generate"},
            "actor": {"model": {"path": model}},
            "data": {"train": data["prompts"], "max_prompt_tokens": 16},
            "rollout": {"engine": "megatron", "max_response_tokens": 4},
            "max_samples": 3,
            "out": tmp_path / "answers.jsonl",
        },
    )
    assert result.files == {"responses.jsonl": tmp_path / "answers.jsonl"}
    rows = result.read("responses.jsonl")
    assert [row["prompt"] for row in rows] == [json.loads(line)["prompt"] for line in data["prompts"].open()][:3]
    with pytest.raises(ValueError, match=r"no file 'eval.json'.*responses.jsonl"):
        result.read("eval.json")


SCRIPT = """
import json, sys
import megarlhf

open("started", "a").write("once ")
rewards = megarlhf.run("rl", json.loads(sys.argv[1]), nproc=2).column("reward_mean")
"""


def test_a_script_without_a_guard_starts_two_ranks_that_find_its_modules(rl, rewards, run_script, tmp_path):
    """The reward's module is beside the script, which no rank imports. Numbers are those of one rank."""
    script = tmp_path / "code" / "script.py"
    script.write_text(SCRIPT)
    two = run_script(script, "rewards", json.dumps(rl(f"{rewards}:length", "two"), default=str))
    one = megarlhf.run("rl", rl(f"{rewards}:length", "one")).column("reward_mean")
    assert two == pytest.approx(one)
    assert one[1] > 0
    assert (tmp_path / "code" / "started").read_text() == "once "


@pytest.mark.parametrize(
    "status, error, text",
    [
        (1, megarlhf.RunFailed, "^rank 1: the disk is full"),
        (2, ValueError, "^rank 1: the disk is full"),
        (75, megarlhf.StopRun, "^rank 1: the disk is full"),
    ],
)
def test_what_ranks_report_is_raised(sft, tmp_path, monkeypatch, status, error, text):
    """Ranks are a shell script here; rank 1 reports an error as a rank does."""
    fake = tmp_path / "python"
    report = json.dumps({"status": status, "message": "the disk is full"})
    fake.write_text(
        f"#!/bin/sh\nif [ $RANK = 1 ]; then mkdir -p $MEGARLHF_LAUNCHED; echo '{report}' > $MEGARLHF_LAUNCHED/1.json\n"
        f"exit {status}; fi\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setenv("MEGARLHF_CACHE", str(tmp_path / "cache"))
    with pytest.raises(error, match=text) as raised:
        megarlhf.run("sft", sft(), nproc=2)
    assert getattr(raised.value, "status", 2) == status


def test_a_start_in_the_wrong_place_is_refused(sft, monkeypatch):
    """In a rank of a launcher, in another thread, in a module that a run imports, and beside a process group."""
    refused = []

    def start():
        with pytest.raises(ValueError, match=r"megarlhf\.run") as error:
            megarlhf.run("sft", sft())
        refused.append(str(error.value))

    thread = threading.Thread(target=start, name="cell")
    thread.start()
    thread.join()
    monkeypatch.setenv("MEGARLHF_BUSY", "megarlhf.run")
    start()
    monkeypatch.delenv("MEGARLHF_BUSY")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    start()
    for message, word in zip(refused, ("thread 'cell'", '__name__ == "__main__"', "rank 1 of 2"), strict=True):
        assert word in message
    assert not sft()["run"]["dir"].exists()


def test_a_module_that_a_run_imports_may_start_nothing(rl, tmp_path, monkeypatch):
    """Neither in a run from Python nor in one of the command line, whose process has the same mark."""
    (tmp_path / "starts_a_run.py").write_text("import megarlhf\nmegarlhf.run('sft', 'sft.yaml')\n")
    (tmp_path / "sft.yaml").write_text(
        "{run: {dir: inner}, actor: {model: {path: m}}, data: {train: d}, "
        "train: {num_steps: 1, mini_batch_samples: 1, micro_batch_samples: 1}}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"starts_a_run.*megarlhf\.run was called while megarlhf\.run is at work"):
        megarlhf.run("rl", rl("starts_a_run:reward"))
    code = """
import os, sys, types
sys.modules["megarlhf.commands.cli"] = types.SimpleNamespace(main=lambda: print(os.environ["MEGARLHF_BUSY"]) or 0)
sys.argv = ["megarlhf", "rl"]
from megarlhf.__main__ import main
main()
"""
    env = os.environ | {"PYTHONPATH": str(Path(megarlhf.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "megarlhf rl\n", done.stderr
    assert not (tmp_path / "inner").exists()


def test_mistakes_have_the_sentences_of_the_command_line(sft):
    def refuse(words, command="sft", config=None, **options):
        with pytest.raises(ValueError, match=words):
            megarlhf.run(command, config or sft(), **options)

    refuse("unknown command 'ppo'; the known ones are sft", command="ppo")
    refuse("unknown key 'trian'; .*train", config=sft(trian={}))
    refuse(r"override 'train.num_step=3': unknown key", overrides=["train.num_step=3"])
    refuse("give a list of texts", overrides="train.num_steps=3")
    refuse("no configuration file nowhere.yaml", config="nowhere.yaml")
    refuse("sft takes a SFTConfig, got a LoopConfig", config=megarlhf.load_config("loop", loop_of(sft())))
    refuse("got a list", config=[1])
    reward = {"kind": "rule", "rule": "__main__:reward"}
    refuse("'__main__:reward'.*module beside it", command="rl", config=rl_of(sft(), reward))
    refuse("is not a multiple of tp x cp x pp", overrides=["actor.parallel.tp=2"])
    assert not sft()["run"]["dir"].exists()


def loop_of(sft):
    train = {"num_steps": 1, "prompts_per_step": 1, "mini_batch_samples": 1, "max_tokens_per_micro_batch": 2048}
    return {"run": sft["run"], "actor": sft["actor"], "train": train}


def rl_of(sft, reward):
    data = {"train": sft["data"]["train"]}
    return {**loop_of(sft), "data": data, "rewards": [reward], "algo": {"advantage": "reinforce"}}


def test_check_describes_a_run_and_prints_nothing(sft, capsys):
    config = megarlhf.load_config("sft", sft(), ["train.num_steps=7"])
    assert config.train.num_steps == 7
    with pytest.raises(ValueError, match="frozen"):
        config.train.num_steps = 8
    described = megarlhf.check("sft", config, nproc=2)
    assert [number.value for number in described.numbers][:3] == [7, 4, 2]  # steps, mini-batch, data-parallel ranks
    assert [role for role, _, _ in described.roles] == ["actor"]
    assert any("64 records" in note for note in described.notes), described.notes
    assert capsys.readouterr().out == ""
    assert not config.run.dir.exists()


def test_a_directory_without_a_run_is_refused(tmp_path, sft):
    with pytest.raises(ValueError, match="holds no run"):
        megarlhf.RunResult.of(tmp_path)
    with pytest.raises(ValueError, match=r"no metric 'lss'.*loss"):
        megarlhf.run("sft", sft()).column("lss")
