"""Batch invariance on a device: a token's numbers are to the bit the same whatever is beside it.

A kernel adds up an element's numbers in an order that follows from its tile and from how programs
share the inputs. Tiles and shares are chosen by the number of rows, since what is fast for one is
slow for many. Where a model is `invariant` (`--batch-invariant`), those who choose are told of the
same number at every step, so that a token is computed in the same way alone and in a crowd, in any
chunk of its prompt, decoded or computed anew. What a library multiplies is then multiplied by
kernels of ours (`layers/linears/plain_product.py`), and nothing is chosen by measuring.

Whether it is, the parts of a model are told as they are loaded (`WeightSource.invariant`, and
`LoadTarget.invariant` for what has no weights). What drafts tokens is not told: other drafts
change no answer, since a draft is kept only where it is the token that is chosen.
"""

from __future__ import annotations

from typing import Final

_APPARENT: Final = 64  # rows of every step: what tiles of few rows and of many both hold


def apparent_rows(rows: int, *, invariant: bool) -> int:
    """Return the number of rows, or of tokens, by which to choose a kernel, a tile or shares."""
    return _APPARENT if invariant else rows
