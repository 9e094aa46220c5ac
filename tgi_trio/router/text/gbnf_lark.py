"""Converts a GBNF grammar to llguidance's dialect of Lark.

llguidance splits text into lexemes, and lexing is greedy: `word ::= [a-z]+` before an "x", written
rule by rule, would match each "x" as well and never end. So a part becomes one lexeme only if
nothing that may follow could continue it. For a grammar without recursion that is the whole, which
then accepts exactly the texts that it derives; otherwise the largest such parts. The rest is
matched character by character. One effect of lexemes remains: where a recursive grammar allows
several at one place, the longest match is taken.

(llguidance's own `gbnf_to_lark` makes a lexeme of every rule that is not recursive.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tgi_trio.errors import ValidationError
from tgi_trio.router.text import grammars
from tgi_trio.router.text.gbnf import (
    ROOT,
    Alternation,
    Characters,
    Literal,
    Node,
    Reference,
    Repeat,
    Series,
    parse,
)

_MOST_PASSES = 32  # over recursive rules, until what may follow each of them is known
_LARGEST = 0x10FFFF  # code point

Update = Callable[[str], None]


def gbnf(text: str) -> str:
    """Return the grammar of a text in GBNF or EBNF, as the shard reads it.

    This takes milliseconds, up to some hundred for the longest texts, so call it in a thread.
    Raises ValidationError that names line and column.
    """
    return grammars.lark(write_lark(parse(text)))


def write_lark(rules: Mapping[str, Node]) -> str:
    """Return Lark for the rules of `parse`. Raises ValidationError for too entangled ones."""
    return _Writer(_keep_reachable(rules)).lark()


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts about a part; sets of characters are bits, one for each interval of code points.

    `first`: the characters with which a text of it may begin. `more`: those that may continue a
    text that is already complete; never too few, sometimes too many. `all`: those that it may
    contain.
    """

    empty: bool = False  # it may be the empty text
    first: int = 0
    more: int = 0
    all: int = 0


_EMPTY = _Facts(empty=True)
_NOTHING = _Facts()


class _Alphabet:
    """The code points, divided into intervals that no class of the grammar distinguishes."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        cuts = {0, _LARGEST + 1}
        for part in _parts(rules.values()):
            if isinstance(part, Literal):
                cuts.update(code for each in part.text for code in (ord(each), ord(each) + 1))
            elif isinstance(part, Characters):
                cuts.update(code for low, high in part.ranges for code in (low, high + 1))
        self._place = {cut: i for i, cut in enumerate(sorted(cuts))}
        self._whole = (1 << (len(cuts) - 1)) - 1

    def bits(self, characters: Characters) -> int:
        """Return the set of a class."""
        bits = 0
        for low, high in characters.ranges:
            bits |= (1 << self._place[high + 1]) - (1 << self._place[low])
        return self._whole & ~bits if characters.negated else bits

    def bit(self, character: str) -> int:
        """Return the set of one character."""
        return 1 << self._place[ord(character)]


class _Analysis:
    """What may begin, continue and follow each part of a grammar."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._alphabet = _Alphabet(rules)
        order = _order_rules(rules)
        self._flat = frozenset(order)  # rules without recursion
        self._facts = dict.fromkeys(rules, _NOTHING)
        self.follow = dict.fromkeys(rules, 0)  # bits: what may follow each rule
        for name in order:  # each after those to which it refers
            self._facts[name] = self.facts(rules[name])
        tangled = [name for name in rules if name not in self._flat]
        self._settle(tangled, self._facts, self._facts_of_rule)
        self._settle(list(rules), self.follow, self._spread)

    def recurs(self, node: Node) -> bool:
        """Return whether a part refers to recursive rules."""
        names = (part.name for part in _parts([node]) if isinstance(part, Reference))
        return any(name not in self._flat for name in names)

    def facts(self, node: Node) -> _Facts:
        """Return the facts about a part."""
        match node:
            case Characters():
                bits = self._alphabet.bits(node)
                return _Facts(first=bits, all=bits)
            case Literal(""):
                return _EMPTY
            case Literal(text):
                everything = 0
                for character in text:
                    everything |= self._alphabet.bit(character)
                return _Facts(first=self._alphabet.bit(text[0]), all=everything)
            case Reference(name):
                return self._facts[name]
            case Series(parts):
                return reduce(_one_after_other, map(self.facts, parts), _EMPTY)
            case Alternation(parts):
                return reduce(_unite_facts, map(self.facts, parts))
            case Repeat(part, least, most):
                return _repeat_facts(self.facts(part), least, most)

    def _settle(self, names: list[str], known: dict[str, Any], update: Update) -> None:
        """Update `known`, in alternating directions, until nothing changes."""
        for _ in range(_MOST_PASSES):
            before = dict(known)
            names = names[::-1]
            for name in names:
                update(name)
            if known == before:
                return
        raise ValidationError("grammar is not valid: its rules refer to one another too often")

    def _facts_of_rule(self, name: str) -> None:
        self._facts[name] = self.facts(self._rules[name])

    def _spread(self, name: str) -> None:
        """Add to the rules to which a rule refers what may follow them."""
        waiting = [(self._rules[name], self.follow[name])]
        while waiting:
            node, follow = waiting.pop()
            if isinstance(node, Reference):
                self.follow[node.name] |= follow
            else:
                waiting += self.parts_and_follows(node, follow)

    def parts_and_follows(self, node: Node, follow: int) -> list[tuple[Node, int]]:
        """Return the parts of a part, each with what may follow it."""
        match node:
            case Series(parts):
                found: list[tuple[Node, int]] = []
                for part in reversed(parts):
                    found.append((part, follow))
                    facts = self.facts(part)
                    follow = facts.first | (follow if facts.empty else 0)
                return found[::-1]
            case Alternation(parts):
                return [(part, follow) for part in parts]
            case Repeat(part, _, most):
                return [(part, follow if most == 1 else follow | self.facts(part).first)]
        return []


