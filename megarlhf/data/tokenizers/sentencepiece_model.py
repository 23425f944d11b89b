"""Tokenizers from a tokenizer.model with further files: added tokens, other end tokens, a chat template.

They are read as by transformers 4, whose fast tokenizers such models were trained with. transformers 5 joins pieces in
another order than SentencePiece, and with a config.json of Mistral's it drops the space before a text.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from megarlhf.data.tokenizers.pieces import fast_tokenizer
from megarlhf.data.tokenizers.sample_texts import TEXTS, where_they_differ
from megarlhf.data.tokenizers.settings import NAMES, Mismatch, Settings, require_ids, token_text, with_settings

logger = logging.getLogger(__name__)


def of_sentencepiece(model: Path) -> Any:
    """A fast tokenizer of transformers. None where the files beside the model add nothing but a chat template.

    Raises: Mismatch where they state ids that their tokens cannot have, and for a model without pairs.
    """
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    from transformers import PreTrainedTokenizerFast

    settings, content = Settings.read(model.parent), model.read_bytes()
    pieces = SentencePieceProcessor(model_proto=content)
    names = _names(settings, pieces)
    if _known(settings, pieces, names):
        return None
    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
        raise Mismatch(
            f"{model} is a SentencePiece model without pairs (unigram); that the files beside it add tokens is not "
            "implemented; give a tokenizer.json"
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_fast(proto, settings),
        add_bos_token=bool(settings.stated.get("add_bos_token", True)) and names["bos_token"] is not None,
        split_special_tokens=bool(settings.stated.get("split_special_tokens", False)),
        **names,
    )
    require_ids(tokenizer, settings)
    for text in TEXTS:
        if (read := tokenizer.encode(text, add_special_tokens=False)) != (theirs := pieces.encode(text)):
            logger.info(
                "%s changes texts before it reads them, which transformers does not do for the tokens that the files "
                "beside it add: %r is %s, and %s by SentencePiece alone",
                *(model, text, *where_they_differ(read, theirs)),
            )
            break
    return with_settings(tokenizer, settings)


def _names(settings: Settings, pieces: Any) -> dict[str, str | None]:
    """Special tokens by name, from the files or else the model."""
    ids = (pieces.bos_id(), pieces.eos_id(), pieces.unk_id(), pieces.pad_id())
    own = {name: pieces.id_to_piece(n) if n >= 0 else None for name, n in zip(NAMES, ids, strict=True)}
    stated = {name: token_text(settings.stated[name]) for name in NAMES if name in settings.stated}
    return own | settings.unstated_names(None) | stated


def _known(settings: Settings, pieces: Any, names: dict[str, str | None]) -> bool:
    """Tell whether tokens, begin and end are those of the SentencePiece model."""
    size = pieces.get_piece_size()
    ids = {"bos_token": pieces.bos_id(), "eos_token": pieces.eos_id()}
    return (
        all(n < size and pieces.id_to_piece(n) == token for token, n in settings.added().items())
        and all(names[name] is None or pieces.piece_to_id(names[name]) == n for name, n in ids.items())
        and bool(settings.stated.get("add_bos_token", True))
    )


def _fast(proto: Any, settings: Settings) -> Any:
    """The model's pieces with its control symbols and the added tokens."""
    from tokenizers import AddedToken

    kinds = proto.SentencePiece
    tokenizer = fast_tokenizer(
        {piece.piece: n for n, piece in enumerate(proto.pieces)},
        [piece.score for piece in proto.pieces],
        {n for n, piece in enumerate(proto.pieces) if piece.type == kinds.NORMAL},
        unknown=proto.trainer_spec.unk_piece,
        byte_fallback=proto.trainer_spec.byte_fallback,
        prefix=proto.normalizer_spec.add_dummy_prefix and settings.stated.get("add_prefix_space") is not False,
        every_stretch=settings.stated.get("legacy") is not False,
    )
    own = [piece for piece in proto.pieces if piece.type in (kinds.CONTROL, kinds.USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(p.piece, normalized=False, special=p.type == kinds.CONTROL) for p in own])
    described = {int(n): token for n, token in (settings.stated.get("added_tokens_decoder") or {}).items()}
    for token, n in sorted(settings.added().items(), key=lambda item: item[1]):
        flags = described.get(n, {"content": token, "normalized": False, "special": True})
        tokenizer.add_tokens([AddedToken(**flags)])
    return tokenizer
