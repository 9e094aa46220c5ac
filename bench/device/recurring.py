"""What a layer that keeps a state must move and compute beside its matrices."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tgi_trio.model.specs.decoder import LayerSpec
from tgi_trio.model.specs.mixers import DeltaRule, Mixer, RecurrentGate, ShortConvolution


@dataclass(frozen=True, slots=True)
class Recurring:
    """Numbers of a sequence's state, and what a token does to it."""

    wide: int = 0  # float32 numbers of the state
    narrow: int = 0  # those of the model's dtype: the convolution's last inputs
    operations: int = 0  # multiplications and additions of a token
    gates: int = 0  # numbers of matrices beside the linear layers, float32

    def moved(self, itemsize: int) -> int:
        """Return the bytes of a row's state, read and written; `itemsize`: of the dtype."""
        return 2 * (4 * self.wide + itemsize * self.narrow)


def find_recurring(layer: LayerSpec) -> Recurring:
    """Return what a layer's mixer keeps; nothing where it has none."""
    mixer = layer.mixer
    if mixer is None:
        return Recurring()
    sizes = {shape.dtype: prod(shape.shape) for shape in mixer.state_shapes(1)}
    wide, narrow, gates = sizes.get("float32", 0), sizes["model"], _count_gates(mixer)
    # A convolution multiplies each channel by a tap for every input, the token's among them.
    convolved = 2 * (narrow + narrow // (mixer.taps - 1))
    operations = _operations_of_a_number(mixer) * wide + convolved + 2 * gates
    return Recurring(wide, narrow, operations, gates)


def _operations_of_a_number(mixer: Mixer) -> int:
    """Return what a token does to each number of a state, and with it."""
    if isinstance(mixer, ShortConvolution):
        return 0
    if isinstance(mixer, RecurrentGate):
        return 2  # decayed, added to
    if isinstance(mixer, DeltaRule):
        return 7  # decayed, read for the key, corrected, read for the query
    return 5  # decayed, added to a product, read


def _count_gates(mixer: Mixer) -> int:
    """Return the numbers of a recurrent gate's two gates, a matrix per head each."""
    return 2 * mixer.heads * mixer.head_dim**2 if isinstance(mixer, RecurrentGate) else 0
