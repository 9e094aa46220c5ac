"""Records which rows of the table of operations adapters may change, while these are written."""

from __future__ import annotations

from collections.abc import Sequence

from tgi_trio.model.adapters.sites import AdapterScope, Role, Site
from tgi_trio.model.matrices.references import LinearRef
from tgi_trio.shard.cpu_backend.operations.adapted import AdaptedSite, HeadProducts
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import Buffer


class SiteRecorder:
    """The sites of a model's layers, each recorded before its rows are added."""

    def __init__(self, writer: OperationWriter, scope: AdapterScope) -> None:
        self.sites: list[AdaptedSite] = []
        self.layer = 0  # whose operations are written
        self._writer = writer
        self._scope = scope

    def add(
        self,
        role: Role,
        linear: LinearRef,
        source: Buffer,
        *,
        paired: bool = False,
        feeder: int | None = None,
        expert: int = 0,
        arranged: int = -1,
        coded: bool = False,
    ) -> None:
        """Record that adapters may change the linear layer that is added next.

        `feeder`: the row that writes its activations; None: the previous one. The rest as for
        `Site` and `AdaptedSite`.
        """
        row = len(self._writer.rows)
        self.sites.append(
            AdaptedSite(
                Site(self.layer, role, expert),
                row,
                source,
                inputs=linear.pieces[0].matrix.columns,
                outputs=sum(each.outputs.size * len(each.outputs.starts) for each in linear.pieces),
                paired=paired,
                feeder=row - 1 if feeder is None else feeder,
                pieces=len(linear.pieces),
                arranged=arranged,
                coded=coded,
            )
        )

    def add_heads(self, products: HeadProducts, source: Buffer) -> None:
        """Record the same for the products of heads with what expands latents, added next, if
        adapters may change that.

        `source`: what each head multiplies, always as floating-point numbers.
        """
        row = len(self._writer.rows)
        for head in range(products.heads if self._scope.latents else 0):
            self.sites.append(
                AdaptedSite(
                    Site(self.layer, "latent up"),
                    row,
                    source,
                    inputs=products.inputs,
                    outputs=products.outputs,
                    paired=False,
                    feeder=row - 1,
                    pieces=1,
                    products=products,
                    head=head,
                )
            )

    def add_experts(
        self,
        role: Role,
        linears: Sequence[LinearRef],
        source: Buffer,
        *,
        paired: bool = False,
        feeder: int,
        arranged: int = -1,
        coded: bool = False,
    ) -> None:
        """Record the same for a linear layer of every expert, if adapters may change experts."""
        for expert, linear in enumerate(linears if self._scope.experts else ()):
            self.add(
                role,
                linear,
                source,
                paired=paired,
                feeder=feeder,
                expert=expert,
                arranged=arranged,
                coded=coded,
            )
