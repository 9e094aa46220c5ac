"""The shortlist of a row: the tokens that can be chosen or listed, found from histograms.

The programs of a row have parts of it. For each part they leave its best score and a histogram of
its tokens' depths below that, in steps of an eighth of what divides a probability by e. From these
follows a depth below which no token survives top-k or top-p or is listed, and it is hardly too
deep. Thresholds are then searched for among the tokens above it, the shortlist.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What has to be read yet for a row that has been surveyed.
DONE = 0
SHORT = 1  # its shortlist
WHOLE = 2  # all of it, because its shortlist would be too long

STEPS = tl.constexpr(8)  # by which a probability becomes e times smaller
DEPTHS = 256  # bins of the histogram; the last one includes everything deeper
_MARGIN = tl.constexpr(1.0 / 64)  # in depths: more than their rounding
_CHUNK = tl.constexpr(8)  # parts read at a time


@triton.jit
def steps_of(heat):
    """Return the factor that makes a score's distance a depth."""
    return tl.minimum(1.0 / heat * STEPS, 1e30)


@triton.jit
def depth_of(score, best, fine, DEPTHS: tl.constexpr):
    """Return the depths of scores below their part's best, int32, for any score and best."""
    depth = (best - score) * fine
    return tl.where(depth < DEPTHS - 1, depth, DEPTHS - 1).to(tl.int32)


# fmt: off
@triton.jit
def plan_shortlist(
    cuts,  # int32 [R, parts, 2], written: depths of a part that are listed, its offset
    depths,  # int32 [R, parts, DEPTHS]: cumulative histogram of a part's tokens
    parts,  # float64 [parts, 4] of the row: their best scores first, -inf: it has nothing
    row,
    number,  # parts of the row
    best,
    heat,
    total,  # float64: the row's mass relative to the best
    mean,  # float64: mean distance from the best, with typical-p
    vocab,
    k,
    p,
    typical,
    floor,  # log of min-p
    wanted,  # top tokens to be listed
    PARTS: tl.constexpr,
    DEPTHS: tl.constexpr,
    ROOM: tl.constexpr,  # longest shortlist
):
    """Return (state, length of the shortlist).

    A part's depths count from its own best. When they are shifted to the row's best, rounded up, a
    token at depth d lies between d - 1 and d + 1.

    Typical-p keeps the tokens closest to the mean that have the wanted mass. If the tokens within
    twice the mean of the best have that mass, nothing deeper is closer to the mean.
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
    odds = tl.exp((1 - depth).to(tl.float32) * (1.0 / STEPS))  # upper bounds
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
    """Return how deep the parts' best scores lie, float32, at most DEPTHS."""
    bests = tl.load(parts + part * 4, mask=there, other=float("-inf")).to(tl.float32)
    shift = tl.where(bests > float("-inf"), (best - bests) * steps_of(heat), DEPTHS)
    return tl.minimum(shift, DEPTHS)


@triton.jit
def write_shortlist(
    scores,  # float32 [ROOM], written in the order of ids
    names,  # float32 [ROOM], written: the ids
    score,  # float32 [PART]
    at,
    vocab,
    best,  # of the part
    heat,
    depth,  # the number of depths that are listed
    offset,  # the part's place in the shortlist
    DEPTHS: tl.constexpr,
):
    """Write a part's tokens to its row's shortlist."""
    listed = (depth_of(score, best, steps_of(heat), DEPTHS) < depth) & (at < vocab)
    place = offset + tl.cumsum(listed.to(tl.int32), 0) - 1
    tl.store(scores + place, score, mask=listed)
    tl.store(names + place, at.to(tl.float32), mask=listed)
# fmt: on
