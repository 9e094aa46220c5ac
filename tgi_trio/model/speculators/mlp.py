"""The files of IBM's MLP speculators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.matrices.references import LinearRef, MatrixRef, whole_linear
from tgi_trio.model.speculators.spec import MlpSpec, check_base

_BASE = "speculator."  # prefix of every tensor's name


def is_mlp(values: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a folder holds an MLP speculator."""
    return values.get("model_type") == "mlp_speculator"


def read_mlp(
    folder: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    *,
    hidden: int,
    vocabulary: int,
) -> MlpSpec:
    """Return a folder's speculator, for a model with these numbers of hidden features and tokens.

    Raises ModelLoadError, naming what is wrong.
    """
    heads, inner = (_need(folder, values, name) for name in ("n_predict", "inner_dim"))
    for name, own in (("emb_dim", hidden), ("vocab_size", vocabulary)):
        check_base(folder, name, _need(folder, values, name), own)
    base = _BASE if any(name.startswith(_BASE) for name in tensors) else ""
    tied = bool(values.get("tie_weights", False))
    last = 0 if tied else heads - 1

    def matrix(part: str, i: int, rows: int, columns: int) -> MatrixRef:
        return MatrixRef(f"{base}{part}.{i}.weight", rows, columns)

    projections = min(2, heads) if tied else heads  # the first reads the model's hidden state
    refs = {
        f"proj {i}": matrix("proj", i, inner, inner if i else hidden) for i in range(projections)
    }
    refs |= {f"head {i}": matrix("head", i, vocabulary, inner) for i in range(last + 1)}
    tables = {f"emb {i}": matrix("emb", i, vocabulary, inner) for i in range(last + 1)}
    vectors = {}
    for i in range(last + 1):
        vectors[f"gain {i}"] = (f"{base}ln.{i}.weight", inner)
        vectors[f"bias {i}"] = (f"{base}ln.{i}.bias", inner)
    linears: dict[str, LinearRef] = {role: whole_linear(ref) for role, ref in refs.items()}
    names = [ref.name for ref in (*refs.values(), *tables.values())]
    return MlpSpec(
        folder=folder,
        heads=heads,
        linears=linears,
        vectors=vectors,
        tables=tables,
        tensors=(*names, *(name for name, _ in vectors.values())),
        inner=inner,
        scales_input=bool(values.get("scale_input", False)),
        tied=tied,
    )


def _need(folder: Path, values: Mapping[str, Any], name: str) -> int:
    found = values.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ModelLoadError(
            f"{folder / 'config.json'} says {name} {found!r}; an MLP speculator needs a number "
            "above 0"
        )
    return found
