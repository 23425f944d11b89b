"""Texts for a reward model with a tokenizer of its own, and what those of a prompt begin with in common."""

import contextlib

import pytest
import torch

from megarlhf.data.samples.retokenize import Retokenizer
from megarlhf.data.text.omissions import NotWritten
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.rollout.rewards.batch import RewardBatch
from megarlhf.trainers.experience.retokenize import _retokenized, common_beginnings
from tests.classifiers import CHAT_TEMPLATE, write_tokenizer
from tests.data.chat_styles import STYLES, chat_tokenizer, said


@pytest.mark.parametrize("has_turns", [False, True])
def test_a_judge_s_template_may_trim_turns_that_were_sampled(has_turns, tmp_path):
    """And leave out their thoughts: no data can be changed for it."""
    template = STYLES["stripping"].replace("m.content", "(m.content | trim)")
    retokenizer = Retokenizer(chat_tokenizer(tmp_path, template), max_tokens=1000)
    messages = [said("user", "a"), said("assistant", " <think>hm</think>2 "), said("user", "b")]
    with contextlib.nullcontext() if has_turns else pytest.raises(NotWritten):
        assert retokenizer("", messages, "3", finished=True, has_turns=has_turns).tokens


def test_what_the_texts_of_a_prompt_begin_with_stands_for_it():
    """A text that was cut begins otherwise: its prompt is then computed for each. Equal texts are all prompt."""
    texts = [[1, 5, 6, 7], [1, 5, 6], [1, 5, 9, 9], [8, 8], [7, 6, 5], [5], [4, 4], [4, 4], [3]]
    begins, numbers = common_beginnings(
        [torch.tensor(text) for text in texts], torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 4])
    )
    assert begins == [2, 2, 2, 2, 1, 1, 2, 2, 1]
    assert numbers.tolist() == [0, 0, 0, 1, 9, 10, 3, 3, 4]
    for begin, text, number in zip(begins, texts, numbers.tolist(), strict=True):
        others = [other[:begin] for other, n in zip(texts, numbers.tolist(), strict=True) if n == number]
        assert all(other == text[:begin] for other in others)


def test_a_text_of_an_environment_goes_on_in_the_message_of_the_model(tmp_path):
    """The first of two turns, and the text between them, are begun; the end of the turn is behind both."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, letters="12+=[]au", chat_template=CHAT_TEMPLATE))
    question = {"role": "user", "content": "1+1="}
    batch = RewardBatch(
        prompts=["", ""],
        responses=["2", "+12"],
        prompt_tokens=[[], []],
        response_tokens=[[], []],
        finished=[True, True],
        fields=[{}, {}],
        messages=[[question, {"role": "assistant", "content": "1="}], None],
        samples=[0, 1],
    )
    continued, plain = (_retokenized("", batch, row, Retokenizer(tokenizer, 64)).tokens for row in range(2))
    assert continued == Retokenizer(tokenizer, 64)("", [question], "1=2", finished=True).tokens
    assert tokenizer.decode(plain[1:-1]) == "+12"
