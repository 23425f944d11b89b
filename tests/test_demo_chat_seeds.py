"""The chat demo's seeds, variants and layouts: configurations, arithmetic, the page. Not covered: what is learnt."""

import contextlib
import json
import math
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from megarlhf.config import RLConfig, SFTConfig, load_config
from megarlhf.observe.records.run_directory import FINISHED_FILE
from megarlhf.observe.terminal.progress import make_console
from megarlhf.observe.watch.profile import CURVE
from megarlhf.planning.batch import rl_batch_numbers
from megarlhf.planning.unused_keys import without_effect
from tests.chat_model import write_chat_model
from tests.command import ROOT, outside_a_run
from tests.refuses import missing_names, refuses
from tests.test_demo_chat import SMALL
from tools.demo_chat import seeds, tables
from tools.demo_chat.figures import of_training, paired
from tools.demo_chat.killed import call_and_kill
from tools.demo_chat.pipeline import GRPO, SFT, Runner
from tools.demo_chat.rehearsed import STEP, beside, measured_memory, predicted_memory
from tools.demo_chat.result_file import about, added, earlier, mean_over, over_seeds, settings
from tools.demo_chat.seeds import LAYOUTS, SHORT, SMALL_STEP, VARIANTS
from tools.demo_chat.sliced import IN_SLICES, SLICED, SLICES, WHOLE
from tools.demo_chat.sliced import over_seeds as over_seeds_90


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_is_a_configuration_that_means_what_it_says(variant):
    changes = VARIANTS[variant]
    cfg = load_config(RLConfig, GRPO.config, changes)
    rl_batch_numbers(cfg, 1)
    set_by_variant = {change.partition("=")[0] for change in changes}
    unread = {note.partition(": ")[2].partition(" ")[0] for note in without_effect(cfg)}
    assert not unread & set_by_variant
    assert cfg.algo.shuffle_rewards is (variant == "control")
    assert (cfg.actor.lora is not None) is (variant == "grpo-lora")
    assert not cfg.algo.needs_critic, "a critic that knows the rewards would enter the control's advantages"


def test_slices_differ_from_whole_responses_in_nothing_else():
    whole, sliced = (load_config(RLConfig, GRPO.config, SLICED[name]) for name in (WHOLE, IN_SLICES))
    assert sliced.rollout.slices == SLICES
    assert sliced.model_copy(update={"rollout": whole.rollout}) == whole
    assert not {note.partition(":")[0] for note in without_effect(sliced)} & {"rollout.slices"}
    found = over_seeds_90([-0.01, 0.0, 0.01])
    assert found["low"] == pytest.approx(-2.920 * 0.01 / math.sqrt(3))
    assert over_seeds_90([0.5])["low"] is None


def test_layouts_are_legal():
    """Nine heads by three, and a batch that every layout can take."""
    for ranks, parallel in LAYOUTS.values():
        changes = [f"run.nproc={ranks}", *SHORT, *(f"actor.parallel.{key}={size}" for key, size in parallel.items())]
        sft = load_config(SFTConfig, SFT.config, changes)
        rl = load_config(RLConfig, GRPO.config, [*changes, *SMALL_STEP, "rollout.parallel.tp=1"])
        assert sft.actor.parallel == rl.actor.parallel
        assert ranks == rl.actor.parallel.tp * rl.actor.parallel.pp, "one data-parallel rank, as alone"
        assert rl.rollout.parallel.tp == 1
        rl_batch_numbers(rl, ranks)


def test_the_mean_over_seeds_by_hand():
    """.2, .3, .4: mean .3, deviation .1, t of two degrees of freedom 4.303."""
    by_seed = [
        {
            "models": {"sft": {"right": {"value": value}}},
            "checks": {"sft": {"kind": {"value": 2 * value}}},
            "differences": {"a over b": {"right": {"value": -value}}},
        }
        for value in (0.2, 0.3, 0.4)
    ]
    found = over_seeds(by_seed)
    of = found["models"]["sft"]["right"]
    assert of["value"] == pytest.approx(0.3)
    assert of["high"] - of["value"] == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-4)
    assert of["seeds"] == [0.2, 0.3, 0.4]
    assert found["differences"]["a over b"]["right"]["low"] == pytest.approx(-of["high"])
    assert found["checks"]["sft"]["kind"]["value"] == pytest.approx(0.6)
    assert mean_over([0.5])["low"] is None


