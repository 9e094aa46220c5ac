"""A layer of the model's own checkpoint that drafts further tokens, in the kernels: `MtpSpec`.

Its decoder layer is a program of its own, as a stage amid a pipeline is: states come in and go out.
Embedding and head are the model's; what joins state and embedding is a lone linear of its program.
Norms are in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.matrices.references import NormRef
from tgi_trio.model.mtp_layers import MtpSpec
from tgi_trio.model.speculators.spec import HeadsSpec
from tgi_trio.model.stages import Run
from tgi_trio.shard.checkpoint.lookup import Weights
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.cpu_backend.drafting.heads import LoadedHeads, normalise
from tgi_trio.shard.cpu_backend.forward import Forward, Tokens
from tgi_trio.shard.cpu_backend.program import Program
from tgi_trio.shard.cpu_backend.program_builder import FinalNorm
from tgi_trio.shard.speculation.arithmetic import MODEL_HEAD

Floats = NDArray[np.float32]

# Roles, by number of the layer.
_FUSE: Final = "fuse {}"
_FUSE_EMBEDDING: Final = "fuse embedding {}"
_NONE_WANTED: Final = np.empty(0, np.int32)
_LEAST_ROOM: Final = 256  # tokens, and positions


def lone_linears(specs: Sequence[MtpSpec]) -> HeadsSpec:
    """Return the linear layers that belong into the model's own program, as those of heads do."""
    linears = {_FUSE.format(i): spec.fuse for i, spec in enumerate(specs)}
    for i, spec in enumerate(specs):
        if spec.fuse_embedding is not None:
            linears[_FUSE_EMBEDDING.format(i)] = spec.fuse_embedding
    return HeadsSpec(folder=Path(), heads=len(specs), linears=linears, tensors=())


def find_lone(
    heads: LoadedHeads | None,
    files: Weights | None,
    mtp: Sequence[MtpSpec],
    checkpoint: Weights,
) -> tuple[HeadsSpec, Weights] | None:
    """Return the linear layers of what drafts that are run by the model's own program."""
    if heads is not None and files is not None:
        return heads.spec, files
    return (lone_linears(mtp), checkpoint) if mtp else None


def run_of_layers(spec: MtpSpec) -> Run:
    """Return what its own program computes: neither embedding nor head."""
    return Run(range(len(spec.decoder.layers)), is_first=False, is_last=False)


class MtpNorms:
    """The norms before a layer."""

    def __init__(self, spec: MtpSpec, weights: Weights) -> None:
        """Read them; raises ModelLoadError as the weights do."""
        self._added = np.float32(spec.decoder.norm.endswith("plus_one"))
        self.embedding = self._read(spec.embedding_norm, weights)
        self.state = self._read(spec.state_norm, weights)
        self.states_first = spec.states_first

    def _read(self, ref: NormRef, weights: Weights) -> FinalNorm:
        weight = weights.vector(ref.weight, ref.size) + self._added
        return FinalNorm(weight, None, ref.eps, centred=False)

    def join(self, embedded: Floats, states: Floats) -> Floats:
        """Return both normalised, side by side: [T, 2 * hidden]."""
        both = normalise(self.embedding, embedded), normalise(self.state, states)
        return np.concatenate(both[::-1] if self.states_first else both, axis=1)


class StatesBeyond:
    """What comes before a run of layers and after it: arrays of the caller's."""

    def __init__(self) -> None:
        self.given = self.taken = np.empty((0, 0), np.float32)

    def receive(self, hidden: Floats) -> None:
        """Write what was given to `hidden` [T, hidden]."""
        np.copyto(hidden, self.given)

    def send(self, hidden: Floats) -> None:
        """Take `hidden` [T, hidden], which the next run overwrites."""
        self.taken = hidden


@dataclass(frozen=True, slots=True)
class PackedMtp:
    """A layer that is packed and does not run yet."""

    program: Program
    norms: MtpNorms

    def start(self, model: Forward, cores: list[int], number: int) -> KernelMtp:
        """Start a team of its own on the processors of the model's, with the same kernels."""
        beyond = StatesBeyond()
        layer = Forward(self.program, model.variant, cores, beyond)
        kind = KernelMtp if self.program.spec.gated_streams is None else StreamsMtp
        return kind(model, layer, beyond, self.norms, number)


