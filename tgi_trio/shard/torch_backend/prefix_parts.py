"""Parts of computed prefixes in tensors, on a CPU or a device; see `kept_prefixes.py`."""

from __future__ import annotations

import torch

from tgi_trio.shard.kept_prefixes import Bytes, Ints


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
