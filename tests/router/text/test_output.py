from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.text.kinds import BACKENDS, served, unhurried
from tgi_trio.router.request import StoppingCriteria, Token
from tgi_trio.router.text.output import OutputText

PROMPT = "Once upon a time"


def output_for(kind: str, *stop: str, keep: bool = True, least: int = 0) -> OutputText:
    tokenizer = served(kind)
    stopping = StoppingCriteria(
        max_new_tokens=1000, min_new_tokens=least, stop=stop, keep_stop=keep
    )
    return OutputText(tokenizer, tokenizer.encode_ids(PROMPT), stopping)


def ids_of(kind: str, text: str) -> list[int]:
    return served(kind).encode_ids(text, add_special_tokens=False).tolist()


def run(output: OutputText, ids: list[int]) -> list[Token]:
    tokens = []
    for token_id in ids:
        tokens.append(output.push(token_id, -0.5))
        if output.stopped:
            break
    return tokens


@pytest.mark.parametrize("kind", BACKENDS)
@unhurried
@given(data=st.data())
def test_stream_and_body_agree_whatever_is_generated(kind: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, served(kind).vocab_size + 2), max_size=25))
    stops = data.draw(st.lists(st.text("aet .\ufffd", max_size=3), max_size=2))
    least = data.draw(st.integers(0, 9))
    output = output_for(kind, *stops, keep=data.draw(st.booleans()), least=least)
    tokens = run(output, ids)
    assert not output.stopped or len(tokens) > least
    streamed = "".join(token.text for token in tokens if not token.special) + output.finish()
    assert streamed == output.generated_text
    assert [token.id for token in tokens] == ids[: len(tokens)]
    if not output.stopped and kind in ("byte_level", "wordpiece", "unigram"):
        tokenizer = served(kind)
        prompt = tokenizer.decode(tokenizer.encode_ids(PROMPT))
        everything = [*tokenizer.encode_ids(PROMPT).tolist(), *ids]
        assert prompt + streamed == tokenizer.decode(everything)


def test_special_tokens_show_their_text_and_stay_out_of_the_whole() -> None:
    output = output_for("byte_level")
    tokens = run(output, ids_of("byte_level", "a<|user|>b</s>"))
    assert [(token.text, token.special) for token in tokens] == [
        ("a", False),
        ("<|user|>", True),
        ("b", False),
        ("</s>", True),
    ]
    assert (output.finish(), output.generated_text) == ("", "ab")


@pytest.mark.parametrize(("keep", "expected"), [(True, "The batch"), (False, "The ")])
def test_stop_text_is_kept_or_dropped(keep: bool, expected: str) -> None:
    output = output_for("byte_level", "batch", keep=keep)
    tokens = run(output, ids_of("byte_level", "The batched server"))
    assert output.stopped
    assert "".join(token.text for token in tokens) == expected
    assert (output.finish(), output.generated_text) == ("", expected)


def test_text_held_back_comes_with_finish() -> None:
    output = output_for("byte_level", "batching", keep=False)
    tokens = run(output, ids_of("byte_level", "The batch"))
    assert "".join(token.text for token in tokens) == "The "
    assert output.finish() == "batch"
    assert (output.generated_text, output.stopped) == ("The batch", False)
    assert output.finish() == ""


def test_a_half_character_at_the_end_comes_with_finish() -> None:
    output = output_for("sentencepiece")
    tokenizer = served("sentencepiece")
    token_id = tokenizer.token_id("<0xF0>") or 0
    assert output.push(token_id, -1.0).text == ""
    assert (output.finish(), output.generated_text) == ("\ufffd", "\ufffd")


@pytest.mark.parametrize("keep", [True, False])
def test_a_stop_string_may_name_a_special_token(keep: bool) -> None:
    output = output_for("byte_level", "<|user|>", keep=keep)
    run(output, ids_of("byte_level", "a<|user|>b"))
    assert (output.stopped, output.finish(), output.generated_text) == (True, "", "a")
    assert output.stopped


def test_a_special_token_stops_nothing_before_there_are_tokens_enough() -> None:
    output = output_for("byte_level", "<|user|>", "b<|user|>", keep=False, least=4)
    tokens = run(output, ids_of("byte_level", "a<|user|>b<|user|>b<|user|>c"))
    assert (len(tokens), output.matched, output.finish()) == (6, "b<|user|>", "")
    assert output.generated_text == "ab"


@pytest.mark.parametrize("stop", ["|", "user", ">", "<|user|>b", "<|user", "b<|user|>"])
def test_no_stop_string_hits_inside_a_special_token(stop: str) -> None:
    output = output_for("byte_level", stop, keep=False)
    tokens = run(output, ids_of("byte_level", "a<|user|>"))
    assert not output.stopped
    assert "".join(t.text for t in tokens if not t.special) + output.finish() == "a"


@pytest.mark.parametrize(("keep", "expected"), [(True, "one two\n"), (False, "one two")])
def test_a_stop_string_may_end_with_a_special_token(keep: bool, expected: str) -> None:
    output = output_for("byte_level", "\n<|user|>", "two three", keep=keep)
    tokens = run(output, ids_of("byte_level", "one two\n<|user|>three"))
    assert output.stopped and tokens[-1].text == "<|user|>"
    streamed = "".join(token.text for token in tokens if not token.special)
    assert (streamed + output.finish(), output.generated_text) == (expected, expected)


@pytest.mark.parametrize("keep", [True, False])
def test_the_token_that_ends_the_text_is_not_searched(keep: bool) -> None:
    """Whether it is special or has a text of its own."""
    for last, expected in (("</s>", "a<"), ("s", "a<s")):
        output = output_for("byte_level", "</s>", "<s", "s", keep=keep)
        tokens = run(output, ids_of("byte_level", "a<"))
        (id,) = ids_of("byte_level", last)
        tokens.append(output.push(id, -0.5, eos=True))
        streamed = "".join(token.text for token in tokens if not token.special) + output.finish()
        assert (streamed, output.generated_text, output.stopped) == (expected, expected, False)


def test_a_special_token_does_not_tear_a_character() -> None:
    """The whole text is decoded without special tokens; the stream must agree."""
    output = output_for("byte_level")
    tokenizer = served("byte_level")
    ids = [tokenizer.token_id(token) or 0 for token in ("Ã", "</s>", "©")]
    assert [output.push(token_id, 0.0).text for token_id in ids] == ["", "</s>", "é"]
    assert output.generated_text == "é"


def test_logprobs_and_alternatives() -> None:
    output = output_for("byte_level")
    tokenizer = served("byte_level")
    a, eos, space = (tokenizer.token_id(token) or 0 for token in ("a", "</s>", "Ġ"))
    token = output.push(a, -0.25, [(a, -0.25), (space, -2.0), (eos, -3.0)])
    assert (token.logprob, token.special) == (-0.25, False)
    assert token.top == [
        Token(a, "a", -0.25, False),
        Token(space, " ", -2.0, False),
        Token(eos, "</s>", -3.0, True),
    ]
