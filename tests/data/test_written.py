"""Whatever a chat template leaves out of a conversation is found, whatever texts are in it. Not covered: keys of
messages (test_unread_keys.py)."""

import random
from collections import Counter

import pytest

from megarlhf.data.sample_types import Changed, sample_of
from megarlhf.data.samples.encoders import PairEncoder, PromptEncoder, SFTEncoder, Unusable
from megarlhf.data.text.omissions import KINDS, NotWritten
from megarlhf.data.text.templates import Conversation, chat_template
from tests.data.chat_styles import STYLES, chat_tokenizer, said
from tests.data.conversation_parts import conversation, parts, stands_in
from tests.refuses import refuses

OPTIONS = {"tokenizer": None, "max_prompt_tokens": 100_000, "max_response_tokens": 100_000, "template": "chat"}
AB = {"messages": [said("user", "a"), said("assistant", "b")]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("written"), None)


def spelled(tokenizer, tokens):
    return "".join(names[token] for names in [tokenizer.tokens()] for token in tokens)


def check_records(tokenizer, template, records, spell):
    """Each record is used with all of its parts in the text and each answer in what is learnt; or is refused, and a
    part of it, or the way to it, is indeed not written so. Returns: how often each happened."""
    outcomes = Counter()
    for loss_on in ("last", "all"):
        encode = SFTEncoder(**OPTIONS, loss_on=loss_on, chat_template=template).by(tokenizer)
        for record in records:
            try:
                sample = encode(0, record)
            except ValueError as error:
                outcomes[type(error).__name__] += 1
                continue
            assert not isinstance(sample, Changed), "nothing may be left out"
            outcomes["used"] += 1
            whole = spell(sample.tokens)
            assert all(stands_in(part, whole) for message in record["messages"] for part in parts(message)), record
            pairs = zip(sample.stretches[0::2], sample.stretches[1::2], strict=True)
            learnt = [(spell(sample.tokens[:first]), spell(sample.tokens[first:end])) for first, end in pairs]
            answers = [message for message in record["messages"] if message["role"] == "assistant"]
            for answer, (before, text) in zip(answers[-len(learnt) :], learnt, strict=True):
                opened = "<think>\n" * before.endswith("<think>\n")  # by the text that asks for the answer
                assert all(stands_in(part, opened + text) for part in parts(answer)), (record, text)
    return outcomes


@pytest.mark.parametrize("style", STYLES)
def test_all_parts_of_random_conversations_are_written_and_learnt_or_refused(tokenizer, style):
    records = [conversation(random.Random(seed)) for seed in range(60)]
    template = STYLES[style]
    outcomes = check_records(tokenizer, template, records, lambda tokens: spelled(tokenizer, tokens))
    if style == "reasoning":  # which writes all of them
        assert set(outcomes) == {"used"}
        return
    assert outcomes["NotWritten"] + outcomes["ValueError"] > 0
    if style not in ("mistral", "gemma", "llama_3"):  # which refuse or trim nearly all of these
        assert outcomes["used"] > 5, outcomes


@pytest.mark.parametrize("style", ["qwen_3", "llama_3", "two_roles", "deepseek", "stripping"])
def test_what_may_be_left_out_is_left_out_and_counted(tokenizer, style):
    """With all kinds allowed, nothing but an answer that is learnt is a reason to refuse; every record of which a part
    is missing in the text is counted."""
    encoder = SFTEncoder(**OPTIONS, chat_template=STYLES[style], template_may_drop=KINDS)
    encode, used, counted, refusals = encoder.by(tokenizer), 0, Counter(), []
    for seed in range(60):
        record = conversation(random.Random(seed))
        try:
            made = encode(0, record)
        except ValueError as error:
            refusals.append(str(error))
            continue
        whole = spelled(tokenizer, sample_of(made).tokens)
        missing = not all(stands_in(part, whole) for message in record["messages"] for part in parts(message))
        assert not missing or isinstance(made, Changed)
        used += 1
        counted.update(made.how if isinstance(made, Changed) else ())
    assert all("not be learnt" in refusal or "is asked for" in refusal for refusal in refusals)
    assert used > 5
    assert counted, "something was left out"
    assert all(words.startswith("without ") for words in counted)


