"""What may not follow is what transformers' NoRepeatNGramLogitsProcessor bars."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.shard.sampling.sampling_oracle import barred
from tests.shard.sampling.sampling_support import sequence
from tgi_trio.shard.sampling.no_repeats import find_repeats

TEXTS = st.lists(st.integers(0, 4), max_size=40)
SIZES = st.integers(1, 5)


@given(text=TEXTS, size=SIZES)
def test_a_text_as_a_whole(text: list[int], size: int) -> None:
    from transformers import NoRepeatNGramLogitsProcessor

    ids = torch.tensor([text], dtype=torch.long)
    scores = NoRepeatNGramLogitsProcessor(size)(ids, torch.zeros(1, 5))
    found = find_repeats(sequence(text, prompt=0, no_repeat_size=size), 5)
    assert found.tolist() == torch.nonzero(scores[0] < 0)[:, 0].tolist()


@given(text=TEXTS, size=SIZES, window=st.integers(5, 50), spared=st.sets(st.integers(0, 4)))
def test_a_window_and_tokens_that_may_always_follow(
    text: list[int], size: int, window: int, spared: set[int]
) -> None:
    asked: dict[str, Any] = {"no_repeat_window": window, "no_repeat_spared": tuple(spared)}
    found = find_repeats(sequence(text, prompt=0, no_repeat_size=size, **asked), 5)
    assert set(found.tolist()) == barred(text, size, window) - spared


def test_what_lies_behind_the_known_tokens_is_not_read() -> None:
    row = sequence([1, 2, 1, 2, 3], no_repeat_size=2)
    row.length = 3  # drafts follow
    assert find_repeats(row, 5).tolist() == [2]


def test_an_id_beyond_the_vocabulary_is_not_among_them() -> None:
    """Images have such ids in prompts."""
    assert not len(find_repeats(sequence([1, 7, 1], no_repeat_size=2), 5))
    assert find_repeats(sequence([1, 7, 1], no_repeat_size=2), 8).dtype == np.int64
