"""Rehearsals of conversations with an environment: lengths, tokens, memory and messages of a real run.

Not covered: the environment's own time; vLLM, whose cache may have lost what was written before an answer.
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.rehearsal import real_run
from benchmarks.rehearsal.cases import Case
from benchmarks.rehearsal.cases import job_of as job_of_case
from benchmarks.rehearsal.truth import compare
from megarlhf.config import RLConfig
from megarlhf.config.environment import EnvironmentConfig
from megarlhf.rehearsal.cost_model.decoding import RolloutWork, Sequences, prefill_seconds
from megarlhf.rehearsal.fakes.drawn_samples import (
    ConversationLengths,
    PartialConversation,
    conversation_lengths,
    default_sampled,
)
from megarlhf.rehearsal.fakes.engine import GivenResponses
from megarlhf.rehearsal.fakes.inputs import ENVIRONMENT, stand_in
from megarlhf.rehearsal.fakes.lengths import Constant, Lengths, Uniform, parse_lengths
from megarlhf.rehearsal.job import Job, RankRecord
from megarlhf.rehearsal.rehearse import _Rehearsal
from megarlhf.rehearsal.request import check_request
from megarlhf.rollout.environments.environment import TurnLimits
from megarlhf.runtime import Runtime
from tests.refuses import missing_names, refuses
from tests.rehearsal.jobs import job_tree, records_of, request_of, run_command, write_job
from tests.rehearsal.test_pricing import SHAPE, pricing
from tests.rehearsal.test_rehearsed_trees import HIDDEN, LAYERS, VOCABULARY, WEIGHTS
from tests.rehearsal.test_truth import MOST, rehearsed

MISSING = "nowhere_to_be_found:Guess"
PROMPT, SAMPLED, OBSERVED, SAMPLES = 24, 20, 10, 8
"""Tokens of each sample, and samples of a step."""


# --- lengths --------------------------------------------------------------------------------------


def lengths(turns: int, sampled: int, observed: int, *, max_turns: int = 4, turn_tokens: int = 64) -> Any:
    return ConversationLengths(
        turns=Constant(turns), sampled=Constant(sampled), observed=Constant(observed),
        limits=TurnLimits(max_turns, turn_tokens),
    )  # fmt: skip


BY_HAND: dict[str, tuple[Any, int, int, PartialConversation]] = {
    "the whole": (lengths(3, 7, 5), 64, 64, PartialConversation((3, 3, 2, 2, 2), "environment")),
    "one turn": (lengths(1, 7, 5), 64, 64, PartialConversation((7,), "environment")),
    "an answer has a token or more": (lengths(3, 7, 0), 64, 64, PartialConversation((3, 1, 2, 1, 2), "environment")),
    "so has a turn": (lengths(4, 2, 5), 64, 64, PartialConversation((1, 5, 1), "environment")),
    "more turns than there may be": (
        lengths(9, 7, 5, max_turns=2),
        64,
        64,
        PartialConversation((4, 5, 3), "max_turns"),
    ),
    "longer turns than there may be": (
        lengths(2, 70, 5, turn_tokens=9),
        64,
        64,
        PartialConversation((9, 5, 9), "environment"),
    ),
    "the whole fits to the last token": (lengths(3, 7, 5), 13, 13, PartialConversation((3, 3, 2, 2, 2), "environment")),
    "it ends with the last token": (lengths(3, 7, 5), 12, 12, PartialConversation((3, 3, 2, 2, 2), "turn_cut")),
    "a turn is cut": (lengths(3, 7, 5), 11, 11, PartialConversation((3, 3, 2, 2, 1), "turn_cut")),
    "no room after an answer": (lengths(3, 7, 5), 10, 10, PartialConversation((3, 3, 2), "no_room")),
    "a slice ends in a turn": (lengths(3, 7, 5), 2, 64, PartialConversation((2,), "")),
    "a slice ends with a turn": (lengths(3, 7, 5), 3, 64, PartialConversation((3, 3, 0), "")),
    "a slice ends in an answer": (lengths(3, 7, 5), 5, 64, PartialConversation((3, 3, 0), "")),
    "a slice ends with the last turn": (lengths(3, 7, 5), 12, 64, PartialConversation((3, 3, 2, 2, 2), "environment")),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_conversation_by_hand(case) -> None:
    talks, until, longest, expected = BY_HAND[case]
    assert talks.draw(seed=1, until=until, longest=longest) == expected


def test_a_sample_of_an_earlier_run_keeps_its_lengths_together(tmp_path) -> None:
    """Of one turn, and of several; a column that is missing is named."""
    written = {"prompts": [4] * 3, "responses": [9, 20, 31], "observed": [0, 8, 12], "turns": [1, 2, 4]}
    (tmp_path / "lengths.jsonl").write_text(json.dumps({"step": 1, **written}) + "\n")
    columns = {"turns": "turns", "sampled": "responses", "observed": "observed"}
    given: Any = {name: parse_lengths(str(tmp_path), column) for name, column in columns.items()}
    talks = ConversationLengths(**given, limits=TurnLimits(4, 64))
    drawn = {talks.draw(seed, 64, 64).stretches for seed in range(40)}
    assert drawn == {(9,), (10, 8, 10), (8, 4, 8, 4, 8, 4, 7)}
    (tmp_path / "lengths.jsonl").write_text(json.dumps({"step": 1, "responses": [9]}))
    with refuses("line 1", "'turns'", "environment"):
        parse_lengths(str(tmp_path), "turns")


def test_defaults_follow_from_the_limits() -> None:
    """600 tokens: a response has 200 in the mean. A conversation has 100 sampled and 100 observed ones; in four turns
    of 60 no more than a third of 240; in one turn 200 again, none observed."""
    means = []
    for max_turns, turn_tokens in ((8, None), (4, 60), (1, None)):
        section = EnvironmentConfig(function=MISSING, max_turns=max_turns, max_turn_tokens=turn_tokens)
        means.append(default_sampled(600, section).mean)
    assert default_sampled(600).mean == 200
    assert means == [100, 80, 200]


# --- time of an engine ----------------------------------------------------------------------------


def test_turns_are_decoded_and_answers_computed_after_what_is_in_the_cache() -> None:
    """A prompt of 5, then 4 sampled, 3 observed and 2 sampled: 6 steps at means of 5 + 2.5 and 12 + 1.5 tokens. Beside
    it a response of 5: both in the first 4 steps, and it alone is in the cache's way in one of the last two."""
    work = Sequences.of_stretches([5], [(4, 3, 2)])
    (time,), _ = pricing().decode_seconds(SHAPE, RolloutWork([work]), 14_000)
    assert time.decode == pytest.approx((6 * 5_000_000 + 1000 * (4 * 7.5 + 2 * 13.5)) / 5e9)
    assert (time.steps, time.most_running, work.responses, work.num_observed) == (6, 1, [6], 3)
    assert time.prefill == sum(prefill_seconds(pricing(), SHAPE, *tokens) for tokens in ((5,), (3, 9)))
    both = Sequences.of_stretches([5, 5], [(4, 3, 2), (5,)])
    (time,), _ = pricing().decode_seconds(SHAPE, RolloutWork([both]), 24_000)
    cached = 4 * (10 + 2 * 2.5) + (5 + 4 + 3 + 5 + 4 + 2 * 1.0) + (5 + 4 + 3 + 1 + 1.0)
    assert time.decode == pytest.approx((6 * 5_000_000 + 1000 * cached) / 5e9)
    with refuses("14 tokens", "13 tokens"):
        pricing().decode_seconds(SHAPE, RolloutWork([work]), 13_000)


