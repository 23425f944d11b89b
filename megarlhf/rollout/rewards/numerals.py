"""Numbers in texts, as people and models write them: signs, thousands, currencies, in ASCII or not."""

from __future__ import annotations

import re
from decimal import Decimal

_MINUS = "\N{MINUS SIGN}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}"
_DASHES = "\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}"
"""Dashes that stand for a minus before a number, and are punctuation elsewhere."""
_SPACES = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}\N{FIGURE SPACE}"
_CURRENCY = r"(?:\\?[$€£¥₹][ \u00a0]?)"
# A sign belongs to the number only if no number or word precedes it: 37-5 ends in 5.
# The same holds for a leading point: .5 is a half, but "so...5" ends in 5.
# Spaces may separate thousands, but not in a row of numbers: the last number of 10 20 300 is 300.
_THOUSANDS = r"\d{1,3}(?:,\d{3})+(?!\d)|(?<!\d )\d{1,3}(?: \d{3})+(?! ?\d)"
_DIGITS = rf"(?:(?:{_THOUSANDS}|\d+)(?:\.\d+)?|(?<![\w.)])\.\d+)(?:[eE][-+]?\d{{1,4}})?"
_NUMBER = re.compile(rf"(?:(?<![\w.)])[-+]|(?<![\w.)$])[-+]{_CURRENCY})?{_DIGITS}")
_ALONE = re.compile(rf"\$?(?:[-+]{_CURRENCY}?|{_CURRENCY}[-+]?)?{_DIGITS}\$?")
# A minus and a space before a number: after a sign such as = or at the start of the text. In a list it is a bullet.
_SPACED = re.compile(r"((?<=[=:(\[{,≈])[ \t]*|\A\s*)-[ \t]+(?=\\?[$€£¥₹]?\.?\d)")


def with_plain_minus(text: str) -> str:
    """Replace every minus, and every dash that stands for one, by `-`."""
    text = text.translate(dict.fromkeys(map(ord, _MINUS), "-"))
    return re.sub(rf"(?<![\w)])[{_DASHES}](?=\s*\\?[$€£¥₹]?\s*\.?\d)", "-", text)


def with_plain_signs(text: str) -> str:
    """`with_plain_minus`, and thousands without special spaces and `_`."""
    text = with_plain_minus(text)
    return re.sub(rf"(?<=\d)[{_SPACES}_](?=\d{{3}}(?!\d))", "", text)


def _plain(text: str) -> str:
    text = with_plain_signs(text.replace("{,}", ",").replace("\\,", "\N{THIN SPACE}"))
    is_list = "\n" in text.strip()
    return _SPACED.sub(lambda match: match[0] if is_list and match.start() == 0 else match[1] + "-", text)


def last_number(text: str) -> Decimal | None:
    """The last number in the text, with its sign: -3 for `-$3`, `x = - 3` and `fell to −3`, but 3 for `5-3`."""
    numbers = _NUMBER.findall(_plain(text))
    return _decimal(numbers[-1]) if numbers else None


def number_of(text: str) -> Decimal | None:
    """The number that the whole text is; None: it is no number."""
    text = _plain(text).strip()
    return _decimal(text) if _ALONE.fullmatch(text) else None


def _decimal(text: str) -> Decimal:
    return Decimal(re.sub(r"[^\d.eE+-]", "", text))
