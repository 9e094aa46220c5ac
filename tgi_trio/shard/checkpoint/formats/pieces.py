"""Formats with several safetensors per matrix; other matrices are not quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import MatrixLayout, check_parts
from tgi_trio.shard.checkpoint.container import Container, Headers, RawTensor
from tgi_trio.shard.checkpoint.formats.plain import PlainFormat
from tgi_trio.shard.checkpoint.formats.quantised_matrix import QuantisedMatrix, QuantisedSource
from tgi_trio.shard.checkpoint.stored_matrix import StoredMatrix

# Opens a matrix of a shape from its parts, by their roles.
Open = Callable[[tuple[int, int], Mapping[str, RawTensor]], QuantisedSource]


class PiecesFormat:
    """The `WeightFormat` of one checkpoint."""

    def __init__(self, layout: MatrixLayout, open_source: Open) -> None:
        self.name = layout.name
        self._layout = layout
        self._open = open_source

    def claims(self, config: ModelConfig, container: Container) -> bool:
        return True

    def matrix(
        self, container: Container, name: str, shape: tuple[int, int], *, transposed: bool = False
    ) -> StoredMatrix:
        """Return a matrix, see `WeightFormat`; `transposed` concerns only those that are not
        quantised.
        """
        headers = Headers(container)
        matrix = MatrixRef(name, *shape, transposed=transposed)
        parts = self._layout.parts(matrix, headers)
        if not parts:
            return PlainFormat().matrix(container, name, shape, transposed=transposed)
        check_parts(parts, headers, container.folder)
        tensors = {part.role: container.tensor(part.name) for part in parts if part.name in headers}
        source = self._open(shape, tensors)
        return QuantisedMatrix(source, range(shape[0]), range(shape[1]))
