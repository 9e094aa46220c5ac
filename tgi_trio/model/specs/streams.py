"""The specs of several hidden states of a token, and of per-layer embeddings. Literal data only.

Others import them from `specs/decoder.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PerLayerInputsSpec:
    """Per-layer embeddings: every layer embeds each token itself (Gemma 3n, Google 2025).

    It is a row of a table, added to a projection of the first layer's input.
    """

    width: int
    rows: int  # of the table; other token ids get the first row
    image_token: int  # whose row an image's tokens get


@dataclass(frozen=True, slots=True)
class HyperSpec:
    """Several hidden states of a token, mixed before and after attention and MLP.

    Source: manifold-constrained hyper-connections (Xie and others 2026). Both read a sum of the
    states, and their result is added to each; sums and a mixture of the states have weights that
    are computed from all of them. Those of the mixture are made doubly stochastic. Hunyuan 4 has no
    mixture.
    """

    count: int
    iterations: int  # of Sinkhorn and Knopp's algorithm; 0: states are not mixed
    eps: float
    added: float = 2.0  # the largest weight of a result in a state
    added_eps: float = 0.0  # is added to that weight


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Several hidden states of a token, of which layers compute one and adapt the others.

    Source: Alternating Updates (AltUp; Baykal, others 2023), as in Gemma 3n; beside its attention a
    layer has a low-rank detour.
    """

    count: int
    active: int  # the one that layers compute
    scaled: bool  # the corrected stream is scaled for the layers' own embeddings
    detour_rank: int
