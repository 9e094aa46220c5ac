"""The single layer of an EAGLE-3 drafter in torch, with a paged KV cache of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tgi_trio.model.matrices.references import every_unit, whole_linear
from tgi_trio.model.speculators.spec import EagleSpec
from tgi_trio.shard.checkpoint.heads import open_heads, read_token_map
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.choice import choose_attention
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.drafting.own_kv import OwnKv
from tgi_trio.shard.torch_backend.kv_cache import KVShape
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.weights import WeightSource


class TorchEagle(OwnKv):
    """Implements `EagleLayer` of `speculation/eagle.py`. States have the model's dtype."""

    def __init__(
        self,
        spec: EagleSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linears: dict[str, Linear],
        vectors: dict[str, torch.Tensor],
        embedding: torch.Tensor,
        token_map: NDArray[np.int64] | None,
    ) -> None:
        """`embedding` [vocabulary, features]: the drafter's own, or the model's."""
        layer = spec.layer
        self.features = spec.linears["fuse"].pieces[0].matrix.columns  # read from the model
        self.spec = spec
        self.max_positions = spec.max_positions
        self.token_map = token_map
        super().__init__(KVShape(1, layer.kv_heads, layer.head_dim), dtype, device)
        self._linears = linears
        self._vectors = vectors
        self._embedding = embedding
        self._attention = choose_attention(device, dtype, self._shape)
        self._facts = AttentionLayer(
            0,
            layer.heads,
            layer.kv_heads,
            layer.head_dim,
            layer.layers[0].scale,
            window=layer.layers[0].window,
        )
        turning = layer.layers[0].rotary
        self._rotary = None if turning is None else Rotary(turning, device)
        self._steps = HeadSteps(layer.heads, layer.kv_heads, layer.head_dim, rotary=self._rotary)

    def nbytes(self) -> int:
        """Return the bytes of all weights, excluding the model's embedding."""
        own = [self._embedding] if self.spec.tables else []
        plain = sum(each.nbytes for each in (*self._vectors.values(), *own))
        return plain + sum(linear.nbytes() for linear in self._linears.values())

    @torch.inference_mode()
    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        norms = [role for role in self._vectors if role.startswith("input norm")]
        if norms:
            parts = zip(norms, states.chunk(len(norms), dim=-1), strict=True)
            states = torch.cat([self._normalise(role, part) for role, part in parts], dim=-1)
        return self._linears["fuse"](states)

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, states: torch.Tensor, wanted: NDArray[np.int64]
    ) -> tuple[torch.Tensor, NDArray[np.int64]]:
        embedded = self._normalise("embedding norm", self._embed(plan))
        normed = self._normalise("state norm", states)
        x = torch.cat((embedded, normed), dim=-1)
        out = self._attend(plan, x, normed if self.spec.norms_residual else states, wanted)
        if out is None:
            return states[:0], np.empty(0, np.int64)
        normed = self._normalise("final norm", out)
        best: NDArray[np.int64] = self._linears["head"](normed).argmax(dim=-1).cpu().numpy()
        return normed if self.spec.norms_output else out, best

    def _embed(self, plan: StepPlan) -> torch.Tensor:
        ids = torch.from_numpy(plan.token_ids).to(self._device)
        return functional.embedding(ids, self._embedding)

    def _attend(
        self, plan: StepPlan, x: torch.Tensor, residual: torch.Tensor, wanted: NDArray[np.int64]
    ) -> torch.Tensor | None:
        """Compute the layer's attention for its inputs `x` [T, inputs], and store K and V.

        Return what leaves the layer at the places `top_counts`: `residual` [T, features] and the
        outputs of attention and MLP; None if no place is wanted.
        """
        if self._cache is None:
            raise RuntimeError("the drafter has no KV cache before the warm-up")
        positions = torch.from_numpy(plan.positions).to(self._device)
        qkv, table = self._linears["qkv"](x), None
        if self._rotary is not None:  # the length at each position is the position + 1
            table = self._rotary.table(positions, positions + 1, qkv.dtype)
        batch = self._attention.prepare(plan, self._cache)
        attended = self._attention.attend_projected(self._facts, qkv, self._steps, table, batch)
        if not len(wanted):
            return None
        some = torch.from_numpy(wanted).to(self._device)
        y = residual.index_select(0, some)
        y = y + self._linears["output"](attended.index_select(0, some))
        gate, up = self._linears["inner"](self._normalise("mlp norm", y)).chunk(2, dim=-1)
        return y + self._linears["down"](functional.silu(gate) * up)

    def _normalise(self, role: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._vectors[role]
        return functional.rms_norm(x, weight.shape, weight, self.spec.layer.norm_eps)


def load_eagle(
    spec: EagleSpec,
    *,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
    embedding: Callable[[], torch.Tensor],
    make: Callable[..., TorchEagle] = TorchEagle,
) -> TorchEagle:
    """Read the weights of a drafter; raises ModelLoadError if files cannot be used.

    `embedding`: returns the model's whole embedding, for a drafter without one; `make`: the
    drafter's class.
    """
    with open_heads(spec) as files, torch.inference_mode():
        source = WeightSource(files, dtype=dtype, device=device, rank=0, world_size=1)
        linears = {
            role: source.linear(ref, every_unit, source.bias(ref, every_unit))
            for role, ref in spec.linears.items()
        }
        for linear in linears.values():
            linear.pack()
        own = spec.tables.get("embedding")
        return make(
            spec,
            dtype=dtype,
            device=device,
            linears=linears,
            vectors={role: source.vector(*named) for role, named in spec.vectors.items()},
            embedding=embedding()
            if own is None
            else source.weight(whole_linear(own), every_unit).clone(),
            token_map=read_token_map(spec, vocabulary),
        )
