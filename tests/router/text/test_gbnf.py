"""GBNF, held to a definition of its own: a matcher of trees that never meets llguidance."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.router.text.kinds import unhurried
from tests.router.text.test_grammars import TOKENIZER, accepts
from tgi_trio.errors import ValidationError
from tgi_trio.router.text.gbnf import MOST_CHARACTERS, looks_like_gbnf
from tgi_trio.router.text.gbnf_lark import gbnf

# ---- the definition --------------------------------------------------------------------------

Tree = tuple[
    Any, ...
]  # ("text", t) ("class", chars) ("rule", n) ("seq"|"alt", *trees) ("rep", ...)
TEXTS = ["".join(each) for n in range(5) for each in itertools.product("ab", repeat=n)]

leaves = st.one_of(
    st.tuples(st.just("text"), st.text("ab", max_size=2)),
    st.tuples(st.just("class"), st.sampled_from(["a", "b", "ab"])),
    st.tuples(st.just("rule"), st.integers(0, 2)),
)


def compounds(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    several = st.lists(inner, min_size=1, max_size=3)
    counts = st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (1, 3), (2, None)])
    return st.one_of(
        several.map(lambda trees: ("seq", *trees)),
        several.map(lambda trees: ("alt", *trees)),
        st.tuples(st.just("rep"), inner, counts).map(lambda t: ("rep", t[1], *t[2])),
    )


trees = st.recursive(leaves, compounds, max_leaves=6)


def written(tree: Tree) -> str:
    kind, *rest = tree
    match kind:
        case "text":
            return f'"{rest[0]}"'
        case "class":
            return f"[{rest[0]}]"
        case "rule":
            return f"rule-{rest[0]}"
        case "seq":
            return "(" + " ".join(map(written, rest)) + ")"
        case "alt":
            return "(" + " | ".join(map(written, rest)) + ")"
    inner, least, most = rest
    return f"({written(inner)}){{{least},{'' if most is None else most}}}"


def language(rules: list[Tree], longest: int) -> list[set[str]]:
    """Return what each rule derives, up to `longest` characters: the least fixed point."""
    known: list[set[str]] = [set() for _ in rules]

    def derived(tree: Tree) -> set[str]:
        kind, *rest = tree
        match kind:
            case "text":
                return {rest[0]}
            case "class":
                return set(rest[0])
            case "rule":
                return known[rest[0]]
            case "alt":
                return set().union(*map(derived, rest))
            case "seq":
                whole = {""}
                for each in rest:
                    whole = joined(whole, derived(each))
                return whole
        inner, least, most = rest
        one, reached, found = derived(inner), {""}, set()
        for count in range(longest + least + 1 if most is None else most + 1):
            found |= reached if count >= least else set()
            reached = joined(reached, one)
        return found

    def joined(left: set[str], right: set[str]) -> set[str]:
        return {a + b for a in left for b in right if len(a + b) <= longest}

    while True:
        before = [set(each) for each in known]
        for i, rule in enumerate(rules):
            known[i] |= derived(rule)
        if known == before:
            return known


def lark_accepts(text: str) -> Callable[[str], bool]:
    grammar = gbnf(text)
    return lambda candidate: accepts(grammar, candidate)


def gbnf_of(rules: list[Tree]) -> str:
    return "root ::= rule-0\n" + "".join(
        f"rule-{i} ::= {written(rule)}\n" for i, rule in enumerate(rules)
    )


def flat(rules: list[Tree]) -> bool:
    """Whether no rule can come back to itself."""
    uses = [set(map(int, re.findall(r"rule-(\d)", written(rule)))) for rule in rules]
    for _ in rules:
        uses = [each | {b for a in each for b in uses[a]} for each in uses]
    return all(i not in each for i, each in enumerate(uses))


# ---- the properties ----------------------------------------------------------------------------


@unhurried
@given(rules=st.lists(trees, min_size=3, max_size=3))
@example(
    rules=[("seq", ("rule", 1), ("text", "b")), ("rep", ("class", "ab"), 1, None), ("text", "")]
)
def test_a_grammar_accepts_what_its_rules_derive(rules: list[Tree]) -> None:
    derived = language(rules, 4)[0]
    if not derived:
        return
    check = lark_accepts(gbnf_of(rules))
    accepted = {text for text in TEXTS if check(text)}
    assert accepted <= derived
    if flat(rules):
        assert accepted == derived


def test_a_rule_that_could_swallow_what_follows_it_does_not() -> None:
    """Read as one lexeme, a word would take every x, and the text could never end."""
    matcher = LLMatcher(TOKENIZER, gbnf('root ::= word "x" root | "."\nword ::= [a-z]+'))
    for text in ("abx", "xx", "."):
        assert matcher.consume_tokens(TOKENIZER.tokenize_str(text)), matcher.get_error()
    assert matcher.is_accepting()


# ---- syntax --------------------------------------------------------------------------------------

SAMPLES = [
    (r'root ::= "\u00e9\x41\U0001F600\"\\\n"', ['éA😀"\\\n'], ["éA"]),
    (r"root ::= [^a-c\]\\\n] [-x] [x-]", ["d--", "-xx"], ["a--", "]--", "\n--"]),
    ("root ::= .{2}", ["a\n", "é😀"], ["a", "abc"]),
    ("root ::= [^]", ["\n", "]"], [""]),
    ('root ::= a-1 B_2 # a comment ]\na-1 ::=\n  "a"\n  | "c"\nB_2::=("b"\n)?', ["ab", "c"], ["b"]),
    ("root ::= ", [""], ["a"]),
    ('root ::= "a" {2, 3} "b"{0}', ["aa", "aaa"], ["a", "aab"]),
    ('root ::= "/" [/] "\x7f"', ["//\x7f"], ["/"]),
    ('root ::= root "a" | "b"', ["b", "baa"], ["a", "ab"]),
    ('\r\nroot ::= x\r\nx ::= "1" | "(" x ")"\r\nunused ::= unused', ["1", "((1))"], ["(1"]),
]


@pytest.mark.parametrize(("text", "texts", "others"), SAMPLES)
def test_what_the_syntax_means(text: str, texts: list[str], others: list[str]) -> None:
    check = lark_accepts(text)
    assert [each for each in texts if not check(each)] == []
    assert [each for each in others if check(each)] == []


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a": [1, -2.5e3, null],\n  "b": {"\\u0041": "x"}}', True),
        ('{"a": [[], {}, true, "\\""]} ', True),
        ('{"a": 01}', False),
        ('{"a": }', False),
        ("[1]", False),
    ],
)
def test_json_as_llama_cpp_users_write_it(text: str, fits: bool) -> None:
    assert lark_accepts(JSON)(text) is fits


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1, column 1: there is no rule `root`"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule `root` is there already"),
        ('root ::= "a"\n  | other', "line 2, column 5: there is no rule `other`"),
        ('root ::= ("a"', "line 1, column 10: this `(` is never closed"),
        ('root ::= "a")', "line 1, column 13: this `)` closes nothing"),
        ('root ::= "a', 'line 1, column 10: this `"` is never closed'),
        ("root ::= [a", "line 1, column 10: this `[` is never closed"),
        ("root ::= []", "line 1, column 10: `[]` holds no character"),
        ("root ::= [z-a]", "upside down"),
        (r'root ::= "a\q"', r"line 1, column 12: `\q` is no escape sequence"),
        (r'root ::= "\ud800"', "is no character"),
        (r'root ::= "\x4"', "is no escape sequence"),
        ("root ::= *", "line 1, column 10: `*` has nothing to repeat"),
        ('root ::= "a"**', "line 1, column 14: `*` has nothing to repeat"),
        ('root ::= "a"{3,2}', "`{3,2}` can never be met"),
        ('root ::= "a"{,2}', "line 1, column 13: unexpected `{`"),
        ("root ::= ::= a", "line 1, column 10: no name comes before `::=`"),
        ("root = a", "line 1, column 6: unexpected `=`"),
        ('root ::= "a" "b" ;', "line 1, column 18: unexpected `;`"),
        ("root ::= <think>", "tokens by name or id (`<...>`) are not served"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "more than 100 groups in one another"),
        ("root ::= " + '"a" ' * MOST_CHARACTERS, f"{MOST_CHARACTERS} are allowed"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(ValidationError, match="grammar is not valid: ") as caught:
        gbnf(text)
    assert problem in str(caught.value)


def test_rules_refer_to_others_as_deeply_as_they_like() -> None:
    count = 1200
    links = [f'r{i} ::= r{i + 1} | "b" root' for i in range(count)]
    for order in (links, links[::-1]):
        gbnf("\n".join(["root ::= r0", *order, f'r{count} ::= "a"']))
    gbnf(
        "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(count)), f'r{count}::="a"'])
    )


@pytest.mark.parametrize(
    ("text", "gbnf_it_is"),
    [
        ('root ::= "a"', True),
        ('# start: x\n  root::="a"', True),
        ('start: "a" | b\nb: /x/', False),
        ('start: "::="', False),
        ("", False),
    ],
)
def test_gbnf_is_told_from_lark(text: str, gbnf_it_is: bool) -> None:
    assert looks_like_gbnf(text) is gbnf_it_is
