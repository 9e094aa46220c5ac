"""Thoughts that clients carry: what we encoded is read, and nothing else is an error."""

from __future__ import annotations

import pytest

from tgi_trio.router.http.dialects.thought_codec import decode_thought, encode_thought


@pytest.mark.parametrize("thought", ["", "Hm, rain.", "déjà vu 🌧", "x" * 5000])
def test_a_thought_comes_back_as_it_went(thought: str) -> None:
    assert decode_thought(encode_thought(thought)) == thought


@pytest.mark.parametrize(
    "text",
    [None, "", "SGk=", "tgi-trio:", "tgi-trio:S", "tgi-trio:@@@@", "tgi-trio:/w==", "tgi-trio:é"],
)
def test_what_something_else_made_is_no_thought(text: str | None) -> None:
    """Letters beyond ASCII, which only a client can put there, were a status of 500."""
    assert decode_thought(text) == ""
