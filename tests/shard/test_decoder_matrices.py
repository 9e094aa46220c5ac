"""The description of a decoder's matrices: what loaders read, all of it and each number once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.shard.torch_backend.family_variants import VARIANTS
from tests.shard.torch_backend.models_support import ALONE
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_tensors import read_tensors
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.matrices.decoder import layer_refs, outer_refs
from tgi_trio.model.matrices.references import (
    LinearRef,
    MatrixRef,
    NormRef,
    TensorRef,
    Units,
    VectorRef,
    run_of,
)
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.split import unit_share
from tgi_trio.model.tensors import decoder_claims

Checkpoint = Callable[..., Path]
CASES = [*((family, {}) for family in ALONE), *VARIANTS]


def spec_of(folder: Path) -> DecoderSpec:
    spec = decoder_spec(read_config(folder))
    assert spec is not None
    return spec


def parts(refs: Any) -> Iterator[Any]:
    """Yield every record of a description, however deep it lies."""
    if dataclasses.is_dataclass(refs):
        yield refs
        for field in dataclasses.fields(refs):
            yield from parts(getattr(refs, field.name))
    elif isinstance(refs, tuple):
        for part in refs:
            yield from parts(part)


def records(spec: DecoderSpec) -> list[Any]:
    layers = [layer_refs(spec, index) for index in range(len(spec.layers))]
    return [part for refs in (outer_refs(spec), *layers) for part in parts(refs)]


def shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return every tensor that is described, by name."""
    found: dict[str, tuple[int, ...]] = {}
    for part in records(spec):
        if isinstance(part, MatrixRef):
            shape = (part.rows, part.columns)
            found[part.name] = shape[::-1] if part.transposed else shape
            found[part.bias] = (part.rows,)
        elif isinstance(part, NormRef):
            found |= dict(part.tensors())
        elif isinstance(part, VectorRef):
            found[part.name] = (part.size,)
        elif isinstance(part, TensorRef):
            found[part.name] = part.shape
    found.pop("", None)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda v: str(v)[:40])
def test_it_names_what_save_pretrained_writes(
    checkpoint: Checkpoint, family: str, changes: dict[str, Any]
) -> None:
    folder = checkpoint(family, **changes)
    spec = spec_of(folder)
    stored = {name: tensor.shape for name, tensor in read_tensors(read_config(folder)).items()}
    described = shapes(spec)
    if not any(name.startswith(spec.names.base) for name in stored):
        described = {name.removeprefix(spec.names.base): s for name, s in described.items()}
    known = decoder_claims(spec).known  # which transformers does not use itself
    assert described == {name: shape for name, shape in stored.items() if name not in known}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("family", "changes"), CASES, ids=lambda v: str(v)[:40])
def test_every_number_is_in_one_cut_of_one_rank(
    checkpoint: Checkpoint, family: str, changes: dict[str, Any], ranks: int
) -> None:
    """But what every rank has whole, and the key-value head that ranks share.

    Those of a block that layers share are in as many cuts as there are layers that do.
    """
    spec = spec_of(checkpoint(family, **changes))
    used = Counter(
        name
        for index in range(len(spec.layers))
        for name in {p.name for p in parts(layer_refs(spec, index)) if isinstance(p, MatrixRef)}
    )
    seen: dict[str, np.ndarray[Any, Any]] = {}
    linears = [part for part in records(spec) if isinstance(part, LinearRef)]
    for piece in (piece for linear in linears for piece in linear.pieces):
        splits = {piece.outputs.split, piece.inputs.split} - {"whole"}
        alone = not splits or (splits == {"kv_heads"} and len(piece.outputs.starts) < ranks)
        matrix = piece.matrix
        counts = seen.setdefault(matrix.name, np.zeros((matrix.rows, matrix.columns), int))
        for rank in range(1 if alone else ranks):
            for cut in LinearRef((piece,)).cuts(partial(unit_share, rank=rank, ranks=ranks)):
                assert cut.matrix is matrix
                for columns in cut.columns:
                    counts[cut.rows, columns] += 1
    tied = outer_refs(spec).head.pieces[0].matrix.name if spec.tied_head else ""
    for name, counts in seen.items():
        assert (counts == (2 if name == tied else max(1, used[name]))).all(), name


def test_units_of_heads_in_groups_become_few_slices() -> None:
    queries = Units("heads", (0, 4, 8, 20, 24, 28), 4)  # three to a group, then a key and a value
    assert queries.spans(slice(0, 6)) == [slice(0, 12), slice(20, 32)]
    assert queries.spans(slice(2, 4)) == [slice(8, 12), slice(20, 24)]
    assert run_of("mlp", 1000, first=1000).spans(slice(500, 1000)) == [slice(1500, 2000)]


def test_units_that_cannot_be_split_are_named() -> None:
    with pytest.raises(ModelLoadError, match="3 attention heads cannot be split over 2 shards"):
        unit_share(run_of("heads", 3, 16), 0, 2)
    with pytest.raises(ModelLoadError, match="2 rows cannot be split over 4 shards"):
        unit_share(run_of("vocabulary", 2), 0, 4)


@pytest.mark.parametrize(("heads", "ranks"), [(1, 2), (2, 4), (4, 2)])
def test_ranks_share_the_key_value_heads_there_are(heads: int, ranks: int) -> None:
    units = run_of("kv_heads", heads, 16)
    shares = [unit_share(units, rank, ranks) for rank in range(ranks)]
    found = [head for share in shares for head in range(heads)[share]]
    assert found == sorted(found) and set(found) == set(range(heads))
    assert len(found) == max(heads, ranks)
