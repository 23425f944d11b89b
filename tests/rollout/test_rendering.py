"""What stands between two turns: sampled tokens stay, and the whole is what the chat template writes, or it is refused
or counted. Published templates: `tests/published/test_turns.py`.

Not covered: white space that a token takes in at a border (Phi-3's marks) and that the model samples there."""

import io
import json
import random
from collections import Counter

import pytest
import sentencepiece

from megarlhf.data.sample_types import Unusable
from megarlhf.data.samples.encoders import PromptEncoder
from megarlhf.data.text.omissions import NotWritten
from megarlhf.data.text.templates import Conversation, chat_template
from megarlhf.data.tokenizers.tokenizer import SentencePieceTokenizer, load_tokenizer
from megarlhf.rollout.environments.rendering import ChatRendering, HistoryRewritten, NotContinued, PlainRendering
from megarlhf.rollout.environments.template_trial import describe_trials, try_template
from tests.chat_model import write_chat_tokenizer
from tests.data.chat_styles import CHATML, STYLES, chat_tokenizer, said
from tests.refuses import missing_names, refuses
from tests.rollout.turn_styles import TURN_STYLES

TRIED = {
    "chatml": "EE EE EE", "json": "EE EE EE", "opened": "EE EE EE", "bracketed": "EE EE EE", "emptied": "EE EE EE",
    "twice": "EE EE EE", "reasoning": "EE EE EE",
    "llama_3": "EE EE EE",
    "gemma": "EE XX XX", "mistral": "EE XX XX", "deepseek": "EE EE EE",
    "lead": "EE XX XX", "refusing": "ER ER ER", "two_roles": "EE XX XX", "hoisting": "EE XX XX",
    "qwen_3": "ER EE ER", "thinking": "ER ER ER", "stripping": "ER ER ER", "splitting": "EE EE EE",
    "switched": "RR RR RR", "marked": "EE EE EE",
    "next_begins": "RR RR RR", "earlier_ends": "RR RR RR", "no_ends": "XX XX XX", "late_ends": "XX XX XX",
}  # fmt: skip
"""By answers of the user, of a tool, and of a tool and then the user: without and with a thought; exact, white space,
rewritten, or x: cannot be continued."""
LETTER = {"exact": "E", "white_space": "W", "rewritten": "R", "refused": "X"}


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """One token a character, and one a mark."""
    return chat_tokenizer(tmp_path_factory.mktemp("letters"), None)


def template_of(letters, style, **variables):
    return chat_template(letters, {**STYLES, **TURN_STYLES}[style], variables)


def outcomes(trials):
    letters = [LETTER[trial.outcome] for trial in trials]
    return " ".join("".join(letters[n : n + 2]) for n in range(0, len(letters), 2))


@pytest.mark.parametrize("style", TRIED)
def test_the_trial_of_each_template(letters, style):
    trials = try_template(template_of(letters, style))
    assert outcomes(trials) == TRIED[style], [trial.reason for trial in trials]
    assert all(bool(trial.reason) == (trial.outcome != "exact") for trial in trials)


def squeezed(text):
    return "".join(text.split())


def drawn_text(draw, number):
    """A turn's text: plain, with white space around, with a thought, with names of special tokens or tags, or empty."""
    word = draw.choice(
        ["4", "zqxjkv", "zqxjkv1 zqxjkv", "so 2+2", "a\nb", "<|im_end|>", "</think> hm", "<tool>x</tool>"]
    )
    text = f"{word}{number}" if draw.random() < 0.8 else "".join(draw.choices(["4", " ", "\n", ""], k=2))
    edges = draw.choice([("", "")] * 4 + [(" ", ""), ("", "\n"), ("\n\n", " ")])
    thought = draw.choice(
        ["", "", "", "<think>\nhm\n</think>\n\n", "hm\n</think>\n\n", "<think>\n\n</think>\n\n", "<think>hm"]
    )
    return thought + edges[0] + text + edges[1]


