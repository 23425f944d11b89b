"""Published chat templates between the turns of a conversation: which of them write the history as it was sampled.

Not covered: Mistral's templates, which no package has (its tokenizer of pieces is here, with a template in their
style), and calls of tools, which an environment reads from a turn's text.
"""

import random
from pathlib import Path

import mistral_common
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from megarlhf.data.text.templates import ChatTemplate, Conversation, chat_template
from megarlhf.data.tokenizers.tokenizer import SentencePieceTokenizer, load_tokenizer
from megarlhf.rollout.environments.rendering import ChatRendering
from megarlhf.rollout.environments.template_trial import try_template
from tests.published.test_live import folder_of, write_directory
from tests.rollout.test_rendering import outcomes
from tests.rollout.turn_styles import LEAD
from tools import published

pytestmark = [pytest.mark.published, pytest.mark.timeout(600)]

MARKS = {
    "cohere2": "<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|START_RESPONSE|> <|END_RESPONSE|> <|USER_TOKEN|> "
    "<|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>",
    "gemma4": "<bos> <|turn> <turn|> <|tool_response> <tool_response|> <|channel> <channel|>",
    "glm4moe": "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think>",
    "nemotron_3_nano": "<think> </think>",
    "lfm2_2_5": "<|startoftext|> <think> </think>",
    "phi3_5": "<|system|> <|user|> <|assistant|> <|end|>",
}
"""Special tokens of templates whose tokenizer no package has. They are added to SmolLM2's."""
TOKENIZERS = {
    "deepseek_r1_distill": "deepseek_v3", "deepseekv3": "deepseek_v3", "gptoss": "gptoss", "llama3_1": "llama3_1",
    "llama3_2": "llama3_1", "qwen2_5": "qwen3", "qwen3_5_think": "qwen3", "qwen3_instruct_2507": "qwen3",
    "qwen3_training": "qwen3",
}  # fmt: skip
"""The tokenizer of a template in TRL's package."""
OWN = ("smollm2", "qwen3", "deepseek_v3", "gemma3", "llama3", "llama3_1")
"""Packages of a tokenizer with its template."""


def marked(directory: Path, name: str) -> Path:
    """SmolLM2's tokenizer with the marks of a template. Phi-3's take in white space after them."""
    write_directory("smollm2", directory, "llama")
    file = FastTokenizer.from_file(str(directory / "tokenizer.json"))
    right = name == "phi3_5"
    file.add_special_tokens([AddedToken(m, special=True, normalized=False, rstrip=right) for m in MARKS[name].split()])
    (directory / "tokenizer.json").write_text(file.to_str())
    return directory


def template_of(name: str, directory: Path, **variables: object) -> ChatTemplate:
    """`own/NAME`: of the tokenizer's package; else of TRL's."""
    own = name.removeprefix("own/")
    if own != name:
        return chat_template(load_tokenizer(write_directory(own, directory, "llama")), None, variables)
    text = (published.fetch("templates") / f"{name}.jinja").read_text(encoding="utf-8")
    made = marked(directory, name) if name in MARKS else write_directory(TOKENIZERS[name], directory, "llama")
    return chat_template(load_tokenizer(made), text, variables)


TRIED = {
    "own/smollm2": "EE EE EE", "qwen2_5": "EE EE EE", "qwen3_instruct_2507": "EE EE EE", "own/llama3": "EE EE EE",
    "own/llama3_1": "EE EE EE", "llama3_1": "EE EE EE", "llama3_2": "EE EE EE", "own/deepseek_v3": "EE EE EE",
    "own/gemma3": "EE XX XX", "gemma4": "EE XX XX", "cohere2": "EE XX XX", "phi3_5": "EE XX XX",
    "own/qwen3": "ER EE ER", "lfm2_2_5": "ER EE ER", "nemotron_3_nano": "ER EE ER",
    "deepseek_r1_distill": "ER ER ER", "deepseekv3": "ER ER ER",
    "qwen3_5_think": "ER EE RR", "qwen3_training": "EE EE EE", "glm4moe": "RR RR RR", "gptoss": "RR XX XX",
}  # fmt: skip
"""See tests/rollout/test_rendering.py. Where a template asks with `<think>`, a plain turn never ends its thought."""


