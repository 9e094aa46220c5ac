"""The layer of an EAGLE or EAGLE-2 drafter in torch; see `EagleOneSpec`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.drafting.eagle import TorchEagle
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm


class TorchEagleOne(TorchEagle):
    """Implements `EagleLayer` of `speculation/eagle.py`. Its states are behind a final norm."""

    def __init__(self, *args: Any, norm: Norm | None, head: Linear, **more: Any) -> None:
        """`norm`, `head`: the model's, the head as a whole; the rest as in `TorchEagle`."""
        super().__init__(*args, **more)
        self.features = self.spec.layer.hidden_size
        self._norm = norm
        self._head = head

    @torch.inference_mode()
    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states if self._norm is None else self._norm(states)

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, states: torch.Tensor, wanted: NDArray[np.int64]
    ) -> tuple[torch.Tensor, NDArray[np.int64]]:
        x = self._linears["fuse"](torch.cat((self._embed(plan), states), dim=-1))
        out = self._attend(plan, x, x, wanted)
        if out is None:
            return states[:0], np.empty(0, np.int64)
        best: NDArray[np.int64] = self._head(out).argmax(dim=-1).cpu().numpy()
        return out, best
