"""Mixers: parts of layers instead of attention, or beside it, with a state per sequence.

A state's size does not depend on the sequence's length; every token overwrites it. No torch in
this file, since every backend reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, prod
from typing import Literal, TypeAlias

# "float32": recurrences, which sum over a whole sequence; "model": the model's dtype; "token":
# token ids, int64.
StateDtype = Literal["float32", "model", "token"]
_BYTES = {"float32": 4, "token": 8}
# How a checkpoint stores a delta rule's projections, see `matrices/mixers.py`.
#   grouped:    one matrix; per key head its query, key, values and gates (Qwen3-Next)
#   stacked:    queries, keys and values in one, gates in another (Qwen 3.5)
#   mixed:      stacked, but with betas and decays grouped (Qwen3-Next in GGUF)
#   separate:   one matrix and one convolution for each (OLMo hybrid)
#   compressed: the same, but decays and gates are of low rank (Kimi Linear)
#   low rank:   the same, but decays' rates are a vector (GLM 5.3)
#   full rank:  the same, but one matrix has all decays, and one all gates (Ling 3)
DeltaLayout = Literal[
    "grouped", "stacked", "mixed", "separate", "compressed", "low rank", "full rank"
]


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a layer's state for a sequence: the share of one rank."""

    name: str
    shape: tuple[int, ...]
    dtype: StateDtype

    def nbytes(self, model_itemsize: int) -> int:
        """Return its bytes for one sequence; `model_itemsize`: of a number in the model's dtype."""
        return prod(self.shape) * _BYTES.get(self.dtype, model_itemsize)


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A gated causal convolution over the last few tokens, per channel (LFM2, Liquid AI 2025).

    (b, c, x) = in(u); y_t = c_t * sum_k w_k (b * x)_(t - taps + 1 + k); out(y).
    """

    channels: int
    taps: int  # of the convolution: the token itself and preceding ones
    bias: bool = False  # of the convolution and of both linears

    def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
        """Return a rank's state: the last inputs of the convolution, oldest first.

        Channels are split evenly over `ranks`.
        """
        return (StateShape("tail", (self.taps - 1, self.channels // ranks), "model"),)


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Linear attention whose state is corrected key by key, see `states/delta_rule.py`.

    Queries, keys and values pass a convolution first; `value_heads` share `key_heads` as queries
    share KV heads. The state's output is normalised per head and multiplied by a gate.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolution
    layout: DeltaLayout
    norm_eps: float
    # Value heads of a key head are `key_heads` apart instead of adjacent (Qwen 3.5 in GGUF).
    tiled: bool = False
    by_channel: bool = False  # a decay per channel of a key, not one per head
    # Decays by channel and the gate are projected in two steps, with this rank between them; 0: in
    # one.
    channel_rank: int = 0
    gate: Literal["silu", "sigmoid"] = "silu"
    # Bound of a decay's logarithm, which is this times a sigmoid; 0: none, it is by softplus.
    least_decay: float = 0.0
    beta_scale: float = 1.0  # 2: the state may also be reversed along a key
    activation: str = "silu"  # after the convolution

    def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
        """Return a rank's state: a matrix per value head, and the convolution's last inputs."""
        keys, values = _kv_share(self.key_heads, ranks), self.value_heads // ranks
        channels = 2 * keys * self.key_dim + values * self.value_dim
        return (
            StateShape("recurrence", (values, self.key_dim, self.value_dim), "float32"),
            StateShape("tail", (self.taps - 1, channels), "model"),
        )


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A state space with a decay per head, see `states/mamba2.py`.

    The state's output is multiplied by a gate and normalised, group by group.
    """

    heads: int
    head_dim: int
    groups: int  # of heads that share b and c
    state_dim: int
    taps: int  # of the convolution
    norm_eps: float
    norm: Literal["none", "before gate", "behind gate"] = "behind gate"
    convolution_bias: bool = True
    inner_bias: bool = False
    output_bias: bool = False
    least_step: float = 0.0  # bounds of the time step
    most_step: float = inf
    # Factors of the gate, x, b, c and the time steps, and of the result.
    multipliers: tuple[float, ...] = ()
    output_multiplier: float = 1.0
    activation: str = "silu"  # after the convolution

    def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
        """Return a rank's state: a matrix per head, and the convolution's last inputs."""
        heads, groups = self.heads // ranks, _kv_share(self.groups, ranks)
        channels = heads * self.head_dim + 2 * groups * self.state_dim
        return (
            StateShape("recurrence", (heads, self.head_dim, self.state_dim), "float32"),
            StateShape("tail", (self.taps - 1, channels), "model"),
        )


@dataclass(frozen=True, slots=True)
class Mamba1:
    """A state space with a decay per channel and state dimension, see `states/mamba1.py`.

    Time steps, b and c are projected from the convolution's output; time steps in two linears, with
    `step_rank` numbers between them.
    """

    channels: int
    state_dim: int
    step_rank: int
    taps: int  # of the convolution
    # Norm of these, of b and of c: RMSNorm without weights (Falcon Mamba), or with (Jamba).
    norm: Literal["none", "plain", "weighted"] = "none"
    norm_eps: float = 1e-6
    convolution_bias: bool = True
    bias: bool = False  # of the first and of the last linear
    activation: str = "silu"  # after the convolution, and of the gate

    def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
        """Return a rank's state: numbers per channel, and the convolution's last inputs."""
        channels = self.channels // ranks
        return (
            StateShape("recurrence", (self.state_dim, channels), "float32"),
            StateShape("tail", (self.taps - 1, channels), "model"),
        )


@dataclass(frozen=True, slots=True)
class RecurrentGate:
    """RG-LRU (De, others 2024: Griffin), see `states/recurrent_gate.py`.

    It follows a convolution; its output is multiplied by the activation of a second branch.
    """

    heads: int  # the two gates of a channel are computed from all channels of its head
    head_dim: int
    taps: int  # of the convolution
    activation: str

    def state_shapes(self, ranks: int) -> tuple[StateShape, ...]:
        """Return a rank's state: a number per channel, and the convolution's last inputs."""
        width = self.heads // ranks * self.head_dim
        return (
            StateShape("recurrence", (width,), "float32"),
            StateShape("tail", (self.taps - 1, width), "model"),
        )


Mixer: TypeAlias = ShortConvolution | DeltaRule | Mamba2 | Mamba1 | RecurrentGate


def _kv_share(count: int, ranks: int) -> int:
    """Return how many of some heads a rank has; if there are fewer than ranks, ranks share one."""
    return max(1, count // ranks)
