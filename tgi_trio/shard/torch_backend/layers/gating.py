"""act(gate) * up, in one launch on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from tgi_trio.shard.torch_backend.layers.activation import (
    ACTIVATIONS,
    Activation,
    SparseActivation,
    Xielu,
)
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import overlap, runs_kernels

# The activations that `kernels/activations.py` has, with its names for them.
_KERNELS: Final[dict[Activation, str]] = {
    functional.silu: "silu",
    functional.gelu: "gelu",
    ACTIVATIONS["gelu_new"]: "gelu_tanh",
    ACTIVATIONS["quick_gelu"]: "quick_gelu",
    functional.relu: "relu",
    ACTIVATIONS["relu2"]: "relu2",
    torch.sigmoid: "sigmoid",
}
_BLOCK = 1024
_MOST: Final = 1 << 15  # gates of a token that a program cuts


def name_activation(act: Activation) -> str:
    """Return an activation's name in `kernels/activations.py`; "" if it is not there."""
    return _KERNELS.get(act, "")


# Those of them for which torch has no single operation.
_SEVERAL: Final = {
    ACTIVATIONS[name]: kernel
    for name, kernel in (("relu2", "relu2"), ("gelu_bloom", "gelu_tanh"), ("quick_gelu",) * 2)
}


def activate(act: Activation, x: torch.Tensor) -> torch.Tensor:
    """Return act(x), in one launch on a device."""
    name = "xielu" if isinstance(act, Xielu) else _SEVERAL.get(act, "")
    if not name or not runs_kernels(x.device):
        return act(x)
    from tgi_trio.shard.torch_backend.kernels import activations  # imports Triton

    own = (act.positive, act.negative, act.beta, act.eps) if isinstance(act, Xielu) else (x,) * 4
    x = x.contiguous()
    out = torch.empty_like(x)
    activations.activate_alone[(-(-x.numel() // _BLOCK),)](
        *(out, x, *own, x.numel()), BLOCK=_BLOCK, ACT=name, **overlap(x.device)
    )
    return out


class Opening(NamedTuple):
    """An activation as kernels are told of it that open what they read."""

    limit: float
    scale: float
    constants: dict[str, bool | str]


def describe_opening(act: Activation | None) -> Opening | None:
    """Return an activation for kernels, `act` None: what they read is open; None: none has it."""
    if isinstance(act, Gate):
        name, limits = act.opened_by, act.limit > 0
        flags = {"GATED": True, "LIMITS": limits, "PAIRED": act.paired}
        flags["RAISED"] = limits and act.raised
        return Opening(act.limit, act.scale, {"ACT": name, **flags}) if name else None
    name = "" if act is None else _SEVERAL.get(act) or name_activation(act)
    flags = dict.fromkeys(("GATED", "LIMITS", "RAISED", "PAIRED"), False)
    return Opening(0.0, 1.0, {"ACT": name, **flags}) if name or act is None else None


def count_cutting_warps(padded: int) -> int:
    """Return the warps of a program that cuts `padded` gates: at least 16 a thread."""
    return max(1, min(16, padded // 512))


def open_own(gate: torch.Tensor, own: torch.Tensor, act: Activation) -> torch.Tensor:
    """Return act(gate) * own for `gate` and `own` [T, width], in one launch on a device."""
    name = name_activation(act)
    if not name or not runs_kernels(gate.device) or own.stride(1) != 1:
        opened: torch.Tensor = act(gate) * own
        return opened
    from tgi_trio.shard.torch_backend.kernels import activations  # imports Triton

    (tokens, width), gate = gate.shape, gate.contiguous()
    out = torch.empty_like(gate)
    activations.open_own[(tokens, -(-width // _BLOCK))](
        *(out, gate, own, own.stride(0)),
        SIZE=width,
        BLOCK=_BLOCK,
        ACT=name,
        **overlap(gate.device),
    )
    return out


@dataclass(frozen=True, slots=True)
class Gate:
    """act(gate) * up of the two halves that a gated MLP projects.

    With a `limit`, gates are clamped from above and ups on both sides; where the ups are `raised`
    (gpt-oss), 1 is added to them: act(min(gate, limit)) * (clamp(up) + 1). Where it
    `bounds_opened` (Step 3.5), activated gates are clamped: min(act(gate), limit) * clamp(up).
    """

    act: Activation
    limit: float = 0.0  # 0: none
    paired: bool = False  # gates and ups alternate; otherwise all gates come first
    scale: float = 1.0  # of gates, applied first
    raised: bool = True
    bounds_opened: bool = False
    bounded: int = 0  # where experts are grouped, those that have the limit, the first; 0: all

    @property
    def kernel(self) -> str:
        """The activation's name in products' kernels; "" if they do not open such gates."""
        return self.opened_by if self.scale == 1.0 else ""

    @property
    def opened_by(self) -> str:
        """Its name in `kernels/activations.py`; "" if gates are not opened there."""
        return "" if self.limit and self.bounds_opened else name_activation(self.act)

    def __call__(self, inner: torch.Tensor) -> torch.Tensor:
        """Return [T, width] for `inner` [T, 2 width]."""
        name = self.opened_by
        if runs_kernels(inner.device):
            if name:
                return self._launch(inner, name)
            if isinstance(self.act, SparseActivation) and self.cuts(inner.shape[1] // 2):
                return self._launch_cut(inner, self.act)
        if self.paired:
            gate, up = inner.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            gate, up = inner.chunk(2, dim=-1)
        if self.scale != 1.0:
            gate = gate * self.scale
        if self.limit:
            up = up.clamp(-self.limit, self.limit)
            up = up + 1 if self.raised else up
        opened: torch.Tensor = self._open(gate) * up
        return opened

    def _open(self, gate: torch.Tensor) -> torch.Tensor:
        """Return activated gates, clamped before or afterwards if there is a limit."""
        if self.limit and not self.bounds_opened:
            gate = gate.clamp(max=self.limit)
        opened: torch.Tensor = self.act(gate)
        return opened.clamp(max=self.limit) if self.limit and self.bounds_opened else opened

    def cuts(self, width: int) -> bool:
        """Return whether a kernel cuts `width` gates of a token at a bound, and opens them."""
        sparse = isinstance(self.act, SparseActivation) and name_activation(self.act.act) != ""
        return sparse and self.scale == 1.0 and not self.limit and width <= _MOST

    def _launch_cut(self, inner: torch.Tensor, act: SparseActivation) -> torch.Tensor:
        from tgi_trio.shard.torch_backend.kernels.streams import (
            alternating_updates,  # imports Triton
        )

        tokens, width = inner.shape[0], inner.shape[1] // 2
        padded = next_power_of_2(width)
        out = torch.empty((tokens, width), dtype=inner.dtype, device=inner.device)
        alternating_updates.cut_and_gate[(tokens,)](
            out,
            inner.contiguous(),
            act.deviations,
            SIZE=width,
            PADDED=padded,
            ACT=name_activation(act.act),
            PAIRED=self.paired,
            **overlap(inner.device),
            num_warps=count_cutting_warps(padded),
        )
        return out

    def _launch(self, inner: torch.Tensor, name: str) -> torch.Tensor:
        from tgi_trio.shard.torch_backend.kernels import activations  # imports Triton

        tokens, width = inner.shape[0], inner.shape[1] // 2
        out = torch.empty((tokens, width), dtype=inner.dtype, device=inner.device)
        activations.gate[(tokens, -(-width // _BLOCK))](
            out,
            inner.contiguous(),
            self.limit,
            self.scale,
            SIZE=width,
            BLOCK=_BLOCK,
            ACT=name,
            LIMITS=self.limit > 0,
            RAISED=self.limit > 0 and self.raised,
            PAIRED=self.paired,
            **overlap(inner.device),
        )
        return out
