"""SentencePiece's pairs as a fast tokenizer, such as Llama 2's tokenizer.json is one."""

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

    normal: ids of pieces of text, of which alone others are joined
    prefix: whether a space is put before a text; with `every_stretch` also before what follows an added token
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
    """SentencePiece joins the neighbours whose joint piece has the highest score: every cut of a piece into two, in the
    order of the scores. A mark is never joined out of pieces."""
    merges = []
    for token, number in ids.items():
        if number not in normal:
            continue
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in ids and b in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(scores[number], pair) for pair in known]
    merges.sort(key=lambda merge: -merge[0])
    return [pair for _, pair in merges]
