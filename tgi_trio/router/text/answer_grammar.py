"""The grammar of a whole answer, from its first token on, for the shard.

    thought? answer

The thought is that of `thoughts/rules.py`, if the model thinks. The answer is in the form that a
client asks for, prose in which calls may begin, calls alone, or anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from tgi_trio.router.text import grammars
from tgi_trio.router.text.tag_calls import CALLS
from tgi_trio.router.text.thoughts.place import Place
from tgi_trio.router.text.thoughts.rules import ThoughtRules
from tgi_trio.router.text.tools.call_formats import Format
from tgi_trio.router.text.tools.call_rules import call_rules
from tgi_trio.router.text.tools.channels import Begun, channel_rules
from tgi_trio.router.text.tools.functions import ToolUse
from tgi_trio.router.text.tools.terms import (
    escape_regex,
    find_token,
    spell_json,
    write_terms,
    write_tokens,
)

_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_TEXT = "(?s:.+)"
_FORM = "answer_form"  # name of the grammar that the client asks for
_LINES: Final = 256  # of a grammar that are joined at a time
_PIECE: Final = 1 << 13  # characters of a line that are written at a time
_BEGUN: Mapping[Place, Begun] = {
    Place.INSIDE: "thought",
    Place.CLOSED: "answer",
    Place.MAY_OPEN: None,
}


def tool_grammar(
    form: Format,
    use: ToolUse,
    added: Mapping[str, int],
    thought: ThoughtRules | None = None,
    otherwise: str | None = None,
    *,
    tagged: bool = False,
) -> str:
    """Return the grammar of an answer that may, or must, call tools.

    `otherwise`: the grammar of an answer without calls; None: free prose. `tagged`: it is that of
    a structural tag, which says itself where calls begin (`tag_calls.py`).

    `added`: text -> id of the tokenizer's added tokens. llguidance may not know such a token by its
    text, so where the format contains one, both the token and its spelling are allowed, and prose
    may contain all others.
    """
    more = [] if otherwise is None or use.required else _named(otherwise)
    if form.channels:
        return _on_channels(use, added, thought, *more)
    calls = call_rules(form, use, added)
    if use.required:
        beginning = {"answer": f"{write_terms(form.trigger, added)} calls"}
    elif more and tagged:
        more.append({"name": CALLS, **_lark({"start": "calls", **calls})})
        beginning, calls = {"answer": f"@{_FORM}"}, {}
    elif more:
        trigger = write_terms(form.trigger, added)
        if form.anchored:  # both are JSON
            trigger = spell_json(form.trigger)
        beginning = {"answer": f"{trigger} calls | @{_FORM}"}
    else:
        beginning = _write_prose(form, added, thought)
    if thought is None:
        grammar = _compose([{"start": "answer"}, beginning, calls], *more)
    else:
        forced = use.required or otherwise is not None
        grammar = _with_thought(thought, [beginning, calls], *more, forced=forced)
    while calls:  # freed all at once, those of many tools would hold the interpreter
        calls.popitem()
    return grammar


def silent_grammar(
    form: Format, added: Mapping[str, int], thought: ThoughtRules | None = None
) -> str:
    """Return the grammar of an answer that calls nothing, though its model is shown tools.

    `added`: as `tool_grammar` has it. What looks like a call in a thought is none.
    """
    if form.channels:
        return _on_channels(None, added, thought)
    rules = _write_prose(form, added, thought, calls=False)
    if thought is None:
        return _compose([{"start": "answer"}, rules])
    return _with_thought(thought, [rules], forced=False)


def form_grammar(form: str, thought: ThoughtRules | None) -> str:
    """Return the grammar of an answer that matches `form`, with a thought before it."""
    if thought is None:
        return form
    if thought.on_channels:
        return _on_channels(None, thought.added, thought, *_named(form))
    return _with_thought(thought, [{"answer": f"@{_FORM}"}], *_named(form), forced=True)


def _named(form: str) -> list[Mapping[str, Any]]:
    """Return the parts of a whole grammar, the first with a name to which rules can refer."""
    first, *more = json.loads(form)["grammars"]
    return [{**first, "name": _FORM}, *more]


def free_grammar(added: Mapping[str, int], thought: ThoughtRules) -> str:
    """Return the grammar of any answer after a thought of bounded length."""
    if thought.on_channels:
        return _on_channels(None, added, thought)
    tokens = write_tokens(id for id in added.values() if id != thought.begin_token)
    rules = {"answer": f"(TEXT? {tokens})* TEXT?", "TEXT": f"/{_TEXT}/{thought.not_begun}"}
    return _with_thought(thought, [rules], forced=False)


def _on_channels(
    use: ToolUse | None,
    added: Mapping[str, int],
    thought: ThoughtRules | None,
    *form: Mapping[str, Any],
) -> str:
    """Return the grammar of an answer on channels; `form`: the grammar of its content, if any."""
    channels = channel_rules(
        use,
        added,
        begun=None if thought is None else _BEGUN[thought.place],
        budget=None if thought is None else thought.budget,
        final=f"@{_FORM}" if form else None,
    )
    return _compose([channels.rules], *channels.subs, *form)


def _write_prose(
    form: Format, added: Mapping[str, int], thought: ThoughtRules | None, *, calls: bool = True
) -> dict[str, str]:
    """Return the rules for prose up to and including the trigger of calls.

    `calls`: whether there may be any; False: for prose without the trigger.
    """
    begin, not_begun = (None, "") if thought is None else (thought.begin_token, thought.not_begun)
    trigger, spelled = escape_regex(form.trigger), grammars.literal(form.trigger)
    token = added.get(form.trigger)
    others = write_tokens(id for id in added.values() if id not in (token, begin))
    if form.anchored:
        return {
            "answer": (
                f"{others}* (FIRST ({others} TEXT?)*{f' | {spelled} calls' if calls else ''})?"
            ),
            "FIRST": f"/{_TEXT}/ & ~/{trigger}(?s:.*)/{not_begun}",
            "TEXT": f"/{_TEXT}/",
        }
    ends = ["TEXT?", "lead calls"]
    if token is not None:
        ends.append(f"TEXT? {write_tokens([token])} calls")
    elif (inside := find_token(form.trigger, added)) is not None:
        others = write_tokens(id for id in added.values() if id not in (added[inside], begin))
        return _write_around(form, inside, added, others, not_begun, calls=calls)
    text = f"/{_TEXT}/ & ~/(?s:.*){trigger}(?s:.*)/{not_begun}"
    if not calls:
        # Two texts never meet: the trigger could be cut in two.
        pieces = "" if others == write_tokens(()) else f"(TEXT? {others})* "
        return {"answer": f"{pieces}TEXT?", "TEXT": text}
    return {
        "answer": f"(TEXT? {others})* ({' | '.join(ends)})",
        # A lazy terminal ends as soon as the trigger is complete.
        "lead[lazy]": f"LEAD {spelled}",
        "LEAD": f"/(?s:.*)/{not_begun}",
        "TEXT": text,
    }


def _write_around(
    form: Format,
    inside: str,
    added: Mapping[str, int],
    others: str,
    not_begun: str,
    *,
    calls: bool,
) -> dict[str, str]:
    """Return the rules for prose if an added token is part of the trigger: what follows decides."""
    opened = write_tokens([added[inside]])
    trigger, spelled = escape_regex(form.trigger), grammars.literal(form.trigger)
    rest = form.trigger.partition(inside)[2]
    following = rest.partition(find_token(rest, added) or "\n")[0]
    prose = {
        "answer": f"TEXT? | TEXT? {others} answer | TEXT? {opened} behind",
        "behind": f"OTHER? | OTHER? {others} answer | OTHER? {opened} behind",
        "TEXT": f"/{_TEXT}/ & ~/(?s:.*){trigger}(?s:.*)/{not_begun}",
        "OTHER": f"TEXT & ~/{escape_regex(following)}(?s:.*)/",
    }
    if not calls:
        return prose
    return {
        **prose,
        "answer": f"{prose['answer']} | lead calls",
        "behind": f"{write_terms(rest, added)} calls | {prose['behind']}",
        "lead[lazy]": f"LEAD {spelled}",
        "LEAD": f"/(?s:.*)/{not_begun}",
    }


def _with_thought(
    thought: ThoughtRules,
    rules: Sequence[Mapping[str, str]],
    *more: Mapping[str, Any],
    forced: bool,
) -> str:
    start = {"start": thought.start(forced=forced)}
    return _compose([start, *rules, thought.rules], *thought.subs, *more)


def _compose(rules: Sequence[Mapping[str, str]], *more: Mapping[str, Any]) -> str:
    """Return the grammar as JSON: these rules, and what they refer to.

    It is written bit by bit, and copied once: one call for all would hold the interpreter.
    """
    lines = _lines(rules)
    texts = ['{"grammars":[{"lark_grammar":"', *_escape(next(lines))]
    while some := list(islice(lines, _LINES)):
        texts.append("".join(piece for line in some for piece in _escape(f"\n{line}")))
    return "".join([*texts, '"}', *(f",{_JSON.encode(each)}" for each in more), "]}"])


def _lark(rules: Mapping[str, str]) -> dict[str, str]:
    return {"lark_grammar": "\n".join(_lines([rules]))}


def _lines(rules: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the lines of rules; of those with one name the last counts, in the first one's place.

    A dictionary of all of them would be made, grow and be freed in calls that take long.
    """
    for i, part in enumerate(rules):
        for name, rule in part.items():
            if any(name in before for before in rules[:i]):
                continue
            last = next((each[name] for each in rules[:i:-1] if name in each), rule)
            yield f"{name}: {last}"


def _escape(text: str) -> Iterator[str]:
    """Yield pieces of a text as JSON has it, without the quotes."""
    for begin in range(0, len(text), _PIECE):
        yield _JSON.encode(text[begin : begin + _PIECE])[1:-1]
