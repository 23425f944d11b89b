"""Which tokens of a conversation are learnt, written out by hand for templates in the style of well-known models."""

import pytest

from megarlhf.data.samples.encoders import PairEncoder, PromptEncoder, SFTEncoder, Unusable
from megarlhf.data.samples.truncation import CuttingEncoder
from megarlhf.data.text.assistant_mask import Inexact, Whole, answered
from megarlhf.data.text.templates import Conversation, chat_template
from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer
from tests.data.chat_styles import STYLES, chat_tokenizer, said
from tests.refuses import refuses

TALK = [said("user", "1+1"), said("assistant", "2"), said("user", "2+2"), said("assistant", "4")]
LONG = [*TALK, said("user", "3+3"), said("assistant", "6"), said("user", "4+4"), said("assistant", "8")]
ASK = {"tokenizer": None, "max_prompt_tokens": 500}
LIMITS = {**ASK, "max_response_tokens": 500}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    root = tmp_path_factory.mktemp("styles")
    return {name: chat_tokenizer(root / name, template) for name, template in STYLES.items()} | {
        "none": chat_tokenizer(root / "none", None)
    }


def learnt_texts(tokenizer, sample):
    """Each stretch as text, its special tokens spelled."""
    names = tokenizer.tokens()
    pairs = zip(sample.stretches[0::2], sample.stretches[1::2], strict=True)
    return ["".join(names[token] for token in sample.tokens[first:end]) for first, end in pairs]


@pytest.mark.parametrize("style, last, everything", [
    ("chatml", ["4<|im_end|>"], ["2<|im_end|>", "4<|im_end|>"]),
    ("llama_3", ["4<|eot_id|>"], ["2<|eot_id|>", "4<|eot_id|>"]),
    ("mistral", ["4</s>"], ["2</s>", "4</s>"]),
    ("marked", ["4<|im_end|>"], ["2<|im_end|>", "4<|im_end|>"]),
])  # fmt: skip
def test_answers_and_their_ends_are_learnt_and_nothing_else(tokenizers, style, last, everything):
    """Every token is one character or one mark. All tokens up to the last answer's end are transformers' own; behind
    it stands white space only."""
    tokenizer = tokenizers[style]
    template, talk = chat_template(tokenizer), Conversation(TALK)
    theirs = tokenizer.of_transformers.apply_chat_template(TALK, tokenize=True, return_dict=False)
    for loss_on, expected in (("last", last), ("all", everything)):
        found = answered(template, talk, loss_on)
        assert learnt_texts(tokenizer, found) == expected
        assert found.tokens == theirs[: len(found.tokens)]
        assert not tokenizer.decode(theirs[len(found.tokens) :]).strip()
    assert found.tokens[-1] == template.end


@pytest.mark.parametrize("style", ["chatml", "marked", "llama_3"])
@pytest.mark.parametrize("source", ["messages", "conversations"])
def test_an_answer_of_weight_0_is_not_learnt(tokenizers, style, source):
    """By prefixes and by marks. The text ends with the last answer that is learnt; null and 1 are answers as any."""

    def weighed(*weights):
        answers = iter(weights)
        talk = [{**each, "weight": next(answers)} if each["role"] == "assistant" else each for each in LONG]
        if source == "messages":
            return {"messages": talk}
        names = {"user": "human", "assistant": "gpt"}
        turns = [{"from": names[m["role"]], "value": m["content"], "weight": m.get("weight")} for m in talk]
        return {"conversations": turns}

    every, last = (SFTEncoder(**LIMITS, loss_on=on).by(tokenizers[style]) for on in ("all", "last"))
    whole = every(0, {"messages": LONG})
    found = every(0, weighed(0, 1, 0.0, 0))
    texts = learnt_texts(tokenizers[style], whole)
    assert len(texts) == 4
    assert learnt_texts(tokenizers[style], found) == texts[1:2]
    assert found.tokens == whole.tokens[: whole.stretches[3]]
    assert every(0, weighed(1, None, 1, True)) == whole
    assert learnt_texts(tokenizers[style], every(0, weighed(1, 0, 1, 0))) == [texts[0], texts[2]]
    assert last(0, weighed(0, 0, 0, 1)) == last(0, {"messages": LONG})
    with refuses("every answer", error=Unusable):
        every(0, weighed(0, 0, 0, 0))
    with refuses("the last answer", error=Unusable):
        last(0, weighed(1, 1, 1, 0))
    with refuses("message 2", "weight = float 0.5", "1 or true"):
        every(0, weighed(0.5, 1, 1, 1))


