"""What a speculator's heads are made of: plain data, for every backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices import LinearRef, MatrixRef
from tgi_trio.model.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsSpec:
    """Heads that guess from the hidden state at which the last token was chosen.

    Weights by their roles, which the kind's file in `shard/speculation/` computes with.
    """

    folder: Path
    heads: int  # one guess each; of those that guess on from their own guesses, how many by default
    linears: Mapping[str, LinearRef]
    vectors: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # tensor, size
    tables: Mapping[str, MatrixRef] = field(default_factory=dict)  # whose rows are looked up
    tensors: tuple[str, ...]  # every name that is read
    token_map: str = ""  # tensor of the token that each row of a head stands for; "": all tokens
    maps_by_offset: bool = False  # the tensor says how far behind its row's number the token is

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


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpec(HeadsSpec):
    """The MLP speculator (Wertheimer and others 2024, arXiv 2404.19124).

    Roles, per head or (tied) of the first: "proj I", "head I", tables "emb I", vectors "gain I"
    and "bias I" of the norms.
    """

    inner: int
    scales_input: bool
    tied: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleSpec(HeadsSpec):
    """EAGLE-3 (Li and others 2025, arXiv 2503.01840): one decoder layer that guesses on and on.

    It reads the model's hidden states at several of its layers, and the token that came of them.
    Roles: linears "fuse" (the states, to the layer's features), "qkv" (of the normed embedding and
    the normed state, side by side), "output", "inner" (gate, then up), "down", "head"; vectors
    "embedding norm", "state norm", "mlp norm", "final norm"; table "embedding", if it has its own.
    """

    layer: DecoderSpec  # of one layer: heads, rotary embedding, epsilon of the norms
    max_positions: int  # longest sequence it was trained for; 0: not stated
    norms_residual: bool  # what the layer adds to is the normed state
    stated_taps: tuple[int, ...]  # which states it reads, as `taps`; (): config.json does not say

    def taps(self, layers: int) -> tuple[int, ...]:
        """Return which states of a model of so many layers it reads: what goes into layer i.

        `layers` stands for what leaves the last one. Raises ModelLoadError for none of the model's.
        """
        found = self.stated_taps or (2, layers // 2, layers - 3)
        if all(0 <= i <= layers for i in found):
            return found
        raise ModelLoadError(
            f"the speculator in {self.folder} reads hidden states of the layers {list(found)}, as "
            "its eagle_aux_hidden_state_layer_ids say (or 2, half and 3 from the end, where they "
            f"are not there); the model has {layers} layers"
        )


def check_base(folder: Path, name: str, found: int, own: int) -> None:
    """Raise ModelLoadError where config.json has another number than the model that is served."""
    if found != own:
        raise ModelLoadError(
            f"the speculator in {folder} was made for another model: its {name} is {found}, the "
            f"model's is {own}"
        )
