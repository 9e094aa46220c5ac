"""Embedding and head over the vocabulary, with each rank holding some tokens' rows."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class Gathering(Protocol):
    """The collectives that these functions need."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...
    def all_gather(self, x: torch.Tensor) -> torch.Tensor: ...


class ChangeEmbedded(Protocol):
    """Puts adapters' own embeddings in their places."""

    @property
    def used(self) -> bool:
        """Whether a row of the present step has an adapter."""
        ...

    def __call__(self, token_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return embeddings [T, width] of the step's tokens [T], given those of the model, `x`."""
        ...


def embed(
    token_ids: torch.Tensor, rows: torch.Tensor, part: slice, ranks: Gathering | None
) -> torch.Tensor:
    """Return the embeddings [T, hidden] of `token_ids` [T]; `rows` has those of `part`.

    Tokens of other ranks are zero on this one, so the sum over the ranks is exact. `ranks`: None if
    there are no others; then `part` is everything.
    """
    if ranks is None:
        return functional.embedding(token_ids, rows)
    own = token_ids - part.start
    foreign = (own < 0) | (own >= len(rows))
    x = functional.embedding(own.masked_fill(foreign, 0), rows)
    return ranks.all_reduce(x.masked_fill_(foreign[:, None], 0))


def gather_logits(logits: torch.Tensor, vocab_size: int, ranks: Gathering | None) -> torch.Tensor:
    """Return all logits [S, vocab] from the ranks' own [S, part of the vocabulary]."""
    if ranks is None:
        return logits
    width = -(-vocab_size // ranks.size)  # the last rank may hold fewer
    if logits.shape[-1] < width:
        logits = functional.pad(logits, (0, width - logits.shape[-1]))
    return ranks.all_gather(logits)[:, :vocab_size]
