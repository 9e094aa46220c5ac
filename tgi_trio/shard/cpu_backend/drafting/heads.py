"""Speculation heads: their linear layers in the kernels, the small rest in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.matrices.references import every_unit, whole_linear
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.speculators.spec import EagleSpec, HeadsSpec
from tgi_trio.shard.checkpoint.heads import open_heads, read_token_map
from tgi_trio.shard.checkpoint.lookup import read_table
from tgi_trio.shard.checkpoint.numbers import to_float32
from tgi_trio.shard.cpu_backend.program_builder import FinalNorm
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError

if TYPE_CHECKING:
    from tgi_trio.shard.cpu_backend.forward import Forward
    from tgi_trio.shard.cpu_backend.program import Program

Floats = NDArray[np.float32]

_FEATURES: Final = 32  # row widths are multiples of this, for the kernels
_EPS: Final = 1e-6


def find_unfit(spec: HeadsSpec) -> str | None:
    """Return why the kernels cannot compute these heads, or None."""
    if spec.widest % _FEATURES:
        return f"heads with {spec.widest} features, which is no multiple of {_FEATURES}"
    if not isinstance(spec, EagleSpec):
        return None
    pieces = [piece for ref in spec.linears.values() for piece in ref.pieces[:-1]]
    # other pieces follow in the same rows
    if any(piece.matrix.rows % _FEATURES for piece in pieces):
        return f"an EAGLE-3 drafter whose matrices have rows in no multiples of {_FEATURES}"
    rotary = spec.layer.layers[0].rotary
    if rotary is not None and rotary.interleaved:
        return "an EAGLE-3 drafter that rotates neighbours"
    return None


class LoadedHeads:
    """The weights of heads that are not linear layers, and their token map. No compiler here."""

    def __init__(self, heads: HeadsSpec, spec: DecoderSpec) -> None:
        """Read them; raises ModelLoadError as the files do, UnsupportedError for unfit sizes."""
        if (reason := find_unfit(heads)) is not None:
            raise UnsupportedError(reason)
        self.spec = heads
        self.token_map = read_token_map(heads, spec.vocab_size)
        with open_heads(heads) as files:
            self.vectors = {
                role: files.vector(name, size) for role, (name, size) in heads.vectors.items()
            }
            self.tables = {
                role: _table(read_table(files, whole_linear(ref), every_unit).dequantised())
                for role, ref in heads.tables.items()
            }


def _table(values: NDArray[Any]) -> NDArray[Any]:
    return values.copy()  # a copy, since the file is closed


def normalise(norm: FinalNorm | None, x: Floats) -> Floats:
    """Return a norm of rows [n, features]; None: they are returned as they are."""
    if norm is None:
        return x
    if norm.centred:
        x = x - x.mean(axis=1, keepdims=True)
    x = x / np.sqrt(_mean_square(x) + np.float32(norm.eps))
    if norm.weight is not None:
        x = x * norm.weight
    return x if norm.bias is None else x + norm.bias


class KernelArithmetic:
    """The `Arithmetic` of heads on the CPU kernels; see `speculation/arithmetic.py`.

    Linear layers are operations after those of the model, which the same team runs.
    """

    def __init__(self, forward: Forward, program: Program, heads: LoadedHeads) -> None:
        self._forward = forward
        self._norm = program.final_norm
        self._heads = heads

    def normalise(self, x: Floats) -> Floats:
        return normalise(self._norm, x)

    def concatenate(self, parts: Sequence[Floats]) -> Floats:
        return np.concatenate(parts)

    def multiply(self, role: str, x: Floats) -> Floats:
        return self._forward.multiply(role, x)

    def look_up(self, role: str, ids: NDArray[np.int64]) -> Floats:
        return to_float32(self._heads.tables[role][ids])

    def vector(self, role: str) -> Floats:
        return self._heads.vectors[role]

    def silu(self, x: Floats) -> Floats:
        half = np.float32(0.5)
        found: Floats = x * (half + half * np.tanh(half * x))  # with tanh, since exp may overflow
        return found

    def gelu(self, x: Floats) -> Floats:
        found: Floats = np.float32(0.5) * x * (1 + _erf(x * np.float32(0.5**0.5)))
        return found

    def inverse_rms(self, x: Floats) -> Floats:
        found: Floats = 1 / np.sqrt(_mean_square(x) + np.float32(_EPS))
        return found

    def best(self, logits: Floats) -> NDArray[np.int64]:
        found: NDArray[np.int64] = logits.argmax(axis=1)
        return found


def _mean_square(x: Floats) -> Floats:
    """Return [n, 1]; for a small row, numpy's own `mean` takes longer."""
    total: Floats = np.add.reduce(x * x, axis=1, keepdims=True)
    return total * np.float32(1 / x.shape[1])


def _erf(x: Floats) -> Floats:
    """Return the error function to 1.5e-7 (Abramowitz and Stegun 7.1.26); numpy has none."""
    size = np.abs(x)
    t = 1 / (1 + np.float32(0.3275911) * size)
    series: Any = np.float32(1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = series * t + np.float32(factor)
    result: Floats = np.copysign(1 - series * t * np.exp(-size * size), x)
    return result
