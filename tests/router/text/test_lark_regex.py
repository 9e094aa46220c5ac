"""Grammars without recursion as expressions, held against llguidance's own reading of them."""

from __future__ import annotations

import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.router.text.test_answer_grammar import EOS, tokenizer_with
from tgi_trio.errors import ValidationError
from tgi_trio.router.text import grammars
from tgi_trio.router.text.lark_regex import lark_regex

MOST = 1 << 16
# As Codex sends it: what its patches look like.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
ADDED = '*** Begin Patch\n*** Add File: a.py\n+print("é\\n")\n*** End Patch'
MOVED = "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@ x\n-1\n+2\n 3\n*** End of File\n"
# grammar, texts of it, texts that are none
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "patch": (
        PATCH,
        [ADDED, ADDED + "\n", MOVED + "*** End Patch"],
        ["", MOVED, ADDED.replace("Add", "Ad"), ADDED + "x", ADDED.replace("+p", "p")],
    ),
    "sums": (
        'start: expr\nexpr: term (SP "+" SP term)* -> add\n    | term\n'
        '// a comment\nterm: INT\nSP: " "\n%import common.INT\n',
        ["1", "12 + 3", "1 + 2 + 3"],
        ["", "1 +", "1+2", "x"],
    ),
    "choices": ('start: ("a" | "b"i)+ ["!"]\n', ["a", "bB", "aBa!"], ["A", "", "a!!"]),
    "expressions": (
        "start: A B?\nA.2: /[a-c\\/]+/\nB: /X.y/is\n",
        ["a/c", "cx\nY", "bXzY"],
        ["", "d", "axy"],
    ),
    "signs": (  # without spaces; those before a rule are a part of its name
        'start: A?B+C? d\n?d: "d"*\n!?e: "e"\nA: "a"\nB: "b"\nC: "c"\n',
        ["b", "ab", "abbc", "bdd"],
        ["a", "", "bcc", "c"],
    ),
    "ranges": ('start: "a".."f" "0".."9"*\n', ["a", "f09"], ["g", "A1"]),
    "escapes": ('start: "\\"\\\\\\n\\t." "[]{}()|"\n', ['"\\\n\t.[]{}()|'], ['"\\\n\tx[]{}()|']),
    "imports": (
        "start: WORD (WS_INLINE NUM)?\n%import common (WORD, WS_INLINE)\n"
        "%import common.SIGNED_NUMBER -> NUM\n",
        ["abc", "x -1.5e3"],
        ["1", "x 1.x"],
    ),
}


SHARED = ("patch", "sums", "escapes")  # in what llguidance reads as well


class Model:
    """A tokenizer with a token per byte, and what it may write."""

    backend = tokenizer_with((), False)
    tokenizer = LLTokenizer(backend.to_str(), eos_token=EOS)

    def accepts(self, grammar: str, text: str) -> bool:
        matcher, ids = (
            LLMatcher(self.tokenizer, grammar, log_level=0),
            self.backend.encode(text).ids,
        )
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", CASES)
def test_an_expression_matches_what_the_rules_derive(name: str) -> None:
    grammar, good, bad = CASES[name]
    expression, model = lark_regex(grammar, MOST), Model()
    whole = grammars.regex(expression)
    python = re.compile(expression)
    for text in (*good, *bad):
        fits = text in good
        assert model.accepts(whole, text) is fits, text
        assert (python.fullmatch(text) is not None) is fits, text
        if name in SHARED:
            assert model.accepts(grammars.lark(grammar), text) is fits, text


def test_it_holds_inside_a_json_string() -> None:
    expression, model = lark_regex(PATCH, MOST), Model()
    schema = grammars.json_schema({"type": "string", "pattern": f"^(?:{expression})$"})
    quoted = '"' + ADDED.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    assert model.accepts(schema, quoted)
    assert not model.accepts(schema, quoted.replace("Add", "Ad"))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "`start` is not defined"),
        ("start: a", "`a` is not defined"),
        ('start: "(" start ")" | "x"', "`start` refers to itself (start -> start)"),
        ("start: a\na: b\nb: a", "(a -> b -> a)"),
        ('start: "a"\nstart: "b"', "line 2: `start` is there twice"),
        ('start: "a"\n%ignore WS', "line 2: `%ignore` is not supported"),
        ('start: "a"\n%import python.X', "only names of `common`"),
        ("start: X\n%import common.X", "`common` has no `X`"),
        ('start{x}: "a"', "templates are not supported"),
        ('start: ("a"', "`)` is missing"),
        ('start: "a" )', "unexpected `)`"),
        ("start: /a/x", "the flag `x`"),
        ('start: "ab".."c"', "a range goes from"),
        ('start "a"', "`start` needs `:`"),
        ("start: <|end|>", "line 1: unexpected `<`"),
        ('start: "a" ~ b', "a number must follow"),
        ('start: "\\q"', "is no string"),
        ('start: "\\ud83d"', "is no string"),  # half of a pair, which was a status of 500
    ],
)
def test_what_is_refused(grammar: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        lark_regex(grammar, MOST)
    assert words in str(caught.value)


def test_a_number_of_any_length_is_read() -> None:
    """One of thousands of digits, which Python does not read, was a status of 500."""
    assert lark_regex('start: "a"~007..8', MOST) == "(?:a){7,8}"
    assert lark_regex('start: "a"~000', MOST) == "(?:a){0,0}"
    assert "{999999999,999999999}" in lark_regex('start: "a"~' + 5000 * "9", MOST)


def test_a_grammar_that_grows_without_end_is_refused() -> None:
    rules = "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(30)) + 'r30: "x"\nstart: r0\n'
    with pytest.raises(ValidationError, match="more than 1000 characters"):
        lark_regex(rules, 1000)
    deep = "".join(f"r{i}: r{i + 1}\n" for i in range(90)) + 'r90: "x"\nstart: r0\n'
    with pytest.raises(ValidationError, match="nests too deeply"):
        lark_regex(deep, 1000)
    with pytest.raises(ValidationError, match="nests too deeply"):
        lark_regex("start: " + "(" * 5000 + '"a"' + ")" * 5000, MOST)