def test_an_answer_attends_to_all_that_was_before() -> None:
    """Computed in two parts, the operations of attention are those of the whole."""

    class Flops:
        def product_seconds(self, flops: float, nbytes: float, dtype: str) -> float:
            return flops

        collective_seconds: Any = None

    parts = prefill_seconds(Flops(), SHAPE, 9) + prefill_seconds(Flops(), SHAPE, 3, before=9)
    assert parts == prefill_seconds(Flops(), SHAPE, 12)


# --- whole rehearsals -----------------------------------------------------------------------------


def tree_of(folder: Path, environment: dict[str, Any] | None, **rollout: Any) -> dict[str, Any]:
    """GRPO on one rank, a step of one mini-batch; a group fits into a micro-batch."""
    tree = job_tree("rl", folder)
    del tree["reward_model"], tree["critic"]
    tree["rewards"] = [{"kind": "rule", "rule": "exact_match"}]
    tree["algo"] = {"advantage": "group_relative", "kl": {"coef": 0.05}}
    tree["rollout"] |= {"num_samples_per_prompt": 2, **rollout}
    tree["train"] |= {"num_steps": 4, "prompts_per_step": 4, "mini_batch_samples": SAMPLES}
    if environment is not None:
        tree["environment"] = {"function": MISSING, "args": {"highest": 9}, **environment}
    return tree


