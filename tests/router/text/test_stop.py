from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tests.router.text.kinds import unhurried
from tgi_trio.router.text.stop import StopMatcher

# Few letters, so that stop strings begin often, overlap and contain one another.
words = st.text("ab\n", max_size=12)
stop_lists = st.lists(st.text("ab\n", max_size=5), max_size=4)


def oracle(text: str, stops: list[str], keep: bool, early: int = 0) -> tuple[str, bool]:
    """The definition: cut at the first character at which a stop string is complete.

    It is not looked for in the first `early` characters, where it may begin.
    """
    for end in range(early + 1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            return text[: end if keep else end - max(map(len, complete))], True
    return text, False


def run(matcher: StopMatcher, chunks: list[str]) -> tuple[str, bool]:
    out, matched = "", False
    for chunk in chunks:
        released, matched = matcher.push(chunk)
        out += released
    return out + matcher.flush(), matched


@unhurried
@given(chunks=st.lists(words, max_size=8), stops=stop_lists, keep=st.booleans())
@example(chunks=["aab", "aac"], stops=["aabaab", "abaac"], keep=False)
@example(chunks=["ab"], stops=["b", "ab"], keep=False)
@example(chunks=["a" * 6], stops=["aaa", "aaaa"], keep=True)
@example(chunks=["aabaaab"], stops=["aabaab", "aaab"], keep=False)
def test_every_chunking_gives_what_the_definition_says(
    chunks: list[str], stops: list[str], keep: bool
) -> None:
    expected = oracle("".join(chunks), stops, keep)
    out, matched = run(StopMatcher(stops, keep), chunks)
    assert (out, matched or not chunks) == (expected[0], expected[1] or not chunks)


@unhurried
@given(
    early=st.lists(words, max_size=4),
    chunks=st.lists(words, max_size=4),
    stops=stop_lists,
    keep=st.booleans(),
)
@example(early=["ab"], chunks=["a", "ab"], stops=["aba"], keep=False)
@example(early=["aa"], chunks=["b", "a"], stops=["aa"], keep=False)
@example(early=["ab", "a"], chunks=["ab"], stops=["abab", "ab"], keep=True)
def test_what_is_complete_too_early_is_text_and_may_begin_another(
    early: list[str], chunks: list[str], stops: list[str], keep: bool
) -> None:
    matcher = StopMatcher(stops, keep)
    matcher.waits = True
    passed = "".join(matcher.push(chunk)[0] for chunk in early)
    matcher.waits = False
    out, matched = run(matcher, ["", *chunks])
    before = "".join(early)
    expected = oracle(before + "".join(chunks), stops, keep, len(before))
    assert (passed + out, matched) == expected
    if keep:
        assert passed == before


@unhurried
@given(chunks=st.lists(words, max_size=8), stops=stop_lists)
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(
    chunks: list[str], stops: list[str]
) -> None:
    matcher, text, out = StopMatcher(stops, keep=False), "", ""
    for chunk in chunks:
        released, matched = matcher.push(chunk)
        text, out = text + chunk, out + released
        if matched:
            break
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))} | {""}
        held = max((b for b in beginnings if text.endswith(b)), key=len)
        assert out == text[: len(text) - len(held)]


@unhurried
@given(chunks=st.lists(words, max_size=8), stops=stop_lists)
def test_kept_stop_strings_hold_nothing_back(chunks: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops, keep=True)
    for chunk in chunks:
        released, matched = matcher.push(chunk)
        if matched:
            break
        assert released == chunk


def test_a_stop_string_across_many_tokens_never_leaks() -> None:
    matcher = StopMatcher(["\nHuman:"], keep=False)
    tokens = ["Sure", ".", "\n", "Hu", "man", ": hello"]
    assert [matcher.push(token)[0] for token in tokens] == ["Sure", ".", "", "", "", ""]
    assert matcher.matched
    assert matcher.flush() == ""


def test_held_text_comes_out_when_it_is_no_stop_string_after_all() -> None:
    matcher = StopMatcher(["\nHuman:"], keep=False)
    assert [matcher.push(token)[0] for token in ["\n", "Hum", "ble"]] == ["", "", "\nHumble"]


def test_a_stop_string_ends_inside_a_token() -> None:
    assert StopMatcher(["a"], keep=True).push("ab") == ("a", True)
    assert StopMatcher(["a"], keep=False).push("ab") == ("", True)


def test_after_a_match_everything_is_swallowed() -> None:
    matcher = StopMatcher(["x"], keep=True)
    assert matcher.push("1x2") == ("1x", True)
    assert matcher.push("3") == ("", True)


def test_a_long_stop_string_that_keeps_almost_matching_costs_linear_time() -> None:
    """Steps are counted, not seconds: each one moves the text or shortens the match."""
    stop = "a" * 2000 + "b" + "a" * 2000
    matcher = StopMatcher([stop], keep=False)
    released = "".join(matcher.push("a" * 5)[0] for _ in range(4000))
    assert len(released) == 20_000 - 2000


def test_tgi_conformance_of_the_matcher() -> None:
    for stop in ("/test;", "<|stop|>"):
        for end in range(1, len(stop)):
            assert StopMatcher([stop], keep=True).push(stop[:end]) == (stop[:end], False)
        assert StopMatcher([stop], keep=True).push(stop) == (stop, True)
