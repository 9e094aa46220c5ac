"""The memory to be set aside for adapters that are loaded while the server runs."""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.adapters.sites import EVERYTHING, AdapterScope, adaptable_linears
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.runner import Runner

# Rounding of what is computed with: the kernels have whole panels, and allocations whole pages.
_PACKED: Final = 1.25


@runtime_checkable
class KeepsRoom(Runner, Protocol):
    """A runner that sets memory aside for adapters beside its KV cache."""

    bytes_per_adapter: int  # set aside for each that may be loaded later


def largest_adapter(settings: ShardSettings, config: ModelConfig, dtype: str) -> int:
    """Return the bytes of an adapter of the largest rank, on all linears that may be changed.

    `dtype`: the model's. With several ranks it is what a single rank would need.
    """
    spec = decoder_spec(config)
    if spec is None:
        return 0
    numbers = count_numbers(spec, settings.max_lora_rank, AdapterScope.of(settings.adapter_scope))
    return int(numbers * (4 if dtype == "float32" else 2) * _PACKED)


def count_numbers(spec: DecoderSpec, rank: int, scope: AdapterScope = EVERYTHING) -> int:
    """Return how many parameters an adapter of all linears in `scope` has."""
    linears = adaptable_linears(spec, scope)
    matrices = {piece.matrix for _, linear in linears for piece in linear.pieces}
    own = 2 if scope.gains else 0  # gains and offsets of an output, with DoRA and biases
    embedded = rank * spec.hidden_size if scope.tokens else 0
    if scope.lookups:
        embedded += rank * (spec.vocab_size + spec.hidden_size)
        embedded += spec.hidden_size if scope.gains else 0
    return embedded + sum(
        rank * (matrix.rows + matrix.columns) + own * matrix.rows for matrix in matrices
    )
