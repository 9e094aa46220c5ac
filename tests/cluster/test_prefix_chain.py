"""Chains are equal exactly as far as prompts are."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.cluster.prefix_chain import HASH_BYTES, LONGEST, make_prefix_chain


def chat(*texts: str, **before: object) -> bytes:
    return json.dumps(
        {**before, "messages": [{"role": "user", "content": t} for t in texts]}
    ).encode()


def common(one: bytes, other: bytes) -> int:
    """Return how many hashes two bodies' chains have in common, and check that they end there."""
    a, b = make_prefix_chain(one), make_prefix_chain(other)
    equal = [x == y for x, y in zip(a, b, strict=False)]
    assert equal == sorted(equal, reverse=True)
    return sum(equal)


def test_a_conversation_goes_on_with_the_chain_of_its_last_turn() -> None:
    first = chat("a" * 1000)
    second = chat("a" * 1000, "b" * 1000)
    assert common(first, second) == len(make_prefix_chain(first)) == 4
    assert len(make_prefix_chain(second)) == 8


def test_what_is_said_of_sampling_does_not_count() -> None:
    assert make_prefix_chain(chat("a" * 1000, seed=1)) == make_prefix_chain(
        chat("a" * 1000, seed=2, n=3)
    )


def test_a_key_in_quotes_within_a_text_is_no_key() -> None:
    body = {"user": 'says "prompt": ' + "x" * 300, "inputs": "a" * 1000}
    assert len(make_prefix_chain(json.dumps(body).encode())) == 3


def test_a_short_prompt_has_no_chain_and_a_long_one_a_bounded_one() -> None:
    assert make_prefix_chain(b"") == make_prefix_chain(chat("Hello")) == ()
    longest = make_prefix_chain(chat("a" * 300_000))
    assert len(longest) == LONGEST and {len(head) for head in longest} == {HASH_BYTES}
    assert make_prefix_chain(memoryview(chat("a" * 1000))) == make_prefix_chain(chat("a" * 1000))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20_000), st.integers(1, 20_000))
def test_chains_part_where_prompts_do(shared: int, more: int) -> None:
    head = b'"prompt": "' + b"a" * shared
    one, other = head + b"b" * more, head + b"c" * more
    assert common(one, other) == len(make_prefix_chain(head))
