"""Pieces of JSON that are written many at a time are those that are written one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.router.http.messages.render import (
    number_json,
    numbers_json,
    token_json,
    tokens_json,
)
from tgi_trio.router.request import Token

numbers = st.floats(width=32)  # those that are not finite as well: they are null


@given(st.lists(numbers, max_size=20))
def test_many_numbers_are_written_as_each_is(values: list[float]) -> None:
    assert numbers_json(values) == [number_json(value) for value in values]


@given(st.lists(st.builds(Token, st.integers(0, 2**31), st.text(), numbers, st.booleans())))
def test_many_tokens_are_written_as_each_is(tokens: list[Token]) -> None:
    assert tokens_json(tokens) == b"[%b]" % b",".join(map(token_json, tokens))
