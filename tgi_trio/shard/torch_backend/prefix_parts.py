"""Parts of computed prefixes in tensors, on a CPU or a device; see `kept_prefixes.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tgi_trio.shard.kept_prefixes import Bytes, Ints, PrefixParts
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.states.pool import StatePool


class TensorPart:
    """A tensor of blocks, or of slots of states."""

    def __init__(self, tensor: torch.Tensor, items: int) -> None:
        """`tensor`: contiguous, of so many blocks or slots."""
        self._bytes = tensor.view(items, -1).view(torch.uint8)

    @property
    def item_bytes(self) -> int:
        return self._bytes.shape[1]

    @torch.inference_mode()
    def take(self, items: Ints) -> Bytes:
        places = torch.from_numpy(items).to(self._bytes.device)
        taken: Bytes = self._bytes.index_select(0, places).cpu().numpy()
        return taken

    @torch.inference_mode()
    def put(self, first: int, data: Bytes) -> None:
        self._bytes[first : first + len(data)].copy_(torch.from_numpy(data))


def find_parts(
    cache: KVCache | None, beside: Sequence[torch.Tensor] = (), pool: StatePool | None = None
) -> PrefixParts:
    """Return what a rank knows of prefixes.

    `beside`: what a drafter keeps of tokens, each [blocks * BLOCK_SIZE, ...].
    """
    if cache is None:
        return PrefixParts()
    blocks = [TensorPart(each, cache.blocks) for each in (*cache.tensors, *beside)]
    states = [] if pool is None else pool.tensors
    return PrefixParts(blocks, [TensorPart(each, len(each)) for each in states])