@pytest.mark.parametrize("name", TRIED)
def test_the_trial_of_each_template(name, tmp_path):
    trials = try_template(template_of(name, tmp_path))
    assert outcomes(trials) == TRIED[name], [trial.reason for trial in trials]


@pytest.mark.parametrize("name, expected", [
    ("own/qwen3", "RR RR RR"), ("qwen3_5_think", "RR ER RR"), ("nemotron_3_nano", "ER EE ER"),
])  # fmt: skip
def test_without_thinking(name, expected, tmp_path):
    """These ask with an empty thought, which is in the history nowhere, behind the last question, and everywhere."""
    template = template_of(name, tmp_path, enable_thinking=False)
    assert template.text(ASKED, reply=True).endswith(("<think>\n\n</think>\n\n", "<think></think>"))
    assert outcomes(try_template(template)) == expected


def test_glm_ends_a_turn_with_the_mark_of_the_next_message(tmp_path):
    """Its models' generation_config.json names these tokens. Thoughts without line breaks would be exact."""
    template = template_of("glm4moe", tmp_path)
    ends = [template.tokenizer.encode(mark)[0] for mark in ("<|user|>", "<|observation|>")]
    assert outcomes(try_template(template, end_ids=ends)) == "ER EW ER"


ASKED = Conversation([{"role": "user", "content": "Hello"}])
DATA = Path(mistral_common.__file__).parent / "data"
WORDS = ["three birds", "over the sea", "Straße 12", "你好", "x = [1, 2]", "don't", "calc(2*3)", '{"a": "b"}', "a\n\nb"]


def converse(template: ChatTemplate, draw: random.Random, lead: str = "") -> int:
    """Up to four turns with canonical tokens: the ids are those of the whole rendering. Returns their number."""
    rendering, conversation = ChatRendering(template), ASKED
    ids = rendering.opening(conversation, ()).ids
    for _ in range(draw.randint(1, 4)):
        text, observed = (" ".join(draw.choices(WORDS, k=draw.randint(1, 4))) for _ in range(2))
        cut = draw.random() < 0.3
        messages = [{"role": "user", "content": observed}]
        delta = rendering.delta(conversation, lead + text, messages, ended_by=None if cut else template.end)
        assert delta.history == "exact"
        sampled = template.tokenizer.encode(lead + text, continuation=True)
        ids = [*ids, *sampled, *([] if cut else [template.end]), *delta.ids]
        conversation = delta.conversation
    assert isinstance(conversation, Conversation)
    assert ids == template.ids(template.text(conversation, reply=True))
    return len(ids)


@pytest.mark.parametrize("name", [name for name, outcome in TRIED.items() if outcome[0] == "E"])
def test_ids_are_those_of_the_whole_rendering(name, tmp_path):
    template, lead = template_of(name, tmp_path), "<think>\n\n</think>\n\n" if name == "qwen3_training" else ""
    assert sum(converse(template, random.Random(seed), lead) for seed in range(50)) > 2500


@pytest.mark.parametrize("file", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"])
def test_mistral_s_pieces_with_a_template_that_writes_a_space_before_answers(file):
    """The space is the model's to sample. Where it samples none, white space is all that differs."""
    template = chat_template(SentencePieceTokenizer((DATA / file).read_bytes(), file, LEAD))
    assert outcomes(try_template(template)) == "EE XX XX"
    assert sum(converse(template, random.Random(seed), lead=" ") for seed in range(50)) > 2500


def test_the_tables_name_every_template_that_is_fetched():
    """But one that TRL has changed for training where the original has the same outcomes."""
    known = {name.removeprefix("own/") for name in TRIED} | {"qwen2_5_training", "gptoss_training"}
    assert known == {*published.TEMPLATES, *OWN}
    assert {name for name in MARKS if name not in published.TEMPLATES} == set()
    assert all(folder_of(name).is_dir() for name in {*TOKENIZERS.values(), *OWN})
