"""Parts of the grammars of structural tags: what ends a format, and terms of rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tgi_trio.router.text.tools.terms import escape_regex, write_terms

# What follows a format: one of these texts, which it must end with; nothing that is known; or the
# end of the answer.
Ends = tuple[str, ...]
UNKNOWN: Final[Ends] = ()
LAST: Final[Ends] = ("",)

ANY: Final = "(?s:.*)"
_OPEN: Final = frozenset({"any_text", "triggered_tags", "dispatch"})


@dataclass(slots=True)
class RuleBook:
    """Collects the rules of one grammar."""

    added: Mapping[str, int]  # text -> id of the tokenizer's added tokens
    rules: dict[str, str] = field(default_factory=dict)
    subs: list[dict[str, Any]] = field(default_factory=list)  # grammars to which rules refer

    def spell(self, text: str) -> str:
        """Return terms for a text, of which added tokens may be a part."""
        return write_terms(text, self.added)

    def refer(self, whole: str) -> str:
        """Return a term for another grammar."""
        return self._add(json.loads(whole)["grammars"][0])

    def embed(self, rules: Mapping[str, str]) -> str:
        """Return a term for rules (name -> right side) of their own, the top one `start`."""
        return self._add({"lark_grammar": "\n".join(": ".join(each) for each in rules.items())})

    def _add(self, grammar: Mapping[str, Any]) -> str:
        name = f"tag_content_{len(self.subs)}"
        self.subs.append({**grammar, "name": name})
        return f"@{name}"

    def rule(self, kind: str, right: str, *, lazy: bool = False) -> str:
        """Add a rule, a terminal for a name in capitals; return its name."""
        for name, known in self.rules.items():
            if known == right and name.startswith(f"{kind}_") and not lazy:
                return name
        name = f"{kind}_{len(self.rules)}"
        self.rules[f"{name}[lazy]" if lazy else name] = right
        return name


def is_open(given: Any) -> bool:
    """Return whether a format is free text, which ends only where something known follows."""
    return isinstance(given, dict) and str(given.get("type")) in _OPEN


def find_opening(given: Any) -> Ends:
    """Return the text with which a format begins; nothing where that is not one text."""
    if not isinstance(given, dict):
        return UNKNOWN
    text = given.get({"const_string": "value", "tag": "begin"}.get(str(given.get("type")), ""))
    return (text,) if isinstance(text, str) and text else UNKNOWN


def write_either(terms: Sequence[str]) -> str:
    """Return a term for one of some terms, of which there is at least one."""
    return terms[0] if len(terms) == 1 else f"({' | '.join(terms)})"


def write_without(texts: Iterable[str]) -> str:
    """Return an intersection for a terminal that contains none of these texts."""
    found = "|".join(escape_regex(each) for each in texts if each)
    return f" & ~/{ANY}(?:{found}){ANY}/" if found else ""