def record_of(folder: Path, tree: dict[str, Any], sampled: Lengths, **talks: Lengths) -> RankRecord:
    """One step."""
    folder.mkdir()
    given = {"prompt_lengths": Constant(PROMPT), "response_lengths": sampled}
    request = request_of("rl", tree, folder, world_size=1, steps=1, **given)
    conversations = conversation_lengths(request.cfg, sampled=sampled, **talks) if talks else None
    (record,) = records_of(request, folder / "in", 0, conversations=conversations)
    return record


@pytest.fixture(scope="module")
def talked(tmp_path_factory) -> RankRecord:
    """Conversations of three turns."""
    folder = tmp_path_factory.mktemp("talked")
    tree = tree_of(folder, {"max_turns": 4})
    tree["rewards"] = [{"kind": "environment"}]
    return record_of(folder / "run", tree, Constant(SAMPLED), turns=Constant(3), observed=Constant(OBSERVED))


def peaks_of(record: RankRecord, *kinds: str) -> dict[str, Any]:
    """Bytes at the peak of each phase of a role; of these kinds, or of all together."""
    peaks: dict[str, Any] = {}
    for phase in record.memory:
        if phase.phase.startswith(("train/", "score/", "optimizer/")):
            peaks[phase.phase] = [phase.by_kind.get(kind, 0) for kind in kinds] if kinds else phase.peak
    return peaks


def test_observed_tokens_are_computed_and_have_no_loss(talked) -> None:
    """Products and attention on all tokens, the vocabulary on sampled ones, by the formula: a prompt once for its
    samples. The engine draws the sampled ones."""
    written = SAMPLED + OBSERVED
    tokens = SAMPLES // 2 * PROMPT + SAMPLES * written
    pairs = SAMPLES // 2 * PROMPT * (PROMPT + 1) // 2 + SAMPLES * (PROMPT * written + written * (written + 1) // 2)
    for phase, passes in (("train/actor", 3), ("score/reference", 1)):
        products = 2 * tokens * WEIGHTS + 2 * SAMPLES * SAMPLED * VOCABULARY
        assert talked.flops[1, phase, "matmul"] == passes * products, phase
        assert talked.flops[1, phase, "attention"] == passes * 4 * pairs * LAYERS * HIDDEN, phase
        (work,) = talked.loads[phase]
        assert work.tokens == tokens
    assert talked.tokens[1, "train/actor"] == SAMPLES * (PROMPT + written)
    assert [(row.tokens, row.observed) for row in talked.rollouts] == [(SAMPLES * SAMPLED, SAMPLES * OBSERVED)]


def test_memory_of_training_is_that_of_responses_as_long(talked, tmp_path) -> None:
    """What layers keep, to the byte; the log-probs' kernels take less, since observed tokens have none."""
    longer = record_of(tmp_path / "run", tree_of(tmp_path, None), Constant(SAMPLED + OBSERVED))
    kept, kernels = (
        [peaks_of(record, kind)["train/actor"] for record in (talked, longer)]
        for kind in ("activations", "logits and kernels")
    )
    assert kept[0] == kept[1] > [0]
    assert [0] < kernels[0] < kernels[1]
    assert talked.tokens == longer.tokens


def test_one_turn_is_a_rehearsal_without_an_environment(tmp_path) -> None:
    """Work, tokens, the engine's time, and memory of the roles. Beside that the host exchanges what the conversations
    were, and puts the tokens of each sample together from its stretches, in a few operations more."""
    sampled = Uniform(8, 60)
    plain = record_of(tmp_path / "plain", tree_of(tmp_path, None), sampled)
    tree = tree_of(tmp_path, {"max_turns": 4})
    talked = record_of(tmp_path / "talked", tree, sampled, turns=Constant(1), observed=Constant(0))
    for name in ("flops", "loads", "tokens", "rollouts", "cache_bytes", "refusals", "held"):
        assert getattr(talked, name) == getattr(plain, name), name
    assert peaks_of(talked) == peaks_of(plain)
    assert talked.rollouts[0].tokens > 0 < peaks_of(talked)["train/actor"]