class _Writer:
    """Writes the rules that `root` needs, as rules (`r1`) and as lexemes (`L2`)."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._analysis = _Analysis(rules)
        self._names: dict[Node, str] = {Reference(ROOT): "start"}  # of rules
        self._lexemes: dict[Node, str] = {}
        self._waiting: list[tuple[str, Callable[[], str]]] = []  # names and their writers

    def lark(self) -> str:
        """Return the whole grammar."""
        root, written = self._rules[ROOT], []
        self._waiting.append(("start", lambda: self._rule(root, 0)))
        while self._waiting:
            name, write = self._waiting.pop()
            written.append(f"{name}: {write()}")
        return "\n".join(written)

    def _rule(self, node: Node, follow: int) -> str:
        """Return a part as a term inside a rule."""
        if isinstance(node, Characters | Literal):
            return _one_lexeme(node)
        if not self._analysis.recurs(node) and not self._analysis.facts(node).more & follow:
            return self._lexeme_name(node)
        match node:
            case Reference(name):
                return self._rule_name(name)
            case Series() | Alternation() | Repeat():
                inner = self._analysis.parts_and_follows(node, follow)
                return _compose(node, [self._rule(part, behind) for part, behind in inner])

    def _lexeme(self, node: Node) -> str:
        """Return a part as a term inside a lexeme."""
        match node:
            case Characters() | Literal():
                return _one_lexeme(node)
            case Reference():
                return self._lexeme_name(node)
            case Series(parts) | Alternation(parts):
                return _compose(node, [self._lexeme(part) for part in parts])
            case Repeat(part):
                return _compose(node, [self._lexeme(part)])

    def _rule_name(self, name: str) -> str:
        node, follow = self._rules[name], self._analysis.follow[name]
        return self._name(self._names, "r", Reference(name), lambda: self._rule(node, follow))

    def _lexeme_name(self, node: Node) -> str:
        inner = self._rules[node.name] if isinstance(node, Reference) else node
        return self._name(self._lexemes, "L", node, lambda: self._lexeme(inner))

    def _name(
        self, names: dict[Node, str], letter: str, node: Node, write: Callable[[], str]
    ) -> str:
        if node not in names:
            names[node] = f"{letter}{len(names)}"
            self._waiting.append((names[node], write))
        return names[node]


def _one_lexeme(node: Characters | Literal) -> str:
    if isinstance(node, Literal):
        return grammars.literal(node.text)
    ranges = node.ranges or ((0, _LARGEST),)
    inner = "".join(rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in ranges)
    return f"/[{'^' * (node.negated and bool(node.ranges))}{inner}]/"


def _compose(node: Series | Alternation | Repeat, parts: Sequence[str]) -> str:
    match node:
        case Series():
            return f"({' '.join(parts)})" if parts else '""'
        case Alternation():
            return f"({' | '.join(parts)})"
        case Repeat(_, least, most):
            return f"({parts[0]}){{{least},{'' if most is None else most}}}"


# ---- facts -----------------------------------------------------------------------------------


def _one_after_other(a: _Facts, b: _Facts) -> _Facts:
    everything = a.all | b.all
    clear = not a.more & b.first  # the end of the first is unambiguous
    more = b.more | (a.more | b.first if b.empty else 0) if clear else everything
    return _Facts(a.empty and b.empty, a.first | (b.first if a.empty else 0), more, everything)


def _unite_facts(a: _Facts, b: _Facts) -> _Facts:
    everything, first = a.all | b.all, a.first | b.first
    empty = a.empty or b.empty
    # With a common beginning, one may continue where the other is complete.
    more = everything if a.first & b.first else a.more | b.more | (first if empty else 0)
    return _Facts(empty, first, more, everything)


def _repeat_facts(one: _Facts, least: int, most: int | None) -> _Facts:
    empty = one.empty or least == 0
    if most == 1:
        more = one.more | (one.first if empty else 0)
    elif one.more & one.first:
        more = one.all
    elif least == most and not one.empty:
        more = one.more
    else:
        more = one.more | one.first
    return _Facts(empty, one.first, more, one.all)


# ---- the tree --------------------------------------------------------------------------------


def _parts(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield all parts of trees, including their roots."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Series | Alternation):
            waiting += node.parts
        elif isinstance(node, Repeat):
            waiting.append(node.part)


def _references(node: Node) -> set[str]:
    return {part.name for part in _parts([node]) if isinstance(part, Reference)}


def _keep_reachable(rules: Mapping[str, Node]) -> dict[str, Node]:
    """Return the rules that `root` needs."""
    found, waiting = {ROOT}, [ROOT]
    while waiting:
        news = _references(rules[waiting.pop()]) - found
        found |= news
        waiting += news
    return {name: node for name, node in rules.items() if name in found}


def _order_rules(rules: Mapping[str, Node]) -> list[str]:
    """Return the rules that refer to no recursive rule, each after those to which it refers."""
    needs = {name: _references(node) for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, needed in needs.items():
        for each in needed:
            users[each].append(name)
    ready = [name for name, needed in needs.items() if not needed]
    order: list[str] = []
    while ready:
        name = ready.pop()
        order.append(name)
        for user in users[name]:
            needs[user].discard(name)
            if not needs[user]:
                ready.append(user)
    return order
