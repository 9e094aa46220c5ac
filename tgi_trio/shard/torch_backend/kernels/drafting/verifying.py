"""Judging drafts on the device, and moving rows by the number that were right."""

from __future__ import annotations

import triton
import triton.language as tl


# Sizes are not specialised: a new one must not make Triton compile another variant.
@triton.jit(do_not_specialize=["count"])
def judge_drafts(
    chosen,  # int64 [rows], written: each row's last token
    moved,  # int32 [rows], written: how many of the row's drafts were right
    drafted,  # int64 [rows, MOST], written: drafts that follow its last token
    found,  # float64 [C, 3]: token, log-probability, fault
    ids,  # int64 [C]: the token after which each choice is made; a draft except for a row's first
    targets,  # int64 [C]: row, -1: none
    aheads,  # int32 [C]: how many drafts of its row a choice assumes to be right
    drafts,  # int64 [C, MOST]: drafts after each choice
    count,  # C
    MOST: tl.constexpr,  # drafts of a row
    TAKES: tl.constexpr,  # take `drafted` from `drafts`; otherwise another kernel writes it
):
    """Follow a row's choices up to the first wrong draft; one program per choice."""
    first = tl.program_id(0)
    row = tl.load(targets + first)
    if (row >= 0) & (tl.load(aheads + first) == 0):
        right = tl.full([], 0, tl.int32)
        token = tl.load(found + 3 * first)
        for i in range(MOST):
            after = first + i + 1
            there = after < count
            ahead = tl.load(aheads + after, mask=there, other=0)
            fault = tl.load(found + 3 * after + 2, mask=there, other=1.0)
            draft = tl.load(ids + after, mask=there, other=-1)
            goes_on = (right == i) & (ahead == i + 1) & (fault == 0.0)
            goes_on = goes_on & (draft.to(tl.float64) == token)
            token = tl.where(goes_on, tl.load(found + 3 * after, mask=there, other=0.0), token)
            right += goes_on.to(tl.int32)
        fine = tl.load(found + 3 * first + 2) == 0.0
        tl.store(chosen + row, tl.where(fine, token, 0.0).to(tl.int64))
        tl.store(moved + row, right)
        if TAKES:
            for i in range(MOST):
                draft = tl.load(drafts + (first + right).to(tl.int64) * MOST + i)
                tl.store(drafted + row * MOST + i, draft)


@triton.jit(do_not_specialize=["most"])
def move_rows(
    tokens,  # int64 [T], written: the tokens to compute, 0 where there is no draft
    ids,  # int64 [T]: drafts are written to it, -1 where there is none
    positions,  # int64 [T], moved, as are the next three
    slots,  # int64 [T]
    contexts,  # int32 [T]
    uniforms,  # float64 [T]
    follows,  # int32 [T]: row of the previous step, -1: the token does not move
    aheads,  # int32 [T]: which of its row's drafts a token is, 0: none
    numbers,  # float64 [T, most + 1]: uniform numbers of the places that a token may move to
    tables,  # int32 [T, width]: the block table of each token's row
    width,  # int32 [1]
    moved,  # int32 [rows], as `drafted` written by the previous step
    drafted,  # int64 [rows, most]
    most,  # drafts of a row
    PAGE: tl.constexpr,
):
    """Move a token by the number of its row's drafts that were right; one program per token."""
    token = tl.program_id(0)
    row = tl.load(follows + token)
    own = tl.load(ids + token)
    if row >= 0:
        right = tl.load(moved + row)
        ahead = tl.load(aheads + token)
        place = tl.load(positions + token) + right
        tl.debug_barrier()  # all threads have read what is overwritten
        if ahead > 0:
            own = tl.load(drafted + row * most + ahead - 1)
            tl.store(ids + token, own)
        block = tl.load(tables + token.to(tl.int64) * tl.load(width) + place // PAGE)
        tl.store(positions + token, place)
        tl.store(slots + token, block.to(tl.int64) * PAGE + place % PAGE)
        tl.store(contexts + token, (place + 1).to(tl.int32))
        tl.store(uniforms + token, tl.load(numbers + token * (most + 1) + right))
    tl.store(tokens + token, tl.maximum(own, 0))
