"""Which of a row's tokens can be chosen or listed at all, found without having seen them together.

A row's programs have a part of it each. Beside its best score a part leaves how many of its tokens
lie how deep below that, in steps of an eighth of what divides a probability by e. From these counts
follows a depth below which nothing survives top-k or top-p or is listed, hardly too deep: the
tokens above it, the shortlist, are then all that thresholds are found among.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What a row still lacks when it has been looked over.
DONE = 0
SHORT = 1  # what its shortlist says
WHOLE = 2  # what all of it says: its shortlist would be too long

STEPS = tl.constexpr(8)  # in which a probability becomes e times less
DEPTHS = 256  # that are told apart; what lies deeper is counted as of the last
_MARGIN = tl.constexpr(1.0 / 64)  # of depths: more than they are rounded by
_CHUNK = tl.constexpr(8)  # parts looked at together


@triton.jit
def steps_of(heat):
    """Return what a score's distance is multiplied by to be a depth."""
    return tl.minimum(1.0 / heat * STEPS, 1e30)


@triton.jit
def depth_of(score, best, fine, DEPTHS: tl.constexpr):
    """Return int32 how deep scores lie below their part's best, for any score and best."""
    depth = (best - score) * fine
    return tl.where(depth < DEPTHS - 1, depth, DEPTHS - 1).to(tl.int32)


# fmt: off
@triton.jit
def plan_shortlist(
    cuts,  # int32 [R, parts, 2], written: depths of a part that are listed, where its tokens go
    depths,  # int32 [R, parts, DEPTHS]: tokens of a part that lie no deeper
    parts,  # float64 [parts, 4] of the row: their best scores first, -inf: it has nothing
    row,
    number,  # of parts
    best,
    heat,
    total,  # float64: the row's mass relative to the best
    mean,  # float64: mean distance from the best, with typical-p
    vocab,
    k,
    p,
    typical,
    floor,  # log of min-p
    wanted,  # tokens that are listed
    PARTS: tl.constexpr,
    DEPTHS: tl.constexpr,
    ROOM: tl.constexpr,  # of a shortlist
):
    """Return (state, length of the shortlist).

    A part's depths begin where its best lies. Moved to the row's, rounded up, tokens that are said
    to be at depth d lie between d - 1 and d + 1.

    Typical-p keeps what lies closest to the mean, of as much mass as is wanted. What is within
    twice the mean of the best, and has that mass, has all of it: nothing deeper is closer.
    """
    first = row.to(tl.int64) * number
    cuts += first * 2
    depths += first * DEPTHS
    depth = tl.arange(0, DEPTHS)
    above, here = tl.zeros([DEPTHS], tl.int32), tl.zeros([DEPTHS], tl.int32)
    for low in range(0, number, _CHUNK):
        part = low + tl.arange(0, _CHUNK)
        there = part < number
        shift = tl.ceil(find_shift(parts, part, there, best, heat, DEPTHS)).to(tl.int32)
        place = depth[None, :] - shift[:, None]
        own = depths + (part[:, None] * DEPTHS + tl.minimum(place, DEPTHS - 2))
        upto = tl.load(own, mask=there[:, None] & (place >= 0), other=0)
        higher = there[:, None] & (place >= 1) & (place < DEPTHS - 1)
        before = tl.load(own - 1, mask=higher, other=0)
        above += tl.sum(upto, 0)
        here += tl.sum(tl.where(place < DEPTHS - 1, upto - before, 0), 0)
    cut = (k > 0) | (p < 1.0) | (typical < 1.0)
    odds = tl.exp((1 - depth).to(tl.float32) * (1.0 / STEPS))  # at most
    weight = here.to(tl.float64) * odds
    deepest = tl.where(depth == DEPTHS - 1, (vocab - above).to(tl.float64) * odds, 0.0)
    below = tl.sum(deepest + weight, 0) - tl.cumsum(weight, 0)
    share = tl.where(k > 0, 0.0, tl.where(p < 1.0, p, tl.where(typical < 1.0, typical, 0.0)))
    left = tl.where(share > 0.0, (1.0 - share) * total * 0.999, float("inf"))
    deep = tl.where(floor > float("-inf"), -floor, 0.0)
    deep = tl.where((k == 0) & (p >= 1.0) & (typical < 1.0), 2.001 * mean, tl.where(cut, 0.0, deep))
    deep *= STEPS
    enough = (above >= tl.where(cut, k, wanted)) & (below <= left) & (depth + 1 >= deep)
    bound = tl.min(tl.where(enough, depth + 1, DEPTHS), 0)
    bound = tl.where(bound < DEPTHS, bound.to(tl.float32) + _MARGIN, float("inf"))

    part = tl.arange(0, PARTS)
    there = part < number
    shift = find_shift(parts, part, there, best, heat, DEPTHS)
    listed = tl.minimum(tl.maximum(tl.ceil(bound - shift), 0.0), DEPTHS).to(tl.int32)
    own = depths + (part * DEPTHS + listed - 1)
    each = tl.load(own, mask=there & (listed > 0), other=0)
    tl.store(cuts + part * 2, listed, mask=there)
    tl.store(cuts + part * 2 + 1, tl.cumsum(each, 0) - each, mask=there)
    length = tl.sum(each, 0)
    return tl.where(length <= ROOM, 1, 2), length


@triton.jit
def find_shift(parts, part, there, best, heat, DEPTHS: tl.constexpr):
    """Return float32 how deep the best scores of parts lie, DEPTHS at most."""
    bests = tl.load(parts + part * 4, mask=there, other=float("-inf")).to(tl.float32)
    shift = tl.where(bests > float("-inf"), (best - bests) * steps_of(heat), DEPTHS)
    return tl.minimum(shift, DEPTHS)


@triton.jit
def write_shortlist(
    scores,  # float32 [ROOM], written: in the order of their ids
    names,  # float32 [ROOM], written: the ids
    score,  # float32 [PART]
    at,
    vocab,
    best,  # of the part
    heat,
    depth,  # so many are listed
    offset,  # where the part's tokens go
    DEPTHS: tl.constexpr,
):
    """Write a part's tokens to the shortlist of its row."""
    listed = (depth_of(score, best, steps_of(heat), DEPTHS) < depth) & (at < vocab)
    place = offset + tl.cumsum(listed.to(tl.int32), 0) - 1
    tl.store(scores + place, score, mask=listed)
    tl.store(names + place, at.to(tl.float32), mask=listed)
# fmt: on
