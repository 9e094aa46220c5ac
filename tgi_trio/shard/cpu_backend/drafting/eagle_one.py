"""The layer of an EAGLE or EAGLE-2 drafter with the CPU kernels; see `EagleOneSpec`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.speculators.eagle_one import EagleOneSpec
from tgi_trio.model.speculators.spec import EagleSpec
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.cpu_backend.drafting.eagle import Floats, KernelEagle
from tgi_trio.shard.cpu_backend.drafting.heads import KernelArithmetic
from tgi_trio.shard.speculation.arithmetic import MODEL_HEAD

if TYPE_CHECKING:
    from tgi_trio.shard.cpu_backend.drafting.heads import LoadedHeads
    from tgi_trio.shard.cpu_backend.forward import Forward


class KernelEagleOne(KernelEagle):
    """The `EagleLayer` of `speculation/eagle.py`. Its states are behind the model's final norm."""

    def __init__(self, forward: Forward, spec: EagleSpec, heads: LoadedHeads) -> None:
        super().__init__(forward, spec, heads)
        self._model = KernelArithmetic(forward, forward.program, heads)

    def fuse(self, states: Floats) -> Floats:
        return self._model.normalise(states)

    def run(
        self, plan: StepPlan, states: Floats, wanted: NDArray[np.int64]
    ) -> tuple[Floats, NDArray[np.int64]]:
        both = np.concatenate((self._embed(plan), states), axis=1)
        x = self._forward.multiply("fuse", both)
        out = self._compute(plan, x, x, wanted)
        if out is None:
            return states[:0], np.empty(0, np.int64)
        best: NDArray[np.int64] = self._forward.multiply(MODEL_HEAD, out).argmax(axis=1)
        return out, best


def make_eagle(forward: Forward, spec: EagleSpec, heads: LoadedHeads) -> KernelEagle:
    """Return the layer of a drafter; `heads`: its weights that are not linear layers."""
    kind = KernelEagleOne if isinstance(spec, EagleOneSpec) else KernelEagle
    return kind(forward, spec, heads)
