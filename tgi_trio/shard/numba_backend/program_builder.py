"""From a model's spec and checkpoint to rows of the table of operations; a packer gets weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.adapters.sites import Role, Site
from tgi_trio.model.decoder_matrices import layer_refs, outer_refs
from tgi_trio.model.matrices import (
    AttentionRefs,
    LayerRefs,
    LinearRef,
    MlpRefs,
    NormRef,
    every_unit,
)
from tgi_trio.model.spec import DecoderSpec, LayerSpec
from tgi_trio.model.speculators.spec import HeadsSpec
from tgi_trio.shard.checkpoint.lookup import Weights, read_bias, read_linear, read_table
from tgi_trio.shard.checkpoint.numbers import to_bfloat16, to_float32
from tgi_trio.shard.checkpoint.stored_matrix import Stack, StoredMatrix
from tgi_trio.shard.numba_backend.adapted_operations import AdaptedSite
from tgi_trio.shard.numba_backend.arena import address
from tgi_trio.shard.numba_backend.kinds.packing import Packing
from tgi_trio.shard.numba_backend.kinds.table import find_packing
from tgi_trio.shard.numba_backend.packing import Packer, interleave, to_storage
from tgi_trio.shard.numba_backend.quantised_operations import QuantisedOperations
from tgi_trio.shard.numba_backend.tables import ACTIVATIONS, OPERATION, Buffer, Code, Epilogue, Form
from tgi_trio.shard.numba_backend.weight_layout import PANEL, CacheNumbers
from tgi_trio.shard.speculation.arithmetic import MODEL_HEAD

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """The model's last norm, for who computes it beside the kernels."""

    weight: Array | None  # float32 [hidden]
    bias: Array | None
    eps: float
    centred: bool


@dataclass(frozen=True, slots=True)
class LoneLinear:
    """Operations that compute one linear layer of rows given from outside."""

    first: int  # rows of the table
    end: int
    inputs: int
    outputs: int
    width: int  # features of a result's row: whole panels
    wide: bool  # its input is float32, which the first operation makes whole numbers of


