"""The operations around latent attention, up to the linear layer that ends the branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.adapters.sites import find_query_up
from tgi_trio.model.matrices.references import LinearRef, every_unit
from tgi_trio.model.matrices.roles import AttentionRefs, LatentRefs
from tgi_trio.model.specs.decoder import DecoderSpec, IndexSpec, LatentSpec, RotarySpec
from tgi_trio.shard.checkpoint.lookup import read_table
from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16, to_float32
from tgi_trio.shard.cpu_backend.head_order import head_order
from tgi_trio.shard.cpu_backend.operations.adapted import HeadProducts
from tgi_trio.shard.cpu_backend.operations.adapted_sites import SiteRecorder
from tgi_trio.shard.cpu_backend.operations.gates import add_gates
from tgi_trio.shard.cpu_backend.operations.mixtures import pad_to_panel
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import LATENT, Activation, Buffer, Code, Form
from tgi_trio.shard.cpu_backend.weight_layout import PANEL


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The widths of the rows from which latents and queries are computed."""

    spec: LatentSpec
    heads: int
    gates: int  # beside queries and latents; 0: none
    index: IndexSpec | None = None  # that chooses what is attended to
    reads_only: bool = False  # latents are another layer's

    @classmethod
    def of(
        cls,
        model: DecoderSpec,
        latent: LatentSpec,
        index: IndexSpec | None = None,
        *,
        reads_only: bool = False,
    ) -> LatentShape:
        """Return the shape of a model's layers with latents, and with an `index` of their own."""
        gates = model.heads if model.gated_heads else 0
        if model.gated_values and not latent.doubled:
            gates = model.heads * latent.value_dim
        return cls(latent, model.heads, gates, index, reads_only)

    @property
    def query_dim(self) -> int:
        return self.spec.plain_dim + self.spec.rotary_dim

    @property
    def projected_width(self) -> int:
        """Features of a row of PROJECTED: queries or their compressed form, a latent, an index's
        key and the weights of its heads, gates.
        """
        return pad_to_panel(self.gates_place + self.gates)

    @property
    def latent_place(self) -> int:
        """The offset of a latent in a row of PROJECTED."""
        return self.spec.query_rank or self.heads * self.query_dim

    @property
    def index_place(self) -> int:
        """The offset of an index's key in a row of PROJECTED."""
        own = 0 if self.reads_only else self.spec.rank + self.spec.rotary_dim
        return self.latent_place + own

    @property
    def gates_place(self) -> int:
        """The offset of the gates in a row of PROJECTED."""
        own = self.index
        return self.index_place + (own.kept + own.heads if own is not None else 0)

    @property
    def query_width(self) -> int:
        """Features of a row of QKV: queries, if they were compressed."""
        return pad_to_panel(self.heads * self.query_dim) if self.spec.query_rank else 0

    @property
    def values_width(self) -> int:
        """Features of a row of what all heads say."""
        return self.heads * self.spec.value_dim

    @property
    def mixed_width(self) -> int:
        """Most features of a row of MIXED."""
        each = max(self.spec.plain_dim, self.spec.value_dim)
        doubled = 1 + self.spec.doubled
        return max(self.heads * each, doubled * self.spec.query_rank)

    @property
    def late_gates(self) -> int:
        """Features of a row of gates that are computed like queries; 0: none."""
        return pad_to_panel(self.values_width) if self.spec.doubled else 0


def add_queries(
    writer: OperationWriter,
    refs: AttentionRefs,
    latent: LatentRefs,
    shape: LatentShape,
    rotary: RotarySpec | None,
    sites: SiteRecorder,
    *,
    bf16: bool,
    norms: dict[str, int],
    choose: Callable[[int], None] | None = None,
    **fields: Any,
) -> None:
    """Add everything from the layer's norm, added last, up to ATTEND.

    `sites`: records its linear layers. `norms`: addresses of the weights of "query" and "latent";
    `choose`: adds the choice of an index, by the row that writes compressed queries, if it reads
    these; `fields`: of TURN. Raises ModelLoadError as the weights do.
    """
    spec, width, source = shape.spec, shape.projected_width, Buffer.PROJECTED
    sites.add("qkv", refs.qkv, Buffer.NORMED)
    writer.linear(refs.qkv, Buffer.NORMED, Buffer.PROJECTED)
    reads_input = shape.index is not None and shape.index.reads_input
    if choose is not None and reads_input:
        choose(-1)
    facts = np.zeros((1,), LATENT)
    facts["query_width"], facts["place"] = width, shape.latent_place
    if latent.query_up is not None and latent.query_norm is not None:
        after = None if reads_input else choose
        feeder = _compress_queries(
            writer, spec, width, (norms["query"], latent.query_norm.eps), after
        )
        _expand_queries(writer, refs, latent.query_up, latent.gate_up, sites, feeder)
        source, facts["query_width"] = Buffer.QKV, shape.query_width
    for name in ("rank", "plain_dim", "rotary_dim"):
        facts[name] = getattr(spec, name)
    pairs = None if rotary is None else head_order(rotary, spec.rotary_dim)
    order = np.arange(spec.rotary_dim, dtype=np.int32) if pairs is None else pairs
    writer.add(
        Code.TURN,
        source=source,
        target=Buffer.MIXED,
        inputs=width,
        weights=norms["latent"],
        eps=spec.norm_eps,
        order=writer.keep(order),
        facts=writer.keep(facts),
        **fields,
    )
    _absorb_queries(writer, latent.up, shape, sites, bf16=bf16)


