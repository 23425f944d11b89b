"""A fast tokenizer from SentencePiece's pairs, as in Llama 2's tokenizer.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

_SPACE = "▁"


def fast_tokenizer(
    ids: Mapping[str, int],
    scores: Sequence[float],
    normal: Collection[int],
    *,
    unknown: str | None,
    byte_fallback: bool = True,
    prefix: bool = True,
    every_stretch: bool = True,
) -> Any:
    """A `tokenizers.Tokenizer` without added tokens and post-processor.

    normal: ids of ordinary pieces of text, the only ones that are joined from others
    prefix: put a space before a text; with `every_stretch` also after each added token
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(
            vocab=dict(ids),
            merges=_merges_by_score(ids, scores, normal),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    )
    replaced = normalizers.Replace(" ", _SPACE)
    if prefix and not every_stretch:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced]) if prefix else replaced
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(content=" ", left=1, right=0)] * prefix
    )
    return tokenizer


def _merges_by_score(ids: Mapping[str, int], scores: Sequence[float], normal: Collection[int]) -> list[tuple[str, str]]:
    """Merges: every cut of a piece into two pieces, in the order of the scores. SentencePiece joins the neighbours
    whose joint piece has the highest score. A special token is never joined from pieces."""
    merges = []
    for token, token_id in ids.items():
        if token_id not in normal:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in ids and b in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(scores[token_id], pair) for pair in known]
    merges.sort(key=lambda merge: -merge[0])
    return [pair for _, pair in merges]