def test_a_conversation_is_cut_where_it_would_be_skipped(tokenizers):
    """At the sum of the limits, wherever its first answer stands; it ends with a learnt token, and what has none
    before that is skipped."""
    tokenizer, limits = tokenizers["chatml"], {"tokenizer": None, "loss_on": "all"}
    record = {"messages": LONG}
    whole = SFTEncoder(**LIMITS, loss_on="all").by(tokenizer)(0, record)
    size = len(whole.tokens)
    for most in range(1, size + 2):
        options = {**limits, "max_prompt_tokens": most // 3 or 1, "max_response_tokens": most - (most // 3 or 1) or 1}
        most = options["max_prompt_tokens"] + options["max_response_tokens"]
        encoder = SFTEncoder(**options)
        cut = CuttingEncoder(encoder).by(tokenizer)
        if most >= size:
            assert cut(0, record) == encoder.by(tokenizer)(0, record) == whole
            continue
        with refuses(f"longer than {most} tokens", error=Unusable):
            encoder.by(tokenizer)(0, record)
        learnt = [n for n, is_learnt in enumerate(whole.learnt()[:most]) if is_learnt]
        if not learnt:
            with refuses(f"longer than {most} tokens", error=Unusable):
                cut(0, record)
            continue
        made = cut(0, record)
        assert made.how == (f"conversation cut at {most} tokens",)
        assert made.sample.tokens == whole.tokens[: learnt[-1] + 1]
        assert [n for n, is_learnt in enumerate(made.sample.learnt()) if is_learnt] == learnt


def test_weights_where_nobody_can_tell_what_is_marked(tokenizers):
    twice = STYLES["marked"].replace(
        "{% generation %}", "{% generation %}<|im_end|>{% endgeneration %};{% generation %}"
    )
    template = chat_template(tokenizers["none"], twice)
    assert len(answered(template, Conversation(TALK), "all").stretches) == 8
    with refuses("message 2 ('assistant')", "one stretch", error=Inexact):
        answered(template, Conversation(TALK, unlearnt=frozenset({1})), "all")


def test_pairs_of_weight_0_are_skipped_and_other_weights_do_not_matter(tokenizers):
    """Nor are they a difference of the two sides; prompts have none."""
    encode = PairEncoder(**LIMITS).by(tokenizers["chatml"])
    sides = [[*TALK[:2], TALK[2], said("assistant", answer, weight=1)] for answer in "45"]
    plain = encode(0, {"chosen": sides[0], "rejected": sides[1]})
    other = [*TALK[:1], {**TALK[1], "weight": 0}, *sides[1][2:]]
    assert encode(0, {"chosen": sides[0], "rejected": other}) == plain
    with refuses("not to be learnt", error=Unusable):
        encode(0, {"chosen": sides[0], "rejected": [*TALK[:3], said("assistant", "5", weight=0)]})
    with refuses("chosen equals rejected", error=Unusable):
        encode(0, {"chosen": sides[0], "rejected": TALK})
    prompt = PromptEncoder(**ASK).by(tokenizers["chatml"])(0, {"messages": other[:3]})
    assert prompt.messages == TALK[:3]


def test_a_mask_by_hand(tokenizers):
    """ChatML: marks are one id each, every other character too."""
    encode = SFTEncoder(**LIMITS, loss_on="all")
    sample = encode.by(tokenizers["chatml"])(0, {"messages": TALK[:2]})
    start, end = (tokenizers["chatml"].tokens().index(name) for name in ("<|im_start|>", "<|im_end|>"))
    spell = tokenizers["chatml"].encode
    asked = [start, *spell("user\n1+1"), end, *spell("\n"), start, *spell("assistant\n")]
    assert sample.tokens == [*asked, *spell("2"), end]
    assert sample.learnt() == [False] * len(asked) + [True, True]


def test_prompts_are_what_transformers_asks_with_and_what_is_learnt_behind(tokenizers):
    """In every style, with the begin-of-sequence that the template writes, and none that it does not. The prompt of
    `rl` is the beginning of the sample of `sft`."""
    for style in ("chatml", "llama_3", "mistral", "marked"):
        prompt = PromptEncoder(**ASK).by(tokenizers[style])(0, {"messages": TALK[:3]})
        theirs = tokenizers[style].of_transformers
        options = {"add_generation_prompt": True, "return_dict": False}
        assert prompt.tokens == theirs.apply_chat_template(TALK[:3], tokenize=True, **options)
        assert prompt.text == theirs.apply_chat_template(TALK[:3], tokenize=False, add_generation_prompt=True)
        assert prompt.messages == TALK[:3]
        if style != "marked":
            sample = SFTEncoder(**LIMITS).by(tokenizers[style])(0, {"messages": TALK})
            assert sample.tokens[: sample.prompt_length] == prompt.tokens


REFUSED = [
    ("marked", STYLES["marked"].replace("{% generation %}", "").replace("{% endgeneration %}", ""), "last", TALK,
     "message 4 ('assistant')|data.chat_template|inexact: skip"),
    ("changing",
     STYLES["chatml"].replace("<|im_end|>", "{{ '!' if loop.last and m.role == 'assistant' }}<|im_end|>"), "all", TALK,
     "message 2 ('assistant')|differently|loss_on to last"),
    ("no mark", STYLES["marked"].replace("m.role == 'assistant'", "m.role == 'nobody'"), "all", TALK, "marks nothing"),
    ("mark without the end", STYLES["marked"].replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
     "all", TALK, "{% generation %}|'2'|ends a turn"),
    ("no end of a turn", STYLES["mistral"].replace("{{ eos_token }}", ""), "all", TALK, "no token|loss_on to last"),
    ("begins with the answer", STYLES["chatml"], "all", TALK[1:], "message 1|assistant"),
]  # fmt: skip


@pytest.mark.parametrize("name, template, loss_on, talk, names", REFUSED, ids=[case[0] for case in REFUSED])
def test_what_is_not_exact_is_refused(tokenizers, name, template, loss_on, talk, names):
    """With the message that is meant and what to do; or counted, where that was asked for."""
    with refuses(*names.split("|"), error=Inexact) as raised:
        answered(chat_template(tokenizers["none"], template), Conversation(talk), loss_on)
    assert "\n" not in str(raised.value)
    if name != "begins with the answer":
        options = {**LIMITS, "template": "chat", "chat_template": template, "loss_on": loss_on}
        with refuses("cannot be told", error=Unusable):
            SFTEncoder(**options, inexact="skip").by(tokenizers["none"])(0, {"messages": talk})


def test_an_answer_that_would_merge_with_the_text_before_it_stands_behind_it(fast_tokenizer):
    """The tokenizer of conftest.py has a token for "37"; a model that is asked with "3" answers "7", a token of its
    own. Of an answer that others follow, the ids of the whole conversation are another model's input: refused."""
    tokenizer = HuggingFaceTokenizer(fast_tokenizer(prefix=False, eos_token="</s>"), "here")
    assert len(tokenizer.encode("37")) == 1
    glued = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = chat_template(tokenizer, glued)
    fine = Conversation([said("user", "3"), said("assistant", "a")])
    assert answered(template, fine, "last").tokens == [*tokenizer.encode("3a"), tokenizer.eos_id]
    found = answered(template, Conversation([said("user", "3"), said("assistant", "7")]), "last")
    assert found.tokens == [*tokenizer.encode("3"), *tokenizer.encode("7"), tokenizer.eos_id]
    assert found.stretches == [1, 3]
    talk = [said("user", "3"), said("assistant", "7"), said("user", "3"), said("assistant", "7")]
    turns = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    with refuses("message 2 ('assistant')", "merges", error=Inexact):
        answered(chat_template(tokenizer, turns), Conversation(talk), "all")
    only = answered(chat_template(tokenizer, turns), Conversation(talk), "last")
    assert only.tokens == [*tokenizer.encode("37</s>3"), *tokenizer.encode("7</s>")]
    assert only.stretches == [len(only.tokens) - 2, len(only.tokens)]


def test_a_conversation_that_ends_otherwise_than_a_turn(tokenizers):
    """Phi-3 writes an end of sequence behind a whole conversation: each answer is learnt up to its own end."""
    template = STYLES["chatml"].replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    made, tokenizer = chat_template(tokenizers["none"], template), tokenizers["none"]
    assert made.text(Conversation(TALK)).endswith("<|im_end|>\n</s>")
    found = answered(made, Conversation(LONG), "all")
    assert learnt_texts(tokenizer, found) == [f"{number}<|im_end|>" for number in (2, 4, 6, 8)]
    assert found.tokens == answered(chat_template(tokenizer, STYLES["chatml"]), Conversation(LONG), "all").tokens


def test_what_stands_behind_the_last_answer_is_counted_and_not_learnt(tokenizers):
    """As in ShareGPT's conversations, which end where the user stopped."""
    options = {**LIMITS, "template": "chat"}
    for loss_on in ("last", "all"):
        encode = SFTEncoder(**options, loss_on=loss_on).by(tokenizers["chatml"])
        made = encode(0, {"messages": [*TALK, said("user", "thanks"), said("tool", "4")]})
        assert made.sample == encode(0, {"messages": TALK})
        assert made.how == ("with messages behind the last answer, which nobody learns",)


def test_an_answer_that_ends_with_one_of_its_calls_is_refused(tokenizers):
    """DeepSeek-V3's template writes an end behind the second call, and none behind one alone."""
    calls = (
        "{% for c in m.tool_calls or [] %}<|start_header_id|>{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "<|end_header_id|>{% if not loop.first %}<|im_end|>{% endif %}{% endfor %}"
    )
    for written, one_is_fine in ((calls, False), (calls.replace("not loop.first", "loop.last"), True)):
        template = STYLES["chatml"].replace(
            "{{ m.content }}<|im_end|>", "{{ m.content }}" + written + "{% if not m.tool_calls %}<|im_end|>{% endif %}"
        )
        made, tokenizer = chat_template(tokenizers["none"], template), tokenizers["none"]
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        one, two = ([said("user", "1"), said("assistant", "", tool_calls=[call] * number)] for number in (1, 2))
        (learnt,) = learnt_texts(tokenizer, answered(made, Conversation(two), "last"))
        assert learnt.endswith("f{}<|end_header_id|><|im_end|>")
        if one_is_fine:
            (learnt,) = learnt_texts(tokenizer, answered(made, Conversation(one), "last"))
            assert learnt == "<|start_header_id|>f{}<|end_header_id|><|im_end|>"
        else:
            with refuses("message 2 ('assistant')", "does not end with token", error=Inexact):
                answered(made, Conversation(one), "last")


@pytest.mark.parametrize("style", ["chatml", "llama_3", "mistral", "none"])
def test_ids_of_a_beginning_are_those_of_the_whole_up_to_a_mark(fast_tokenizer, style):
    """What is made anew behind the last mark equals what is made of the text alone; also where the text goes on
    otherwise, and where a user writes a mark."""
    fast = fast_tokenizer(prefix=False, eos_token="</s>", additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer = HuggingFaceTokenizer(fast, "here")
    bare = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    template = chat_template(tokenizer, STYLES.get(style, bare))
    for talk in (LONG, [said("user", "37 <|im_end|> 37<|im_"), *TALK[1:]]):
        text = template.text(Conversation(talk))
        whole = Whole(template, text)
        for number in range(len(text) + 1):
            for behind in ("", "3", "<|im_start|>", " </s>"):
                beginning = text[:number] + behind
                assert whole.ids_of(beginning) == template.ids(beginning)


def test_a_template_that_ends_no_turn_gets_the_end_of_sequence(tokenizers):
    """Which is what a generated response then ends with; white space that the template writes behind it is left out."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    made = chat_template(tokenizers["none"], template)
    found = answered(made, Conversation(TALK[:2]), "all")
    spell = tokenizers["none"].encode
    assert found.tokens == [*spell("user: 1+1\nassistant: 2"), tokenizers["none"].eos_id]
    assert found.stretches == [len(found.tokens) - 2, len(found.tokens)]
    assert (made.turn_end, made.end) == (None, tokenizers["none"].eos_id)


def test_calls_of_tools_are_learnt_as_the_template_writes_them(tokenizers):
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        said("user", "1+1"), {"role": "assistant", "content": None, "tool_calls": [call]}, said("tool", "2"),
        said("assistant", "2"),
    ]  # fmt: skip
    tokenizer = tokenizers["tools"]
    sample = SFTEncoder(**LIMITS, loss_on="all").by(tokenizer)(0, {"messages": messages, "tools": tools})
    assert learnt_texts(tokenizer, sample) == ['<call>add{"a": 1}</call><|im_end|>', "2<|im_end|>"]
    text = "".join(tokenizer.tokens()[token] for token in sample.tokens)
    assert text.startswith('<|im_start|>system\n{"type": "function", "function": {"name": "add"}}\n<|im_end|>\n')
    encode = SFTEncoder(**LIMITS).by(tokenizers["chatml"])
    with refuses("tools", "name 'add'"):
        encode(0, {"messages": TALK, "tools": tools})
    with refuses("message 2 ('assistant')", "name 'add'"):
        encode(0, {"messages": messages})


PAIRS = {
    "texts": {"prompt": "1+1", "chosen": "2", "rejected": "3"},
    "answers as messages": {
        "prompt": [said("user", "1+1")], "chosen": [said("assistant", "2")], "rejected": [said("assistant", "3")],
    },
    "conversations": {
        "chosen": [said("user", "1+1"), said("assistant", "2")],
        "rejected": [said("user", "1+1"), said("assistant", "3")],
    },
    "conversations beside their prompt": {
        "prompt": "1+1", "chosen": [said("user", "1+1"), said("assistant", "2")],
        "rejected": [said("user", "1+1"), said("assistant", "3")],
        "messages": [said("user", "1+1"), said("assistant", "2")],
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "1+1"}],
        "chosen": {"from": "gpt", "value": "2"}, "rejected": {"from": "gpt", "value": "3"},
    },
}  # fmt: skip


@pytest.mark.parametrize("form", PAIRS)
def test_pairs_in_every_form_are_one_sample(tokenizers, form):
    """Their common beginning is the prompt, and both end with the token that ends a turn."""
    template = "chat" if form == "texts" else "auto"
    pair = PairEncoder(**LIMITS, template=template).by(tokenizers["chatml"])(0, PAIRS[form])
    end, spell = tokenizers["chatml"].tokens().index("<|im_end|>"), tokenizers["chatml"].encode
    assert pair.chosen_tokens == [*spell("2"), end]
    assert pair.rejected_tokens == [*spell("3"), end]
    asked = PromptEncoder(**ASK).by(tokenizers["chatml"])
    assert pair.prompt_tokens == asked(0, {"messages": [said("user", "1+1")]}).tokens


def test_a_misspelt_role_is_refused_where_the_template_would_write_it(tokenizers):
    """ChatML writes any role. One that a template names in its text is its own."""
    encode = PromptEncoder(**ASK).by(tokenizers["chatml"])
    with refuses("message 2", "'asistant'", "did you mean 'assistant'"):
        encode(0, {"messages": [said("user", "1"), said("asistant", "2"), said("user", "3")]})
    named = STYLES["chatml"] + "{% if messages[0].role == 'context' %}{% endif %}"
    own = PromptEncoder(**ASK, chat_template=named).by(tokenizers["none"])
    assert own(0, {"messages": [said("context", "1"), said("user", "2")]}).text.startswith("<|im_start|>context\n1")


def test_variables_of_the_template_are_the_configuration_s(tokenizers):
    template = STYLES["chatml"] + "{{ 'think' if thinking else '' }}"
    with_it, without = (
        PromptEncoder(**ASK, chat_template=template, template_args=args)
        .by(tokenizers["none"])(0, {"messages": TALK[:1]}).text
        for args in ({"thinking": True}, {})
    )  # fmt: skip
    assert with_it == without + "think"


@pytest.mark.parametrize("change, fault", [
    ("m.content | upper", "changes or cuts"), ("m.content[:3]", "changes or cuts"), ("m.role", "writes nothing"),
])  # fmt: skip
def test_a_template_that_does_not_write_the_answer_says_what_it_does(tokenizers, change, fault):
    template = STYLES["chatml"].replace("m.content", change)
    assert template != STYLES["chatml"]
    with refuses("chat template", fault, "assistant's message", "'zqxjkv'"):
        SFTEncoder(**LIMITS, chat_template=template, loss_on="all").by(tokenizers["none"])(0, {"messages": TALK})