def test_a_result_is_added_to_what_other_machines_have_found(tmp_path):
    """Of all seeds the summary; each part by the last that ran it. Other settings are refused."""
    model = tmp_path / "model"
    model.mkdir()

    def of(commit, parts=(), **seeds):
        found = {
            seed: {"models": {"sft": {"right": {"value": value}}}, "checks": {}, "differences": {}}
            for seed, value in seeds.items()
        }
        names = [*(f"seed {seed}" for seed in seeds), *parts]
        return {
            "settings": settings(model, (), {}), "about": {name: {"commit": commit} for name in names},
            **{part: {"of": commit} for part in parts}, **({"seeds": found} if found else {}),
        }  # fmt: skip

    path = tmp_path / "result.json"
    assert earlier(path, settings(model, (), {})) == {}
    first = added({}, of("a", parts=("layouts", "killed"), **{"10": 0.5}))
    path.write_text(json.dumps(first))
    both = added(earlier(path, settings(model, (), {})), of("b", parts=("killed",), **{"2": 0.25}))
    assert both["summary"]["models"]["sft"]["right"]["seeds"] == [0.25, 0.5]
    assert list(both["seeds"]) == ["2", "10"]
    assert (both["layouts"]["of"], both["killed"]["of"]) == ("a", "b")
    assert {name: each["commit"] for name, each in both["about"].items()} == {
        "seed 10": "a", "layouts": "a", "killed": "b", "seed 2": "b",
    }  # fmt: skip
    assert added(both, of("c", parts=("layouts",)))["seeds"] == both["seeds"]
    others = [settings(model, ("grpo:train.num_steps=1",), {})]
    others.append(settings(model, (), {"grpo-lora": ("actor.lora={rank: 8}",)}))
    (model / "config.json").write_text("{}")
    for other in (*others, settings(model, (), {})):
        with refuses("result.json", "other settings", "--out"):
            earlier(path, other)


def test_a_part_names_the_commits_of_its_runs(tmp_path):
    """Not that of the call which only finds them finished; of a run that went on at another commit both."""
    commits = {"sft": "a", "grpo": "b", "control": "a", "killed": "c", "layouts-sft-tp3": "d", "profiled-rm": "e"}
    (tmp_path / "commits.json").write_text(json.dumps({name: [commit] for name, commit in commits.items()}))
    runner = Runner(tmp_path, make_console(), tmp_path)
    (tmp_path / "grpo").mkdir()
    for commit in ("c", "c", "b"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tools.demo_chat.pipeline.commit_of_sources", lambda commit=commit: commit)
            runner.note_start("grpo", [f"actor.model.path={tmp_path}/sft"])
    assert json.loads((tmp_path / "commits.json").read_text())["grpo"] == ["b", "c"]
    assert json.loads((tmp_path / "changes.json").read_text()) == {"grpo": ["actor.model.path=sft"]}
    commits = {name: [commit] for name, commit in commits.items()}
    (tmp_path / "commits.json").write_text(json.dumps(commits))
    assert about(runner.commits(seeds.is_of_seed))["commit"] == "a, b"
    assert runner.commits(partial(seeds.is_of, seeds.RUNS["killed"])) == ["c"]
    assert about([])["commit"], "of runs before it was noted: this one"


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (["--parts", "layouts"], ["seed 5, seed 6, killed", "--add"]),
        (["--seeds", "5"], ["seed 6", "--add"]),
        (["--set", "data:test=8"], ["other settings"]),
        (["--set", "data:test=8", "--add"], ["other settings"]),
    ],
)
def test_a_result_is_not_replaced_unasked(asked, names, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    out = tmp_path / "result.json"
    has = {
        "settings": settings(model, seeds.PRECISE, VARIANTS), "seeds": {"5": {}, "6": {}}, "layouts": {}, "killed": {},
    }  # fmt: skip
    out.write_text(json.dumps(has))
    command = [*asked, "--root", str(tmp_path / "runs"), "--out", str(out), "--model", str(model)]
    assert seeds.main(command, call=lambda _: pytest.fail("a stage was started")) == 2
    assert not missing_names(capsys.readouterr().err, *names)
    assert json.loads(out.read_text()) == has
    assert not (tmp_path / "runs").exists()
    assert not seeds.not_measured(has, seeds.PARTS, [5, 6, 7])


def test_models_are_compared_on_the_same_prompts_only():
    assert paired([("a", 1.0), ("b", 0.5)], [("a", 0.0), ("b", 1.0)]) == [1.0, -0.5]
    with refuses("different prompts", "test-..."):
        paired([("a", 1.0)], [("b", 0.0)])


def test_a_command_is_killed_with_all_that_it_has_started(tmp_path):
    script = f"""
import os, pathlib, subprocess, time
pathlib.Path("{tmp_path}/new").write_text(str(subprocess.Popen(["sleep", "100"]).pid))
os.rename("{tmp_path}/new", "{tmp_path}/sign")
time.sleep(100)
"""
    assert call_and_kill([sys.executable, "-c", script], tmp_path / "sign", seconds=60) == -signal.SIGKILL
    end = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int((tmp_path / "sign").read_text()))
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "its child sleeps on"
            time.sleep(0.05)
    ends_early = [sys.executable, "-c", "import sys; print('words'); sys.exit(3)"]
    with refuses("status 3", "words", error=RuntimeError):
        call_and_kill(ends_early, tmp_path / "never", seconds=60, log=tmp_path / "log")


