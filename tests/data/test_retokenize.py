"""Texts in another tokenizer's ids, by hand: a token for each character, in another order."""

import pytest

from megarlhf.data.samples.retokenize import Retokenizer, TextTooLong
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer, load_tokenizer
from tests.classifiers import CHAT_TEMPLATE, write_tokenizer
from tests.refuses import refuses

BOS, EOS = 1, 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """<unk> <s> </s> <pad>, then 1 is 4, 2 is 5, + is 6, = is 7, [ is 8, ] is 9, a is 10, u is 11."""
    folder = tmp_path_factory.mktemp("letters")
    return load_tokenizer(write_tokenizer(folder, letters="12+=[]au", chat_template=CHAT_TEMPLATE))


@pytest.mark.parametrize("finished", [True, False])
def test_text_between_begin_and_end(tokenizer, finished):
    made = Retokenizer(tokenizer, 64)("1+1=", None, "2", finished=finished)
    assert made.tokens == [BOS, 4, 6, 4, 7, 5] + [EOS] * finished
    assert not made.truncated


def test_messages_are_rendered_by_its_own_template_whatever_the_prompt_was(tokenizer):
    """Which writes no begin-of-sequence here, so there is none."""
    messages = [{"role": "user", "content": "1+1="}]
    made = Retokenizer(tokenizer, 64)("<|user|>another template", messages, "2", finished=True)
    assert made.tokens == [8, 11, 9, 4, 6, 4, 7, 8, 10, 9, 5, EOS]


def test_what_is_too_long_is_refused_or_loses_its_beginning(tokenizer):
    with refuses("7 tokens", "may read 5", error=TextTooLong):
        Retokenizer(tokenizer, 5)("1+1=", None, "2", finished=True)
    assert not Retokenizer(tokenizer, 7)("1+1=", None, "2", finished=True).truncated
    made = Retokenizer(tokenizer, 5, cuts=True)("1+1=", None, "2", finished=True)
    assert made.tokens == [BOS, 4, 7, 5, EOS], "behind its begin-of-sequence"
    assert made.truncated


def test_a_begin_of_sequence_that_only_the_template_writes_is_kept(fast_tokenizer):
    """The tokenizer itself begins no text with it."""
    fast = fast_tokenizer(prefix=False, eos_token="</s>", bos_token="<s>")
    fast.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    other = HuggingFaceTokenizer(fast, "here")
    assert other.bos_id is None
    messages = [{"role": "user", "content": "37+48="}]
    whole = Retokenizer(other, 64)("", messages, "85", finished=True).tokens
    cut = Retokenizer(other, 5, cuts=True)("", messages, "85", finished=True)
    assert cut.truncated
    assert len(whole) > 5
    assert cut.tokens == [BOS, *whole[-4:]]


def test_messages_that_its_own_template_leaves_out_are_refused_unless_they_may_be(tmp_path):
    """The score would be of another conversation than the actor has had."""
    only_users = "{% for m in messages if m.role != 'system' %}[u]{{ m.content }}{% endfor %}"
    reader = load_tokenizer(write_tokenizer(tmp_path, letters="12+=[]au", chat_template=only_users))
    talk = [{"role": "system", "content": "1"}, {"role": "user", "content": "1+1="}]
    with refuses("message 1 ('system')"):
        Retokenizer(reader, 64)("", talk, "2", finished=True)
    made = Retokenizer(reader, 64, may_drop=("messages",))("", talk, "2", finished=True)
    assert made == Retokenizer(reader, 64)("", talk[1:], "2", finished=True)
