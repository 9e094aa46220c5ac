"""Texts of sequences on a device, and what followed their last tokens at an earlier occurrence.

The rule is that of `speculation/ngram.py`: the latest earlier occurrence of the last 4 tokens, else
of the last 3, else of the last 2, and the tokens after it. Programs share a text in pieces; the
last one to finish reads the drafts, and resets what they share.
"""

from __future__ import annotations

import triton
import triton.language as tl

LONGEST = 1 << 28  # tokens of a text: the length of a match is packed above its place, in 32 bits


# Sizes are not specialised: a new one must not make Triton compile another variant.
@triton.jit(do_not_specialize=["room"])
def write_texts(
    texts,  # int32 [slots, room], written
    slots,  # int32 [N]: the text that a piece belongs to
    places,  # int32 [N]: where the piece begins in that text
    starts,  # int32 [N + 1]: where it begins in `tokens`
    tokens,  # int32
    room,
    BLOCK: tl.constexpr,  # tokens of a piece, at most
):
    """Write pieces of texts to their places; one program per piece."""
    piece = tl.program_id(0)
    text = texts + tl.load(slots + piece).to(tl.int64) * room + tl.load(places + piece)
    begin, at = tl.load(starts + piece), tl.arange(0, BLOCK)
    there = begin + at < tl.load(starts + piece + 1)
    tl.store(text + at, tl.load(tokens + begin + at, mask=there, other=0), mask=there)


@triton.jit(do_not_specialize=["room"])
def keep_tokens(
    texts,  # int32 [slots, room], written
    slots,  # int32 [C]: the text that a choice belongs to, -1: none
    targets,  # int64 [C]: row, -1: none
    aheads,  # int32 [C]: how many drafts of its row a choice assumes to be right
    positions,  # int64 [C]: of the token after which each choice is made
    ids,  # int64 [C]: that token
    found,  # float64 [C, 3]: token, log-probability, fault
    moved,  # int32 [rows]: how many drafts were right
    room,
):
    """Add to each text the step's first token and the tokens chosen; one program per choice."""
    choice = tl.program_id(0)
    row, slot = tl.load(targets + choice), tl.load(slots + choice)
    place = tl.load(positions + choice)
    if (row >= 0) & (slot >= 0) & (place + 1 < room):
        text = texts + slot.to(tl.int64) * room + place
        ahead = tl.load(aheads + choice)
        if ahead == 0:
            tl.store(text, tl.load(ids + choice).to(tl.int32))
        if ahead <= tl.load(moved + row):
            tl.store(text + 1, tl.load(found + 3 * choice).to(tl.int32))


@triton.jit(do_not_specialize=["room"])
def look_up(
    drafted,  # int64 [rows, MOST], written: what follows each row's last token, -1: nothing
    behind,  # int64 [C, MOST], written: the same, at the row's last accepted choice
    best,  # int32 [rows]: 0 before and after
    arrived,  # int32 [rows]: 0 before and after
    texts,  # int32 [slots, room]
    slots,  # int32 [C], as for `keep_tokens`, like the next four
    targets,  # int64 [C]
    aheads,  # int32 [C]
    positions,  # int64 [C]
    moved,  # int32 [rows]
    ends,  # int32 [C]: 1 if drafts end before any of `eos`
    eos,  # int32 [EOS]
    room,
    EOS: tl.constexpr,
    PADDED_EOS: tl.constexpr,
    MOST: tl.constexpr,  # drafts of a row
    BLOCK: tl.constexpr,  # places of a text compared at a time
    LONGEST: tl.constexpr,
):
    """Find what follows each row's last token; a row of programs for each choice.

    Those of choices other than a row's first have nothing to do.
    """
    first = tl.program_id(0)
    row = tl.load(targets + first)
    if (row >= 0) & (tl.load(aheads + first) == 0):
        slot, right = tl.load(slots + first), tl.load(moved + row)
        length = tl.load(positions + first).to(tl.int32) + right + 2
        length = tl.where((slot >= 0) & (length <= room), length, 0)
        text = texts + tl.maximum(slot, 0).to(tl.int64) * room
        last = tl.load(text + length - 1, mask=length >= 2, other=-1)
        second = tl.load(text + length - 2, mask=length >= 2, other=-1)
        third = tl.load(text + length - 3, mask=length >= 3, other=-1)
        fourth = tl.load(text + length - 4, mask=length >= 4, other=-1)
        # `at` is the place after an occurrence, from 2 to the last token's.
        share = tl.cdiv(tl.maximum(length - 2, 0), tl.num_programs(1))
        low = 2 + tl.program_id(1) * share
        high = tl.minimum(low + share, length)
        most = tl.zeros([BLOCK], tl.int32)
        for begin in range(low, high, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            there = at < high
            two = there & (tl.load(text + at - 1, mask=there, other=-2) == last)
            two = two & (tl.load(text + at - 2, mask=there, other=-2) == second)
            inside = there & (at >= 3)
            three = two & (tl.load(text + at - 3, mask=inside, other=-2) == third)
            inside = there & (at >= 4)
            four = three & (tl.load(text + at - 4, mask=inside, other=-2) == fourth)
            tokens = 2 * two.to(tl.int32) + three.to(tl.int32) + four.to(tl.int32)
            most = tl.maximum(most, tl.where(two, tokens * LONGEST + at, 0))
        tl.atomic_max(best + row, tl.max(most, 0))
        tl.debug_barrier()  # a program's match is written before it counts as arrived
        if tl.atomic_add(arrived + row, 1) == tl.num_programs(1) - 1:
            tl.store(arrived + row, 0)
            match = tl.atomic_xchg(best + row, 0)
            source = match % LONGEST
            period = tl.maximum(length - source, 1)
            goes_on = (match > 0).to(tl.int32)
            own = tl.arange(0, PADDED_EOS)
            end = tl.load(eos + own, mask=own < EOS, other=-1)
            stops = tl.load(ends + first)
            into = behind + (first + right).to(tl.int64) * MOST
            for i in range(MOST):
                # If the occurrence reaches into the drafts, they repeat themselves.
                token = tl.load(text + source + i % period, mask=goes_on > 0, other=-1)
                goes_on = goes_on * (1 - stops * tl.max((end == token).to(tl.int32), 0))
                draft = tl.where(goes_on > 0, token, -1).to(tl.int64)
                tl.store(into + i, draft)
                tl.store(drafted + row * MOST + i, draft)
