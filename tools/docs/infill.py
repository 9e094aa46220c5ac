"""The table of ways to write gaps, from the rows themselves."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from tgi_trio.router.text.infill import FORMATS, Gap
from tools.docs.markdown import show_code, table


def render() -> str:
    """Return the table: who writes gaps how, and what ends an answer beside the tokens shown."""
    rows = (
        (
            name,
            show_code(form.write(Gap("BEFORE", "BEHIND"), ())),
            ", ".join(map(show_code, form.others_begin)),
            ", ".join(map(show_code, form.ends)),
        )
        for name, form in FORMATS.items()
    )
    heads = ("families", "a gap", "begins another file or repository", "ends an answer as well")
    return table(heads, rows)


SECTIONS: Final = MappingProxyType({"infill-formats": render})
