"""Notes on end tokens, where training data, generated responses and other tools disagree on them."""

from __future__ import annotations

from pathlib import Path

from megarlhf.architectures.hf_config import read_config
from megarlhf.config import ConversationConfig, RoleConfig
from megarlhf.data.text.end_tokens import turn_end_of
from megarlhf.data.text.templates import has_template
from megarlhf.data.tokenizers.files import has_tokenizer
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.model_directory import end_tokens


def end_notes(
    role: str, section: RoleConfig, data: ConversationConfig, *, generates: bool, texts: bool = False
) -> list[str]:
    """Notes on the tokens that end a run's responses.

    generates: the run draws responses
    texts: its data has no conversations, by the first records

    Raises: ValueError for a chat template that the configuration names and that cannot be used.
    """
    directory = section.model.hf_directory()
    tokenizer = load_tokenizer(section.model.tokenizer_place())
    eos, ends = tokenizer.eos_id, end_tokens(directory, tokenizer.eos_id)
    turn, names = turn_end_of(data, tokenizer), tokenizer.tokens()

    def named(*tokens: int) -> str:
        return ", ".join(f"{token} ({names[token]})" if token < len(names) else str(token) for token in tokens)

    notes = _contradiction(role, directory, {*ends, turn})
    if texts and not generates:
        turn = None  # nothing is written with the template
    if turn is not None and turn not in ends and texts:
        note = (
            f"{role}: generated responses end at token {named(turn)} too, with which the chat template ends an "
            f"answer, beside {named(*ends)}, by which tokenizer and eos_token_id in {directory} end a response"
        )
    elif turn is not None and turn not in ends:
        other = "generated responses end at it too"
        if not generates:
            other = "exports say so in generation_config.json, by which generated responses end"
        note = (
            f"{role}: the chat template ends an answer with token {named(turn)}, which is none of {named(*ends)}, by "
            f"which tokenizer and eos_token_id in {directory} end a response: conversations are learnt with the first, "
            f"and {other}"
        )
    elif further := ends[1:]:
        learnt = "training data ends with the first only"
        if turn is not None and not texts:
            learnt = f"conversations are learnt with {named(turn)}, plain texts with the first"
        note = (
            f"{role}: generated responses end at token {named(eos)}, the tokenizer's end-of-sequence, and at "
            f"{named(*further)}, which eos_token_id in {directory} names; {learnt}"
        )
    else:
        return notes
    return [note, *notes]


def _contradiction(role: str, directory: Path, ends: set[int | None]) -> list[str]:
    """A note on an end token that only config.json names. A generation_config.json takes precedence."""
    ids = read_config(directory).get("eos_token_id")
    named = ids if isinstance(ids, list) else [ids]
    others = [str(token) for token in named if token is not None and token not in ends]
    note = (
        f"{role}: config.json in {directory} names {', '.join(others)} as eos_token_id, and generation_config.json "
        "does not: nothing ends there; correct the one that is wrong"
    )
    return [note] * bool(others)


def scorer_notes(actor: RoleConfig, scorer: RoleConfig, data: ConversationConfig) -> list[str]:
    """A note where the reward model's chat template ends answers with another token than the actor's. The score is read
    at the token that ends a response, and the model was trained with its own. Empty without a template of its own.

    Raises: ValueError as `end_notes`.
    """
    scorer_tokenizer = scorer.model.tokenizer_place()
    if (
        data.template_mode == "plain"
        or not has_tokenizer(scorer_tokenizer)
        or not has_template(load_tokenizer(scorer_tokenizer))
    ):
        return []
    tokenizer = load_tokenizer(actor.model.tokenizer_place())
    written, read = turn_end_of(data, tokenizer), turn_end_of(ConversationConfig(), load_tokenizer(scorer_tokenizer))
    if written is None or read is None or written == read:
        return []
    names = tokenizer.tokens()
    note = (
        f"reward_model: the actor's chat template ends an answer with token {written} ({names[written]}), that of "
        f"{scorer_tokenizer} with {read}: conversations are scored at a token at which the reward model may not have "
        "been trained; give both one chat template"
    )
    return [note]
