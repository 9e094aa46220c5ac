"""What a speculator's heads are made of: plain data, for every backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tgi_trio.model.matrices import LinearRef, MatrixRef


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsSpec:
    """Heads that guess from the hidden state at which the last token was chosen.

    Weights by their roles, which the kind's file in `shard/speculation/` computes with.
    """

    folder: Path
    heads: int  # one guess each
    linears: Mapping[str, LinearRef]
    vectors: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # tensor, size
    tables: Mapping[str, MatrixRef] = field(default_factory=dict)  # whose rows are looked up
    tensors: tuple[str, ...]  # every name that is read

    @property
    def widest(self) -> int:
        """Most features that go into a linear layer."""
        return max(p.matrix.columns for ref in self.linears.values() for p in ref.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaSpec(HeadsSpec):
    """Medusa (Cai and others 2024, arXiv 2401.10774): blocks x + SiLU(Wx + b), then a head.

    Roles: "first" (the first blocks of all heads, one below the other), "HEAD.LAYER" (further
    ones), "head HEAD" (own heads, where the model's is not shared).
    """

    layers: int  # blocks of a head
    shares_head: bool  # the model's own head follows the blocks
    token_map: str = ""  # tensor of the token that each row of a head stands for; "": all tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpec(HeadsSpec):
    """The MLP speculator (Wertheimer and others 2024, arXiv 2404.19124).

    Roles, per head or (tied) of the first: "proj I", "head I", tables "emb I", vectors "gain I"
    and "bias I" of the norms.
    """

    inner: int
    scales_input: bool
    tied: bool
