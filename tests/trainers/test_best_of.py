"""Which responses become training data, by hand. Not covered: the command (tests/distributed/test_sampling_options)."""

import math
from dataclasses import replace
from types import SimpleNamespace

import torch

from megarlhf.config import RewardConfig
from megarlhf.data.samples.encoders import PromptSample
from megarlhf.rollout.environments.transcript import Transcript
from megarlhf.rollouts import Dialogue
from megarlhf.trainers.experience.reward_outputs import RewardOutput, without_failures
from megarlhf.trainers.generation.best_of import Candidate, candidates, choose, record_of
from megarlhf.trainers.generation.generate import Generated, _chosen_lines, _summary
from tests.tables import make_rollouts, ragged


def test_what_was_cut_is_empty_or_has_no_reward_is_no_candidate():
    rewards_N = torch.tensor([1.0, 2.0, math.nan, 3.0, 1.0, 1.0])
    finished_N = torch.tensor([True, False, True, True, True, True])
    found, left_out = candidates(["a", "b", "c", "d", " ", "f"], finished_N, rewards_N, per_prompt=3)
    assert found == [[Candidate("a", 1.0)], [Candidate("d", 3.0), Candidate("f", 1.0)]]
    assert left_out == {"responses_cut": 1, "responses_without_reward": 1, "responses_empty": 1}


def test_sums_that_are_equal_on_paper_are_no_pair():
    (group,), _ = candidates(
        ["a", "b"], torch.tensor([True, True]), torch.tensor([0.1 + 0.2, 0.3], dtype=torch.float64), 2
    )
    assert choose([group], "best_and_worst", min_reward=0.3)[1] == {"prompts_with_equal_rewards": 1}


GROUPS = [
    [Candidate("a", 1.0), Candidate("b", 3.0), Candidate("c", 3.0), Candidate("d", 0.0)],
    [Candidate("e", 2.0), Candidate("f", 2.0)],
    [],
    [Candidate("g", 0.5)],
]


def texts(chosen: list[list[tuple[Candidate, ...]]]) -> list[list[list[str]]]:
    return [[[each.response for each in picked] for picked in of] for of in chosen]


def test_the_best_and_the_first_among_equals():
    chosen, left_out = choose(GROUPS, "best", min_reward=1.0)
    assert texts(chosen) == [[["b"]], [["e"]], [], []]
    assert left_out == {"prompts_without_candidate": 1, "prompts_below_min_reward": 1}


def test_the_best_and_the_worst_where_they_differ():
    chosen, left_out = choose(GROUPS, "best_and_worst", min_reward=None)
    assert texts(chosen) == [[["b", "d"]], [], [], []]
    assert left_out == {"prompts_without_candidate": 1, "prompts_with_equal_rewards": 2}


def test_several_pairs_go_from_both_ends_to_where_rewards_are_equal():
    """No candidate is in two of them, also where the number is odd or many are equal."""
    odd = [Candidate(name, reward) for name, reward in zip("hijkl", (0.0, 0.5, 1.0, 0.5, 0.25), strict=True)]
    equal = [Candidate(name, reward) for name, reward in zip("mnopq", (1.0, 1.0, 1.0, 0.0, 1.0), strict=True)]
    chosen, left_out = choose([*GROUPS, odd, equal], "best_and_worst", None, pairs=4)
    assert texts(chosen) == [[["b", "d"], ["c", "a"]], [], [], [], [["j", "h"], ["i", "l"]], [["m", "p"]]]
    assert left_out == {"prompts_without_candidate": 1, "prompts_with_equal_rewards": 2}
    chosen, _ = choose([odd], "best_and_worst", None, pairs=1)
    assert texts(chosen) == [[["j", "h"]]]


