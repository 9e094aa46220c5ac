"""Numbers in English words, as SmolVLM's prompts have them (those of the package num2words)."""

from __future__ import annotations

from typing import Final

_SMALL: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS: Final = "twenty thirty forty fifty sixty seventy eighty ninety".split()
MOST: Final = 999_999


def spell_number(number: int) -> str:
    """Return a number from 0 to 999,999 in words; raises ValueError for any other."""
    if not 0 <= number <= MOST:
        raise ValueError(f"{number} is not written in words")
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return f"{_TENS[tens - 2]}-{_SMALL[rest]}" if rest else _TENS[tens - 2]
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_SMALL[hundreds]} hundred" + (f" and {spell_number(rest)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    between = ", " if rest >= 100 else " and "
    return f"{spell_number(thousands)} thousand" + (between + spell_number(rest) if rest else "")
