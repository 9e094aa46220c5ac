"""Reductions over rows of scores, in an order that no other row and no batch size changes.

Torch splits a long reduction over threads when there is one row, and does not when there are
several, so `sum` or `logsumexp` over a vocabulary differ in the last bit between a batch of one
and a batch of two. Softmax works row by row; everything else here goes over chunks of a row.
Chunks are also what makes it fast: `argmax` and `topk` over a long row cost ten times an `amax`.

Softmax divides by a float32 sum, taken number after number in as many lanes as a vector register
has: over 150,000 tokens it is off by 5e-5 with AVX2 and by 2e-5 with AVX512. So what it returns is
in the right proportions, but does not sum to 1; `masses` says to what.
"""

from __future__ import annotations

import numpy as np
import torch

from tgi_trio.shard.sampling.truncation import Cuts, Floats, Ints

CHUNK = 64  # a row's width is a multiple of this


def select(scores: torch.Tensor, rows: Ints) -> torch.Tensor:
    """Return these rows, without a copy when they are all."""
    if len(rows) == len(scores):
        return scores
    return scores[torch.from_numpy(rows).to(scores.device)]


def to_numpy(values: torch.Tensor) -> Floats:
    """Return a tensor as float64 on the host."""
    return values.double().cpu().numpy()


def chunks(scores: torch.Tensor) -> torch.Tensor:
    """Return [R, W] as [R, W / CHUNK, CHUNK]."""
    return scores.view(len(scores), -1, CHUNK)


def largest(scores: torch.Tensor) -> torch.Tensor:
    """Return each row's largest entry [R]; NaN when there is one."""
    return scores.amax(-1)


def first_largest(scores: torch.Tensor) -> Ints:
    """Return the first index of each row's largest entry: int64 [R].

    `argmax` over long rows is ten times slower on a CPU than `amax`, hence the way over chunks.
    """
    chunked = chunks(scores)
    chunk = chunked.amax(-1).argmax(-1)
    within = chunked[torch.arange(len(scores), device=scores.device), chunk].argmax(-1)
    return (chunk * CHUNK + within).cpu().numpy()


def masses(probabilities: torch.Tensor) -> Floats:
    """Return the mass of each row up to and with each of its chunks: float64 [R, W / CHUNK].

    Within a chunk sums are float32, which 64 numbers do no harm.
    """
    sums: Floats = to_numpy(chunks(probabilities).sum(-1)).cumsum(axis=1)
    return sums


def draw(probabilities: torch.Tensor, mass: Floats, uniforms: Floats) -> Ints:
    """Return the first index at which each row's CDF exceeds its uniform number: int64 [R].

    `mass` [R, W / CHUNK]: their `masses`.
    """
    chunked = chunks(probabilities)
    total = mass[:, -1]
    targets = np.minimum(uniforms * total, np.nextafter(total, 0.0))
    chunk = (mass > targets[:, None]).argmax(axis=1)
    rows = np.arange(len(mass))
    before = np.where(chunk > 0, mass[rows, chunk - 1], 0.0)
    at = torch.arange(len(mass), device=chunked.device), torch.from_numpy(chunk).to(chunked.device)
    inside = to_numpy(chunked[at])
    above = before[:, None] + inside.cumsum(axis=1) > targets[:, None]
    # Float32 chunk sums can promise a little more than the chunk has: take its last token then.
    last = CHUNK - 1 - (inside[:, ::-1] > 0).argmax(axis=1)
    within = np.where(above.any(axis=1), above.argmax(axis=1), last)
    drawn: Ints = chunk * CHUNK + within
    return drawn


def candidates(scores: torch.Tensor, width: int) -> tuple[Floats, Ints]:
    """Return each row's `width` best scores and their ids, best first, lower ids first in ties.

    The best `width` tokens are all in the `width` chunks with the largest maxima, so only those
    are sorted. Which of several tokens tied with the last one make it is left open.
    """
    chunked = chunks(scores)
    if chunked.shape[1] > width:
        _, chosen = chunked.amax(-1).topk(width, sorted=False)
        chosen, _ = chosen.sort(-1)
        pool = chunked.gather(1, chosen[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
        best, places = pool.topk(width)
        ids = chosen.gather(1, places // CHUNK) * CHUNK + places % CHUNK
    else:
        best, ids = scores.topk(min(width, scores.shape[1]))
    values, names = to_numpy(best), ids.cpu().numpy()
    if (values[:, 1:] == values[:, :-1]).any():
        order = np.lexsort((names, -values))
        values = np.take_along_axis(values, order, axis=1)
        names = np.take_along_axis(names, order, axis=1)
    return values, names


def mass_and_entropy(scores: torch.Tensor, cuts: Cuts) -> tuple[Floats, Floats]:
    """Return sum(exp(score)) and entropy of the rows whose cuts need them: float64 [R] each."""
    totals, entropies = np.ones(len(scores)), np.zeros(len(scores))
    rows = np.flatnonzero(cuts.top_k == 0)
    if len(rows) == 0:
        return totals, entropies
    own = select(scores, rows)
    probabilities = own.softmax(-1)
    mass = masses(probabilities)[:, -1]
    totals[rows] = mass / to_numpy(largest(probabilities))
    typical = np.flatnonzero((cuts.typical_p[rows] < 1) & (cuts.top_p[rows] >= 1))
    if len(typical):
        # 0 * -inf is not 0: bring what is masked down to a finite score first.
        terms = select(probabilities, typical) * select(own, typical).clamp(min=-1e30)
        means = masses(terms)[:, -1] / mass[typical]
        entropies[rows[typical]] = np.log(totals[rows[typical]]) - means
    return totals, entropies