def _absorb_queries(
    writer: OperationWriter, up: LinearRef, shape: LatentShape, sites: SiteRecorder, *, bf16: bool
) -> None:
    """Add the product of queries in MIXED with `up`, which would expand latents to keys."""
    spec = shape.spec
    keys, _ = _read_heads(writer, up, spec)
    each = HeadProducts(shape.heads, spec.plain_dim, spec.rank, spec.plain_dim, of_keys=True)
    sites.add_heads(each, Buffer.MIXED)
    writer.add(
        Code.ABSORB,
        heads=shape.heads,
        head_dim=spec.rank + spec.rotary_dim,
        source=Buffer.MIXED,
        target=Buffer.QUERY,
        inputs=spec.plain_dim,
        outputs=spec.rank,
        span=spec.plain_dim,
        weights=writer.keep(pack_heads(keys, bf16=bf16)),
    )


def _compress_queries(
    writer: OperationWriter,
    spec: LatentSpec,
    width: int,
    norm: tuple[int, float],
    choose: Callable[[int], None] | None,
) -> int:
    """Add the norm of compressed queries, and `choose` behind it; return the row that they have.

    `width`: of a row of PROJECTED; `norm`: the address of its weights, and its epsilon.
    """
    compress: dict[str, Any] = {
        "source": Buffer.PROJECTED,
        "target": Buffer.MIXED,
        "inputs": width,
        "width": spec.query_rank,
        "weights": norm[0],
        "eps": norm[1],
    }
    writer.add(Code.COMPRESS, outputs=spec.query_rank, **compress)
    if choose is not None:
        choose(len(writer.rows) - 1)
    if spec.doubled:
        writer.add(Code.COMPRESS, outputs=2 * spec.query_rank, **compress)
    return _last(writer, Code.COMPRESS)


def _expand_queries(
    writer: OperationWriter,
    refs: AttentionRefs,
    query_up: LinearRef,
    gate_up: LinearRef | None,
    sites: SiteRecorder,
    feeder: int,
) -> None:
    """Add the linears that read the compressed queries which the row `feeder` has written."""
    if gate_up is not None:
        writer.linear(gate_up, Buffer.MIXED, Buffer.DECAYS, feeder=feeder)
    if (adapted := find_query_up(refs)) is not None:
        sites.add("query up", adapted, Buffer.MIXED, feeder=feeder)
    writer.linear(query_up, Buffer.MIXED, Buffer.QKV, feeder=feeder)


def add_values(
    writer: OperationWriter,
    latent: LatentRefs,
    shape: LatentShape,
    sites: SiteRecorder,
    *,
    bf16: bool,
    activation: Activation,
    attending: int = 1,
) -> None:
    """Add the matrices from attention's results, which are latents, to values in MIXED, by way of
    gates opened by `activation` if there are any.

    `sites`: as for `add_queries`. `attending`: how many operations, added last, write results.
    """
    spec = shape.spec
    gated = bool(shape.gates or shape.late_gates)
    for row in writer.rows[-attending:]:
        row["forms"] |= Form.PLAIN
    _, values = _read_heads(writer, latent.up, spec)
    span = spec.rank + spec.rotary_dim
    each = HeadProducts(shape.heads, spec.rank, spec.value_dim, span, of_keys=False)
    sites.add_heads(each, Buffer.ATTENDED)
    writer.add(
        Code.EXPAND,
        source=Buffer.ATTENDED,
        target=Buffer.QKV if gated else Buffer.MIXED,
        heads=shape.heads,
        inputs=spec.rank,
        outputs=spec.value_dim,
        span=span,
        weights=writer.keep(pack_heads(values.swapaxes(1, 2), bf16=bf16)),
        forms=Form.WIDE if gated else 0,
    )
    if gated:
        add_gates(
            writer,
            Buffer.QKV,
            inputs=shape.values_width,
            width=shape.values_width,
            gates=Buffer.DECAYS if shape.late_gates else Buffer.PROJECTED,
            gate_width=shape.late_gates or shape.projected_width,
            gate_place=0 if shape.late_gates else shape.gates_place,
            gate_size=spec.value_dim if shape.gates == shape.heads else 1,
            group=spec.value_dim,
            activation=activation,
        )


def pack_heads(matrices: Floats, *, bf16: bool) -> NDArray[Any]:
    """Return matrices [heads, in, out] as panels for each head, laid out as in `kernels/linear.py`:
    float32 [heads, out / 32, in, 32], or uint32 [heads, out / 32, in / 2, 32].
    """
    heads, inputs, outputs = matrices.shape
    parts = matrices.reshape(heads, inputs, outputs // PANEL, PANEL).swapaxes(1, 2)
    if not bf16:
        return np.ascontiguousarray(parts, np.float32)
    pairs = to_bfloat16(np.ascontiguousarray(parts))
    pairs = pairs.reshape(heads, outputs // PANEL, inputs // 2, 2, PANEL).swapaxes(3, 4)
    return np.ascontiguousarray(pairs).view(np.uint32)[..., 0]


def _last(writer: OperationWriter, code: Code) -> int:
    """Return the row of the last operation of a kind."""
    return max(i for i, row in enumerate(writer.rows) if row["code"] == code)


def _read_heads(writer: OperationWriter, up: LinearRef, spec: LatentSpec) -> tuple[Floats, Floats]:
    """Return latents' matrices: to keys [heads, plain_dim, rank], to values [.., value_dim, ..].

    They are dequantised, since columns of the one and rows of the other are multiplied.
    """
    parts = read_table(writer.source, up, every_unit).parts  # as torch reads it
    writer.dequantised |= {part.coding for part in parts} - {"numbers"}
    whole = np.concatenate([to_float32(part.dequantised()) for part in parts])
    heads = whole.reshape(-1, spec.plain_dim + spec.value_dim, spec.rank)
    keys, values = np.split(heads, [spec.plain_dim], axis=1)
    return keys, values
