"""What a layer has instead of attention, or beside it, that keeps a state per sequence.

A state has one size however long its sequence is; every token overwrites it. No torch in this file:
every backend reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod
from typing import Literal, TypeAlias

# "float32": recurrences, which add up over a whole text; "model": the dtype of the model.
StateDtype = Literal["float32", "model"]
# How a checkpoint stores what a delta rule projects, see `mixer_matrices.py`.
#   grouped:    one matrix, per key head its query, key, values and gates (Qwen3-Next)
#   stacked:    queries, keys and values in one, gates in another (Qwen 3.5)
#   mixed:      as stacked, but betas and decays as grouped (Qwen3-Next in GGUF)
#   separate:   one for each, and a convolution for each (OLMo hybrid)
#   compressed: the same, but decays and gates are made in two steps (Kimi Linear)
DeltaLayout = Literal["grouped", "stacked", "mixed", "separate", "compressed"]


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of what a layer keeps for a sequence, as one rank has it."""

    name: str
    shape: tuple[int, ...]
    dtype: StateDtype

    def nbytes(self, model_itemsize: int) -> int:
        """Return its bytes for one sequence; `model_itemsize`: of a number of the model."""
        return prod(self.shape) * (4 if self.dtype == "float32" else model_itemsize)


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A gated causal convolution over the last few tokens, per channel (LFM2, Liquid AI 2025).

    (b, c, x) = in(u); y_t = c_t * sum_k w_k (b * x)_(t - taps + 1 + k); out(y).
    """

    channels: int
    taps: int  # of the convolution: the token itself and those before it
    bias: bool = False  # of the convolution and of both linears

    def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
        """Return what a rank keeps: the last inputs of the convolution, oldest first.

        Channels are divided evenly over `ranks`.
        """
        return (StateShape("tail", (self.taps - 1, self.channels // ranks), "model"),)


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Linear attention whose state is corrected key by key, see `states/delta_rule.py`.

    Queries, keys and values pass a convolution first; `value_heads` share `key_heads` as queries
    share KV heads. What is read of a state is normalised per head and multiplied with a gate.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution
    layout: DeltaLayout
    norm_eps: float
    # Value heads that share a key head are `key_heads` apart, not neighbours (Qwen 3.5 in GGUF).
    tiled: bool = False
    # Per head, what is forgotten is one number; or it is one for each channel of a key, and what
    # it and the gate are made of is compressed to this many numbers.
    channel_rank: int = 0
    gate: Literal["silu", "sigmoid"] = "silu"
    beta_scale: float = 1.0  # 2: what a state says of a key may be turned round
    activation: str = "silu"  # behind the convolution

    def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
        """Return what a rank keeps: a matrix per value head, and the convolution's last inputs."""
        keys, values = _kv_share(self.key_heads, ranks), self.value_heads // ranks
        channels = 2 * keys * self.key_dim + values * self.value_dim
        return (
            StateShape("recurrence", (values, self.key_dim, self.value_dim), "float32"),
            StateShape("tail", (self.taps - 1, channels), "model"),
        )


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A state space with a decay per head, see `states/mamba2.py`.

    What is read is multiplied with a gate and normalised, group by group.
    """

    heads: int
    head_dim: int
    groups: int  # of heads, which share b and c
    state_dim: int
    taps: int  # of the convolution
    norm_eps: float
    norm: Literal["none", "before gate", "behind gate"] = "behind gate"
    convolution_bias: bool = True
    inner_bias: bool = False
    output_bias: bool = False
    least_step: float = 0.0  # of time, and the most
    most_step: float = inf
    # What the gate, x, b, c and the steps are multiplied with, and the result.
    multipliers: tuple[float, ...] = ()
    output_multiplier: float = 1.0
    activation: str = "silu"  # behind the convolution

    def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
        """Return what a rank keeps: a matrix per head, and the convolution's last inputs."""
        heads, groups = self.heads // ranks, _kv_share(self.groups, ranks)
        channels = heads * self.head_dim + 2 * groups * self.state_dim
        return (
            StateShape("recurrence", (heads, self.head_dim, self.state_dim), "float32"),
            StateShape("tail", (self.taps - 1, channels), "model"),
        )


@dataclass(frozen=True, slots=True)
class Mamba1:
    """A state space with a decay per channel and number of its state, see `states/mamba1.py`.

    Steps of time, b and c are made of what has passed the convolution; steps in two linears, with
    `step_rank` numbers between them.
    """

    channels: int
    state_dim: int
    step_rank: int
    taps: int  # of the convolution
    # Of those numbers, of b and of c: an RMS norm without weights (Falcon Mamba), or with (Jamba).
    norm: Literal["none", "plain", "weighted"] = "none"
    norm_eps: float = 1e-6
    convolution_bias: bool = True
    bias: bool = False  # of the first linear and of the last
    activation: str = "silu"  # behind the convolution, and of the gate

    def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
        """Return what a rank keeps: numbers per channel, and the convolution's last inputs."""
        channels = self.channels // ranks
        return (
            StateShape("recurrence", (self.state_dim, channels), "float32"),
            StateShape("tail", (self.taps - 1, channels), "model"),
        )


@dataclass(frozen=True, slots=True)
class RecurrentGate:
    """RG-LRU (De, others 2024: Griffin), see `states/recurrent_gate.py`.

    Behind a convolution; what it says is multiplied with the activation of as many numbers.
    """

    heads: int  # the two gates of a number are made of those of its head
    head_dim: int
    taps: int  # of the convolution
    activation: str

    def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
        """Return what a rank keeps: a number per channel, and the convolution's last inputs."""
        width = self.heads // ranks * self.head_dim
        return (
            StateShape("recurrence", (width,), "float32"),
            StateShape("tail", (self.taps - 1, width), "model"),
        )


Mixer: TypeAlias = ShortConvolution | DeltaRule | Mamba2 | Mamba1 | RecurrentGate


def _kv_share(count: int, ranks: int) -> int:
    """Return how many of some heads a rank has, which others share where they are too few."""
    return max(1, count // ranks)