def test_the_command_with_slices(tmp_path) -> None:
    """Stretches of 7, 5, 7, 5, 6 in slices of 22: the first has 14 sampled tokens, and ends in the answer after the
    second turn, which is part of what the next begins with. That has 6, the third none. The first step draws its own
    samples, those of the next step as far as the second slice, and the first slice of those after. The user's class
    is not there."""
    file = write_job("rl", tmp_path, tree_of(tmp_path, {"max_turns": 4}, slices=3))
    given = {"prompt": PROMPT, "response": SAMPLED, "observed": OBSERVED}
    options = [text for name, number in given.items() for text in (f"--{name}-lengths", f"constant:{number}")]
    done = run_command("rl", file, tmp_path / "out", "--world-size", "1", "--turns", "constant:3", *options)
    assert done.status == 0
    said = done.json()
    first, later = (20 + 20 + 14, 10 + 10 + 5), (6 + 14, 5)
    assert [(row["tokens"], row["observed"]) for row in said["rollouts"]] == [
        (SAMPLES * sampled, SAMPLES * observed) for sampled, observed in (first, later)
    ]
    for step in said["times"]:
        trained = step["tokens_per_second"] * step["seconds"]
        assert trained == pytest.approx(SAMPLES * (PROMPT + SAMPLED + OBSERVED))
    (note,) = (note for note in said["notes"] if "Lengths of conversations" in note)
    assert not missing_names(
        note, "sampled tokens always 20", "turns always 3 turns, at most 4 of 64", "observed tokens"
    )
    assert not missing_names(" ".join(said["notes"]), MISSING, "not started", "answers at once")
    assert said["config"]["environment"]["function"] == MISSING


# --- a real run -----------------------------------------------------------------------------------


def real_rank(runtime: Runtime, job: Job) -> real_run.Seen:
    given = partial(GivenResponses, conversations=job.conversations)
    with patch.object(real_run, "GivenResponses", given) if job.conversations else nullcontext():
        return real_run.real_rank(runtime, job)


def test_peaks_and_messages_are_those_of_real_ranks(ranks, tmp_path) -> None:
    """Two ranks over gloo. The same lengths, and real tensors."""
    case = Case(command="rl", advantage="group_relative", world_size=2, packed=True, dtype="bf16", layers=2, samples=8)
    job = job_of_case(case, tmp_path)
    tree: Any = job.cfg.model_dump(mode="json")
    tree |= {"environment": {"function": ENVIRONMENT, "max_turns": 4}, "rewards": [{"kind": "environment"}]}
    tree["rollout"] |= {"slices": 2}
    cfg = RLConfig.model_validate(tree)
    talks = conversation_lengths(cfg, turns=None, sampled=Uniform(8, 64), observed=Uniform(1, 60))
    assert talks is not None
    assert {len(talks.draw(seed, 128, 128).stretches) for seed in range(20)} == {1, 3, 5, 7}
    job = replace(job, cfg=cfg, conversations=talks)
    real, told = (ranks.run(2, each, job) for each in (real_rank, rehearsed))
    found = compare(case.name, real, told)
    assert found.mismatches == []
    assert [row for row in found.rows if row.error > MOST] == []
    assert {row.step for row in found.rows} == {0, 1, 2}


# --- what is not given, and what is refused -------------------------------------------------------


def test_what_is_not_given_is_said(tmp_path) -> None:
    """Of one turn nothing is observed, so only the sampled tokens can be given."""
    for max_turns, named in ((4, ["--response-lengths", "--observed-lengths"]), (1, ["--response-lengths"])):
        tree = tree_of(tmp_path, {"max_turns": max_turns})
        request = request_of("rl", tree, tmp_path, response_lengths=None, turns=Constant(2))
        folder = tmp_path / str(max_turns)
        stood = stand_in(request.cfg, folder, prompt_lengths=None, response_lengths=None, steps=1)
        (note, _) = _Rehearsal(request, stood, lambda progress: None)._notes_of_lengths(64)
        assert "mean 10.6667" in note or max_turns == 1
        assert [option for option in ("--response-lengths", "--turns", "--observed-lengths") if option in note] == named


def test_lengths_of_conversations_need_an_environment(tmp_path) -> None:
    for option in ("turns", "observed_lengths"):
        name = "--" + option.replace("_", "-")
        for command in ("sft", "rl"):
            request = request_of(command, job_tree(command, tmp_path), tmp_path, **{option: Constant(2)})
            with refuses(name, "environment", "leave it out"):
                check_request(request)
    request = request_of("rl", tree_of(tmp_path, {"max_turns": 1}), tmp_path, observed_lengths=Constant(2))
    with refuses("--observed-lengths", "environment.max_turns = 1"):
        check_request(request)
