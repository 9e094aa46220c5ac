"""Stop expressions, held to Python's `re` and to the definition."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.router.text.kinds import unhurried
from tgi_trio.errors import ValidationError
from tgi_trio.router.text.regexes import MOST_POSITIONS, Automaton, compile_regex
from tgi_trio.router.text.stop import StopMatcher
from tgi_trio.router.text.stop_regex import MOST_HELD, RegexPattern

words = st.text("abB1\n é", max_size=8)
# Characters with other cases than one: of two letters, three, of which one is another's, none.
cases = st.text("kKK sSſß iIıİ σςΣ µμ ǰ ﬁ Ǆǆǅ 1²_-", max_size=3)  # noqa: RUF001


def accepts(automaton: Automaton, text: str) -> bool:
    live = 0
    for i, character in enumerate(text):
        reached = automaton.first if i == 0 else automaton.after(live)
        live = reached & automaton.taking(character)
    return bool(live & automaton.last)


# ---- what an expression means ------------------------------------------------------------------

atoms = st.one_of(
    st.sampled_from(
        ["a", "b", "B", "1", "é", "\\n", " ", ".", "\\d", "\\W", "\\s", "\\x61", "\\."]
    ),
    st.sampled_from(["[ab]", "[^a]", "[a-b1]", "[\\w]", "[^\\s1]", "[]a]", "[a\\-]", "{", "[-b]"]),
)
counts = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "{,2}", "*?", "{2,3}?"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda each: f"(?:{'|'.join(each)})"),
        st.tuples(inner, counts).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=8,
)


@unhurried
@given(expression=expressions, flags=st.sampled_from(["", "(?i)", "(?s)"]), text=words)
@example(expression="(a{0,3}|b){2,3}(1?)*", flags="", text="aab1")
@example(expression="((a)?){1,2}((b)?){0,2}a", flags="", text="ba")
def test_an_expression_means_what_pythons_re_means(expression: str, flags: str, text: str) -> None:
    oracle = re.compile(flags + expression)
    assume(not oracle.fullmatch(""))
    assert accepts(compile_regex(flags + expression), text) == bool(oracle.fullmatch(text))


@pytest.mark.parametrize(
    "expression",
    ["[A-Z]", "[^A-Z]", r"\W", r"[\W_]", r"[^\W1]", "σ", "[s-t]", "i", "ß", "[α-ω]", "Ǆ", "k+"],  # noqa: RUF001
)
@unhurried
@given(text=cases)
@example(text="ß")  # its capital letters are two, which are between A and Z
@example(text="ς")  # the same letter at the end of a word
def test_cases_are_those_of_pythons_re(expression: str, text: str) -> None:
    oracle = re.compile(f"(?i){expression}")
    assert accepts(compile_regex(f"(?i){expression}"), text) == bool(oracle.fullmatch(text))


@pytest.mark.parametrize("expression", [r"\012", r"\07", r"[\0-\011]", r"a\0001"])
def test_octal_numbers_are_those_of_pythons_re(expression: str) -> None:
    automaton, oracle = compile_regex(expression), re.compile(expression)
    texts = [*map(chr, range(128)), "a\x001", "a\x0001", "\x0012"]
    assert [accepts(automaton, each) for each in texts] == [
        bool(oracle.fullmatch(each)) for each in texts
    ]


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("a*", "matches the empty text"),
        ("", "matches the empty text"),
        ("(a", "character 1: this `(` is never closed"),
        ("a)", "character 2: this `)` closes nothing"),
        ("x[a", "character 2: this `[` is never closed"),
        ("[b-a]", "character 2: the range has no such ends"),
        (r"[\d-x]", "character 2: the range has no such ends"),
        ("*a", "character 1: `*` has nothing to repeat"),
        ("a|{2,}", "character 3: `{2,}` has nothing to repeat"),
        ("a**", "character 4: a repetition is repeated"),
        ("a*+", "possessive"),
        ("a{3,2}", "can never be met"),
        (f"a{{{MOST_POSITIONS + 1}}}", f"no more than {MOST_POSITIONS} repetitions"),
        ("^a", "`^` is not served"),
        ("a$", "`$` is not served"),
        (r"a\b", r"`\b` is not served"),
        (r"(a)\1", r"`\1` is not served"),
        (r"\q", r"`\q` is not served"),
        ("\\", "`\\` is not served"),
        (r"\Uffffffff", r"`\U` is not served"),
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        ("(?>a)b", "atomic"),
        ("(?x) a", "of its flags only"),
        ("a(?i)", "inner flags"),
        ("(" * 60 + "a" + ")" * 60, "more than 50 groups"),
        ("a" * 1001, "has 1001 characters, 1000 are allowed"),
        ("((a{1,100}){1,100}){1,100}", "is too large"),
        ("(((){128}){128}){128}a", "is too large"),
    ],
)
def test_what_is_not_served_is_refused_by_its_place(expression: str, problem: str) -> None:
    with pytest.raises(ValidationError, match="`stop_regex`") as caught:
        compile_regex(expression)
    assert problem in str(caught.value)


def test_an_expression_that_makes_others_backtrack_for_ever_does_not_here() -> None:
    """Operations are counted, not seconds: each character asks each live position once."""
    automaton, asked = compile_regex("(a*)*(a|a)*(a+)+b"), 0
    pattern = RegexPattern(automaton)
    for _ in range(1000):
        assert pattern.find("a" * 10) == -1
        asked += sum(positions.bit_count() for _, positions in pattern._live)
    assert asked <= 1000 * len(automaton.follow)
    assert pattern.find("b") == 1


# ---- where it ends a text ------------------------------------------------------------------------

EXPRESSIONS = ["ab+1", "a.*b", "[ab]{2,3}1", "\\n\\w+:|1", "a.{2}b|b.{3}1", "(?i)b[ab]b", "\\d\\s"]


def oracle(text: str, expression: str, least: int = 0) -> tuple[int, int]:
    """The definition: the first end of any match, and the leftmost beginning that goes with it.

    It ends behind `least` characters.
    """
    compiled = re.compile(expression)
    for end in range(least + 1, len(text) + 1):
        for start in range(end):
            if compiled.fullmatch(text, start, end):
                return start, end
    return -1, -1


@unhurried
@given(chunks=st.lists(st.text("abB1\n :", max_size=6), max_size=8), i=st.integers(0, 6))
@example(chunks=["a", "aab", "x"], i=1)
@example(chunks=["ab", "b\n", "ab1"], i=4)
def test_every_chunking_finds_what_the_definition_says(chunks: list[str], i: int) -> None:
    pattern, seen = RegexPattern(compile_regex(EXPRESSIONS[i])), 0
    start, end = oracle("".join(chunks), EXPRESSIONS[i])
    for chunk in chunks:
        found = pattern.find(chunk)
        if found >= 0:
            assert (seen + found - pattern.length, seen + found) == (start, end)
            return
        seen += len(chunk)
    assert end == -1


@unhurried
@given(chunks=st.lists(st.text("ab1", max_size=4), max_size=6))
def test_what_is_held_back_is_the_longest_beginning_of_a_match(chunks: list[str]) -> None:
    """Of `ab+1|b{2}a1`; its beginnings are listed by hand."""
    beginnings = re.compile("a?|ab+|b|bb|bba")
    pattern, text = RegexPattern(compile_regex("ab+1|b{2}a1")), ""
    for chunk in chunks:
        if pattern.find(chunk) >= 0:
            return
        text += chunk
        held = max(n for n in range(len(text) + 1) if beginnings.fullmatch(text[len(text) - n :]))
        assert pattern.matched == held


@unhurried
@given(
    chunks=st.lists(st.text("ab1\n", max_size=6), max_size=8),
    stops=st.lists(st.sampled_from(["ab", "b1a", "\n\n", "aaa"]), max_size=2),
    picked=st.lists(st.sampled_from(["ab+1", "[ab]{2,3}1", "\\n1?a"]), max_size=2),
    keep=st.booleans(),
    early=st.integers(0, 3),
)
@example(chunks=["aab", "b1"], stops=["b1a"], picked=["ab+1"], keep=False, early=0)
@example(chunks=["ab1", "b1"], stops=["aaa"], picked=["[ab]{2,3}1"], keep=False, early=1)
def test_strings_and_expressions_end_a_text_together(
    chunks: list[str], stops: list[str], picked: list[str], keep: bool, early: int
) -> None:
    """No sooner than behind the `early` chunks, which the longest match may begin in."""
    text, least = "".join(chunks), len("".join(chunks[:early]))
    ends = [(*oracle(text, each, least), each) for each in (*map(re.escape, stops), *picked)]
    found = sorted((end, start) for start, end, _ in ends if end >= 0)
    matcher = StopMatcher(stops, keep, map(compile_regex, picked))
    out = ""
    for i, chunk in enumerate(chunks):
        matcher.waits = i < early
        out += matcher.push(chunk)[0]
    out += matcher.flush()
    assert matcher.matched == bool(found)
    if not found:
        assert (out, matcher.found) == (text, None)
        return
    end, start = found[0]
    assert out == text[: end if keep else start]
    longest = {each for begin, stop, each in ends if (stop, begin) == (end, start)}
    assert re.escape(matcher.found or "") in longest or matcher.found in longest


def test_no_more_is_held_back_than_the_bound() -> None:
    pattern = RegexPattern(compile_regex("a.*b"))
    assert pattern.find("a" + "x" * 5000) == -1
    assert pattern.matched == MOST_HELD
    assert (pattern.find("xb"), pattern.length) == (2, MOST_HELD)
