"""Texts that end a response: when one is complete, and what the ranks of a vLLM do then. A stand-in takes the steps."""

from dataclasses import replace

import pytest

from megarlhf.config import RoleConfig, RolloutConfig
from megarlhf.rollout.factory import sampling_of
from megarlhf.rollout.responses import FinishedResponses, Sampling, StopStrings
from megarlhf.rollout.vllm.generate_loop import GenerateLoop, response_of
from tests.rollout.test_generate_loop import ROWS, feed_of, output
from tests.tables import make_response
from tools.demo.make_data import Recipe, write_all

PIECES = {1: "a", 2: "b", 3: "ab", 4: "", 5: "</answer", 6: ">x", 7: "é"}


def decode(tokens):
    return "".join(PIECES[token] for token in tokens)


def sampling(*texts):
    return Sampling(max_tokens=9, end_ids=(9,), stop=StopStrings(texts, decode))


@pytest.mark.parametrize(
    ("texts", "tokens", "ends"),
    [
        (["ab"], [1, 2], True),
        (["ab"], [2, 3], True),
        (["ab"], [2, 1], False),
        (["ab"], [1, 4, 4, 4, 4, 4, 4, 2], True),  # tokens without text stand between
        (["</answer>"], [1, 1, 1, 1, 1, 1, 5, 6], True),  # the token goes on behind the text
        (["</answer>"], [5], False),
        (["aé"], [1, 7], True),
        (["zz", "b"], [2], True),
        (["b"], [], False),
    ],
)
def test_a_text_is_complete(texts, tokens, ends):
    assert sampling(*texts).ends(tokens) is ends


def test_only_the_end_of_a_response_is_looked_at():
    asked = []
    stop = StopStrings(("ab",), lambda tokens: asked.append(len(tokens)) or decode(tokens))
    assert not stop.complete_in([2] * 1000)
    assert asked == [3]


def test_what_responses_depend_on_is_said_as_it_was_where_nothing_of_this_is_set():
    plain = Sampling(max_tokens=3, end_ids=(2,))
    assert plain.identity() == {"max_tokens": 3, "temperature": 1.0, "greedy": False, "end_ids": [2]}
    assert replace(plain, top_k=4).identity()["top_k"] == 4
    assert sampling("x").identity()["stop"] == ["x"]


class TwoRequests:
    """What it says in each step; an aborted request says nothing more."""

    steps = (
        [output([1], None, "10"), output([1], None, "11")],
        [output([1, 2], None, "10"), output([1, 1], None, "11")],
        [output([1, 1, 9], "stop", "11")],
    )

    def __init__(self):
        self.open, self.taken, self.aborted = ["10-a1", "11-b2"], 0, []

    def get_num_unfinished_requests(self):
        return len(self.open)

    def step(self):
        self.taken += 1
        if self.taken == len(self.steps):
            self.open.remove("11-b2")
        return self.steps[self.taken - 1]

    def abort_request(self, requests, internal):
        assert internal
        self.aborted += requests
        self.open = [name for name in self.open if name not in requests]


def test_a_request_is_ended_with_the_token_that_completes_a_text():
    engine, bank = TwoRequests(), FinishedResponses()
    loop = GenerateLoop(engine, lambda _: list(engine.open), feed_of(4, 7), ROWS, sampling("ab"), 0, bank)
    assert loop.run() is False
    assert engine.aborted == ["10-a1"]
    assert bank.held == {4: make_response([1, 2], [-0.5] * 2, True), 7: make_response([1, 1, 9], [-0.5] * 3, True)}


def test_a_text_that_is_complete_at_the_longest_length_has_ended_the_response():
    assert response_of(output([1, 1, 2], "length"), replace(sampling("ab"), max_tokens=3), 0).finished


def test_the_configuration_reaches_the_engines(tmp_path):
    write_all(tmp_path, Recipe(validation=4, test=4, sft_train=1, pairs_train=1, prompts_train=1), seed=0)
    from megarlhf.data.tokenizers.tokenizer import load_tokenizer

    actor = RoleConfig.model_validate({"model": {"path": str(tmp_path / "base")}})
    tokenizer = load_tokenizer(tmp_path / "base")
    rollout = RolloutConfig(stop=("1+",), stop_token_ids=(15, 2), top_k=3)
    made = sampling_of(rollout, actor, tokenizer)
    assert (made.end_ids, made.top_k, made.stop.texts) == ((2, 15), 3, ("1+",))
    assert made.ends(tokenizer.encode("51+"))
    assert sampling_of(rollout, actor, tokenizer, greedy=True).top_k == 0, "of the evaluation within rl"
    with pytest.raises(ValueError, match=r"rollout.stop_token_ids names \[16\]; the tokenizer has ids from 0 to 15"):
        sampling_of(RolloutConfig(stop_token_ids=(16,)), actor, tokenizer)
