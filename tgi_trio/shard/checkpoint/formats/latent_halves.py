"""Checkpoints that have the expansion of latents in two matrices, in any format of these."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.latent_halves import find_halves
from tgi_trio.shard.checkpoint.container import Container, Headers
from tgi_trio.shard.checkpoint.formats.joined_heads import JoinedHeads
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix, WeightFormat


@dataclass(frozen=True, slots=True)
class HalvesFormat:
    """A `WeightFormat` that joins halves, which another format reads like all other matrices."""

    inner: WeightFormat

    @property
    def name(self) -> str:
        return self.inner.name

    def claims(self, config: ModelConfig, container: Container) -> bool:
        return self.inner.claims(config, container)

    def matrix(
        self, container: Container, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> StoredMatrix:
        """Return a matrix, see `WeightFormat`; raises ModelLoadError as `find_halves` does."""
        halves = find_halves(MatrixRef(name, *shape), Headers(container))
        if halves is None:
            return self.inner.matrix(container, name, shape, transposed=transposed)
        keys, values = (
            self.inner.matrix(container, half.name, (half.rows, half.columns)) for half in halves
        )
        return JoinedHeads(
            keys=keys,
            values=values,
            heads=keys.shape[0] // shape[1],
            outputs=range(shape[0]),
            inputs=range(shape[1]),
        )
