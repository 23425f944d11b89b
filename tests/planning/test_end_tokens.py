"""Whether the tokens that end a response are agreed on: between data, generation and scoring."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarlhf.config import ConversationConfig, RoleConfig
from megarlhf.planning.data.end_tokens import end_notes, scorer_notes
from megarlhf.planning.data.first_rows import _require_template_of_scorer
from tests.data.chat_styles import CHATML, LLAMA_3, MISTRAL, write_chat_tokenizer
from tests.refuses import missing_names, refuses


@pytest.fixture
def role(tmp_path):
    """The function that makes one: a tokenizer with a template, and what generation_config.json names."""

    def make(name: str, template: str | None, eos: list[int] | None = None) -> RoleConfig:
        directory: Path = write_chat_tokenizer(tmp_path / name, template)
        (directory / "config.json").write_text("{}")
        if eos is not None:
            (directory / "generation_config.json").write_text(f'{{"eos_token_id": {eos}}}')
        return RoleConfig.model_validate({"model": {"path": directory}})

    return make


def test_a_turn_end_that_the_model_s_files_do_not_name_is_said(role):
    """`</s>` is 2, `<|im_end|>` 5. Nothing to say where the template ends answers with end of sequence."""
    data = ConversationConfig()
    (note,) = end_notes("actor", role("chatml", CHATML), data, generates=True)
    assert not missing_names(note, "token 5 (<|im_end|>)", "2 (</s>)", "generated responses")
    (note,) = end_notes("actor", role("trained", CHATML), data, generates=False)
    assert not missing_names(note, "exports", "generation_config.json")
    (note,) = end_notes("actor", role("named", CHATML, [2, 5]), data, generates=True)
    assert not missing_names(note, "conversations", "5 (<|im_end|>)", "plain texts")
    assert end_notes("actor", role("mistral", MISTRAL), data, generates=True) == []
    contradicting = role("contradicting", MISTRAL, [2])
    (contradicting.model.path / "config.json").write_text('{"eos_token_id": [2, 7]}')
    (note,) = end_notes("actor", contradicting, data, generates=True)
    assert not missing_names(note, "7 as eos_token_id", "generation_config.json does not")
    assert end_notes("actor", role("none", None), data, generates=True) == []
    assert end_notes("actor", role("plain", CHATML), ConversationConfig(template="plain"), generates=True) == []
    with refuses("chat template", "data.chat_template"):
        end_notes("actor", role("without", None), ConversationConfig(template="chat"), generates=True)


def test_data_of_texts_only_learns_no_end_of_a_template(role):
    """Nothing is said of conversations that are not there; what is generated ends at the template's token all the
    same."""
    data = ConversationConfig()
    assert end_notes("actor", role("chatml", CHATML), data, generates=False, texts=True) == []
    (note,) = end_notes("actor", role("drawn", CHATML), data, generates=True, texts=True)
    assert not missing_names(note, "generated responses", "token 5 (<|im_end|>)")
    assert "learnt" not in note
    (note,) = end_notes("actor", role("named", CHATML, [2, 5]), data, generates=True, texts=True)
    assert not missing_names(note, "training data", "first only")


def test_a_reward_model_whose_template_ends_otherwise_is_said(role):
    actor, data = role("actor", CHATML), ConversationConfig()
    (note,) = scorer_notes(actor, role("llama", LLAMA_3), data)
    assert not missing_names(note, "token 5 (<|im_end|>)", "with 8", "scored")
    assert scorer_notes(actor, role("same", CHATML), data) == []
    assert scorer_notes(actor, role("bare", None), data) == []
    assert scorer_notes(actor, role("llama_2", LLAMA_3), ConversationConfig(template="plain")) == []


def test_conversations_for_a_reward_model_without_a_template_are_refused_before_a_run(role):
    record = {"prompt": [{"role": "user", "content": "a"}]}

    def cfg(name: str, template: str | None, retokenizes: bool) -> Any:
        data = SimpleNamespace(template_mode="auto", template_may_drop=())
        scorer = role(name, template)
        return SimpleNamespace(reward_model=scorer, uses_reward_model=True, retokenizes=retokenizes, data=data)

    _require_template_of_scorer(cfg("text", CHATML, True), record)
    _require_template_of_scorer(cfg("ids", None, False), record)
    with refuses("reward_model (retokenize: true)", "no chat template"):
        _require_template_of_scorer(cfg("bare", None, True), record)
