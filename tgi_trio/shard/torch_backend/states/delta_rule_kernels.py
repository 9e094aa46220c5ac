"""Launches what a `DeltaRule` computes between its convolution and its last product.

Decodes are one launch, steps with prompts four at most, whatever their rows' lengths. Where batch
invariance is kept, both are the same two.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from tgi_trio.model.specs.mixers import DeltaRule
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.states.steps import StateSteps
from tgi_trio.shard.torch_backend.states.walking import WARPS, count_walked, list_walked
from tgi_trio.shard.torch_backend.torch_device import FLOAT32_PRODUCTS

_MOST: Final = 1 << 15  # numbers of a head's state that a program holds
_MOST_KEYS: Final = 256  # channels of a key, of which a program holds a part of a state
_LEAST: Final = 16  # sides of a product's operands
BLOCK: Final = 32  # channels at a time of a program that prepares a chunk
PART: Final = 16  # channels of values of a program that takes a state from chunk to chunk
TILE: Final = 16  # tokens of a program that gates


class Projected(NamedTuple):
    """What a layer projects of T tokens."""

    mixed: torch.Tensor  # float32 [T, ...]: queries, keys, values behind their convolution
    gate: torch.Tensor  # [T, value_heads * value_dim], as are the next with a stride
    beta: torch.Tensor  # [T, value_heads]
    decay: torch.Tensor  # [T, value_heads], or [T, value_heads * key_dim]


class ChunkTile(NamedTuple):
    """How rows are cut into chunks, and how precisely float32 numbers are multiplied."""

    tokens: int  # of a chunk
    block: int  # channels of keys at a time of a program that takes a state from chunk to chunk
    precision: str  # of products
    solves: str  # of those that invert


def choose_chunk_tile(dtype: torch.dtype, key_dim: int) -> ChunkTile:
    """Return the tile for a model of a dtype: the largest with which hardly anything spills.

    Three products of bfloat16 are as precise as an output in half precision can tell, at twice the
    rate of tf32's, and take fewer registers. A single one of tf32 is not, where keys are alike.
    """
    if dtype is torch.float32 or torch.version.hip is not None:
        block = 32 if key_dim % 64 else 64  # masks take registers as well
        return ChunkTile(32, block, FLOAT32_PRODUCTS, FLOAT32_PRODUCTS)
    return ChunkTile(32, 32, "bf16x3", FLOAT32_PRODUCTS)


def pad(size: int) -> int:
    """Return the next power of two that products allow."""
    return max(_LEAST, next_power_of_2(size))


def count_warps(key_dim: int, value_dim: int) -> int:
    """Return the warps of a program that holds a head's state: 64 numbers a thread."""
    return max(1, min(16, key_dim * value_dim // 2048))


class DeltaRuleKernels:
    """The kernels of one layer's heads on this rank."""

    def __init__(
        self,
        mixer: DeltaRule,
        key_heads: int,
        rate: torch.Tensor,
        decay_bias: torch.Tensor,
        *,
        invariant: bool = False,
    ) -> None:
        """`rate`, `decay_bias`, `invariant` as for `DeltaRuleLayer`."""
        self._mixer = mixer
        self.invariant = invariant
        self._heads = len(rate)
        self._rates = rate, decay_bias
        self._first = 2 * key_heads * mixer.key_dim  # the channel at which values begin
        self._shape: dict[str, Any] = {
            "HEADS": self._heads,
            "KEY_HEADS": key_heads,
            "KEY": mixer.key_dim,
            "PADDED_KEY": pad(mixer.key_dim),
            "VALUE": mixer.value_dim,
            "TILED": mixer.tiled,
            "BY_CHANNEL": decay_bias.shape[1] > 1,
        }

    @property
    def fit(self) -> bool:
        """Whether a head is small enough."""
        key, value = pad(self._mixer.key_dim), pad(self._mixer.value_dim)
        return key * value <= _MOST and key <= _MOST_KEYS

    def launch(
        self, own: Projected, norm: torch.Tensor, states: torch.Tensor, steps: StateSteps
    ) -> torch.Tensor:
        """Return what tokens read of their states, normalised and gated, [T, heads * value_dim].

        `norm`: float32 [value_dim]. `states` float32 [slots, heads, key_dim, value_dim] is moved;
        `own.mixed` is overwritten.
        """
        read = own.gate.new_empty((len(own.mixed), self._heads * self._mixer.value_dim))
        if self.invariant:
            self._walk(own, states, steps)
            self._open(read, own, norm, None)
            return read
        if steps.decodes:
            self._step(read, own, norm, states, steps, None)
            return read
        tile = choose_chunk_tile(own.gate.dtype, self._mixer.key_dim)
        cut = steps.pieces(tile.tokens)
        if len(cut.rows):
            self._run(own, states, steps, tile)
            self._open(read, own, norm, steps.spans()[1])
        if len(cut.lone):
            self._step(read, own, norm, states, steps, cut.lone)
        return read

    def _step(
        self,
        read: torch.Tensor,
        own: Projected,
        norm: torch.Tensor,
        states: torch.Tensor,
        steps: StateSteps,
        rows: torch.Tensor | None,
    ) -> None:
        """Move rows of one token; None: all are."""
        from tgi_trio.shard.torch_backend.kernels.states import delta_rule  # imports Triton

        mixer, value = self._mixer, pad(self._mixer.value_dim)
        listed = (steps.reads, steps.reads) if rows is None else (rows, steps.spans()[0])
        delta_rule.step_delta_rule[(len(listed[0]), self._heads)](
            *(read, own.mixed, own.gate, own.beta, own.decay, *self._rates, norm),
            *(states, steps.reads, steps.writes, steps.fresh, *listed),
            mixer.key_dim**-0.5,
            mixer.norm_eps,
            mixer.beta_scale,
            mixer.least_decay,
            *(own.gate.stride(0), own.beta.stride(0), own.decay.stride(0)),
            **self._shape,
            PADDED_VALUE=value,
            BOUNDED=mixer.least_decay != 0.0,
            SILU=mixer.gate == "silu",
            LISTED=rows is not None,
            num_warps=count_warps(pad(mixer.key_dim), value),
        )

    def _run(
        self, own: Projected, states: torch.Tensor, steps: StateSteps, tile: ChunkTile
    ) -> None:
        """Move the other rows; values in `own.mixed` become what is read of states."""
        from tgi_trio.shard.torch_backend.kernels.states import delta_chunks  # imports Triton

        mixer, cut, starts = self._mixer, steps.pieces(tile.tokens), steps.spans()[0]
        tokens, heads, key = len(own.mixed), self._heads, mixer.key_dim
        fading = key if self._shape["BY_CHANNEL"] else 1
        prepared = [
            own.mixed.new_empty((tokens, heads, numbers))
            for numbers in (key, tile.tokens, fading, 2)
        ]
        delta_chunks.prepare_chunks[(len(cut.begins), heads)](
            *(own.mixed, *prepared, own.beta, own.decay, *self._rates, cut.begins, cut.ends),
            key**-0.5,
            mixer.beta_scale,
            mixer.least_decay,
            *(own.beta.stride(0), own.decay.stride(0)),
            **self._shape,
            BLOCK_KEY=min(BLOCK, pad(key)),
            PADDED_VALUE=pad(mixer.value_dim),
            BLOCK_VALUE=min(BLOCK, pad(mixer.value_dim)),
            SIZE=tile.tokens,
            BOUNDED=mixer.least_decay != 0.0,
            PRECISION=tile.precision,
            SOLVES=tile.solves,
            num_stages=1,
        )
        delta_chunks.run_chunks[(len(cut.rows), heads, -(-mixer.value_dim // PART))](
            *(own.mixed, *prepared, states),
            *(cut.rows, starts, steps.reads, steps.writes, steps.fresh),
            **self._shape,
            BLOCK_KEY=min(tile.block, pad(key)),
            BLOCK_VALUE=PART,
            SIZE=tile.tokens,
            PRECISION=tile.precision,
            num_stages=1,
        )

    def _walk(self, own: Projected, states: torch.Tensor, steps: StateSteps) -> None:
        """Move all rows token by token; values in `own.mixed` become what is read of states."""
        from tgi_trio.shard.torch_backend.kernels.states import token_by_token  # imports Triton

        mixer = self._mixer
        part = count_walked(pad(mixer.key_dim), pad(mixer.value_dim))
        grid = (len(steps.reads), self._heads, -(-mixer.value_dim // part))
        token_by_token.walk_delta_rule[grid](
            *(own.mixed, own.beta, own.decay, *self._rates, states, *list_walked(steps)),
            mixer.key_dim**-0.5,
            mixer.beta_scale,
            mixer.least_decay,
            *(own.beta.stride(0), own.decay.stride(0)),
            **self._shape,
            BLOCK=part,
            BOUNDED=mixer.least_decay != 0.0,
            num_warps=WARPS,
        )

    def _open(
        self,
        read: torch.Tensor,
        own: Projected,
        norm: torch.Tensor,
        places: torch.Tensor | None,
    ) -> None:
        """Normalise and gate what has been read; padding of a recording becomes zeros.

        `places`: int32 [T] of tokens in their rows; None: what padding would have read is zero.
        """
        from tgi_trio.shard.torch_backend.kernels.states import delta_chunks  # imports Triton

        mixer, tokens = self._mixer, len(read)
        delta_chunks.open_outputs[(-(-tokens // TILE), self._heads)](
            *(read, own.mixed, own.gate, norm, norm if places is None else places),
            mixer.norm_eps,
            tokens,
            own.gate.stride(0),
            HEADS=self._heads,
            FIRST=self._first,
            VALUE=mixer.value_dim,
            PADDED_VALUE=pad(mixer.value_dim),
            TILE=TILE,
            SILU=mixer.gate == "silu",
            PLACED=places is not None,
        )
