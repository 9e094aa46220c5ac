"""The spec of a speculator's heads: plain data, for every backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import LinearRef, MatrixRef
from tgi_trio.model.specs.decoder import DecoderSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadsSpec:
    """Heads that draft from the hidden state at which the last token was chosen.

    Weights are named by their roles, by which the kind's file in `shard/speculation/` uses them.
    """

    folder: Path
    heads: int  # a draft each; for drafters that continue from their drafts, the default number
    linears: Mapping[str, LinearRef]
    vectors: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # tensor, size
    # embeddings, whose rows are looked up
    tables: Mapping[str, MatrixRef] = field(default_factory=dict)
    tensors: tuple[str, ...]  # the names of all tensors that are read
    token_map: str = ""  # tensor of the token id of each row of a head; "": all tokens in order
    maps_by_offset: bool = False  # the tensor has token ids minus row numbers

    @property
    def widest(self) -> int:
        """The most inputs of a linear layer."""
        return max(p.matrix.columns for ref in self.linears.values() for p in ref.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaSpec(HeadsSpec):
    """Medusa (Cai and others 2024, arXiv 2401.10774): blocks x + SiLU(Wx + b), then a head.

    Roles: "first" (the first blocks of all heads, stacked), "HEAD.LAYER" (further blocks), "head
    HEAD" (separate head matrices, unless the model's is shared).
    """

    layers: int  # blocks of a head
    shares_head: bool  # the model's head follows the blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpec(HeadsSpec):
    """The MLP speculator (Wertheimer and others 2024, arXiv 2404.19124).

    Roles, per head or (tied) for the first only: "proj I", "head I", tables "emb I", vectors "gain
    I" and "bias I" of the norms.
    """

    inner: int
    scales_input: bool
    tied: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleSpec(HeadsSpec):
    """EAGLE-3 (Li and others 2025, arXiv 2503.01840): one decoder layer that drafts repeatedly.

    With the norms of EAGLE 3.1 (2026, arXiv 2605.09992), if it was trained with them.

    It reads the model's hidden states at several layers, and the token that followed from them.
    Roles: linears "fuse" (from the states to the layer's features), "qkv" (of the normalised
    embedding and the normalised state, concatenated), "output", "inner" (gate, then up), "down",
    "head"; vectors "embedding norm", "state norm", "mlp norm", "final norm", and before "fuse"
    "input norm" of all states that it reads at once, or "input norm I" of each; table "embedding",
    if it has its own.
    """

    layer: DecoderSpec  # of one layer: heads, rotary embedding, epsilon of the norms
    max_positions: int  # longest sequence it was trained for; 0: not stated
    norms_residual: bool  # the residual stream starts from the normalised state
    norms_output: bool  # it continues from its state behind the final norm
    # the states that it reads, as in `taps`; (): config.json does not state it
    stated_taps: tuple[int, ...]

    def taps(self, layers: int) -> tuple[int, ...]:
        """Return which states of a model with `layers` layers it reads: i is the input of layer i.

        `layers` is the output of the last layer. Raises ModelLoadError for other numbers.
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
    """Raise ModelLoadError if a number in config.json differs from the served model's."""
    if found != own:
        raise ModelLoadError(
            f"the speculator in {folder} was made for another model: its {name} is {found}, the "
            f"model's is {own}"
        )