def encoder(tokenizer, style, kind=SFTEncoder, **options):
    limits = {**OPTIONS, **options, "chat_template": STYLES.get(style, style)}
    if kind is PromptEncoder:
        del limits["max_response_tokens"]
    return kind(**limits).by(tokenizer)


def test_a_text_that_stands_elsewhere_too_is_not_taken_for_written(tokenizer):
    """A search would find the system message "4" in the answer, and the thought in the content."""
    talk = [said("system", "4"), said("user", "2+2"), said("assistant", "4")]
    with refuses("message 1 ('system')", "content"):
        encoder(tokenizer, "two_roles")(0, {"messages": talk})
    talk = [said("user", "2+2"), said("assistant", "4", reasoning_content="4")]
    with refuses("reasoning_content '4'"):
        encoder(tokenizer, "chatml")(0, {"messages": talk})
    assert encoder(tokenizer, "chatml")(0, {"messages": [*talk[:1], said("assistant", "4", reasoning_content="")]})


CUT = {
    "the first line": ("{{ m.content.split('\\n')[0] }}", "a\nb"),
    "the first letters": ("{{ m.content[:9] }}", "abcdefghij"),
    "white space": ("{{ m.content | trim }}", "ab "),
    "a line break": ("{{ m.content.strip('\\n') }}", "ab\n"),
    "capitals": ("{{ m.content | lower }}", "Ab"),
    "a mark": ("{{ m.content.replace('/no_think', '') }}", "ab /no_think"),
    "behind a mark": ("{{ m.content.split('###')[0] }}", "ab### c"),
    "what is long": ("{{ m.content if m.content | length < 9 else '...' }}", "abcdefghi"),
}


@pytest.mark.parametrize("name", CUT)
def test_what_is_cut_or_changed_in_any_message_is_refused(tokenizer, name):
    """In each role and in all three kinds of samples; another text passes by the same template."""
    written, text = CUT[name]
    template = STYLES["chatml"].replace("{{ m.content }}", written)
    encode = {kind: encoder(tokenizer, template, kind) for kind in (SFTEncoder, PairEncoder, PromptEncoder)}
    fine, answer, other = said("user", "ab"), said("assistant", "c"), said("assistant", "d")

    def refused(kind, record):
        with refuses("chat template", error=NotWritten):
            encode[kind](0, record)

    for asked in ([said("user", text)], [said("system", text), fine], [fine, said("assistant", text), fine]):
        refused(SFTEncoder, {"messages": [*asked, answer]})
        refused(PairEncoder, {"prompt": asked, "chosen": [answer], "rejected": [other]})
        refused(PromptEncoder, {"messages": asked})
    for side in ("chosen", "rejected"):
        sides = {"chosen": [answer], "rejected": [other], side: [said("assistant", text)]}
        refused(PairEncoder, {"prompt": [fine], **sides})
    assert encode[SFTEncoder](0, {"messages": [fine, answer]}).num_learnt


