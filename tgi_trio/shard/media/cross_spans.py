"""Which images a prompt's tokens attend to, in models with cross-attention to images. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class CrossSpan(NamedTuple):
    """A run of a sequence's tokens that attend to the same images."""

    first: int  # positions
    end: int
    images: range  # which of the sequence's


def cross_spans(
    places: Sequence[int],
    first: int,
    end: int,
    *,
    together: bool,
    untils: Sequence[int | None] | None = None,
) -> Iterator[CrossSpan]:
    """Yield the images seen by the tokens at positions `first` up to `end`, in order.

    `places`: ascending positions of the images' tokens. A token attends to the last image at or
    before it; if `together`, also to images whose tokens are directly before that image's. Each
    image has an end or None in `untils`: from there on, tokens attend to no image until the next
    one. As `get_cross_attention_token_mask` in transformers and the processor of Idefics do.
    """
    bounds = [0, *places, max(end, places[-1] + 1 if places else 0)]
    begin = 0  # first image of those whose tokens are adjacent
    for which, (at, stop) in enumerate(pairwise(bounds)):
        image = which - 1
        if not together or (image > 0 and places[image - 1] + 1 < at):
            begin = max(0, image)
        until = untils[image] if untils and image >= 0 else None
        blind = stop if until is None else min(until, stop)
        for low, high, images in (
            (at, blind, range(begin, which)),
            (blind, stop, range(which, which)),
        ):
            if (low := max(low, first)) < (high := min(high, end)):
                yield CrossSpan(low, high, images)
