"""Which images tokens see: as the processors of Llama 3.2 Vision and Idefics 1 have it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.idefics import processing_idefics as idefics
from transformers.models.mllama import processing_mllama as theirs

from tgi_trio.shard.media.cross_spans import cross_spans

IMAGE, END = 1, 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(ids=PROMPTS, more=st.integers(0, 3), cut=st.integers(0, 15))
def test_neighbours_are_seen_together(ids: list[int], more: int, cut: int) -> None:
    places = [i for i, id in enumerate(ids) if id == IMAGE]
    length = len(ids) + more
    wanted = np.zeros((length, len(places)), np.int64)
    if places:
        spans = theirs.get_cross_attention_token_mask(ids, IMAGE)
        dense = theirs.convert_sparse_cross_attention_mask_to_dense(
            [spans], [[1] * len(places)], 1, len(ids)
        )[0, :, :, 0]
        wanted = np.concatenate((dense, np.tile(dense[-1:], (more, 1))))
    cut = min(cut, length)
    found = np.full_like(wanted, -1)
    for first, end in ((0, cut), (cut, length)):
        for span in cross_spans(places, first, end, together=True):
            assert first <= span.first < span.end <= end
            found[span.first : span.end] = 0
            found[span.first : span.end, list(span.images)] = 1
    assert np.array_equal(found, wanted)


@given(ids=st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_apart_the_last_one_is_seen_to_the_end_of_a_text(ids: list[int]) -> None:
    tokenizer = SimpleNamespace(convert_tokens_to_ids=lambda _: IMAGE, eos_token_id=END)
    which, _ = idefics.image_attention_mask_for_packed_input_ids(
        torch.tensor([ids]), tokenizer, "pt"
    )
    places, ends = ([i for i, id in enumerate(ids) if id == one] for one in (IMAGE, END))
    untils = [next((end + 1 for end in ends if end > place), None) for place in places]
    found = {
        place: list(span.images)
        for span in cross_spans(places, 0, len(ids), together=False, untils=untils)
        for place in range(span.first, span.end)
    }
    wanted = which[0].tolist()
    assert found == {i: [image] if image >= 0 else [] for i, image in enumerate(wanted)}
