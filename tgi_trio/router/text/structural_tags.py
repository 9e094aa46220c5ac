"""Structural tags: text that is free up to where a tag begins, and is in a given form inside it.

The notation is xgrammar's, as vLLM and SGLang take it: `{"format": {...}}`, with formats inside one
another, and the older `{"structures": [...], "triggers": [...]}`. It becomes one grammar, which the
shard applies like any other. JSON is compact, as in all grammars here.

Text that is free can only end where something known follows it: a tag's end, the next constant
text, or the end of the answer. It is read up to there by a lazy terminal, as prose before tool
calls is (`answer_grammar.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import orjson

from tgi_trio.errors import ValidationError
from tgi_trio.router.text import grammars
from tgi_trio.router.text.gbnf_lark import gbnf
from tgi_trio.router.text.tag_fields import (
    below,
    check_triggers,
    number_places,
    read_list,
    read_object,
    read_older,
    read_text,
    read_texts,
    refuse_fields,
)
from tgi_trio.router.text.tag_terms import (
    ANY,
    LAST,
    UNKNOWN,
    Ends,
    find_opening,
    is_open,
    write_either,
    write_without,
)
from tgi_trio.router.text.tools.terms import (
    escape_regex,
    find_token,
    write_terms,
    write_tokens,
)

Given = Mapping[str, Any]

_DEEPEST: Final = 64
_TOKENS: Final = frozenset("exclude_token any_tokens token_triggered_tags token_dispatch".split())


def structural_tag(given: Any, added: Mapping[str, int]) -> str:
    """Return the grammar of a structural tag, as JSON text or its value.

    `added`: text -> id of the tokenizer's added tokens: a model may write a tag as one of them.
    Raises ValidationError, with the place of what is wrong or not served.
    """
    if isinstance(given, str):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError as error:
            raise ValidationError(f"the structural tag is no JSON: {error}") from error
    whole = read_object(given, "the structural tag")
    if "format" in whole:
        root, path = whole["format"], "format"
    elif "structures" in whole or "triggers" in whole:
        root, path = read_older(whole), ""
    else:
        raise ValidationError("the structural tag has neither `format` nor `structures`")
    writer = _Writer({text: id for text, id in added.items() if text})
    start = writer.write(root, path, LAST, 0)
    text = "\n".join(f"{name}: {right}" for name, right in {"start": start, **writer.rules}.items())
    parts = [{"lark_grammar": text}, *writer.subs]
    return json.dumps({"grammars": parts}, ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True)
class _Writer:
    """Collects the rules of one grammar."""

    added: Mapping[str, int]
    rules: dict[str, str] = field(default_factory=dict)
    subs: list[dict[str, Any]] = field(default_factory=list)  # grammars to which rules refer

    def write(self, given: Any, path: str, ends: Ends, depth: int) -> str:
        """Return terms for a format and what it ends with. Raises ValidationError."""
        if depth > _DEEPEST:
            raise ValidationError(f"the structural tag nests deeper than {_DEEPEST} formats")
        form = read_object(given, path)
        kind = str(form.get("type"))
        if kind in _TOKENS:
            raise ValidationError(
                f"`{below(path, 'type')}` is `{kind}`, and of formats of tokens `token` alone is "
                "served: give tags as texts, which may be written as tokens of the model"
            )
        if kind not in _WRITERS:
            known = ", ".join(f"`{each}`" for each in _WRITERS)
            raise ValidationError(
                f"`{below(path, 'type')}` must be one of {known}. Given: `{kind}`"
            )
        return _WRITERS[kind](self, form, path, ends, depth)

    # ---- formats that end by themselves --------------------------------------------------------

    def const_string(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        return self._before(self._spell(read_text(form, "value", path)), ends)

    def token(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        given, known = form.get("token"), self.added
        id = known.get(given) if isinstance(given, str) else given
        if type(id) is not int or id not in known.values():
            raise ValidationError(
                f"`{below(path, 'token')}` must be one of the tokenizer's added tokens, by its "
                "text or its id: others are read as the texts that they are, by `const_string`"
            )
        return self._before(write_tokens([id]), ends)

    def json_schema(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        if form.get("style", "json") != "json":
            raise ValidationError(
                f"`{below(path, 'style')}` must be `json`: for calls in other forms use `tools`"
            )
        refuse_fields(form, path, ("any_order", "excludes", "max_whitespace_cnt"))
        schema = form.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise ValidationError(f"`{below(path, 'json_schema')}` must be a schema")
        return self._before(grammars.embed_schema(schema), ends)

    def regex(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        return self._before(self._refer(grammars.regex(read_text(form, "pattern", path))), ends)

    def grammar(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        text, syntax = read_text(form, "grammar", path), form.get("syntax", "ebnf")
        if syntax not in ("ebnf", "lark"):
            raise ValidationError(f"`{below(path, 'syntax')}` must be `ebnf` or `lark`")
        whole = gbnf(text) if syntax == "ebnf" else grammars.lark(text)
        return self._before(self._refer(whole), ends)

    def tag(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        begin = read_text(form, "begin", path)
        return f"{self._spell(begin)} {self._behind_begin(form, path, ends, depth)}"

    def tags_with_separator(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        refuse_fields(form, path, ("excludes",))
        tags = read_list(form, "tags", path)
        written = [
            self.write({"type": "tag", **read_object(tag, at)}, at, UNKNOWN, depth + 1)
            for tag, at in number_places(tags, path, "tags")
        ]
        one = self._rule("tag", write_either(written))
        more = ""
        if not form.get("stop_after_first"):
            more = f" ({self._spell(read_text(form, 'separator', path))} {one})*"
        text = f"{one}{more}"
        return self._before(text if form.get("at_least_one") else f"({text})?", ends)

    # ---- formats of others ---------------------------------------------------------------------

    def sequence(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        elements = read_list(form, "elements", path)
        written: list[str] = []
        begun = False  # the beginning of the next one has been written
        for place, (each, at) in enumerate(number_places(elements, path, "elements")):
            last = place + 1 == len(elements)
            following = ends if last else find_opening(elements[place + 1])
            open_ended = not last and is_open(each)
            own = following if last or open_ended else UNKNOWN
            written.append(
                self._without_begin(read_object(each, at), at, own, depth + 1)
                if begun
                else self.write(each, at, own, depth + 1)
            )
            begun = open_ended
        return " ".join(written)

    def either(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        elements = number_places(read_list(form, "elements", path), path, "elements")
        return self._rule(
            "either", write_either([self.write(each, at, ends, depth + 1) for each, at in elements])
        )

    def optional(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        return self._repeated(form, path, ends, depth, "?")

    def star(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        return self._repeated(form, path, ends, depth, "*")

    def plus(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        return self._repeated(form, path, ends, depth, "+")

    def repeat(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        least, most = form.get("min"), form.get("max")
        if not isinstance(least, int) or not isinstance(most, int):
            raise ValidationError(f"`{below(path, 'min')}` and `max` must be integers")
        if least < 0 or (most != -1 and most < least):
            raise ValidationError(f"`{below(path, 'max')}` must be -1, or >= `min`, which is >= 0")
        times = f"{{{least},}}" if most == -1 else f"{{{least},{most}}}"
        return self._repeated(form, path, ends, depth, times)

    def _repeated(self, form: Given, path: str, ends: Ends, depth: int, times: str) -> str:
        at = below(path, "content")
        one = self._rule("repeated", self.write(form.get("content"), at, UNKNOWN, depth + 1))
        return self._before(f"{one}{times}", ends)

    # ---- free text -----------------------------------------------------------------------------

    def any_text(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        refuse_fields(form, path, ("max_tokens", "max_chars"))
        self._check_open(path, ends)
        return self._free([], read_texts(form, "excludes", path), ends, loops=False)

    def triggered_tags(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        self._check_open(path, ends)
        triggers = read_texts(form, "triggers", path)
        check_triggers(triggers, path)
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        first = bool(form.get("stop_after_first"))
        whole = []
        for given, at in number_places(read_list(form, "tags", path), path, "tags"):
            tag = read_object(given, at)
            begin = read_text(tag, "begin", at)
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not found:
                raise ValidationError(f"`{below(at, 'begin')}` begins with none of the triggers")
            body = self._rule("body", self._behind_begin(tag, at, UNKNOWN, depth + 1))
            bodies[found[0]].append(f"{self._spell(begin[len(found[0]) :])} {body}")
            whole.append(f"{self._spell(begin)} {body}")
        behind = [
            (trigger, write_either(bodies[trigger])) for trigger in triggers if bodies[trigger]
        ]
        excludes = read_texts(form, "excludes", path)
        if not form.get("at_least_one"):
            return self._free(behind, excludes, ends, loops=not first)
        rest = self._before("", ends) if first else self._free(behind, excludes, ends, loops=True)
        return f"{write_either(whole)} {rest}"

    def dispatch(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        self._check_open(path, ends)
        behind = []
        for given, at in number_places(read_list(form, "rules", path), path, "rules"):
            if not (isinstance(given, list) and len(given) == 2 and isinstance(given[0], str)):
                raise ValidationError(f"`{at}` must be a pattern and a format")
            content = self.write(given[1], f"{at}[1]", UNKNOWN, depth + 1)
            behind.append((given[0], self._rule("body", content)))
        check_triggers([pattern for pattern, _ in behind], path)
        excludes = read_texts(form, "excludes", path)
        return self._free(behind, excludes, ends, loops=bool(form.get("loop", True)))

    def _free(
        self,
        behind: Sequence[tuple[str, str]],
        excludes: Sequence[str],
        ends: Ends,
        *,
        loops: bool,
    ) -> str:
        """Return terms for free text with what must follow its triggers, up to its end.

        `behind`: triggers, each with the terms that follow it.
        """
        last, closing = ends == LAST, tuple(end for end in ends if end)
        marks = [*(trigger for trigger, _ in behind), *closing]
        never = write_without([*marks, *excludes])
        text = self._rule("TEXT", f"/(?s:.+)/{never}")
        inside = {find_token(mark, self.added) for mark in marks} - {None}
        inside |= {token for token in self.added if any(each in token for each in excludes)}
        # Inside a tag, a token could end the answer before the tag's end.
        others = {id for name, id in self.added.items() if name not in inside} if last else ()
        pieces = [f"{text}? {write_tokens(others)}"] if others else []
        parts = []
        for trigger, terms in behind:
            others_marks = [mark for mark in marks if mark != trigger]
            lead = self._lead(trigger, [*others_marks, *excludes])
            parts.append(f"({lead}) {terms}")
        tail = [f"{text}?"] if last else []
        for end in closing:
            others_marks = [mark for mark in marks if mark != end]
            tail.append(self._lead(end, [*others_marks, *excludes]))
        if loops:
            pieces += parts
        else:
            tail += [self._before(part, ends) for part in parts]
        free = f"({write_either(pieces)})* " if pieces else ""
        return self._rule("free", f"{free}{write_either(tail)}")

    def _lead(self, mark: str, others: Sequence[str]) -> str:
        """Return terms for text up to `mark`, with none of `others` and no other `mark` in it.

        A lazy terminal ends as soon as the mark is complete.
        """
        spelled, never = escape_regex(mark), write_without(others)
        whole = self._rule("LEAD", f"/{ANY}{spelled}/{never}")
        terms = self._rule("lead", whole, lazy=True)
        token = find_token(mark, self.added)
        if token is None:
            return terms
        before, _, rest = mark.partition(token)
        opened = write_tokens([self.added[token]])
        text = self._rule(
            "BEFORE", f"/{ANY}{escape_regex(before)}/{write_without([mark, *others])}"
        )
        if not before:
            text = f"{text}?"
        return f"{terms} | {text} {opened} {self._spell(rest)}"

    def _check_open(self, path: str, ends: Ends) -> None:
        if ends == UNKNOWN:
            raise ValidationError(
                f"`{path}` is free text, and nothing that is known follows it: it is the last of "
                "a tag or of the answer, or a constant text or a tag follows"
            )

    # ---- parts ---------------------------------------------------------------------------------

    def _behind_begin(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        """Return terms for a tag's content and end."""
        given = form.get("end")
        own = tuple(given) if isinstance(given, list) else (given,)
        if not own or not all(isinstance(each, str) for each in own):
            raise ValidationError(f"`{below(path, 'end')}` must be a text or a list of texts")
        content, at = form.get("content"), below(path, "content")
        # Behind an empty end comes what comes behind the tag.
        if own == ("",):
            return self.write(content, at, ends, depth + 1)
        return self._before(self.write(content, at, own, depth + 1), ends)

    def _without_begin(self, form: Given, path: str, ends: Ends, depth: int) -> str:
        """Return terms for a format whose `find_opening` has been written."""
        if form.get("type") == "tag":
            return self._behind_begin(form, path, ends, depth)
        return self._before("", ends)

    def _before(self, terms: str, ends: Ends) -> str:
        """Return terms and, behind them, one of `ends`."""
        if ends in (LAST, UNKNOWN):
            return terms or '""'
        return f"{terms} {write_either([self._spell(end) for end in ends])}".strip()

    def _spell(self, text: str) -> str:
        return write_terms(text, self.added)

    def _refer(self, whole: str) -> str:
        """Return a term for another grammar."""
        parts = json.loads(whole)["grammars"]
        name = f"tag_content_{len(self.subs)}"
        self.subs.append({**parts[0], "name": name})
        return f"@{name}"

    def _rule(self, kind: str, right: str, *, lazy: bool = False) -> str:
        """Add a rule, a terminal for a name in capitals; return its name."""
        for name, known in self.rules.items():
            if known == right and name.startswith(f"{kind}_") and not lazy:
                return name
        name = f"{kind}_{len(self.rules)}"
        self.rules[f"{name}[lazy]" if lazy else name] = right
        return name


_Write = Callable[[_Writer, Given, str, Ends, int], str]
_WRITERS: Final[Mapping[str, _Write]] = MappingProxyType(
    {
        "const_string": _Writer.const_string,
        "token": _Writer.token,
        "json_schema": _Writer.json_schema,
        "regex": _Writer.regex,
        "grammar": _Writer.grammar,
        "any_text": _Writer.any_text,
        "sequence": _Writer.sequence,
        "or": _Writer.either,
        "tag": _Writer.tag,
        "triggered_tags": _Writer.triggered_tags,
        "tags_with_separator": _Writer.tags_with_separator,
        "dispatch": _Writer.dispatch,
        "optional": _Writer.optional,
        "star": _Writer.star,
        "plus": _Writer.plus,
        "repeat": _Writer.repeat,
    }
)