def test_white_space_beside_marks_that_take_it_in_is_missed(tokenizer):
    """The marks of Phi-3 have `rstrip`: white space behind them is no token, though the template writes it."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from megarlhf.data.tokenizers.tokenizer import HuggingFaceTokenizer

    letters = dict.fromkeys("</s> \nab<|im_start|>use.")
    base = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate(letters)}, unk_token="."))
    base.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    marks = [AddedToken(mark, rstrip=True, special=True) for mark in ("<|im_start|>", "<|im_end|>")]
    made = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="</s>", additional_special_tokens=marks)
    taking = HuggingFaceTokenizer(made, "here")
    bare = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    template = chat_template(taking, bare + "{% if add_generation_prompt %}<|im_start|>{% endif %}")
    assert taking.encode("<|im_start|> a") == taking.encode("<|im_start|>a")
    for text, missing in (("a", False), (" a", True), ("a ", False), ("a<|im_end|> b", True), ("a b", False)):
        asked = Conversation([said("user", text)])
        omissions = template.written(asked, template.text(asked, reply=True), reply=True).omissions
        assert [each.kind for each in omissions] == ["white_space"] * missing


def test_records_of_which_something_is_left_out_are_counted_with_inexact_skip(tokenizer):
    talk = {"messages": [said("system", "a"), said("user", "b"), said("assistant", "c")]}
    with refuses("messages", "leaves out", error=Unusable):
        encoder(tokenizer, "two_roles", inexact="skip")(0, talk)
    made = encoder(tokenizer, "two_roles", template_may_drop=("messages",))(0, talk)
    assert made.how[0].startswith("without a message")
    assert made.sample == encoder(tokenizer, "two_roles")(0, {"messages": talk["messages"][1:]})
    asked = encoder(tokenizer, "two_roles", PromptEncoder, template_may_drop=("messages",))
    assert isinstance(asked(0, {"messages": talk["messages"][:2]}), Changed)


@pytest.mark.parametrize("key", ["thinking", "reasoning", "reasoning_content"])
def test_a_thought_is_written_under_the_key_that_the_template_reads(tokenizer, key):
    """Whichever of the usual names it has in the data; two names with one text are one thought."""
    answer = said("assistant", "4", **{key: "2 and 2"})
    sample = encoder(tokenizer, "reasoning")(0, {"messages": [said("user", "2+2"), answer]})
    text = spelled(tokenizer, sample.tokens[sample.stretches[0] :])
    assert text == "<think>\n2 and 2\n</think>\n\n4<|im_end|>"
    twice = {**answer, "reasoning_content": "2 and 2", "reasoning": "2 and 2"}
    assert encoder(tokenizer, "reasoning")(0, {"messages": [said("user", "2+2"), twice]}) == sample
    with refuses("message 2 ('assistant')", "reasoning", error=NotWritten):
        encoder(tokenizer, "reasoning")(0, {"messages": [said("user", "2+2"), {**twice, "reasoning": "others"}]})
    parted = said("assistant", [{"type": "thinking", "thinking": "2 and 2"}, {"type": "text", "text": "4"}])
    assert encoder(tokenizer, "reasoning")(0, {"messages": [said("user", "2+2"), parted]}) == sample


ARGUMENTS = {"a": "it's", "b": 'a "b"', "c": "back\\slash", "it's": True, "d": ["x'", {"e": 'y"'}]}
EACH = "{% for k, v in c.function.arguments.items() %}"
ESCAPED = r"""{{ v | replace('\\', '\\\\') | replace("'", "\\'") if v is string else v }}"""
WAYS = {
    "Python": "{{ c.function.arguments }}",
    "JSON": "{{ c.function.arguments | tojson }}",
    "JSON within JSON": "{{ c.function.arguments | tojson | tojson }}",
    "each as it is": EACH + "{{ k }}={{ v if v is string else v | tojson }}{% endfor %}",
    "each in apostrophes": EACH + "{{ k }}='" + ESCAPED + "'{% endfor %}",
}


@pytest.mark.parametrize("written", WAYS.values(), ids=WAYS)
def test_arguments_are_found_in_whatever_way_they_are_written(tokenizer, written):
    template = STYLES["tools"].replace("{{ c.function.arguments | tojson }}", written)

    def talk(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [said("user", "a"), said("assistant", "", tool_calls=[call])]}

    assert encoder(tokenizer, template)(0, talk(ARGUMENTS)).num_learnt
    cut = template.replace("c.function.arguments", "(c.function.arguments | dictsort)[1:] | list")
    with pytest.raises(ValueError, match=r"arguments|refuses the messages"):
        encoder(tokenizer, cut.replace(".items()", ""))(0, talk(ARGUMENTS))


def test_a_command_in_a_system_message_is_obeyed_or_refused(tokenizer):
    """SmolLM3 takes `/no_think` out of it and answers without a thought; one that only takes it out is refused."""
    obeying = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.replace('/no_think', '') }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{{ '<think></think>' if '/no_think' in messages[0].content }}{% endif %}"
    )
    ask = encoder(tokenizer, obeying, PromptEncoder)
    for system in ("/no_think", "Be brief. /no_think"):
        sample = ask(0, {"messages": [said("system", system), said("user", "a")]})
        assert sample.text.endswith("assistant\n<think></think>")
    cut = encoder(tokenizer, obeying.replace("m.content.replace", "m.content[:4].replace"), PromptEncoder)
    with refuses("content 'Be brief"):
        cut(0, {"messages": [said("system", system), said("user", "a")]})
    with refuses("content"):
        ask(0, {"messages": [said("system", "c"), said("user", "a /no_think")]})


def test_variables_of_the_template_are_the_record_s_before_the_configuration_s(tokenizer):
    """TRL's `chat_template_kwargs`, also as JSON text; one that the template does not read is refused."""
    template = STYLES["chatml"] + "{{ '<think></think>' if not thinking }}"
    asked = encoder(tokenizer, template, PromptEncoder, template_args={"thinking": True})

    def text(**columns):
        return asked(0, {"messages": [said("user", "a")], **columns}).text

    plain = text()
    assert text(chat_template_kwargs={"thinking": False}) == plain + "<think></think>"
    assert text(chat_template_kwargs='{"thinking": false}') == plain + "<think></think>"
    assert text(chat_template_kwargs={"thinking": None}) == text(chat_template_kwargs={}) == plain
    with refuses("'thinkng'", "data.chat_template"):
        text(chat_template_kwargs={"thinkng": False})
    with refuses("'chat_template_kwargs'", "str 'no'", "object"):
        text(chat_template_kwargs="no")
    with refuses("'chat_template_kwargs'", "data.template"):
        plain = SFTEncoder(**{**OPTIONS, "template": "plain"}).by(tokenizer)
        plain(0, {"prompt": "a", "response": "b", "chat_template_kwargs": {"thinking": True}})


