"""Do training data, generated responses and other tools agree on the tokens that end a response?"""

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
    """What a user should know of the ends of a run's responses, in sentences.

    generates: whether it draws any
    texts: whether its data has no conversations, as far as was seen

    Raises: ValueError for a chat template that the configuration asks for and that cannot be used.
    """
    directory = section.model.hf_directory()
    tokenizer = load_tokenizer(section.model.tokenizer_place())
    eos, ends = tokenizer.eos_id, end_tokens(directory, tokenizer.eos_id)
    turn, names = turn_end_of(data, tokenizer), tokenizer.tokens()

    def shown(*tokens: int) -> str:
        return ", ".join(f"{token} ({names[token]})" if token < len(names) else str(token) for token in tokens)

    notes = _contradiction(role, directory, {*ends, turn})
    if texts and not generates:
        turn = None  # nothing is written with the template
    if turn is not None and turn not in ends:
        if texts:
            note = (
                f"{role}: generated responses end at token {shown(turn)} too, with which the chat template ends an "
                f"answer, beside {shown(*ends)}, by which tokenizer and eos_token_id in {directory} end a response"
            )
            return [note, *notes]
        other = "generated responses end at it too"
        if not generates:
            other = "exports say so in generation_config.json, by which generated responses end"
        note = (
            f"{role}: the chat template ends an answer with token {shown(turn)}, which is none of {shown(*ends)}, by "
            f"which tokenizer and eos_token_id in {directory} end a response: conversations are learnt with the first, "
            f"and {other}"
        )
        return [note, *notes]
    if further := ends[1:]:
        learnt = "training data ends with the first only"
        if turn is not None and not texts:
            learnt = f"conversations are learnt with {shown(turn)}, plain texts with the first"
        note = (
            f"{role}: generated responses end at token {shown(eos)}, the tokenizer's end-of-sequence, and at "
            f"{shown(*further)}, which eos_token_id in {directory} names; {learnt}"
        )
        return [note, *notes]
    return notes


def _contradiction(role: str, directory: Path, ends: set[int | None]) -> list[str]:
    """A token that config.json alone names as an end, in a sentence: generation_config.json counts where it is."""
    ids = read_config(directory).get("eos_token_id")
    named = ids if isinstance(ids, list) else [ids]
    others = [str(token) for token in named if token is not None and token not in ends]
    note = (
        f"{role}: config.json in {directory} names {', '.join(others)} as eos_token_id, and generation_config.json "
        "does not: nothing ends there; correct the one that is wrong"
    )
    return [note] * bool(others)


def scorer_notes(actor: RoleConfig, scorer: RoleConfig, data: ConversationConfig) -> list[str]:
    """A reward model is read at the token that ends a response: where its own chat template ends answers with another
    one, it was trained to be read there. In sentences; nothing where it has no template of its own.

    Raises: ValueError as `end_notes`.
    """
    place = scorer.model.tokenizer_place()
    if data.template_mode == "plain" or not has_tokenizer(place) or not has_template(load_tokenizer(place)):
        return []
    tokenizer = load_tokenizer(actor.model.tokenizer_place())
    written, read = turn_end_of(data, tokenizer), turn_end_of(ConversationConfig(), load_tokenizer(place))
    if written is None or read is None or written == read:
        return []
    names = tokenizer.tokens()
    note = (
        f"reward_model: the actor's chat template ends an answer with token {written} ({names[written]}), that of "
        f"{place} with {read}: conversations are scored at a token at which the reward model may not have been trained"
        "; give both one chat template"
    )
    return [note]
