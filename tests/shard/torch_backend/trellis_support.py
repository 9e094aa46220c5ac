"""EXL3 matrices, and linear layers of them, for tests of what multiplies them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.checkpoint.quantised_cases import Case, open_matrix
from tests.shard.torch_backend.interpreter import (
    DEVICE,
    need_triton,
)
from tests.support.exl3 import EXL3, store_exl3
from tests.support.quantised import Array
from tgi_trio.shard.checkpoint.formats.exl3 import read_rings
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix

need_triton()

from tgi_trio.shard.torch_backend.layers.linears import trellis_linear  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.stored_trellis import (  # noqa: E402
    Trellis,
    encode_rings,
)
from tgi_trio.shard.torch_backend.layers.linears.trellis_linear import (  # noqa: E402
    TrellisLinear,
)

FLOAT, HALF = torch.float32, torch.bfloat16


def some_matrix(
    folder: Path, outputs: int, inputs: int, bits: float = 3, book: str = "mcg", **how: Any
) -> tuple[StoredMatrix, Array]:
    """Return any matrix of a width and a codebook, and its weights."""
    folder.mkdir(exist_ok=True)
    weight = np.random.default_rng(outputs).standard_normal((outputs, inputs), np.float32)
    tensors, exact = store_exl3(bits, book, **how)("a", weight)
    return open_matrix(folder, Case(EXL3, tensors, exact, int(np.ceil(bits)), 128)), exact


def encoded(matrix: StoredMatrix) -> Trellis:
    rings = read_rings(matrix)
    assert rings is not None
    return encode_rings(rings, matrix.shape)


def linear_of(
    parts: list[Trellis | torch.Tensor],
    dtype: torch.dtype = FLOAT,
    bias: torch.Tensor | None = None,
    *,
    invariant: bool = False,
) -> TrellisLinear:
    return TrellisLinear(parts, bias, dtype, torch.device(DEVICE), invariant=invariant)


def some_rows(rows: int, inputs: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, inputs, generator=draw).to(DEVICE, dtype)


def check_product(
    linear: TrellisLinear,
    weight: Array,
    rows: int,
    dtype: torch.dtype = FLOAT,
    bias: torch.Tensor | None = None,
) -> None:
    """Compare with the product in float64, by what is rounded in a dtype.

    In half precision inputs that have been turned, numbers and results are, by half a step each.
    """
    x = some_rows(rows, weight.shape[1], dtype)
    wide, exact = x.double().cpu(), torch.from_numpy(weight).double().T
    expected = wide @ exact + (0 if bias is None else bias.double().cpu())
    found = linear(x)
    assert found.dtype is dtype and found.shape == expected.shape
    step = 2.0**-21 if dtype is FLOAT else torch.finfo(dtype).eps
    sizes = wide.abs() @ exact.abs() + 1
    assert ((found.double().cpu() - expected).abs() / sizes).max() < step


def write_for_library(monkeypatch: pytest.MonkeyPatch, rows: int = 64) -> None:
    """Have more than `rows` multiplied by a library."""
    monkeypatch.setattr(trellis_linear, "MOST_ROWS", rows)