class KernelMtp:
    """The `EagleLayer` of `speculation/eagle.py` for the CPU kernels. States are float32.

    They are those behind a final norm: the model's, then the layer's own.
    """

    max_positions = 0  # it was trained with the model
    token_map: NDArray[np.int64] | None = None

    def __init__(
        self, model: Forward, layer: Forward, beyond: StatesBeyond, norms: MtpNorms, number: int
    ) -> None:
        """`layer`: of its own program, between the states of `beyond`; `number`: among several."""
        self._role, self._other_role = _FUSE.format(number), _FUSE_EMBEDDING.format(number)
        self.features = model.spec.hidden_size  # read from the model
        self._model = model
        self._layer = layer
        self._beyond = beyond
        self._norms = norms
        self._room = (0, 0)  # tokens, positions

    @property
    def kv_bytes_per_token(self) -> int:
        return self._layer.program.caches.bytes_per_token

    def nbytes(self) -> int:
        """Return the bytes of its own weights, without what is in the model's program."""
        return self._layer.program.weight_bytes

    def make_room(self, blocks: int) -> int:
        """Allocate a cache of as many blocks as the model's; return its bytes."""
        self._reserve(_LEAST_ROOM, _LEAST_ROOM)
        return self._layer.program.allocate_kv(blocks)

    @property
    def caches(self) -> Sequence[NDArray[Any]]:
        """Everything that its layer keeps of tokens, each [blocks, ...]."""
        return self._layer.program.caches.arrays

    def join(self, parts: Sequence[Floats]) -> Floats:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def pick(self, states: Floats, places: NDArray[np.int64]) -> Floats:
        return states[places]

    def fuse(self, states: Floats) -> Floats:
        return normalise(self._model.program.final_norm, states)

    def run(
        self, plan: StepPlan, states: Floats, wanted: NDArray[np.int64]
    ) -> tuple[Floats, NDArray[np.int64]]:
        x = self._compute(plan, states)
        if not len(wanted):
            return states[:0], np.empty(0, np.int64)
        x = normalise(self._layer.program.final_norm, x[wanted])
        return x, self.draft(x)

    def read(self, plan: StepPlan, states: Floats) -> Floats:
        """Compute a plan's tokens, and store their K and V; return their states [T, hidden]."""
        return normalise(self._layer.program.final_norm, self._compute(plan, states))

    def draft(self, states: Floats) -> NDArray[np.int64]:
        """Return the best tokens [n] by states [n, hidden]."""
        best: NDArray[np.int64] = self._model.multiply(MODEL_HEAD, states).argmax(axis=1)
        return best

    def _compute(self, plan: StepPlan, states: Floats) -> Floats:
        """Return what leaves the decoder layer, [T, features], until the next call."""
        program = self._layer.program
        if not program.kv_cache:
            raise RuntimeError("the drafter has no KV cache before the warm-up")
        tokens = Tokens.of(plan, by_length=program.by_length)
        self._reserve(len(tokens.ids), tokens.longest)
        self._beyond.given = self._join(self._model.embed(tokens.ids), states)
        self._layer.run(tokens, _NONE_WANTED)
        return self._take(len(tokens.ids))

    def _join(self, embedded: Floats, states: Floats) -> Floats:
        """Return what the decoder layer reads, by embeddings [T, hidden] and states."""
        return self._model.multiply(self._role, self._norms.join(embedded, states))

    def _take(self, count: int) -> Floats:
        """Return what has left the decoder layer for `count` tokens, until the next run."""
        return self._beyond.taken

    def close(self) -> None:
        """End the threads of its own program."""
        self._layer.close()

    def _reserve(self, tokens: int, positions: int) -> None:
        """Make room for steps of so many tokens and positions; it doubles where it is too small."""
        tokens, positions = (1 << (size - 1).bit_length() for size in (tokens, positions))
        if tokens > self._room[0] or positions > self._room[1]:
            self._room = max(tokens, self._room[0]), max(positions, self._room[1])
            self._layer.reserve(self._room[0], 1, self._room[1])


class StreamsMtp(KernelMtp):
    """A layer that reads and leaves several hidden states of a token, between gates.

    A row of states has all of them, then what gates let the head read of them.
    """

    def __init__(
        self, model: Forward, layer: Forward, beyond: StatesBeyond, norms: MtpNorms, number: int
    ) -> None:
        super().__init__(model, layer, beyond, norms, number)
        self._hidden = model.spec.hidden_size
        streams = model.spec.gated_streams
        self.features = self._hidden * (1 + (streams.count if streams else 0))

    def fuse(self, states: Floats) -> Floats:
        """Return `states` as they are: each layer normalises what it reads."""
        return states

    def draft(self, states: Floats) -> NDArray[np.int64]:
        return super().draft(states[:, -self._hidden :])

    def _join(self, embedded: Floats, states: Floats) -> Floats:
        normed = normalise(self._norms.state, states[:, : -self._hidden])
        read = self._model.multiply(self._role, normed.reshape(-1, self._hidden))
        added = normalise(self._norms.embedding, embedded)
        added = self._model.multiply(self._other_role, added)
        joined: Floats = read.reshape(len(states), -1, self._hidden) + added[:, None]
        return joined.reshape(len(states), -1)

    def _take(self, count: int) -> Floats:
        return self._layer.states(np.arange(count))
