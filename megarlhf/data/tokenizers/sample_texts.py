"""Texts on which tokenizers differ, and a description of the difference."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 8

TEXTS = (
    "The answer is 37+48 = 85, isn't it? In 1984: 1234567.89",
    "  two spaces,   three    four,\ttabs\t\t and\n\n\nlines \r\n and a no-break\u00a0space ",
    " leading, and trailing  ",
    "\n\nline breaks\n \n  first",
    "na\u00efve cafe\u0301 \ufb01ne \u1e9b\u0323 \u65e5\u672c\u8a9e\u306e\u6587\u3001\u4e2d\u6587 \ud55c\uad6d\uc5b4",
    "\u0639\u0631\u0628\u064a\u060c \u05e2\u05d1\u05e8\u05d9\u05ea \u0928\u092e\u0938\u094d\u0924\u0947 \u0e44\u0e17",
    "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0395\u03bb\u03bb\u03b7\u03bd \u0661\u0662\u0663\u00bd",
    "\U0001f642\u200d\u2642 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    'def f(x):\n    return x ** 2  # DON\'T\n\tif (a[0] != b->c) { s += "\\n"; }',
    "CamelCase snake_case kebab-case http://a.example/b?c=d&e=%20 <tag attr='1'>$x^2$</tag>",
)
"""Texts that tokenizers split differently."""


def where_they_differ(ours: Sequence[int], theirs: Sequence[int]) -> tuple[str, str]:
    """Two lists of ids, as text, from shortly before the first difference."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    first = next((n for n, (mine, other) in pairs if mine != other), min(len(ours), len(theirs)))
    start = max(0, first - 2)

    def shown(ids: Sequence[int]) -> str:
        part = ", ".join(map(str, ids[start : start + _SHOWN]))
        return f"[{'..., ' * (start > 0)}{part}{', ...' * (len(ids) > start + _SHOWN)}]"

    return shown(ours), shown(theirs)
