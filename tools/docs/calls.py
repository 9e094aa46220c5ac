"""The table of ways to write calls, from the rows themselves."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

from tgi_trio.router.text.tools.call_formats import FORMATS
from tgi_trio.router.text.tools.format import Format, show_text
from tools.docs.markdown import show_code, table

_CALL = (("f", {"x": "XX", "n": 2}),)


def render() -> str:
    """Return the table: each row, and behind it the variants of which the probe may choose one."""
    return table(("row", "families", "known by", "ids", "a call"), _rows())


def _rows() -> Iterator[tuple[str, str, str, str, str]]:
    for form in FORMATS:
        yield _row(form, ", ".join(map(show_code, form.signs)) + _tell_token(form))
        for each in form.variants:
            yield _row(each, f"as {form.name}, and what the template writes")


def _row(form: Format, known: str) -> tuple[str, str, str, str, str]:
    return form.name, form.families, known, form.ids, show_code(show_text(form.write(_CALL)))


def _tell_token(form: Format) -> str:
    return " (or an added token)" if form.token else ""


SECTIONS: Final = MappingProxyType({"call-formats": render})
