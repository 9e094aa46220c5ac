"""Layers of the model's own that draft from several hidden states of a token, in torch.

They read the states behind the model's last layer, before these are joined, and leave as many; to
draft, they join theirs with weights of their own. Sources: `MTPBlock` of DeepSeek V4's own code;
SGLang's Qwen 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.torch_backend.drafting.mtp import TorchMtp
from tgi_trio.shard.torch_backend.layers.streams.gated_streams import StreamGates
from tgi_trio.shard.torch_backend.layers.streams.hyper_connections import HyperEnds, HyperStates
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.models.gated import GatedDecoder


class StreamsBeside(HyperEnds):
    """The ends of a model whose hidden states are read by what drafts."""

    def join(self, states: HyperStates) -> torch.Tensor:
        """Return their sum, and the states beside it: [T, hidden + count * hidden]."""
        return torch.cat((HyperEnds.join(self, states), states.streams.flatten(1)), dim=-1)


class OpenEnds(HyperEnds):
    """The ends of layers between which states are not joined: those of a token lie side by side."""

    def split(self, x: torch.Tensor) -> HyperStates:
        """Return the states that `x` [T, count * hidden] is."""
        return HyperStates(x.unflatten(1, (self.spec.count, -1)).contiguous())

    def join(self, states: HyperStates) -> torch.Tensor:
        """Return the states as [T, count * hidden]."""
        return states.streams.flatten(1)


def show_streams(model: Decoder) -> None:
    """Let a model return all hidden states of a token [T, count * hidden] behind their mixture."""
    if isinstance(model, GatedDecoder):
        model.shows_streams = True
    elif model.hyper is not None:
        model.hyper = StreamsBeside(model.hyper.spec, model.hyper.weights)


class Joining(Protocol):
    """What makes one hidden state of several."""

    @property
    def count(self) -> int: ...

    def join(self, states: torch.Tensor) -> torch.Tensor:
        """Return [n, hidden] of `states` [n, count * hidden]."""
        ...

    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class HyperJoining:
    """Joins states of hyper-connections."""

    ends: HyperEnds

    @property
    def count(self) -> int:
        return self.ends.spec.count

    def join(self, states: torch.Tensor) -> torch.Tensor:
        return self.ends.join(HyperStates(states.unflatten(1, (self.count, -1))))

    def nbytes(self) -> int:
        return self.ends.nbytes()


@dataclass(frozen=True, slots=True)
class GatedJoining:
    """Joins states by gates."""

    gates: StreamGates

    @property
    def count(self) -> int:
        return self.gates.count

    def join(self, states: torch.Tensor) -> torch.Tensor:
        return self.gates.read(states, None).mixed

    def nbytes(self) -> int:
        return self.gates.nbytes()


class StreamsMtp(TorchMtp):
    """Such a layer. Its states [T, count * hidden] are all of a token's, side by side."""

    def __init__(self, *given: Any, joining: Joining, **parts: Any) -> None:
        """`joining`: before a draft; the rest as for `TorchMtp`."""
        super().__init__(*given, **parts)
        self._joining = joining
        self.features *= joining.count

    def nbytes(self) -> int:
        return super().nbytes() + self._joining.nbytes()

    @torch.inference_mode()
    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Return `states` as they are: each layer normalises what it reads."""
        return states

    @torch.inference_mode()
    def draft(self, states: torch.Tensor) -> NDArray[np.int64]:
        return super().draft(super()._normalise(self._joining.join(states)))

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        return x
