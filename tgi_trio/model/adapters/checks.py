"""Checks whether what an adapter has for a module fits the model, and is computed beside others."""

from __future__ import annotations

from collections.abc import Sequence

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.files import Adapter, Pair, ReplacedRows, SavedMatrix
from tgi_trio.model.adapters.rows import count_tokens
from tgi_trio.model.adapters.tensor_kinds import TensorKind
from tgi_trio.model.matrices.references import LinearRef, MatrixRef


def check_plain(adapter: Adapter, pairs: Sequence[Pair | None], what: str) -> None:
    """Raise ModelLoadError if more than A and B of some modules are changed."""
    if changed := [pair for pair in pairs if pair is not None and pair.vectors]:
        raise ModelLoadError(
            f"{adapter.folder} has DoRA or biases of {changed[0].module}: of {what}, only A and B "
            f"are served. {adapter.config.advise()}"
        )


def check_head(
    adapter: Adapter, pairs: Sequence[Pair | None], rows: ReplacedRows, head: LinearRef
) -> None:
    """Raise ModelLoadError for what is not served of a head some of whose rows are replaced."""
    matrix = head.pieces[0].matrix
    if any(pairs) and isinstance(rows, SavedMatrix):
        raise ModelLoadError(
            f"{adapter.folder} has A and B of {matrix.name} and the whole of it: both together are "
            f"not served. {adapter.config.advise()}"
        )
    check_plain(adapter, pairs, "a head some of whose rows are replaced")
    bias = rows.bias if isinstance(rows, SavedMatrix) else None
    if bias is not None and (not matrix.bias or bias[1].shape != (matrix.rows,)):
        raise ModelLoadError(
            f"{bias[0]} of {adapter.folder} is {list(bias[1].shape)}; the model's head has "
            f"{f'{matrix.rows} outputs' if matrix.bias else 'no bias'}: the adapter is made for "
            "another base"
        )


def check_shapes(adapter: Adapter, pair: Pair, matrix: MatrixRef, *, of_head: bool = False) -> None:
    """Raise ModelLoadError for tensors that do not fit the model's matrix.

    A and B of a head may have fewer or more tokens, as `count_tokens` says.
    """
    rows, columns = matrix.rows, matrix.columns
    outputs = f"outputs are {rows}"
    if of_head and not pair.vectors:
        rows = count_tokens(adapter, pair.names[1], pair.b.shape[0], rows)
    for name, shape, wanted, what in (
        ("lora_A", pair.a.shape, (pair.rank, columns), f"inputs are {columns}"),
        ("lora_B", pair.b.shape, (rows, pair.rank), outputs),
        *((name, each.shape, (rows,), outputs) for name, each in pair.vectors.values()),
        *((name, each.shape, (rows, columns), outputs) for name, each in pair.copies),
    ):
        if shape != wanted:
            raise ModelLoadError(
                f"{name} of {pair.module} in {adapter.folder} is {list(shape)}; the "
                f"model's {what}: the adapter is made for another base"
                + (f", {adapter.config.base}" if adapter.config.base else "")
            )
    if TensorKind.BIAS in pair.vectors and not matrix.bias:
        raise ModelLoadError(
            f"{pair.vectors[TensorKind.BIAS][0]} of {adapter.folder} is a bias, and the model's "
            f"{pair.module} has none: the adapter is made for another base"
        )
