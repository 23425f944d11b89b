"""A smoke test of `make bench-trl`: a tiny random model, one round, without TRL and vLLM; its task, figures and page.

Not covered: TRL's side, which needs its packages (`python -m benchmarks.trl --rehearse --out FILE` runs it too).
"""

import argparse
import contextlib
import json
import sys

import pytest

from benchmarks import kept, trl_compare, trl_curves, trl_task
from benchmarks import trl as bench
from benchmarks import trl_figures as figures
from tests.refuses import missing_names, refuses

ARGUMENTS = ["--rehearse", "--threads", "1", "--no-trl", "--no-vllm"]


def result_of(module, out, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench", *ARGUMENTS, "--out", str(out), *arguments])
        module.main()
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "trl.json"
    return result_of(bench, out, "--rounds", "1", "--only", "grpo_equal", "sft_mixed")


def test_our_side_runs_and_says_where_its_seconds_are(result):
    grpo, sft = (result["comparisons"][name] for name in ("grpo_equal", "sft_mixed"))
    step = grpo["ways"]["ours 96"]
    assert step["part_seconds"].keys() >= {"generate", "reference_logprobs", "actor_forward_backward", "update_weights"}
    assert "old_logprobs" not in step["part_seconds"], "one update for each rollout makes them itself, as TRL's does"
    assert {answer["generated_tokens"] for answer in step["rounds"]} == {16 * 8}
    assert sum(figures.parts_of(step).values()) == pytest.approx(step["seconds"]["median"])
    assert grpo["agreement"]["grad_norms"]["ours 96"] > 0
    update = sft["ways"]["ours 96"]
    assert update["part_seconds"].keys() == {"actor_forward_backward", "actor_optimizer", "other"}
    assert sft["memory"]["ours"]["peak_bytes"] > 0
    assert result["left_out"] == {"trl": "--no-trl"}
    assert result["grpo_equal"] is result["sft_mixed"] is None


def test_the_page_shows_the_result(result):
    """The page can also be filled by a result with missing sides."""
    page = figures.PAGE.read_text(encoding="utf-8")
    refilled = figures.filled(figures.filled(page, result, None), *figures.load())
    assert refilled == page, "python -m benchmarks.trl_figures --page writes it"


def of(ours, trl, memory=(1, 1)):
    """A comparison in which these were the seconds."""
    ways = {name: {"seconds": {"median": s, "min": s, "max": s}} for name, s in (("ours 9", ours), ("trl 4", trl))}
    peaks = {side: {"peak_bytes": each} for side, each in zip(("ours", "trl"), memory, strict=True)}
    return {"ways": ways, "fastest": {"ours": "ours 9", "trl": "trl 4"}, "memory": peaks}


def test_figures_are_ours_over_theirs():
    found = figures.figures({"grpo_mixed": of(2.0, 5.0), "sft_equal": of(4.0, 3.0, memory=(9, 10))})
    assert found["grpo_mixed"] == 0.4
    assert found["sft_equal"] == 4 / 3
    assert found["sft_equal_memory"] == 0.9
    met = {goal["name"]: goal["met"] for goal in figures.goals(found)}
    assert met["grpo_mixed"] is met["sft_equal_memory"] is True
    assert met["sft_equal"] is False
    assert met["rm_mixed"] is None


def test_a_part_is_measured_anew(monkeypatch, tmp_path):
    """The result keeps the other parts, each with its commit. One that is incomplete, of other settings, or lacks a
    side is refused."""
    path = tmp_path / "trl.json"
    monkeypatch.setattr(bench, "RESULT", path)
    arguments = argparse.Namespace(only=["rm_equal"], out=path, rounds=3, threads=2, model="models/one")
    with refuses("grpo_equal, grpo_mixed"):
        bench.earlier(arguments)
    bench.require_whole(path, path, {})
    with refuses("trl: no network"):
        bench.require_whole(path, path, {"trl": "no network"})
    found = {name: of(1.0, 2.0) for name in bench.COMPARISONS}
    machine = {"commit": "older", "cores": 2, "torch": "2.13"}
    found["sft_mixed"]["commit"] = "newer"
    found["sft_equal"]["machine"] = machine | {"commit": "newer", "cores": 4}
    result = {"comparisons": found, "rounds": 3, "threads": 2, "model": "one", "machine": machine}
    path.write_text(json.dumps(result))
    others = bench.earlier(arguments)
    assert others.keys() == bench.COMPARISONS.keys() - {"rm_equal"}
    names = ("rm_mixed", "sft_mixed", "sft_equal")
    where = figures.where({name: others[name]["machine"] for name in names})
    assert not missing_names(where, "older (rm_mixed)", "newer (sft_mixed, sft_equal)", "(rm_mixed, sft_mixed)")
    assert not missing_names(where, "4 cores, torch 2.13 (sft_equal)")
    for key, other in (("threads", 1), ("model", "models/other")):
        with refuses(key):
            bench.earlier(argparse.Namespace(**{**vars(arguments), key: other}))


def test_sides_that_compute_something_else_are_found():
    firsts = {"ours 9": {"loss": 0.5, "grad_norms": [2.0]}, "trl 4": {"loss": 0.5001, "grad_norms": [2.001]}}
    assert trl_compare.agreement_of(firsts)["norms_differ_by"] == pytest.approx(0.0005)
    with pytest.raises(AssertionError, match="gradient norms"):
        trl_compare.agreement_of({**firsts, "trl 8": {"loss": 0.5, "grad_norms": [2.1]}})
    with pytest.raises(AssertionError, match="losses"):
        trl_compare.agreement_of({**firsts, "trl 8": {"loss": 0.6, "grad_norms": [2.0]}})


def test_the_fastest_of_theirs_goes_on():
    """By the faster of two tries after a round that warms up; the one that goes on is warmed anew. It is chosen of all
    together: b is as fast as a within 2%, and c as b, but not as a."""
    seconds = {"a": [1.0, 3.0, 1.0], "b": [9.0, 1.019, 2.0], "c": [1.5, 2.0, 1.03]}
    asked, stopped = [], []

    class Child:
        def __init__(self, name):
            self.seconds, self.name = iter(seconds[name]), name
            asked.append([])

        def ask(self, command, **given):
            assert (command, given) == ("round", {"responses": 3})
            asked[-1].append(self.name)
            return {"phase_seconds": next(self.seconds)}

        def stop(self):
            stopped.append(self.name)

    peers = [trl_compare.Peer(micro=micro, word=name) for micro, name in zip((4, 2, 1), seconds, strict=True)]
    with trl_compare.contextlib.ExitStack() as stack:
        best = trl_compare.fastest_of_theirs(peers, lambda peer: Child(peer.word), {"responses": 3}, stack)
        assert (best.name, stopped) == ("trl b 2", ["a", "b", "c"])
    assert best.tries == {"trl a 4": 1.0, "trl b 2": 1.019, "trl c 1": 1.03}
    assert asked == [["a"] * 3, ["b"] * 3, ["c"] * 3, ["b"]]
    assert stopped == ["a", "b", "c", "b"]


def test_what_changed_sources_have_measured_is_not_kept(monkeypatch, tmp_path):
    """Its commit says so."""
    store = kept.Kept(tmp_path, {"machine": {"commit": "abc"}})
    for name, commit in (("one", "abc"), ("two", "abc-dirty")):
        monkeypatch.setattr(kept, "commit_of_sources", lambda commit=commit: commit)
        store.keep(name, {"x": 1})
    assert (store.found("one"), store.found("two")) == ({"x": 1}, None)
    assert kept.commit_at_end("abc") == "abc, changed while it ran"


@pytest.mark.parametrize(
    ("module", "arguments", "names"),
    [
        (bench, ["--rounds", "0"], ["--rounds", "'0'"]),
        (bench, ["--rounds", "1"], ["3 rounds", "--out"]),
        *[(module, ["--no-vllm"], ["--no-vllm", "--rehearse"]) for module in (bench, trl_curves)],
        *[(module, ["--model", "/nowhere"], ["/nowhere", "config.json"]) for module in (bench, trl_curves)],
        (trl_curves, ["--every", "0"], ["--every", "'0'"]),
    ],
)
def test_options_that_would_have_no_effect_are_refused(module, arguments, names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit):
        module.main()
    assert not missing_names(capsys.readouterr().err, *names)


def test_of_ways_that_are_as_fast_the_smallest_is_compared():
    assert trl_compare.chosen({"ours 2048": 10.0, "ours 1024": 10.1, "ours 512": 10.3}) == "ours 1024"
    assert trl_compare.chosen({"trl padded 8": 10.0, "trl grouped 4": 12.0}) == "trl padded 8"


def test_both_sides_hand_a_rule_the_same_prompt(tmp_path):
    """What the model reads, template and all."""
    from transformers import AutoTokenizer

    from benchmarks.trl_data import prepare_tiny
    from megarlhf.config import DataConfig
    from megarlhf.trainers.experience.prompts import load_prompts

    data = prepare_tiny(tmp_path)
    step = data.steps["equal"]
    settings = {"train": str(step.prompts), "template": "chat", "cache": "none", "max_prompt_tokens": step.max_prompt}
    ours = load_prompts(DataConfig.model_validate(settings), data.model, run_dir=tmp_path / "run").train[0]
    tokenizer = AutoTokenizer.from_pretrained(data.model)
    record = trl_task.conversation_of(trl_task.read_records(step.prompts)[0])
    reward = trl_task.rewards_of("tests.test_bench_trl:noted", tokenizer)
    answer = [{"role": "assistant", "content": "a"}]
    assert reward([record["prompt"]], [answer], answer=[record["answer"]], trainer_state=None) == [0.5]
    assert [(ours.text, "a", {"answer": record["answer"]})] == NOTED
    assert ours.text != record["prompt"][0]["content"]


NOTED: list[tuple[str, str, dict]] = []


def noted(prompt, response, fields):
    NOTED.append((prompt, response, dict(fields)))
    return 0.5


def test_rewards_of_the_list_task():
    """Of 1 are .4 for what belongs there, .3 for the form of items, .3 for their number, each in parts."""
    three = {"what": "fruits", "count": 3}

    def reward(response):
        return trl_task.reward("", response, three)

    assert trl_task.right(reward(" apples, pear, cherries\n"))
    assert reward("Apple, Pear, wild Cherry") == pytest.approx(0.7)
    assert reward("apple, apple, pear") == pytest.approx(0.6 + 0.4 * 2 / 3)
    assert reward("apple, pear, cherry, plum") == pytest.approx(0.7 + 0.3 * 2 / 3)
    assert reward("1. Apple\n2. Pear") == pytest.approx(0.4 * 2 / 3 + 0.3 / 3)
    assert reward("red, three words here, ") == pytest.approx(0.3 / 3 + 0.3)
    assert not trl_task.right(reward("apple, pear, hammer"))
    for wrong in ("not apple, never pear, cherry", "apple pear, apple cherry, apple", "apple, apples, pear"):
        assert not trl_task.right(reward(wrong)), wrong


def test_records_of_a_task_are_read_as_json_lines(tmp_path):
    """A line separator of Unicode ends no line; what is wrong is named with its place."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8")
    assert trl_task.read_records(path) == [{"prompt": "a\u2028b"}, {"prompt": "c"}]
    path.write_text('{"prompt": "a"}\n1')
    with refuses("prompts.jsonl", "line 2", "JSON object"):
        trl_task.read_records(path)


def test_the_splits_of_the_list_task_share_no_prompt(tmp_path):
    task = trl_task.write_task(tmp_path)
    train, test = ([row["prompt"] for row in trl_task.read_records(path)] for path in (task.train, task.test))
    assert len(set(train)) == len(train) == 12 * 5 * 4 - trl_task.NUM_TEST
    assert len(test) == trl_task.NUM_TEST
    assert not set(train) & set(test)
    assert trl_task.rule_of(task.rule) is trl_task.reward


@pytest.fixture
def curves(tmp_path, monkeypatch):
    """Run the learning curves with a child that answers at once. Returns the result and the commands to the child."""
    starts, commands = [], []

    class Child:
        def __init__(self):
            self.facts = {"ways": {"ours 96": {}}}

        def ask(self, command, **given):
            commands.append(command)
            if command == "evaluate":
                return {"rewards": [0.5, 1.0], "mean": 0.75, "texts": ["apple"]}
            numbers = {"reward": 0.25, "response_length": 8.0, "step_seconds": 2.0, "generated_tokens": 64}
            return numbers | {"grad_norms": [1.5]}

        def stop(self):
            commands.append("stop")

    def start(comparison, setting, **options):
        starts.append((options["seed"], trl_task.read_records(setting.data.steps["long_tailed"].prompts)))
        return Child()

    def run(*seeds, every="2"):
        starts.clear(), commands.clear()
        out = tmp_path / "curves.json"
        result = result_of(trl_curves, out, "--seeds", *seeds, "--steps", "3", "--every", every)
        return result, list(commands), list(starts)

    monkeypatch.setattr(trl_curves, "start_ours", start)
    return run


def test_learning_curves(curves):
    """Evaluations are before the first step, after every second and after the last; seconds are those of steps. Later
    seeds are added to a result of the same settings. Not covered: the child."""
    result, commands, starts = curves("3", "4")
    course = ["evaluate", "round", "round", "evaluate", "round", "evaluate", "stop"]
    assert commands == ["round"] * trl_curves.UPDATES + ["evaluate", "stop"] + course * 2
    assert result["updates"]["grad_norms"] == {"ours": [1.5] * 3}
    evaluations = result["seeds"]["3"]["ours"]["evaluations"]
    assert [(row["step"], row["seconds"]) for row in evaluations] == [(0, 0.0), (2, 4.0), (3, 6.0)]
    assert {(row["reward"], row["right"]) for row in evaluations} == {(0.75, 0.5)}
    assert [seed for seed, _ in starts] == [0, 3, 4]
    assert starts[1][1] != starts[2][1], "the order of prompts follows from the seed"
    assert sorted(map(str, starts[1][1])) == sorted(map(str, starts[2][1]))
    more, commands, _ = curves("1")
    assert commands == course
    assert list(more["seeds"]) == ["1", "3", "4"]
    assert (more["updates"], more["seeds"]["3"], more["seeds"]["4"]) == (result["updates"], *result["seeds"].values())
    with pytest.raises(SystemExit):
        curves("1", every="3")


def test_both_sides_see_the_same_prompts():
    trl_curves.require_whole_steps(180, 8, 12)
    trl_curves.require_whole_steps(16, 8, 12)
    with refuses("180 prompts", "22 steps of 8", "23 steps"):
        trl_curves.require_whole_steps(180, 8, 23)


def test_seconds_to_the_same_reward():
    """The lesser best is .5: ours has it between 10 and 20 s, at 15, TRL at 40 s."""

    def course(*points):
        return {
            "evaluations": [{"step": n, "seconds": s, "reward": r, "right": 0.0} for n, (s, r) in enumerate(points)]
        }

    seeds = {"0": {"ours": course((0, 0.2), (10, 0.4), (20, 0.6)), "trl": course((0, 0.2), (40, 0.5), (80, 0.4))}}
    found = trl_curves.summary(seeds)
    assert found["level"] == 0.5
    assert found["seconds_until"] == {"ours": pytest.approx(15.0), "trl": 40.0}
    assert found["ours_over_trl"] == pytest.approx(15 / 40)
    assert found["of_seeds"]["0"]["ours_over_trl"] == found["ours_over_trl"]
    assert found["steps_ours_over_trl"] == 20 / 80


@pytest.mark.parametrize("norms", [(1, 2, 3), (1, 2, 3.1)])
def test_ours_is_given_what_trl_has_drawn(norms, monkeypatch):
    """Updates that are not the same end the benchmark."""
    given = []

    class Child:
        def __init__(self, *norms):
            self._norms = iter(norms)

        def ask(self, command, **told):
            given.append((command, told) if told else command)
            if command == "drawn":
                return {"responses": [[7]]}
            return {"grad_norms": [next(self._norms)], "rewards": [0.5]}

    @contextlib.contextmanager
    def children(*arguments):
        yield {"ours": (Child(*norms, 0), {"way": "ours 96"}), "trl": (Child(1, 2, 3, 0), {})}

    monkeypatch.setattr(trl_curves, "both_sides", children)
    monkeypatch.setattr(trl_curves, "read_records", lambda path: [])
    step = argparse.Namespace(prompts=None)
    if norms[-1] != 3:
        with refuses("not the same computation", error=AssertionError):
            trl_curves.updates_on_the_same(None, step, None)
        return
    found = trl_curves.updates_on_the_same(None, step, None)
    assert given[:3] == ["round", "drawn", ("round", {"way": "ours 96", "responses": [[7]]})]
    assert found["norms_differ_by"] == [0, 0, 0]
    assert found["rewards"] == {"ours": 0.5, "trl": 0.5}