def test_calls_of_tools_are_written_in_the_form_that_the_template_reads(tokenizer):
    call = {"name": "add", "arguments": {"a": 1}}
    texts = []
    for template in ("deepseek", "tools"):
        for message in (
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
            {"role": "assistant", "tool_calls": [{"function": {**call, "arguments": '{"a": 1}'}}]},
            {"role": "assistant", "content": "", "function_call": call},
        ):
            sample = encoder(tokenizer, template)(0, {"messages": [said("user", "1+1"), message]})
            texts.append(spelled(tokenizer, sample.tokens[sample.stretches[0] :]))
    assert set(texts[:3]) == {'[call]add\n{"a": 1}[/call]</s>'}
    assert set(texts[3:]) == {'<call>add{"a": 1}</call><|im_end|>'}
    beside = {"role": "assistant", "content": "I add", "tool_calls": [{"type": "function", "function": call}]}
    with refuses("message 2 ('assistant')", "name"):
        encoder(tokenizer, "deepseek")(0, {"messages": [said("user", "1+1"), beside]})


def test_marks_that_miss_the_answer_or_take_in_others_are_refused(tokenizer):
    """Whatever is learnt of: with one mark around everything, the user's words would be."""
    template = STYLES["marked"].replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}")
    with refuses("message 2 ('assistant')", "outside the marks"):
        encoder(tokenizer, template)(0, AB)
    everyone = STYLES["chatml"].replace(
        "{{ m.content }}<|im_end|>", "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    )
    whole = "{% generation %}" + STYLES["chatml"].replace("{% if add", "{% endgeneration %}{% if add")
    for template in (everyone, whole):
        for loss_on in ("last", "all"):
            with refuses("message 1 ('user')", "inside the marks"):
                encoder(tokenizer, template, loss_on=loss_on)(0, AB)


@pytest.mark.parametrize("finished", [False, "False", "false", 0, "0"])
def test_a_response_that_was_cut_has_no_end_however_that_is_written(tokenizer, finished):
    encode = encoder(tokenizer, "chatml")
    assert encode(0, {**AB, "finished": finished}).tokens == encode(0, AB).tokens[:-1]
    assert encode(0, {**AB, "finished": "True"}) == encode(0, AB)


BESIDE = [
    {**AB, "reasoning_content": "I know why"}, {**AB, "prompt": "Be brief."}, {**AB, "system_message": "Be Spock"},
    {"text": "A long text", "summary": "short"}, {"text": "A long text", "tools": [{"name": "f"}]},
    {"text": "What now?", "role": "prompter", "parent_id": None},
]  # fmt: skip


@pytest.mark.parametrize("record", BESIDE, ids=lambda record: list(record)[1])
def test_columns_beside_messages_and_texts_are_refused(tokenizer, record):
    plain = SFTEncoder(**{**OPTIONS, "template": "plain"})
    encode = plain.by(tokenizer) if "text" in record else encoder(tokenizer, "chatml")
    with refuses(f"'{list(record)[1]}'", "not read"):
        encode(0, record)
    inside = {**record, "prompt": "a"} if "messages" in record else {"text": "A long text", "id": 3}
    for name in ("reasoning_content", "system_message"):
        inside.pop(name, None)
    assert encode(0, inside)