class ProgramBuilder:
    """Writes the operations of a model and of heads that guess for it; holds what they point to."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        packer: Packer,
        *,
        bf16: bool,
        as_stored: bool,
        heads: tuple[HeadsSpec, Weights] | None,
        kv: CacheNumbers | None = None,
    ) -> None:
        """Hand every weight to `packer`; raises ModelLoadError as the weights do. See `Program`."""
        self.rows: list[NDArray[np.void]] = []
        self.lone: dict[str, LoneLinear] = {}
        self.sites: list[AdaptedSite] = []
        self.quantised = QuantisedOperations()
        self.dequantised = set[str]()  # codings of matrices that became plain numbers
        self.weight_bytes = 0
        self.widest = 0  # inputs of linears whose inputs have an order of their own
        self._spec = spec
        self._source = weights
        self._packer = packer
        self._bf16 = bf16
        self._as_stored = as_stored
        self._kv_scales = kv.scales if kv else [(1.0, 1.0)] * len(spec.layers)
        self._packed: dict[Any, int] = {}  # addresses of codes, by their places in files
        self._feeder = 0  # row of the operation that leaves what the linear layer to come reads
        self._index = 0  # of the layer whose operations are written
        self._kept: list[Array] = []  # operations hold addresses only
        self._build()
        self.end = len(self.rows)  # of the model's own
        self.final_norm = self._read_final_norm()
        if heads is not None:
            self._add_heads(*heads)

    def _build(self) -> None:
        spec, outer = self._spec, outer_refs(self._spec)
        embedding = read_table(self._source, outer.embedding, every_unit)
        scale = np.array([spec.embedding_scale], np.float32)
        if self._bf16:  # rounded to the dtype first, as Gemma was trained
            scale = to_float32(to_bfloat16(scale))
        packing = self._packing(embedding.parts)
        if packing is None or packing.kind.floating or packing.order:
            table = self._keep(to_storage(embedding.dequantised(), self._bf16))
        else:
            table = self._pack_codes(embedding.parts, packing)
            self.quantised.add(len(self.rows), packing)
        self._add(
            Code.EMBED,
            target=Buffer.HIDDEN,
            weights=table,
            inputs=spec.hidden_size,
            width=spec.hidden_size,
            scale=scale[0],
        )
        for index, layer in enumerate(spec.layers):
            self._index = index
            self._layer(layer_refs(spec, index), layer)
        self._norm(outer.final_norm, Buffer.HIDDEN, wanted_only=1)
        self._linear(
            outer.head,
            Buffer.NORMED,
            Buffer.LOGITS,
            scale=spec.logit_scale,
            cap=spec.final_soft_cap,
            wanted_only=1,
        )

    def _read_final_norm(self) -> FinalNorm:
        norm = outer_refs(self._spec).final_norm
        if norm is None:
            raise ValueError("the kernels need a norm before the head; see `kernel_fit.py`")
        weight = self._norm_values(norm)
        bias = self._source.vector(norm.bias, norm.size) if norm.bias else None
        return FinalNorm(weight, bias, norm.eps, self._spec.norm == "layer")

    def _add_heads(self, heads: HeadsSpec, weights: Weights) -> None:
        """Add the linear layers of heads, and the model's head once more: for rows of theirs."""
        head = outer_refs(self._spec).head
        stored = self.rows[self.end - 1]
        if self._packing(read_linear(self._source, head, every_unit).parts) is None:
            row = stored.copy()  # the same weights
            row["source"], row["target"], row["wanted_only"] = Buffer.LONE, Buffer.PRODUCT, 0
            self.rows.append(row)
        else:
            self._linear(head, Buffer.LONE, Buffer.PRODUCT)
        self._note_lone(MODEL_HEAD, self.end, self._spec.vocab_size)
        model, self._source = self._source, weights
        for role, ref in heads.linears.items():
            first = len(self.rows)
            self._linear(ref, Buffer.LONE, Buffer.PRODUCT)
            self._note_lone(role, first, sum(p.matrix.rows for p in ref.pieces))
        self._source = model

    def _note_lone(self, role: str, first: int, outputs: int) -> None:
        rows = self.rows[first:]
        self.lone[role] = LoneLinear(
            first=first,
            end=len(self.rows),
            inputs=int(rows[0]["width" if rows[0]["code"] == Code.QUANTISE else "inputs"]),
            outputs=outputs,
            width=int(rows[-1]["width"]),
            wide=bool(rows[0]["code"] == Code.QUANTISE),
        )

    def _layer(self, refs: LayerRefs, layer: LayerSpec) -> None:
        spec, attention = self._spec, refs.attention
        if not isinstance(refs.mlp, MlpRefs):
            raise ValueError("the kernels know no mixtures of experts; see `kernel_fit.py`")
        if attention is None:
            raise ValueError("the kernels know no layers without attention; see `kernel_fit.py`")
        self._norm(refs.attention_norm, Buffer.HIDDEN)
        self._adapt("qkv", attention.qkv, Buffer.NORMED)
        self._linear(attention.qkv, Buffer.NORMED, Buffer.QKV)
        self._rotate(attention, layer)
        value_scale = self._kv_scales[self._index][1]
        self._add(
            Code.ATTEND, window=layer.window, cap=spec.attention_soft_cap, value_scale=value_scale
        )
        self._adapt("output", attention.output, Buffer.ATTENDED)
        self._branch(attention.output, Buffer.ATTENDED, refs.attention_post_norm)
        self._norm(refs.mlp_norm, Buffer.HIDDEN)
        self._adapt("inner", refs.mlp.inner, Buffer.NORMED, paired=refs.mlp.gated)
        self._linear(
            refs.mlp.inner,
            Buffer.NORMED,
            Buffer.INNER,
            paired=refs.mlp.gated,
            width=spec.mlp_width,
            epilogue=Epilogue.GATE if refs.mlp.gated else Epilogue.ACTIVATE,
            activation=ACTIVATIONS[spec.activation],
        )
        self._adapt("down", refs.mlp.down, Buffer.INNER)
        self._branch(refs.mlp.down, Buffer.INNER, refs.mlp_post_norm)

    def _adapt(
        self, role: Role, linear: LinearRef, source: Buffer, *, paired: bool = False
    ) -> None:
        """Take note that adapters may change the linear layer whose operations come next."""
        inputs = linear.pieces[0].matrix.columns
        outputs = sum(piece.outputs.size * len(piece.outputs.starts) for piece in linear.pieces)
        site = Site(self._index, role)
        self.sites.append(AdaptedSite(site, len(self.rows), source, inputs, outputs, paired))

    def _rotate(self, refs: AttentionRefs, layer: LayerSpec) -> None:
        norms = {
            "query_norm": self._norm_weight(refs.query_norm),
            "key_norm": self._norm_weight(refs.key_norm),
        }
        key, value = self._kv_scales[self._index]
        scales = {"scale": layer.scale * key, "key_scale": key, "value_scale": value}
        self._add(Code.ROTATE, eps=self._spec.norm_eps, **norms, **scales)

    def _branch(self, linear: LinearRef, source: Buffer, post_norm: NormRef | None) -> None:
        """End a branch: it joins the residual stream, through a norm of its own if it has one."""
        add: dict[str, Any] = {"epilogue": Epilogue.ADD, "scale": self._spec.residual_scale}
        if post_norm is None:
            self._linear(linear, source, Buffer.HIDDEN, **add)
            return
        self._linear(linear, source, Buffer.BRANCH)
        self._norm(post_norm, Buffer.BRANCH, target=Buffer.HIDDEN, **add)

    def _norm(self, ref: NormRef | None, source: Buffer, **fields: Any) -> None:
        if ref is None:
            raise ValueError("the kernels need a norm before every branch; see `kernel_fit.py`")
        bias = self._source.vector(ref.bias, ref.size) if ref.bias else None
        defaults = {"target": Buffer.NORMED, "epilogue": Epilogue.PASS, "scale": 1.0}
        self._add(
            Code.NORM,
            source=source,
            inputs=ref.size,
            weights=self._norm_weight(ref),
            bias=self._keep(bias),
            centred=self._spec.norm == "layer",
            eps=ref.eps,
            **(defaults | fields),
        )

    def _norm_weight(self, ref: NormRef | None) -> int:
        """Keep a norm's weight; return its address, 0 for none."""
        if ref is None or not ref.weight:
            return 0
        return self._keep(self._norm_values(ref))

    def _norm_values(self, ref: NormRef) -> Array | None:
        if not ref.weight:
            return None
        weight = self._source.vector(ref.weight, ref.size)
        return weight + np.float32(1.0) if self._spec.norm == "rms_plus_one" else weight

    def _linear(
        self,
        linear: LinearRef,
        source: Buffer,
        target: Buffer,
        *,
        paired: bool = False,
        **fields: Any,
    ) -> None:
        """Add a linear layer; `paired`: the gate and up of a gated unit, computed together."""
        self._feeder = len(self.rows) - 1
        weights = read_linear(self._source, linear, every_unit)
        bias = read_bias(self._source, linear, every_unit)
        if paired and bias is not None:
            bias = interleave(*np.split(bias, 2))
        outputs = sum(-(-part.shape[0] // PANEL) * PANEL for part in weights.parts)
        if bias is not None:
            bias = np.pad(bias, (0, outputs - len(bias)))
        defaults = {"epilogue": Epilogue.STORE, "scale": 1.0, "width": outputs} | fields
        offset, runs, unsorted = 0, list(self._runs(weights.parts, paired)), source
        wanted_only = int(fields.get("wanted_only", 0))
        if any(packing is not None and packing.order for packing, _ in runs):
            unsorted = self._leave_unsorted(source, weights.shape[1], wanted_only)
        for packing, parts in runs:
            count = sum(-(-part.shape[0] // PANEL) * PANEL for part in parts)
            own = {} if bias is None else {"bias": self._keep(bias[offset : offset + count])}
            if packing is None:
                self.dequantised |= {part.coding for part in parts} - {"numbers"}
                panels, scales = self._packer.pack(Stack(parts), paired=paired)
                own |= {"weights": self._keep(panels), "scales": self._keep(scales)}
            else:
                own["weights"] = self._pack_codes(parts, packing, paired=paired)
            inputs = weights.shape[1]
            self._feed(unsorted, inputs, packing, wanted_only)
            self._add(
                Code.LINEAR,
                source=source,
                target=target,
                inputs=packing.count_inputs(inputs) if packing else inputs,
                outputs=count,
                offset=offset,
                **own,
                **defaults,
            )
            offset += count

    def _leave_unsorted(self, source: Buffer, inputs: int, wanted_only: int) -> Buffer:
        """See to it that activations are left as float32, for each run of matrices to sort; return
        where.
        """
        self.rows[self._feeder]["forms"] |= Form.WIDE
        if self.rows[self._feeder]["code"] == Code.NORM:
            return Buffer.UNSORTED
        # Adapters find the activations here, in the order of the model.
        self._add(
            Code.QUANTISE, source=source, inputs=inputs, width=inputs, wanted_only=wanted_only
        )
        return source

    def _feed(self, source: Buffer, inputs: int, packing: Packing | None, wanted_only: int) -> None:
        """See to it that the next operation finds its activations in a form that it multiplies."""
        feeder = self.rows[self._feeder]
        if packing is None:
            feeder["forms"] |= Form.PLAIN
            return
        if feeder["forms"] & Form.WIDE or feeder["code"] not in (Code.NORM, Code.QUANTISE):
            feeder["forms"] |= Form.WIDE
            order = self._keep(packing.sources) if packing.order else 0
            count = packing.count_inputs(inputs)
            self.widest = max(self.widest, count)
            self._add(
                Code.QUANTISE,
                source=source,
                inputs=count,
                width=inputs,
                order=order,
                wanted_only=wanted_only,
            )
            self.quantised.add(len(self.rows), packing, len(self.rows) - 1)
            return
        self.quantised.add(len(self.rows), packing, self._feeder)

    def _pack_codes(
        self, parts: Sequence[StoredMatrix], packing: Packing, *, paired: bool = False
    ) -> int:
        """Pack matrices as they are stored; return their address. The same ones are packed once:
        an embedding and a head may share theirs.
        """
        key = tuple((*part.place(), part.shape, part.coding) for part in parts)
        if key not in self._packed:
            panels = self._packer.pack_codes(parts, packing, paired=paired)
            self._packed[key] = self._keep(panels)
        return self._packed[key]

    def _packing(self, parts: Sequence[StoredMatrix]) -> Packing | None:
        """Return how all these matrices can be packed as they are stored; None: not alike."""
        if not self._as_stored:
            return None
        found = {find_packing(part) for part in parts}
        return found.pop() if len(found) == 1 else None

    def _runs(
        self, parts: Sequence[StoredMatrix], together: bool
    ) -> Iterator[tuple[Packing | None, Sequence[StoredMatrix]]]:
        """Yield matrices below each other that are packed alike; `together`: all in one run."""
        if together or not self._as_stored:
            yield self._packing(parts), parts
            return
        for packing, run in itertools.groupby(parts, find_packing):
            yield packing, list(run)

    def _keep(self, array: Array | None) -> int:
        """Keep an array alive; return its address, 0 for none."""
        if array is None:
            return 0
        array = np.ascontiguousarray(array)
        self._kept.append(array)
        self.weight_bytes += array.nbytes
        return address(array)

    def _add(self, code: Code, **fields: Any) -> None:
        row = np.zeros((), OPERATION)
        row["code"] = code
        for name, value in fields.items():
            row[name] = value
        self.rows.append(row)