def test_lines_are_what_sft_rm_and_dpo_read():
    plain = PromptSample([1], "1+1=", {"answer": "2"}, 0)
    chat = PromptSample([1], "<user>1+1=", {}, 4, [{"role": "user", "content": "1+1="}])
    best, worst = Candidate("2", 1.0), Candidate("3", 0.0)
    assert record_of(plain, [best]) == {"prompt": "1+1=", "response": "2", "answer": "2", "reward": 1.0}
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "rewards": [1.0, 0.0]}
    assert record_of(plain, [best, worst]) == {**pair, "answer": "2"}
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert record_of(chat, [best]) == {"messages": messages, "reward": 1.0}
    assert record_of(chat, [best, worst]) == {**pair, "prompt": chat.messages}, "rm and dpo read a conversation too"
    longer = PromptSample([1], "", {"system": "s"}, 4, [{"role": "system", "content": "s"}, *chat.messages])
    assert record_of(longer, [best, worst]) == {**pair, "prompt": longer.messages}, "which says its system message once"


def test_lines_of_conversations_have_all_turns():
    plain, chat = PromptSample([1], "1+1=", {"answer": "2"}, 0), PromptSample([1], "", {"system": "s"}, 4, [{}])
    (best,), (whole,) = (
        candidates(
            ["2"],
            torch.tensor([True]),
            torch.tensor([1.0]),
            1,
            [Transcript(["3", "2"], "1+1=3 no ", messages, messages)],
        )[0][0]
        for messages in (None, [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}])
    )
    assert record_of(plain, [best]) == {"prompt": "1+1=3 no ", "response": "2", "answer": "2", "reward": 1.0}
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert record_of(chat, [whole]) == {"messages": messages, "reward": 1.0}


def test_a_conversation_that_failed_has_no_reward():
    responses = ragged([7], [7], dtype=torch.int64)
    rollouts = make_rollouts(responses, responses, torch.ones(2, dtype=torch.bool))
    output = RewardOutput(torch.tensor([2.0, 3.0]), torch.tensor([False, False]))
    assert without_failures(output, rollouts) is output
    rollouts = replace(rollouts, dialogues=(Dialogue(ended_by="failure"), Dialogue(ended_by="model")))
    masked = without_failures(output, rollouts)
    assert masked.failed_N.tolist() == [True, False]
    assert masked.values_N.isnan().tolist() == [True, False]
    assert masked.values_N[1] == 3


def test_a_response_of_which_a_reward_failed_is_not_chosen():
    """Without the failed reward its sum would be the highest; that one of two does not apply is no failure."""
    rewards = [{"kind": "rule", "rule": "exact_match"}, {"kind": "rule", "rule": "numeric_match", "weight": -1.0}]
    cfg = SimpleNamespace(
        rewards=[RewardConfig.model_validate(reward) for reward in rewards],
        rollout=SimpleNamespace(num_samples_per_prompt=3),
        select="best",
        pairs_per_prompt=1,
        min_reward=None,
    )
    nan = math.nan
    scores = {
        "exact_match": RewardOutput(torch.tensor([3.0, 2.0, 1.0]), torch.zeros(3, dtype=torch.bool)),
        "numeric_match": RewardOutput(torch.tensor([nan, 1.0, nan]), torch.tensor([True, False, False])),
    }
    prompt = PromptSample([1], "1+1=", {}, 0)
    rollouts = SimpleNamespace(finished_N=torch.ones(3, dtype=torch.bool))
    lines, counts = _chosen_lines(cfg, Generated([prompt] * 3, ["a", "b", "c"], rollouts, scores, None))
    assert lines == [{"prompt": "1+1=", "response": "b", "reward": 1.0}], "the first of two that have 1"
    assert counts["responses_without_reward"] == 1


def test_failures_are_counted_apart_from_what_does_not_apply():
    cfg = SimpleNamespace(eval=SimpleNamespace(accuracy=None), rewards=[])
    responses = ragged([7], [7] * 2, [7] * 3, dtype=torch.int64)
    rollouts = make_rollouts(responses, responses, torch.ones(3, dtype=torch.bool))
    scores = {"judge": RewardOutput(torch.tensor([2.0, math.nan, math.nan]), torch.tensor([False, True, False]))}
    found = _summary(cfg, rollouts, scores)
    assert (found["eval_judge"], found["eval_judge_none"], found["eval_judge_failed"]) == (2.0, 1, 1)
