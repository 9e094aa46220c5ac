"""Several hidden states of a token, mixed by gates. Literal data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatedStreamsSpec:
    """Hyper-connections (Zhu, others 2024) with a gate for each number (Qwen 4, 2026).

    Attention and MLP read the mean of all hidden states, each normalised and multiplied by gates
    between 0 and 1; what they say is added to every one of them, times a factor between 0 and 2.
    Gates and factors are projected from all hidden states of the token, gates with this rank.
    """

    count: int
    rank: int
