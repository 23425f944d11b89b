"""Conversations with an environment: the same bits whatever the order, the timing and the number of engines.

Bit for bit in fp32 on a CPU. Not covered: GPUs; kills by SIGKILL (`make test-faults`).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.distributed.environment_jobs import (
    command_with_wrong_history,
    drawn_by_both_engines,
    failing_command,
    failing_engine,
    gradients_with_changes,
)
from tests.distributed.test_resume import rows, weights
from tests.distributed.test_slices import SAME_WEIGHTS, assert_equal, killed, run, tree
from tests.refuses import lines_naming, missing_names

HERE = "tests.distributed.environments:"
ENDS = (1, 2, 5, 7, 9)
"""Tokens that end a turn, or hardly any would end by itself."""


def conversations(
    models: dict[str, Path], data: dict[str, Path], name: str = "Chance", *, tp: int = 1, args: Any = (), **rollout: Any
) -> dict[str, Any]:
    """GRPO of 2 steps with 16 conversations of up to 5 turns and 20 tokens each."""
    rollout = {"max_response_tokens": 20, "engine": "vllm", "stop_token_ids": ENDS, **rollout}
    cfg = tree(models, data, tp=tp, **rollout)
    cfg["train"]["num_steps"] = 2
    cfg["environment"] = {"function": HERE + name, "args": dict(args), "max_turns": 5, "max_turn_tokens": 6}
    cfg["rewards"] = [{"kind": "environment"}]
    return cfg


@pytest.fixture(scope="module")
def alone(vllm_ranks, one_layer, data, tmp_path_factory) -> Any:
    """One engine, which begins all conversations at once; the environments answer at once."""
    return run(vllm_ranks, 1, conversations(one_layer, data), tmp_path_factory.mktemp("alone") / "run")


def test_conversations_have_turns_of_all_kinds(alone) -> None:
    """Otherwise the tests of this file would show little."""
    dialogues = [dialogue for step in alone[0] for dialogue in step["columns"]["dialogues"]]
    assert {talk["ended_by"] for talk in dialogues} == {"environment", "model", "turn_cut", "no_room", "max_turns"}
    assert {len(dialogue["rewards"]) for dialogue in dialogues} >= {1, 2, 3, 4, 5}
    for step in alone[0]:
        columns = step["columns"]
        for prompt, sampled, sequence in zip(
            *(columns[name] for name in ("prompts", "responses", "sequences")), strict=True
        ):
            assert sequence[: len(prompt)] == prompt
            assert len(sampled) <= len(sequence) - len(prompt) <= 20


ORDERS: dict[str, dict[str, Any]] = {
    "one after the other": {"vllm": {"args": {"max_num_seqs": 1}}},
    "rows reversed": {"backwards": True},
    "answers delayed": {"name": "Slow"},
    "engine and trainer delayed": {"name": "Slow", "delayed": 7},
}  # fmt: skip
DRAWN = ("prompts", "responses", "finished", "sequences", "dialogues")
"""What an engine and an environment have drawn, but for log-probs."""


@pytest.mark.parametrize("case", ORDERS)
def test_neither_order_nor_timing_changes_a_bit(case, alone, vllm_ranks, one_layer, data, tmp_path) -> None:
    options = dict(ORDERS[case])
    keys = {key: options.pop(key) for key in ("name", "vllm") if key in options}
    other = run(vllm_ranks, 1, conversations(one_layer, data, **keys), tmp_path / "other", **options)
    assert_equal(alone, other)


@pytest.mark.parametrize(("tp", "tolerance"), [(1, 0.0), (2, 1e-5)])
def test_two_engines_and_one_of_two_ranks_draw_the_same(tp, tolerance, alone, vllm_ranks, one_layer, data, tmp_path):
    """In the first step, before the trainers of other layouts round otherwise."""
    cfg = conversations(one_layer, data, "Slow", tp=tp)
    cfg["train"]["num_steps"] = 1
    other = run(vllm_ranks, 2, cfg, tmp_path / "other")
    mine, theirs = alone[0][0]["columns"], other[0][0]["columns"]
    assert {name: theirs[name] for name in DRAWN} == {name: mine[name] for name in DRAWN}
    logprobs = [columns["engine's log-probs"] for columns in (mine, theirs)]
    assert max(abs(a - b) for a, b in zip(*logprobs, strict=True)) <= tolerance


def test_slices_of_unchanged_weights_are_the_whole_conversations(vllm_ranks, one_layer, data, tmp_path) -> None:
    """Tokens, observations and columns. Each token is drawn by the version of its position, observations counted. Two
    prompts more are drawn than are trained on."""
    cfg, slices = conversations(one_layer, data), 3
    cfg["actor"]["optim"], cfg["algo"]["dynamic_sampling"] = SAME_WEIGHTS, {"surplus": 2}
    cfg["train"]["num_steps"] = 3
    whole = run(vllm_ranks, 1, cfg, tmp_path / "whole")
    sliced = run(vllm_ranks, 1, cfg, tmp_path / "sliced", f"rollout.slices={slices}")
    assert_equal(whole, sliced)
    assert all(row["tokens_unused"] > 0 for row in sliced[1][1:])
    size, spans = -(-20 // slices), set()
    for step, found in enumerate(sliced[0]):
        columns = found["columns"]
        for prompt, sampled, sequence, versions in zip(
            *(columns[name] for name in ("prompts", "responses", "sequences")), found["versions"], strict=True
        ):
            assert len(versions) == len(sampled)
            spans.add(len(set(versions)))
            assert versions == sorted(versions)
            assert versions[0] == max(0, step - slices + 1)
            last = len(sequence) - len(prompt) - 1
            assert versions[-1] == max(0, step - slices + 1 + last // size)
    assert max(spans) == slices


def test_one_turn_is_a_run_without_an_environment(vllm_ranks, one_layer, data, tmp_path) -> None:
    """Samples, columns and weights, bit for bit."""
    cfg = conversations(one_layer, data, "Over")
    cfg["environment"]["max_turn_tokens"] = None
    talked = run(vllm_ranks, 1, cfg, tmp_path / "talked")
    del cfg["environment"]
    cfg["rewards"] = [
        {"kind": "rule", "rule": "tests.distributed.environments:right", "name": "environment", "workers": 0}
    ]
    plain = run(vllm_ranks, 1, cfg, tmp_path / "plain")
    for mine, theirs in zip(talked[0], plain[0], strict=True):
        for name, column in theirs["columns"].items():
            # A turn's reward is a token's: the response's own is 0.
            assert name in ("dialogues", "rewards") or mine["columns"][name] == column, name
    for mine, theirs in zip(talked[1], plain[1], strict=True):
        assert {name: value for name, value in mine.items() if name in theirs} == theirs
    assert talked[1][-1]["turns_mean"] == 1
    assert any(row["reward_mean"] for row in plain[1] if "reward_mean" in row), "no reward differs"


@pytest.mark.parametrize("name", ["Opens"])
def test_an_environment_adds_to_the_prompt(name, vllm_ranks, one_layer, data, tmp_path) -> None:
    """Samples of one prompt then have prompts of their own, whose tokens count as written after it."""
    cfg = conversations(one_layer, data, name)
    steps, _ = run(vllm_ranks, 1, cfg, tmp_path / "run")
    columns = steps[0]["columns"]
    lengths = [[len(prompt) for prompt in columns["prompts"][n : n + 4]] for n in range(0, 16, 4)]
    assert any(len(set(group)) == 2 for group in lengths)
    for prompt, sequence, talk in zip(columns["prompts"], columns["sequences"], columns["dialogues"], strict=True):
        assert (sequence[: len(prompt)], list(talk["opening"])) == (prompt, prompt)
        assert talk["added"] in (1, 2)
        assert len(sequence) - len(prompt) + talk["added"] <= 20


@pytest.mark.parametrize("rows", [{}, {"micro_batch_samples": None, "max_tokens_per_micro_batch": 128}])
def test_the_gradient_is_of_sampled_tokens_and_depends_on_observed_ones(rows, vllm_ranks, one_layer, data, tmp_path):
    """Labels of other tokens change no bit of it; an observed token that is read does."""
    cfg = conversations(one_layer, data)
    cfg["train"] |= {"num_steps": 1, **rows}
    changes = vllm_ranks.run(1, gradients_with_changes, *killed(cfg, tmp_path / "run"))[0]
    assert changes["nothing"] == changes["other labels"] == 0
    assert min(changes["one label"], changes["one input"]) > 1e-4


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def again(vllm_ranks, one_layer, data, tmp_path_factory) -> Any:
    """A run with `Again`, to which nothing happens."""
    return run(vllm_ranks, 1, conversations(one_layer, data, "Again"), tmp_path_factory.mktemp("again") / "run")


@pytest.mark.parametrize("how", ["raises", "hangs", "exits"])
def test_a_conversation_whose_environment_fails_begins_anew(how, again, vllm_ranks, one_layer, data, tmp_path) -> None:
    """It becomes what it would have been; so do the others, whose environments were in the same process."""
    (tmp_path / "marks").mkdir()
    cfg = conversations(one_layer, data, "Faulty", args={"how": how, "marker": str(tmp_path / "marks")})
    cfg["environment"]["seconds_per_step"] = 0.5
    steps, metrics = run(vllm_ranks, 1, cfg, tmp_path / "run")
    assert sum(row.get("conversations_redrawn", 0) for row in metrics) == len(list((tmp_path / "marks").iterdir())) > 0
    for mine, theirs in zip(steps, again[0], strict=True):
        same = {name for name in theirs["columns"] if name != "dialogues"}
        assert {name: mine["columns"][name] for name in same} == {name: theirs["columns"][name] for name in same}


@pytest.mark.parametrize("at", [-1, 1])
def test_a_failed_conversation_is_left_out_and_counted(at, vllm_ranks, one_layer, data, tmp_path) -> None:
    cfg = conversations(one_layer, data, "Faulty", args={"at": at})
    cfg["environment"]["on_failure"] = "drop"
    steps, metrics = run(vllm_ranks, 1, cfg, tmp_path / "run")
    failed = [bool(talk.get("error")) for talk in steps[0]["columns"]["dialogues"]]
    assert 0 < sum(failed) < 16
    assert metrics[1]["ended_by/failure"] == sum(failed) / 16
    assert steps[0]["columns"]["trained"] == [not lost for lost in failed]
    assert metrics[1]["reward/environment_failed"] == metrics[1]["samples_left_out"] == sum(failed)
    assert not any("planted" in path.read_text() for path in (tmp_path / "run/run/bank").rglob("*.jsonl"))


def test_generate_chooses_whole_conversations_of_texts(vllm_ranks, one_layer, data, tmp_path) -> None:
    """Of those that have not failed: in the records stand all turns and answers, the last turn as the response."""
    cfg = conversations(one_layer, data, "Faulty", args={"at": 0}, num_samples_per_prompt=8)
    cfg = {key: cfg[key] for key in ("actor", "data", "rollout", "environment", "rewards")}
    cfg["environment"] |= {"on_failure": "drop", "max_turns": 3}
    cfg |= {"select": "best", "greedy": False, "max_samples": 6, "run": {"dir": str(tmp_path / "run")}}
    vllm_ranks.run(1, "command", *argv_of("generate", cfg, tmp_path / "g.yaml"))
    lines = [json.loads(line) for line in (tmp_path / "run/responses.jsonl").read_text().splitlines()]
    asked = [json.loads(line)["prompt"] for line in data["prompts"].read_text().splitlines()]
    assert 0 < len(lines) <= 6
    assert any(line["prompt"] not in asked for line in lines)
    for line in lines:
        (start,) = (prompt for prompt in asked[:6] if line["prompt"].startswith(prompt))
        later = line["prompt"][len(start) :]
        assert not later or later.endswith(start[-3:]), "the environment's last answer comes before the response"
        assert line["response"]


@pytest.mark.parametrize(("policy", "words"), [("stop", ()), ("redraw", ("began anew 3 times",))])
def test_a_failure_ends_the_run_with_its_line(policy, words, vllm_ranks, one_layer, data, tmp_path) -> None:
    cfg = conversations(one_layer, data, "Faulty")
    cfg["environment"]["on_failure"] = policy
    names = ("the environment of sample", "turn 2", "KeyError", "planted", "environments.py", *words)
    ((status, written),) = vllm_ranks.run(1, failing_command, *killed(cfg, tmp_path / "run"))
    assert (status, missing_names(written, *names)) == (2, []), written


@pytest.mark.parametrize("fault", ["", "off by one", "tokenized again", "a thought dropped"])
def test_the_gap_names_a_wrong_history_in_the_first_step(fault, vllm_ranks, one_layer, data, tmp_path) -> None:
    cfg = conversations(one_layer, data)
    cfg["train"]["num_steps"] = 1
    ((status, written),) = vllm_ranks.run(1, command_with_wrong_history, fault, *killed(cfg, tmp_path / "run"))
    names = ("rollout_logprob_gap_mean", "first turns", "later ones", "tokenized again", "dropped", "positions")
    assert (status != 0, not missing_names(written, *names)) == (bool(fault), bool(fault)), written
    gaps = read_metrics(tmp_path / "run")[1]
    assert gaps["rollout_logprob_gap_first_turns"] < 1e-5
    assert (gaps["rollout_logprob_gap_later_turns"] > 1e-3) is bool(fault)


# --- resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [1, 3])
def test_a_conversation_goes_on_behind_its_last_answered_turn(slices, vllm_ranks, one_layer, data, tmp_path) -> None:
    """After its run has ended where turns are answered, behind a resume point; or after its engine was rebuilt."""
    cfg = conversations(one_layer, data, "Again", slices=slices)
    cfg["train"]["num_steps"] = 2 if slices == 1 else 3
    cfg["checkpoint"] = {"every": 1, "every_minutes": 0, "background": False}
    whole, cut, rebuilt = tmp_path / "whole", tmp_path / "cut", tmp_path / "rebuilt"
    vllm_ranks.run(2, "command", *killed(cfg, whole))
    argv = killed(cfg, cut)
    (status, written), *_ = vllm_ranks.run(2, failing_engine, 5, str(cut), *argv, "rollout.max_engine_rebuilds=0")
    assert (status, "planted in the engine" in written) == (1, True)
    written = vllm_ranks.run(2, "command", *argv)[0]
    others = [cut]
    if slices == 1:  # with slices a conversation may rest behind each answered turn
        assert lines_naming(written, "conversations go on behind their last answered turn")
        (status, written), *_ = vllm_ranks.run(2, failing_engine, 30, "", *killed(cfg, rebuilt))
        assert (status, "engine is rebuilt" in written) == (0, True), written
        others.append(rebuilt)
    for other in others:
        assert rows(other) == rows(whole)
        assert weights(other) == weights(whole)


def test_an_environment_that_answers_otherwise_is_named_and_its_conversation_begins_anew(
    vllm_ranks, one_layer, data, tmp_path
) -> None:
    """The repetition after a failure of the engine; `Drifts` answers otherwise in another process."""
    cfg = conversations(one_layer, data, "Drifts")
    cfg["train"]["num_steps"] = 1
    (status, written), *_ = vllm_ranks.run(1, failing_engine, 30, "", *killed(cfg, tmp_path / "run"))
    assert status == 0
    assert lines_naming(written, "answered otherwise", "the environment of sample", "begins anew")
    assert read_metrics(tmp_path / "run")[1]["conversations_redrawn"] > 0


# --- roles and layouts ----------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_the_actor_itself_draws_what_vllm_draws(tp, vllm_ranks, one_layer, data) -> None:
    """Greedy: equal tokens, log-probs within 1e-5."""
    prompts = [json.loads(line)["prompt"] for line in data["prompts"].read_text().splitlines()[:12]]
    first, second = vllm_ranks.run(tp, drawn_by_both_engines, str(one_layer["plain"]), prompts, tp)[0]
    assert first[:2] == second[:2]
    assert any(len(written) > len(sampled) + 1 for sampled, written in zip(*first[:2], strict=True))
    for mine, theirs in zip(first[2], second[2], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


LORA, PACKED = {"rank": 2, "alpha": 4}, {"micro_batch_samples": None, "max_tokens_per_micro_batch": 128}
REWARDS = [{"kind": "environment"}, {"kind": "model"}]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2, a reward model": (2, {"actor": {"parallel": {"pp": 2}}, "rewards": REWARDS}),
    "cp2": (2, {"actor": {"parallel": {"cp": 2}}}),
    "lora, correction": (1, {"actor": {"lora": LORA}, "algo": {"rollout_correction": {"kind": "mask"}}}),
    "an adapter of the engine's": (1, {"actor": {"lora": LORA}, "rollout": {"lora": "adapter"}}),
    "dynamic sampling, packed": (1, {"algo": {"dynamic_sampling": {"max_refills": 1, "surplus": 1}}, "train": PACKED}),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_run_of_each_kind_to_the_end(case, vllm_ranks, two_layers, data, tmp_path) -> None:
    """Trainer and engine agree about every sampled token."""
    world, changes = LAYOUTS[case]
    cfg = conversations(two_layers, data, "Again")
    for section, keys in changes.items():
        cfg[section] = {**cfg[section], **keys} if isinstance(keys, dict) else keys
    argv = killed(cfg, tmp_path / "run")
    vllm_ranks.run(world, "command", *argv)
    last = read_metrics(tmp_path / "run")[2]
    assert last["rollout_logprob_gap_max"] < 1e-4
    assert last["turns_mean"] > 1
