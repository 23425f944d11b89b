"""Numbers in texts, as people and models write them: signs, thousands, currencies, in ASCII or not."""

from __future__ import annotations

import re
from decimal import Decimal

_MINUS = "\N{MINUS SIGN}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}"
_DASHES = "\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}"
"""A minus where a number follows, and punctuation elsewhere."""
_SPACES = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}\N{FIGURE SPACE}"
_CURRENCY = r"(?:\\?[$€£¥₹][ \u00a0]?)"
# The sign belongs to the number only where no number or word stands before it: 37-5 ends in 5.
# So does a point that no digit precedes: .5 is a half, and what follows the points of "so...5" is 5.
# Spaces between thousands: not in a row of numbers, such as 10 20 300, of which the last is 300.
_THOUSANDS = r"\d{1,3}(?:,\d{3})+(?!\d)|(?<!\d )\d{1,3}(?: \d{3})+(?! ?\d)"
_DIGITS = rf"(?:(?:{_THOUSANDS}|\d+)(?:\.\d+)?|(?<![\w.)])\.\d+)(?:[eE][-+]?\d{{1,4}})?"
_NUMBER = re.compile(rf"(?:(?<![\w.)])[-+]|(?<![\w.)$])[-+]{_CURRENCY})?{_DIGITS}")
_ALONE = re.compile(rf"\$?(?:[-+]{_CURRENCY}?|{_CURRENCY}[-+]?)?{_DIGITS}\$?")
# A minus and a space: behind what asks for a value, or before all that there is; in lines of a list it is their mark.
_SPACED = re.compile(r"((?<=[=:(\[{,≈])[ \t]*|\A\s*)-[ \t]+(?=\\?[$€£¥₹]?\.?\d)")


def with_plain_minus(text: str) -> str:
    """Every minus as `-`, and a dash where it stands for one."""
    text = text.translate(dict.fromkeys(map(ord, _MINUS), "-"))
    return re.sub(rf"(?<![\w)])[{_DASHES}](?=\s*\\?[$€£¥₹]?\s*\.?\d)", "-", text)


def with_plain_signs(text: str) -> str:
    """Every minus as `-`, a dash where it stands for one; thousands without special spaces and `_`."""
    text = with_plain_minus(text)
    return re.sub(rf"(?<=\d)[{_SPACES}_](?=\d{{3}}(?!\d))", "", text)


def _plain(text: str) -> str:
    text = with_plain_signs(text.replace("{,}", ",").replace("\\,", "\N{THIN SPACE}"))
    is_list = "\n" in text.strip()
    return _SPACED.sub(lambda found: found[0] if is_list and found.start() == 0 else found[1] + "-", text)


def last_number(text: str) -> Decimal | None:
    """The last number in the text, with its sign: that of `-$3`, `x = - 3` and `fell to −3`, not of `5-3`."""
    found = _NUMBER.findall(_plain(text))
    return _decimal(found[-1]) if found else None


def number_of(text: str) -> Decimal | None:
    """The number that all of the text is; None: it is none."""
    text = _plain(text).strip()
    return _decimal(text) if _ALONE.fullmatch(text) else None


def _decimal(text: str) -> Decimal:
    return Decimal(re.sub(r"[^\d.eE+-]", "", text))