def observation(draw, role, number):
    content = draw.choice(["4", f"o{number}", "zqxjkv", f"so {number}\n", '{"x": 1}', "", " \n", "a\n\n b"])
    if role != "tool":
        parts = [{"type": "text", "text": content}]
        return [said(role, parts if draw.random() < 0.2 else content)]
    return [said(role, f"{content}{n}" * bool(content), tool_call_id=f"aaaaaaaa{n}") for n in range(draw.randint(1, 3))]


def content_of(message):
    content = message["content"]
    return content if isinstance(content, str) else content[0]["text"]


def converse(letters, template, draw, roles):
    """One conversation by `as_sampled`, compared with `refuse` and with the template. Yields outcomes."""
    names, number = letters.tokens(), 0
    as_sampled, refusing = ChatRendering(template, "as_sampled"), ChatRendering(template)

    def spelled(ids):
        return "".join(names[token] for token in ids)

    first = [said("system", "4")] * (draw.random() < 0.3) + [said("user", "4")]
    following = [said("user", "so zqxjkv")] * (draw.random() < 0.2)
    try:
        opening = as_sampled.opening(Conversation(first), following)
    except ValueError:  # a template without a system message, or without two of the user
        opening = as_sampled.opening(Conversation([said("user", "4")]), ())
    ids, conversation, is_canonical, worst = list(opening.ids), opening.conversation, True, 0
    assert spelled(ids) == template.text(conversation, reply=True)
    for number in range(draw.randint(1, 4)):
        text = drawn_text(draw, number)
        ended_by = draw.choice([template.end] * 7 + [None] * 2 + [letters.pad_id])
        sampled = [names.index(letter) for letter in text] + [ended_by] * (ended_by is not None)
        is_canonical &= letters.encode(text) == sampled[: len(text)]
        messages = observation(draw, draw.choice(roles), number)
        delta = as_sampled.delta(conversation, text, messages, ended_by=ended_by)
        try:
            assert refusing.delta(conversation, text, messages, ended_by=ended_by) == delta
            assert delta.history != "rewritten" or ended_by == letters.pad_id, "by chance, and not by the template"
        except HistoryRewritten:
            assert delta.history == "rewritten"
        ids += [*sampled, *delta.ids]
        read, whole = spelled(ids), template.text(delta.conversation, reply=True)
        assert whole.endswith(spelled(delta.ids))
        assert all(squeezed(content_of(message)) in squeezed(spelled(delta.ids)) for message in messages)
        was_rewritten, worst = worst == 2, max(worst, "EWR".index(LETTER[delta.history]))
        assert bool(delta.reason) == (delta.history != "exact")
        if worst == 0:
            assert read == whole
            assert not is_canonical or ids == template.ids(whole)
        elif worst == 1:
            assert squeezed(read) == squeezed(whole)
        elif delta.history == "rewritten" and not was_rewritten:
            as_is = [*conversation.messages, said("assistant", text), *messages]
            as_is = [{**message, "content": content_of(message)} for message in as_is]
            assert squeezed(read) != squeezed(template.text(Conversation(as_is), reply=True))
        conversation = delta.conversation
        yield LETTER[delta.history]


USER, BOTH = ("user",), ("user", "tool")
WRITES = {
    "chatml": (BOTH, "ER"), "opened": (BOTH, "ER"), "bracketed": (BOTH, "ER"), "emptied": (BOTH, "ER"),
    "twice": (BOTH, "ER"), "marked": (BOTH, "ER"),
    "llama_3": (BOTH, "EWR"), "gemma": (USER, "EWR"), "mistral": (USER, "ER"), "lead": (USER, "EWR"),
    "qwen_3": (BOTH, "EWR"), "thinking": (BOTH, "ER"), "stripping": (BOTH, "EWR"), "splitting": (BOTH, "EWR"),
    "switched": (BOTH, "R"), "next_begins": (BOTH, "ER"), "earlier_ends": (BOTH, "ER"), "hoisting": (USER, "ER"),
}  # fmt: skip
"""Roles that the template writes, and the outcomes that occur: R everywhere, as some turns end with another token."""


