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
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import orjson

from tgi_trio.errors import ValidationError
from tgi_trio.router.text import grammars
from tgi_trio.router.text.gbnf_lark import gbnf
from tgi_trio.router.text.tag_calls import CALLS, CallPlace
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
from tgi_trio.router.text.tag_styles import JSON_STYLE, allow_breaks, write_style
from tgi_trio.router.text.tag_terms import (
    ANY,
    LAST,
    UNKNOWN,
    Ends,
    RuleBook,
    find_opening,
    is_open,
    write_either,
    write_without,
)
from tgi_trio.router.text.tag_tokens import TOKEN_FORMATS, read_token, to_texts
from tgi_trio.router.text.tools.terms import (
    escape_regex,
    find_token,
    write_tokens,
)

Given = Mapping[str, Any]


def structural_tag(given: Any, added: Mapping[str, int], calls: CallPlace | None = None) -> str:
    """Return the grammar of a structural tag, as JSON text or its value.

    `added`: text -> id of the tokenizer's added tokens: a model may write a tag as one of them.
    `calls`: how calls of tools begin, which may come beside it; the grammar refers to one of them
    by the name `tag_calls.CALLS`.

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
    added = {text: id for text, id in added.items() if text}
    root = to_texts(root, path, added)
    calls = None if calls is None else calls.beside(root)
    writer = _Writer(added, calls=calls)
    start = writer.write(root, path, LAST)
    if calls is not None:
        start = calls.begin(start, root, added)
    text = "\n".join(f"{name}: {right}" for name, right in {"start": start, **writer.rules}.items())
    parts = [{"lark_grammar": text}, *writer.subs]
    return json.dumps({"grammars": parts}, ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True)
class _Writer(RuleBook):
    """Writes the rules of one grammar."""

    calls: CallPlace | None = None

    def write(self, given: Any, path: str, ends: Ends) -> str:
        """Return terms for a format and what it ends with. Raises ValidationError."""
        form = read_object(given, path)
        kind = str(form.get("type"))
        if kind == "exclude_token":
            raise ValidationError(
                f"`{below(path, 'type')}` cannot be `exclude_token`: a token that may be "
                "any but some is not supported; give `token`, `regex` or `any_text`"
            )
        if kind not in _WRITERS:
            known = ", ".join(f"`{each}`" for each in (*_WRITERS, *TOKEN_FORMATS))
            raise ValidationError(
                f"`{below(path, 'type')}` must be one of {known}. Given: `{kind[:60]}`"
            )
        return _WRITERS[kind](self, form, path, ends)

    # ---- formats that end by themselves --------------------------------------------------------

    def const_string(self, form: Given, path: str, ends: Ends) -> str:
        return self._before(self.spell(read_text(form, "value", path)), ends)

    def token(self, form: Given, path: str, ends: Ends) -> str:
        text = read_token(form.get("token"), below(path, "token"), self.added)
        return self._before(write_tokens([self.added[text]]), ends)

    def json_schema(self, form: Given, path: str, ends: Ends) -> str:
        refuse_fields(form, path, ("any_order", "excludes", "max_whitespace_cnt"))
        schema = form.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise ValidationError(f"`{below(path, 'json_schema')}` must be a schema")
        style = form.get("style", JSON_STYLE)
        if style == JSON_STYLE:
            return self._before(grammars.embed_schema(schema), ends)
        rules = write_style(style, schema, below(path, "style"), self.added)
        return self._before(self.embed(rules), allow_breaks(style, ends))

    def qwen_xml_parameter(self, form: Given, path: str, ends: Ends) -> str:
        return self.json_schema({**form, "style": "qwen_xml"}, path, ends)

    def regex(self, form: Given, path: str, ends: Ends) -> str:
        return self._before(self.refer(grammars.regex(read_text(form, "pattern", path))), ends)

    def grammar(self, form: Given, path: str, ends: Ends) -> str:
        text, syntax = read_text(form, "grammar", path), form.get("syntax", "ebnf")
        if syntax not in ("ebnf", "lark"):
            raise ValidationError(f"`{below(path, 'syntax')}` must be `ebnf` or `lark`")
        whole = gbnf(text) if syntax == "ebnf" else grammars.lark(text)
        return self._before(self.refer(whole), ends)

    def tag(self, form: Given, path: str, ends: Ends) -> str:
        begin = read_text(form, "begin", path)
        return f"{self.spell(begin)} {self._behind_begin(form, path, ends)}"

    def tags_with_separator(self, form: Given, path: str, ends: Ends) -> str:
        refuse_fields(form, path, ("excludes",))
        tags = read_list(form, "tags", path)
        written = [
            self.write({"type": "tag", **read_object(tag, at)}, at, UNKNOWN)
            for tag, at in number_places(tags, path, "tags")
        ]
        one = self.rule("tag", write_either(written))
        more = ""
        if not form.get("stop_after_first"):
            more = f" ({self.spell(read_text(form, 'separator', path))} {one})*"
        text = f"{one}{more}"
        return self._before(text if form.get("at_least_one") else f"({text})?", ends)

    # ---- formats of others ---------------------------------------------------------------------

    def sequence(self, form: Given, path: str, ends: Ends) -> str:
        elements = read_list(form, "elements", path)
        written: list[str] = []
        begun = False  # the beginning of the next one has been written
        for place, (each, at) in enumerate(number_places(elements, path, "elements")):
            last = place + 1 == len(elements)
            following = ends if last else find_opening(elements[place + 1])
            open_ended = not last and is_open(each)
            own = following if last or open_ended else UNKNOWN
            written.append(
                self._without_begin(read_object(each, at), at, own)
                if begun
                else self.write(each, at, own)
            )
            begun = open_ended
        return " ".join(written)

    def either(self, form: Given, path: str, ends: Ends) -> str:
        elements = number_places(read_list(form, "elements", path), path, "elements")
        return self.rule(
            "either", write_either([self.write(each, at, ends) for each, at in elements])
        )

    def optional(self, form: Given, path: str, ends: Ends) -> str:
        return self._repeated(form, path, ends, "?")

    def star(self, form: Given, path: str, ends: Ends) -> str:
        return self._repeated(form, path, ends, "*")

    def plus(self, form: Given, path: str, ends: Ends) -> str:
        return self._repeated(form, path, ends, "+")

    def repeat(self, form: Given, path: str, ends: Ends) -> str:
        least, most = form.get("min"), form.get("max")
        if type(least) is not int or type(most) is not int:  # true is an int of Python's
            raise ValidationError(f"`{below(path, 'min')}` and `max` must be integers")
        if least < 0 or (most != -1 and most < least):
            raise ValidationError(f"`{below(path, 'max')}` must be -1, or >= `min`, which is >= 0")
        times = f"{{{least},}}" if most == -1 else f"{{{least},{most}}}"
        return self._repeated(form, path, ends, times)

    def _repeated(self, form: Given, path: str, ends: Ends, times: str) -> str:
        at = below(path, "content")
        one = self.rule("repeated", self.write(form.get("content"), at, UNKNOWN))
        return self._before(f"{one}{times}", ends)

    # ---- free text -----------------------------------------------------------------------------

    def any_text(self, form: Given, path: str, ends: Ends) -> str:
        refuse_fields(form, path, ("max_tokens", "max_chars"))
        self._check_open(path, ends)
        return self._free([], read_texts(form, "excludes", path), ends, loops=False)

    def triggered_tags(self, form: Given, path: str, ends: Ends) -> str:
        self._check_open(path, ends)
        triggers = read_texts(form, "triggers", path)
        check_triggers(triggers, path)
        bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        first = bool(form.get("stop_after_first"))
        whole = []
        cut: list[tuple[str, str]] = []
        for given, at in number_places(read_list(form, "tags", path), path, "tags"):
            tag = read_object(given, at)
            begin = read_text(tag, "begin", at)
            found = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not found:
                raise ValidationError(f"`{below(at, 'begin')}` begins with none of the triggers")
            body = self.rule("body", self._behind_begin(tag, at, UNKNOWN))
            bodies[found[0]].append(f"{self.spell(begin[len(found[0]) :])} {body}")
            whole.append(f"{self.spell(begin)} {body}")
            token = find_token(begin, self.added) or ""
            if begin.find(token) < len(found[0]) < begin.find(token) + len(token):
                cut.append((begin, body))
        behind = [
            (trigger, write_either(bodies[trigger])) for trigger in triggers if bodies[trigger]
        ]
        excludes = read_texts(form, "excludes", path)
        if not form.get("at_least_one"):
            return self._free(behind, excludes, ends, cut, loops=not first)
        rest = self._before("", ends)
        if not first:
            rest = self._free(behind, excludes, ends, cut, loops=True)
        return f"{write_either(whole)} {rest}"

    def dispatch(self, form: Given, path: str, ends: Ends) -> str:
        self._check_open(path, ends)
        behind = []
        for given, at in number_places(read_list(form, "rules", path), path, "rules"):
            if not (isinstance(given, list) and len(given) == 2 and isinstance(given[0], str)):
                raise ValidationError(f"`{at}` must be a pattern and a format")
            content = self.write(given[1], f"{at}[1]", UNKNOWN)
            behind.append((given[0], self.rule("body", content)))
        check_triggers([pattern for pattern, _ in behind], path)
        excludes = read_texts(form, "excludes", path)
        return self._free(behind, excludes, ends, loops=bool(form.get("loop", True)))

    def _free(
        self,
        behind: Sequence[tuple[str, str]],
        excludes: Sequence[str],
        ends: Ends,
        cut: Sequence[tuple[str, str]] = (),
        *,
        loops: bool,
    ) -> str:
        """Return terms for free text with what must follow its triggers, up to its end.

        `behind`: triggers, each with the terms that follow it. `cut`: the same of begins of tags
        that have a token of which the trigger is a part.
        """
        last, closing = ends == LAST, tuple(end for end in ends if end)
        called: list[str] = []  # the text with which calls begin here, for good
        if self.calls is not None:
            excludes = [*excludes, *self.calls.kept_out(last=last)]
            if last and self.calls.trigger is not None and not self.calls.anchored:
                called = [self.calls.trigger]
        marks = [*(trigger for trigger, _ in behind), *closing, *called]
        never = write_without([*marks, *excludes])
        text = self.rule("TEXT", f"/(?s:.+)/{never}")
        inside = {find_token(mark, self.added) for mark in marks} - {None}
        inside |= {name for name in self.added if any(each in name for each in (*marks, *excludes))}
        # Inside a tag, a token could end the answer before the tag's end.
        others = {id for name, id in self.added.items() if name not in inside} if last else ()
        pieces = [f"{text}? {write_tokens(others)}"] if others else []
        parts = []
        for trigger, terms in behind:
            others_marks = [mark for mark in marks if mark != trigger]
            lead = self._lead(trigger, [*others_marks, *excludes])
            parts.append(f"({lead}) {terms}")
        parts += [f"{self._token_lead(begin, [*marks, *excludes])} {body}" for begin, body in cut]
        tail = [f"{text}?"] if last else []
        for end in (*closing, *called):
            others_marks = [mark for mark in marks if mark != end]
            lead = self._lead(end, [*others_marks, *excludes])
            tail.append(f"({lead}) @{CALLS}" if end in called else lead)
        if loops:
            pieces += parts
        else:
            tail += [self._before(part, ends) for part in parts]
        free = f"({write_either(pieces)})* " if pieces else ""
        return self.rule("free", f"{free}{write_either(tail)}")

    def _lead(self, mark: str, others: Sequence[str]) -> str:
        """Return terms for text up to `mark`, with none of `others` and no other `mark` in it.

        A lazy terminal ends as soon as the mark is complete.
        """
        spelled, never = escape_regex(mark), write_without(others)
        whole = self.rule("LEAD", f"/{ANY}{spelled}/{never}")
        terms = self.rule("lead", whole, lazy=True)
        if find_token(mark, self.added) is None:
            return terms
        return f"{terms} | {self._token_lead(mark, [mark, *others])}"

    def _token_lead(self, mark: str, others: Sequence[str]) -> str:
        """Return terms for text up to `mark`, which has a token, with none of `others` before."""
        token = find_token(mark, self.added) or ""
        before, _, rest = mark.partition(token)
        opened = write_tokens([self.added[token]])
        text = self.rule("BEFORE", f"/{ANY}{escape_regex(before)}/{write_without(others)}")
        if not before:
            text = f"{text}?"
        return f"{text} {opened} {self.spell(rest)}"

    def _check_open(self, path: str, ends: Ends) -> None:
        if ends == UNKNOWN:
            raise ValidationError(
                f"`{path}` is free text, and nothing that is known follows it: it is the last of "
                "a tag or of the answer, or a constant text or a tag follows"
            )

    # ---- parts ---------------------------------------------------------------------------------

    def _behind_begin(self, form: Given, path: str, ends: Ends) -> str:
        """Return terms for a tag's content and end."""
        given = form.get("end")
        own = tuple(given) if isinstance(given, list) else (given,)
        if not own or not all(isinstance(each, str) for each in own):
            raise ValidationError(f"`{below(path, 'end')}` must be a text or a list of texts")
        content, at = form.get("content"), below(path, "content")
        # Behind an empty end comes what comes behind the tag.
        if own == ("",):
            return self.write(content, at, ends)
        return self._before(self.write(content, at, own), ends)

    def _without_begin(self, form: Given, path: str, ends: Ends) -> str:
        """Return terms for a format whose `find_opening` has been written."""
        if form.get("type") == "tag":
            return self._behind_begin(form, path, ends)
        return self._before("", ends)

    def _before(self, terms: str, ends: Ends) -> str:
        """Return terms and, behind them, one of `ends`."""
        if ends in (LAST, UNKNOWN):
            return terms or '""'
        return f"{terms} {write_either([self.spell(end) for end in ends])}".strip()


_Write = Callable[[_Writer, Given, str, Ends], str]
_WRITERS: Final[Mapping[str, _Write]] = MappingProxyType(
    {
        "const_string": _Writer.const_string,
        "token": _Writer.token,
        "json_schema": _Writer.json_schema,
        "qwen_xml_parameter": _Writer.qwen_xml_parameter,
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