def test_memory_by_phase_of_a_rehearsal_and_of_a_recorded_step():
    """Bytes above those of the step's beginning; the curve's highest point within each phase."""
    rows = [
        {"step": 1, "phase": "train/actor", "start": 0, "peak": 900},
        {"step": STEP, "phase": "rollout", "start": 100, "peak": 130},
        {"step": STEP, "phase": "train/actor", "start": 110, "peak": 300},
        {"step": STEP, "phase": "train/actor", "start": 110, "peak": 250},
    ]
    assert predicted_memory(rows) == {"rollout": 30, "train/actor": 200}
    points = [(0, 5), (1, 40), (2, 7), (3, 210), (9, 999)]
    events = [{"name": CURVE, "ph": "C", "ts": at, "args": {"bytes": held}} for at, held in points]
    events += [
        {"name": "rollout", "cat": "user_annotation", "ts": 0, "dur": 1.5},
        {"name": "train/actor", "cat": "user_annotation", "ts": 1.6, "dur": 2},
        {"name": "optimizer/actor", "cat": "user_annotation", "ts": 5, "dur": 1},
    ]
    measured = measured_memory({"traceEvents": events})
    assert measured == {"rollout": 40, "train/actor": 210}
    assert beside({"a": 1, "b": 2}, {"b": 3}) == {
        "a": {"predicted": 1, "measured": None},
        "b": {"predicted": 2, "measured": 3},
    }


def test_the_page_shows_the_result():
    """The page was made from the result in the repository."""
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page, tables.load_result(tables.RESULT) or {}) == page, (
        "python -m tools.demo_chat.tables --page writes it"
    )


def test_a_step_that_draws_nothing_has_no_gap(tmp_path):
    """As at the end of a run in slices: the last samples were drawn before."""
    rows = [{"step": 1, "rollout_logprob_gap_max": 2e-5, "peak_memory_gib": 1.0}, {"step": 2, "peak_memory_gib": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = of_training(tmp_path)
    assert (found["steps"], found["rollout_logprob_gap_max"], found["peak_memory_gib"]) == (2, 2e-5, 2.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_parts_on_a_small_model(tmp_path) -> None:
    """As `make demo-chat-seeds`, in processes of their own, at all layouts; a second start runs nothing again."""
    model = write_chat_model(tmp_path / "model")
    command = [sys.executable, "-m", "tools.demo_chat.seeds", "--seeds", "0", "--model", str(model)]
    command += ["--root", str(tmp_path / "runs"), "--out", str(tmp_path / "result.json"), "--set", *SMALL]
    ends: list[dict[Path, int]] = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, env=outside_a_run(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        ends.append({path: path.stat().st_mtime_ns for path in tmp_path.glob(f"runs/seed-0/*/{FINISHED_FILE}")})
    assert len(ends[0]) > 30
    assert ends[1] == ends[0]
    of_demo = json.loads((tmp_path / "runs/seed-0/summary.json").read_text())["seconds"]
    assert {"grpo", "test-grpo"} <= of_demo.keys()
    assert not {"control", "test-control"} & of_demo.keys(), "the second start writes the demo's own time too"
    found = json.loads((tmp_path / "result.json").read_text())
    assert set(found["summary"]["models"]) == {"released", "sft", "ppo", "grpo", "control", "grpo-lora"}
    assert found["killed"]["equal"], found["killed"]["differences"]
    assert found["slices"]["seeds"]["0"][IN_SLICES]["staleness_mean"] > 0
    for by_layout in found["layouts"].values():
        one = by_layout.pop("one rank")
        assert list(by_layout) == ["TP3", "PP2", "TP3 x PP2"]
        for of in by_layout.values():
            for name in ("loss", "grad_norm", "reward_mean", "actor_grad_norm"):
                if name in one:
                    assert of[name] == pytest.approx(one[name], rel=1e-4)
            assert of.get("rollout_logprob_gap_max", 0.0) < 1e-4
    for stage in found["rehearsed"].values():
        assert any(each["predicted"] and each["measured"] for each in stage["memory"].values())
        assert any(each["predicted"] and each["measured"] for each in stage["seconds"].values())
    assert tables.filled(tables.PAGE.read_text(encoding="utf-8"), found)
