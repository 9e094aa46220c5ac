"""The linears and norms of a checkpoint, as a rank needs them: what every part is loaded from."""

from __future__ import annotations

import torch

from tgi_trio.shard.layers.linear import Linear
from tgi_trio.shard.layers.norm import Norm
from tgi_trio.shard.models.specs import DecoderSpec
from tgi_trio.shard.weights import WeightSource


class Parts:
    """Linears and norms by name, with what the spec says of all of them."""

    def __init__(self, spec: DecoderSpec, source: WeightSource) -> None:
        self.spec = spec
        self.names = spec.names
        self.source = source
        # Partial sums are added up over the ranks, so a bias may be counted on one only.
        self.first = source.rank == 0

    def column_linear(
        self, name: str, rows: int, part: slice, bias: bool, inputs: int = 0
    ) -> Linear:
        """Return the output features `part` of a linear of `inputs` features, 0: a hidden state."""
        spec = self.spec
        weight = self.source.matrix(
            f"{name}.weight",
            (rows, inputs or spec.hidden_size),
            rows=part,
            transposed=spec.transposed,
        )
        return Linear(weight, self.source.vector(f"{name}.bias", rows, part) if bias else None)

    def row_linear(self, name: str, columns: int, part: slice, bias: bool) -> Linear:
        """Return a linear over the input features `part`."""
        spec = self.spec
        weight = self.source.matrix(
            f"{name}.weight",
            (spec.hidden_size, columns),
            columns=part,
            transposed=spec.transposed,
        )
        wanted = bias and self.first
        return Linear(
            weight, self.source.vector(f"{name}.bias", spec.hidden_size) if wanted else None
        )

    def norm(self, prefix: str, name: str, size: int, eps: float = 0.0) -> Norm | None:
        """Return a norm of the spec's kind; `eps` 0: and of its eps."""
        if not name:
            return None
        spec, path = self.spec, prefix + name
        weight = self.source.vector(f"{path}.weight", size) if spec.norm_weight else None
        bias = self.source.vector(f"{path}.bias", size) if spec.norm_bias else None
        return Norm(spec.norm, weight, bias, eps or spec.norm_eps, size)


def times(heads: slice, dim: int) -> slice:
    """Return the rows of `heads` of `dim` rows each."""
    return slice(heads.start * dim, heads.stop * dim)


def joined(parts: list[Linear]) -> Linear:
    """Return one linear whose outputs are those of `parts` in order."""
    if len(parts) == 1:
        return parts[0]
    biases = None
    if any(part.bias is not None for part in parts):
        biases = torch.cat(
            [
                part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias
                for part in parts
            ]
        )
    return Linear(torch.cat([part.weight for part in parts]), biases)
