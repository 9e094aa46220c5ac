"""The matrices of a layer's n-gram embeddings, and the hashes that a checkpoint states."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    MatrixRef,
    NormRef,
    TensorRef,
    Units,
    run_of,
    whole_units,
)
from tgi_trio.model.matrices.roles import NgramsRefs
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.ngrams import NgramsSpec

TABLE: Final = "ple_embedding.ngram_embedding"


def ngrams_refs(spec: DecoderSpec, prefix: str, ngrams: NgramsSpec) -> NgramsRefs:
    """Return the n-gram embeddings of the layer at `prefix`.

    Ranks split the numbers of each head's embedding, so the projections of them are partial sums.
    """
    place, each = prefix + spec.names.ngrams, ngrams.width // ngrams.heads
    columns = run_of("channels", each)
    if ngrams.parts:
        names = [f"{place}.{TABLE}.shard_{i}.weight" for i in range(len(ngrams.part_rows))]
    else:
        names = [f"{place}.{TABLE}.weight"]
    table = (
        MatrixRef(name, rows, each) for name, rows in zip(names, ngrams.part_rows, strict=True)
    )
    # Number by number, of all heads; a rank has its numbers of each head, as they lie.
    starts = [head * each + i for i in range(each) for head in range(ngrams.heads)]
    inputs = Units("channels", starts, as_they_lie=True)
    projections = (
        MatrixRef(f"{place}.{name}.weight", rows, ngrams.width)
        for name, rows in (("key_proj", ngrams.channels), ("value_proj", spec.hidden_size))
    )

    def norm(name: str) -> NormRef:
        return NormRef(f"{place}.{name}.weight", "", ngrams.channels, spec.norm_eps)

    kernel = (ngrams.channels, 1, ngrams.taps)
    return NgramsRefs(
        table=LinearRef(tuple(LinearPiece(m, whole_units(m.rows), columns) for m in table)),
        inner=LinearRef(tuple(LinearPiece(m, whole_units(m.rows), inputs) for m in projections)),
        query_norm=norm("norm_query"),
        key_norm=norm("norm_key"),
        kernel_norm=norm("norm_conv"),
        kernel=TensorRef(f"{place}.conv1d.weight", kernel, whole_units(ngrams.channels)),
    )


def drop_hashes(tensors: Mapping[str, StoredTensor], spec: DecoderSpec) -> dict[str, StoredTensor]:
    """Return `tensors` without those that state how n-grams are hashed; they need not be there.

    Raises ModelLoadError if they are not as the spec is.
    """
    left = dict(tensors)
    for index, layer in enumerate(spec.layers):
        if layer.ngrams is None:
            continue
        place = f"{spec.names.layer.format(index)}{spec.names.ngrams}.ple_embedding."
        for part, wanted in _hashes(layer.ngrams):
            name = f"{place}{part}"
            stored = left.pop(name, None) or left.pop(name.removeprefix(spec.names.base), None)
            if stored is not None and _integers(stored) != wanted:
                raise ModelLoadError(
                    f"Tensor {name!r} in {stored.file} is not what config.json gives by its seed "
                    "and sizes: other n-grams would be embedded than in training. Check that "
                    "config.json and the weights belong together."
                )
    return left


def _hashes(ngrams: NgramsSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "layer_multipliers", ngrams.factors
    yield "ngram_heads_vocab_sizes", ngrams.rows
    yield "ngram_heads_offsets", ngrams.firsts


def _integers(stored: StoredTensor) -> tuple[int, ...]:
    """Return the numbers of a tensor of 64-bit integers; () for one of another type."""
    if stored.dtype != "I64":
        return ()
    with stored.file.open("rb") as file:
        file.seek(stored.first)
        raw = file.read(stored.end - stored.first)
    return struct.unpack(f"<{len(raw) // 8}q", raw)