@pytest.mark.parametrize("style", WRITES)
def test_random_conversations_are_what_the_template_writes_or_refused_or_counted(letters, style):
    roles, expected = WRITES[style]
    template = template_of(letters, style)
    counted = Counter(
        outcome for seed in range(60) for outcome in converse(letters, template, random.Random(seed), roles)
    )
    assert set(counted) == set(expected), counted


TURNS = ["three birds", "so", "a  boat\n"]
TOOLS = [[said("tool", "7")], [said("tool", "the sea"), said("tool", "7")], [said("user", " two\n")]]


def pieces(directory):
    """SentencePiece with a space before the first word, in which marks are control symbols, or tokens added to it."""
    buffer = io.BytesIO()
    corpus = ["a small red boat", "two birds sing over the sea", "three of us\n\n"] * 30
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=buffer, model_type="bpe", byte_fallback=True, vocab_size=340,
        hard_vocab_limit=False, minloglevel=2, normalization_rule_name="identity", remove_extra_whitespaces=False,
        control_symbols=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    control = SentencePieceTokenizer(buffer.getvalue(), "tokenizer.model", CHATML)
    names = {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    template = CHATML.replace("<|im_start|>", "<|begin|>").replace("<|im_end|>", "<|end|>")
    (directory / "tokenizer.model").write_bytes(buffer.getvalue())
    size = control.vocab_size
    (directory / "added_tokens.json").write_text(json.dumps({"<|end|>": size, "<|begin|>": size + 1}))
    (directory / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": template}))
    added = load_tokenizer(directory)
    assert not isinstance(added, SentencePieceTokenizer)
    return control, added


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    """Tokenizers that merge characters: pairs of bytes, and two that put a space before the first word."""
    directory = tmp_path_factory.mktemp("bytes")
    write_chat_tokenizer(directory)
    control, added = pieces(tmp_path_factory.mktemp("pieces"))
    return {"bytes": load_tokenizer(directory), "control": control, "added": added}


@pytest.mark.parametrize("name", ["bytes", "control", "added"])
def test_ids_are_the_whole_s_where_the_sampled_ones_are_canonical_and_stay_where_they_are_not(merging, name):
    """Turns that the model ended are compared, and turns that were cut, in which another tokenization was sampled."""
    tokenizer = merging[name]
    template = chat_template(tokenizer)
    rendering = ChatRendering(template)
    assert all(name != "bytes" or len(tokenizer.encode(text)) < len(text) for text in TURNS[:1]), "it merges"
    opening = rendering.opening(Conversation([said("system", "so"), said("user", "sing")]), ())
    conversation, canonical, other = opening.conversation, list(opening.ids), list(opening.ids)
    for text, messages in zip(TURNS, TOOLS, strict=True):
        delta = rendering.delta(conversation, text, messages, ended_by=template.end)
        cut = rendering.delta(conversation, text, messages, ended_by=None)
        assert cut.ids == [template.end, *delta.ids]
        assert (delta.history, cut.history, cut.conversation) == ("exact", "exact", delta.conversation)
        letters = [token for letter in text for token in tokenizer.encode(letter, continuation=True)]
        canonical += [*tokenizer.encode(text, continuation=True), template.end, *delta.ids]
        other += [*letters, *cut.ids]
        conversation = delta.conversation
    assert canonical == template.ids(template.text(conversation, reply=True))
    inside = rendering.delta(conversation, "so", " a boat", ended_by=None)
    assert inside.ids == tokenizer.encode(" a boat", continuation=True)
    assert other != canonical
    assert tokenizer.decode(other) == tokenizer.decode(canonical)


def test_an_opening_has_the_ids_of_a_prompt_with_its_messages(letters):
    """With the record's tools and template variables, and a content in parts; a text begins the assistant's turn."""
    given = STYLES["tools"].replace("{% for m in messages %}", "{{ mood }}{% for m in messages %}", 1)
    template = chat_template(letters, given)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    system, following = said("system", "so"), said("user", [{"type": "text", "text": "go"}])
    prompt = [system, said("user", "1+1"), said("assistant", "2"), said("tool", "2")]
    record = {"messages": [*prompt, following], "tools": tools, "chat_template_kwargs": {"mood": "grim"}}
    encode = PromptEncoder(tokenizer=None, max_prompt_tokens=10_000, template="chat", chat_template=given).by(letters)
    asked = Conversation(prompt, tools, variables={"mood": "grim"})
    rendering = ChatRendering(template)
    opening = rendering.opening(asked, [following])
    assert opening.ids == encode(0, record).tokens
    assert not missing_names(letters.decode(opening.ids), "add", "grimsystem")
    assert opening.conversation.messages[-1] == said("user", "go")
    alone = rendering.opening(asked, ()).ids
    assert alone == encode(0, {**record, "messages": prompt}).tokens != opening.ids
    assert rendering.opening(asked, "well").ids == [*alone, *letters.encode("well")]
    with refuses("'tool'", "no assistant"):
        rendering.opening(Conversation([said("user", "a")]), [said("tool", "2")])
    with refuses("template_may_drop", "white_space", error=NotWritten):
        ChatRendering(template_of(letters, "llama_3")).opening(Conversation([said("user", "a")]), [said("user", "b ")])
    may_drop = ChatRendering(template_of(letters, "llama_3"), may_drop=("white_space",))
    assert may_drop.opening(Conversation([said("user", "a")]), [said("user", "b ")]).ids


ASKED = Conversation([said("user", "1+1")])


def test_a_rewritten_history_is_refused_in_words_or_counted(letters):
    template = template_of(letters, "qwen_3")
    thought = "<think>\nhm\n</think>\n\n2"
    with refuses(
        "'user'",
        "<think>",
        "was sampled",
        "environment.history",
        "as_sampled",
        "data.chat_template",
        error=HistoryRewritten,
    ):
        ChatRendering(template).delta(ASKED, thought, [said("user", "go")], ended_by=template.end)
    delta = ChatRendering(template, "as_sampled").delta(ASKED, thought, [said("user", "go")], ended_by=template.end)
    assert letters.decode(delta.ids) == "\nuser\ngo\nassistant\n"
    assert delta.history == "rewritten"
    kept = ChatRendering(template).delta(ASKED, thought, [said("tool", "go")], ended_by=template.end)
    assert kept.history == "exact"
    with refuses("was read", "<think>", "'user'", error=HistoryRewritten):
        ChatRendering(template).delta(kept.conversation, "4", [said("user", "go")], ended_by=template.end)
    other = ChatRendering(template).delta(ASKED, "2", [said("user", "go")], ended_by=letters.pad_id)
    assert (other.ids, other.history) == (delta.ids, "rewritten"), "the model's, not the template's: counted alone"
    assert not missing_names(other.reason, "'<pad>'", "'<|im_end|>'")
    with refuses("'user'", "<think>", error=HistoryRewritten):
        ChatRendering(template).delta(ASKED, thought, [said("user", "go")], ended_by=letters.pad_id)
    earlier_ends = template_of(letters, "earlier_ends")
    with refuses("'<|eot_id|>'", "'<|im_end|>'", "as_sampled", error=HistoryRewritten):
        ChatRendering(earlier_ends).delta(ASKED, "2", [said("user", "go")], ended_by=earlier_ends.end)
    beyond = ChatRendering(template, "as_sampled").delta(ASKED, "2", [said("user", "go")], ended_by=10**6)
    assert (beyond.history, "token 1000000" in beyond.reason) == ("rewritten", True)


@pytest.mark.parametrize("style, content, history", [
    ("opened", "<think>\nhm\n</think>\n\n2", "exact"), ("splitting", "hm\n</think>\n\n2", "exact"),
    ("stripping", "hm\n</think>\n\n2", "rewritten"),
])  # fmt: skip
def test_a_thought_that_the_template_opens_belongs_to_the_message_where_it_keeps_it(letters, style, content, history):
    delta = ChatRendering(template_of(letters, style), "as_sampled").delta(
        ASKED, "hm\n</think>\n\n2", [said("user", "go")], ended_by=None
    )
    assert (delta.conversation.messages[1], delta.history) == (said("assistant", content), history)


def test_a_token_of_the_next_message_may_end_a_turn(letters):
    """As GLM's <|user|>: it is not written twice, and an end of sequence does not stand for it."""
    template = template_of(letters, "next_begins")
    mark = letters.tokens().index("<|im_start|>")
    cut, marked, ended = (
        ChatRendering(template, "as_sampled").delta(ASKED, "2", [said("user", "go")], ended_by=end)
        for end in (None, mark, letters.eos_id)
    )
    assert cut.ids == [mark, *marked.ids] == ended.ids
    assert [cut.history, marked.history, ended.history] == ["exact", "exact", "rewritten"]


def test_a_text_goes_on_inside_the_turn(letters):
    """Behind the end of a turn it would stand outside, which the template never writes."""
    template = template_of(letters, "chatml")
    for history in ("refuse", "as_sampled"):
        inside = ChatRendering(template, history).delta(ASKED, "f(2)", " = 4", ended_by=None)
        assert (inside.ids, inside.conversation, inside.history) == (letters.encode(" = 4"), ASKED, "exact")
    rest = ChatRendering(template).delta(ASKED, "f(2) = 4 so", [said("user", "go")], ended_by=template.end)
    assert rest.conversation.messages[1]["content"] == "f(2) = 4 so"
    with refuses("'<|im_end|>'", "return messages", "rollout.stop", error=HistoryRewritten):
        ChatRendering(template).delta(ASKED, "f(2)", " = 4", ended_by=template.end)
    outside = ChatRendering(template, "as_sampled").delta(ASKED, "f(2)", " = 4", ended_by=template.end)
    assert (outside.ids, outside.history) == (letters.encode(" = 4"), "rewritten")


@pytest.mark.parametrize("style, messages, names", [
    ("two_roles", [said("tool", "4")], ["'tool'", "'4'", "data.chat_template"]),
    ("two_roles", [said("user", "a"), said("tool", "a")], ["'tool'", "another role"]),
    ("hoisting", [said("tool", "4")], ["'tool'", "behind the model's turn"]),
    ("late_ends", [said("user", "4")], ["'user'", "</turn>", "special token", "data.chat_template"]),
    ("no_ends", [said("user", "4")], ["'user'", "special token"]),
    ("gemma", [said("tool", "4")], ["roles must alternate", "user, assistant, tool"]),
    ("chatml", [said("usr", "4")], ["'usr'", "did you mean 'user'"]),
    ("chatml", [said("user", 4)], ["messages of the environment", "content"]),
    ("chatml", [said("user", [{"type": "image_url", "image_url": "x"}])], ["messages of the environment", "text"]),
])  # fmt: skip
@pytest.mark.parametrize("history", ["refuse", "as_sampled"])
def test_what_a_template_cannot_write_behind_a_turn_is_refused(letters, style, messages, names, history):
    """Whatever stands before: here the prompt has the same text as the observation."""
    prompt = Conversation([said("user", "4")])
    with refuses(*names):
        ChatRendering(template_of(letters, style), history).delta(prompt, "4", messages, ended_by=None)


def test_a_template_that_changes_answers_or_cuts_observations_is_refused(letters):
    changed = chat_template(letters, CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"))
    with refuses("assistant's message", "data.chat_template", error=NotContinued):
        ChatRendering(changed, "as_sampled").delta(ASKED, "2", [said("user", "go")], ended_by=None)
    cutting = chat_template(letters, CHATML.replace("{{ m.content }}", "{{ m.content[:9] }}"))
    assert ChatRendering(cutting).delta(ASKED, "2", [said("user", "123456789")], ended_by=None).history == "exact"
    with refuses("'user'", "1234567890", error=NotContinued):
        ChatRendering(cutting).delta(ASKED, "2", [said("user", "1234567890")], ended_by=None)
    splitting = chat_template(letters, CHATML.replace("{{ m.content }}", "{{ m.content.split('###')[0] }}"))
    with refuses("'user'", "ab###c", error=NotContinued):
        ChatRendering(splitting).delta(ASKED, "2", [said("user", "ab###c")], ended_by=None)
    template = template_of(letters, "refusing")
    assert ChatRendering(template).delta(ASKED, "[final]2", [said("user", "go")], ended_by=None).history == "exact"
    with refuses("a mark in a content"):
        ChatRendering(template, "as_sampled").delta(ASKED, "2[final]", [said("user", "go")], ended_by=None)


def test_observations_are_found_behind_whatever_was_sampled_before(letters):
    """A changed answer keeps the renderings from being compared; a search in the delta is left."""
    replacing = "{{ m.content | replace('4', 'four') if m.role == 'assistant' else m.content }}"
    template = chat_template(letters, STYLES["two_roles"].replace("{{ m.content }}", replacing))
    rendering = ChatRendering(template, "as_sampled")
    first = rendering.delta(ASKED, "4", [said("user", "go")], ended_by=None)
    assert first.history == "rewritten"
    second = rendering.delta(first.conversation, "2", [said("user", '{"x": "go on"}')], ended_by=None)
    assert '{"x": "go on"}' in letters.decode(second.ids)
    with refuses("'tool'", error=NotContinued):
        rendering.delta(first.conversation, "2", [said("tool", "gone")], ended_by=None)


def test_texts_without_a_template(merging):
    """Also beside a template, where `data.template` is auto and the record has a text."""
    tokenizer = merging["control"]
    for rendering in (PlainRendering(tokenizer), ChatRendering(chat_template(tokenizer))):
        opening = rendering.opening("two birds", " sing")
        encode = PromptEncoder(tokenizer=None, max_prompt_tokens=99, template="plain").by(tokenizer)
        assert (opening.ids, opening.conversation) == (encode(0, {"prompt": "two birds sing"}).tokens, "two birds sing")
        delta = rendering.delta(opening.conversation, "x", " a boat", ended_by=tokenizer.eos_id)
        assert (delta.ids, delta.history) == (tokenizer.encode(" a boat", continuation=True), "exact")
        assert rendering.opening("two", ()).ids == encode(0, {"prompt": "two"}).tokens
        with refuses("messages", "a text", "data.template", "chat"):
            rendering.delta("two", "x", [said("user", "a")], ended_by=None)
        with pytest.raises(Unusable):
            rendering.opening("", " ")


def test_the_start_of_a_run_is_told_in_sentences(letters):
    """By a prompt of the data and the roles of the environment."""
    trials = try_template(template_of(letters, "qwen_3"))
    exact, rewritten = describe_trials(trials, "refuse")
    assert not missing_names(exact, "keeps", "user (to plain turns)", "tool")
    assert not missing_names(
        rewritten, "environment.history: refuse", "as_sampled", "user (to turns with a thought)",
        "tool and then user (to turns with a thought)", "turn 1",
    )  # fmt: skip
    assert "ends the run" in rewritten
    assert "ends the run" not in describe_trials(trials, "as_sampled")[1]
    (refused,) = describe_trials(try_template(template_of(letters, "gemma"), roles=["tool"]), "refuse")
    assert not missing_names(refused, "cannot be continued", "tool", "roles must alternate")
    trials = try_template(template_of(letters, "two_roles"), Conversation([said("user", "zqanswer0")]), ["user"])
    assert (outcomes(trials), len(describe_trials(trials, "refuse"))) == ("EE", 1)
    assert outcomes(try_template(template_of(letters, "switched", thinking=True))) == "ER ER ER"
