"""Trained speculation heads in torch, which read the generic decoder's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tgi_trio.model.matrices.references import every_unit, whole_linear
from tgi_trio.model.speculators.spec import HeadsSpec
from tgi_trio.shard.checkpoint.heads import open_heads, read_token_map
from tgi_trio.shard.speculation.arithmetic import MODEL_HEAD, Ids
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.weights import WeightSource

_EPS: Final = 1e-6


class TorchHeads:
    """Implements the arithmetic of `speculation/arithmetic.py`. Rows have the model's dtype."""

    def __init__(
        self,
        spec: HeadsSpec,
        model: Decoder,
        *,
        linears: dict[str, Linear],
        vectors: dict[str, torch.Tensor],
        tables: dict[str, torch.Tensor],
        token_map: NDArray[np.int64] | None,
    ) -> None:
        """`linears` include the model's whole head as `MODEL_HEAD`."""
        self.spec = spec
        self.token_map = token_map
        self._norm = model.final_norm
        self._linears = linears
        self._vectors = vectors
        self._tables = tables

    def on_device(self) -> DeviceHeads:
        """Return the same heads for drafting on the device."""
        return DeviceHeads(self)

    def nbytes(self, *, own_head: bool) -> int:
        """Return the bytes of all weights; `own_head`: the model's head here is a further copy."""
        linears = [linear.nbytes() for role, linear in self._linears.items() if role != MODEL_HEAD]
        more = self._linears[MODEL_HEAD].nbytes() if own_head else 0
        plain = (*self._vectors.values(), *self._tables.values())
        return sum(linears) + more + sum(each.nbytes for each in plain)

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._norm is None else self._norm(x)

    def concatenate(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def multiply(self, role: str, x: torch.Tensor) -> torch.Tensor:
        return self._linears[role](x)

    def look_up(self, role: str, ids: Ids) -> torch.Tensor:
        table = self._tables[role]
        return functional.embedding(torch.from_numpy(ids).to(table.device), table)

    def vector(self, role: str) -> torch.Tensor:
        return self._vectors[role]

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x)

    def inverse_rms(self, x: torch.Tensor) -> torch.Tensor:
        squares = x.float().square().mean(dim=-1, keepdim=True)
        return torch.rsqrt(squares + _EPS).to(x.dtype)

    def best(self, logits: torch.Tensor) -> Ids:
        return logits.argmax(dim=-1).cpu().numpy()


class DeviceHeads(TorchHeads):
    """Heads whose drafts stay on the device, so that the host does not wait for them."""

    def __init__(self, heads: TorchHeads) -> None:
        self.spec, self.token_map, self._norm = heads.spec, heads.token_map, heads._norm
        self._linears, self._vectors, self._tables = heads._linears, heads._vectors, heads._tables

    def look_up(self, role: str, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self._tables[role])

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)


def load_heads(
    spec: HeadsSpec,
    model: Decoder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    whole_head: Callable[[], Linear],
) -> TorchHeads:
    """Read the weights of heads for `model`; raises ModelLoadError if files cannot be used.

    `whole_head`: returns the model's whole head if this rank has only a part of it.
    """
    with open_heads(spec) as files, torch.inference_mode():
        source = WeightSource(files, dtype=dtype, device=device, rank=0, world_size=1)
        linears = {
            role: source.linear(ref, every_unit, source.bias(ref, every_unit))
            for role, ref in spec.linears.items()
        }
        for linear in linears.values():
            linear.pack()
        linears[MODEL_HEAD] = model.head if model.ranks is None else whole_head()
        return TorchHeads(
            spec,
            model,
            linears=linears,
            vectors={role: source.vector(*named) for role, named in spec.vectors.items()},
            tables={
                role: source.weight(whole_linear(ref), every_unit).clone()
                for role, ref in spec.tables.items()
            },
            token_map=read_token_map(spec, model.spec.vocab_size),
        )
